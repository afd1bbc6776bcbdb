"""Place graphs of operators on accelerators and CPUs.

workload = read_workload("bert24_training.json")
placement = place(workload, "dp")
print(placement)

Source: Tarnawski et al., NeurIPS 2020 (arXiv 2006.16423), and NeurIPS 2021 (Piper: piper/).
"""

from hybridpar.placement.result import Assignment, make_assignment, read_split, write_assignment
from hybridpar.placement.scoring import (
    Score,
    chunks,
    is_contiguous,
    is_ordered,
    latency,
    problems,
    score,
)
from hybridpar.placement.solve import SOLVERS, Options, place
from hybridpar.placement.workload import (
    Workload,
    make_workload,
    read_document,
    read_workload,
    workload_document,
    write_workload,
)

__all__ = [
    "SOLVERS",
    "Assignment",
    "Options",
    "Score",
    "Workload",
    "chunks",
    "is_contiguous",
    "is_ordered",
    "latency",
    "make_assignment",
    "make_workload",
    "place",
    "problems",
    "read_document",
    "read_split",
    "read_workload",
    "score",
    "workload_document",
    "write_assignment",
    "write_workload",
]
