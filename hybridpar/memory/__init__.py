"""Memory: measured from the allocator, and predicted before a run."""

from hybridpar.memory.layers import Footprints
from hybridpar.memory.meter import Meter, Usage, measure
from hybridpar.memory.predict import check_size, predict
from hybridpar.memory.report import Comparison, MemoryWatch, table
from hybridpar.memory.walk import StageMemory

__all__ = [
    "Comparison",
    "Footprints",
    "MemoryWatch",
    "Meter",
    "StageMemory",
    "Usage",
    "check_size",
    "measure",
    "predict",
    "table",
]
