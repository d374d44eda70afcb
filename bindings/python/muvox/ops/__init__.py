"""The operators. Every one takes uniform sets, tensors (…, M, width), or ragged ones, tensors (N, width) with `splits`:
int64, S + 1 non-decreasing values from 0 to N, of which two successive ones enclose the rows of a set. A set may be empty.

Inputs are half, bfloat16, float or double; sums are kept in float, or in double for double. Rows and sets may have any
stride, 0 included; columns that do not lie next to each other cost a copy. A wrong argument raises ValueError, or
RuntimeError where it is found in C; both name the operator and the argument.
"""

from muvox.ops.aggregate import aggregate
from muvox.ops.attention import attention
from muvox.ops.gravnet import gravnet
from muvox.ops.knn import knn
from muvox.ops.pool import pool

__all__ = ["aggregate", "attention", "gravnet", "knn", "pool"]
