"""Modules of VoxelNet with LUMIN 0.9.1's arguments and state_dict keys, on muvox's operators.

Every module takes any leading dimensions, (..., rows, features); GravNetLayer, GravNet, GraphCollapser and the
attentions take ragged (rows, features) with `splits` too.
"""

from muvox.nn.accelerate import accelerate
from muvox.nn.activations import Swish, lookup_act, lookup_normal_init
from muvox.nn.attention import OffsetSelfAttention, SelfAttention
from muvox.nn.collapse import GraphCollapser, NodePredictor
from muvox.nn.gravnet import GravNet, GravNetLayer
from muvox.nn.norms import LCBatchNorm1d, RunningBatchNorm1d, RunningBatchNorm2d, RunningBatchNorm3d, RunningNorm
from muvox.nn.voxelnet import VoxelNet

__all__ = [
    "GraphCollapser",
    "GravNet",
    "GravNetLayer",
    "LCBatchNorm1d",
    "NodePredictor",
    "OffsetSelfAttention",
    "RunningBatchNorm1d",
    "RunningBatchNorm2d",
    "RunningBatchNorm3d",
    "RunningNorm",
    "SelfAttention",
    "Swish",
    "VoxelNet",
    "accelerate",
    "lookup_act",
    "lookup_normal_init",
]
