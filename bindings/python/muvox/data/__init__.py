"""Muon scans on disk and as network input.

A scan file is HDF5, format ``muvox-scans`` version 1: any number of volumes that share one voxel grid, each with its
own number of muons (none is allowed) and, for training, the truth of every voxel.

======================  ===========================  =================================================================
name                    type, shape                  meaning
======================  ===========================  =================================================================
``/muons``              float32 (total, columns)     one row per muon; attributes ``columns`` and ``units`` name them
``/row_splits``         int64 (volumes + 1)          volume v has the rows ``row_splits[v] : row_splits[v + 1]``
``/volume_id``          int64 (volumes)              the volume's number where it came from
``/split``              uint8 (volumes)              0 training, 1 validation
``/x0``                 float32 (volumes, x, y, z)   truth: radiation length, m; z points upwards
``/material``           uint8 (volumes, x, y, z)     truth: material; attributes ``names`` and ``x0`` (m) list them
``/background``         uint8 (volumes)              truth: commonest material; voxels of another are block voxels
======================  ===========================  =================================================================

Attributes of the file: ``format``, ``version``; ``grid_shape`` int64 (3), ``grid_origin`` and ``voxel_size`` float64
(3), m. The three truths are all there or all absent. Columns are found by name: their order is free and further ones
are kept. FORMAT.md beside this file lists the columns and the rules, what `convert` makes scan files of, and how to write
them from data of one's own: `write_scans`.

>>> with Scans("scan.h5") as scans:
...     for volume in scans.volumes(split="validation"):
...         volume.muons.shape, volume.material.shape
"""

from .convert import convert
from .layout import COLUMNS, Grid, Materials, ScanError, Volume
from .scans import Scans
from .shards import Shards, open_scans
from .writer import write_scans

__all__ = [
    "COLUMNS",
    "Grid",
    "Materials",
    "ScanError",
    "Scans",
    "Shards",
    "Volume",
    "convert",
    "open_scans",
    "write_scans",
]
