"""Simulated muon scans of any size: `simulate_muons` for arrays, `muvox simulate` for files."""

from .native import SimulationError, simulate_muons
from .source import Detector, Source, flux

__all__ = ["Detector", "SimulationError", "Source", "flux", "simulate_muons"]
