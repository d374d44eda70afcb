"""Training VoxelNet on scan files: `train` is the whole recipe, `muvox train` and the demo call it."""

from .batches import TrainingData, turn
from .loop import Report, TrainingError, Validating, is_finished, train
from .recipe import Settings, class_weights, log_x0_loss, one_cycle, voxel_loss
from .run import Run

__all__ = [
    "Report",
    "Run",
    "Settings",
    "TrainingData",
    "TrainingError",
    "Validating",
    "class_weights",
    "is_finished",
    "log_x0_loss",
    "one_cycle",
    "train",
    "turn",
    "voxel_loss",
]
