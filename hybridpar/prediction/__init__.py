"""Memory prediction and measurement: peaks predicted before a run, and measured from the
allocator."""

from hybridpar.prediction.layers import Footprints
from hybridpar.prediction.memory_report import Comparison, MemoryWatch, table
from hybridpar.prediction.meter import Meter, Usage, measure
from hybridpar.prediction.predict import check_size, predict
from hybridpar.prediction.walk import StageMemory

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
