"""Memory: measured from the allocator, and predicted before a run."""

from hybridpar.memory.layers import Footprints
from hybridpar.memory.meter import Meter, Usage, measure
from hybridpar.memory.predict import predict
from hybridpar.memory.report import Comparison, MemoryWatch, table
from hybridpar.memory.walk import StageMemory

__all__ = ["Comparison", "Footprints", "MemoryWatch", "Meter", "StageMemory", "Usage", "measure", "predict", "table"]
