"""Places graphs of operators on accelerators and CPUs.

    workload = read_workload("bert24_training.json")
    placement = place(workload, "dp")
    print(placement)

Source: Tarnawski et al., NeurIPS 2020 (arXiv 2006.16423), and NeurIPS 2021 (Piper: piper.py).
"""

from hybridpar.planner.placement.load import Score, chunks, is_contiguous, is_ordered, latency, problems, score
from hybridpar.planner.placement.result import Placement, make_placement, read_split, write_placement
from hybridpar.planner.placement.solve import SOLVERS, Options, place
from hybridpar.planner.placement.workload import (
    Workload,
    make_workload,
    read_document,
    read_workload,
    workload_document,
    write_workload,
)

__all__ = [
    "SOLVERS", "Options", "Placement", "Score", "Workload", "chunks", "is_contiguous", "is_ordered", "latency",
    "make_placement", "make_workload", "place", "problems", "read_document", "read_split", "read_workload", "score",
    "workload_document", "write_placement", "write_workload",
]
