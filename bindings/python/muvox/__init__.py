"""Memory-efficient set operators for muon tomography: the pair tensor (voxels, muons, muons) never exists.

`muvox.ops` holds the operators, all of them also here; `muvox.nn` the network blocks built on them.
"""

import importlib

from muvox import _threads  # noqa: F401  (first: it has to come before torch)
from muvox import _library
from muvox.ops import (
    aggregate,
    attention,
    devoxelize,
    edge_index,
    gravnet,
    knn,
    neighbour_attention,
    offset_attention,
    pool,
    trilinear_weights,
    voxelize,
)

__version__ = _library.version()
__all__ = [
    "aggregate",
    "attention",
    "devoxelize",
    "edge_index",
    "gravnet",
    "knn",
    "neighbour_attention",
    "nn",
    "offset_attention",
    "ops",
    "pool",
    "trilinear_weights",
    "voxelize",
]


def __getattr__(name):
    if name == "nn":  # loaded when first used: who needs the operators alone does not wait for it
        return importlib.import_module("muvox.nn")
    raise AttributeError(f"module 'muvox' has no attribute {name!r}")
