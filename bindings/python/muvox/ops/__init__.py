"""The operators. Those on sets take uniform ones, tensors (…, M, width), or ragged ones, tensors (N, width) with `splits`:
int64, S + 1 non-decreasing values from 0 to N, of which two successive ones enclose the rows of a set; or jagged nested
tensors (S, j, width), as torch.nested makes them, whose offsets are the splits. Results come back in the form of the
arguments. A set may be empty.

Inputs are half, bfloat16, float or double; sums are kept in float, or in double for double. Rows and sets may have any
stride, 0 included: what torch's expand makes is not copied. Columns that do not lie next to each other cost a copy. A wrong
argument raises ValueError, or RuntimeError where it is found in C; both name the operator and the argument.

attention, offset_attention and neighbour_attention have no CUDA kernels yet: NotImplementedError for CUDA tensors. That
splits on a device are in order is checked only with MUVOX_CHECK=1 in the environment, as the call then waits for them.
"""

from muvox.ops.aggregate import aggregate
from muvox.ops.attention import attention
from muvox.ops.devoxelize import devoxelize
from muvox.ops.gravnet import gravnet
from muvox.ops.knn import edge_index, knn
from muvox.ops.neighbour_attention import neighbour_attention
from muvox.ops.offset_attention import offset_attention
from muvox.ops.pool import pool
from muvox.ops.trilinear_weights import trilinear_weights
from muvox.ops.voxelize import voxelize

__all__ = [
    "aggregate",
    "attention",
    "devoxelize",
    "edge_index",
    "gravnet",
    "knn",
    "neighbour_attention",
    "offset_attention",
    "pool",
    "trilinear_weights",
    "voxelize",
]
