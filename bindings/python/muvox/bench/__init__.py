"""`muvox bench`: time and peak memory of every operator beside its peers, in one run and on the same inputs.

A case (`cases`) is an operator at a size, in one direction; a peer (`peers`) is what a user would write with stock
PyTorch, or another library where it can be imported. muvox and the peers take turns (`measure`); the medians, the ratio
to the fastest peer and the targets end in a table (`tables`).
"""

from .command import bench

__all__ = ["bench"]
