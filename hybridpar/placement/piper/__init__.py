"""Piper: split a graph of layers into stages, with tensor and data parallelism and recomputation
for each stage.

plan = plan_stages(read_instance("bert32a100.json"))

Source: Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN
Parallelization", NeurIPS 2021.
"""

from hybridpar.placement.piper.equal import Allowed, plan_equal_stages
from hybridpar.placement.piper.instance import Instance, is_instance, make_instance, read_instance
from hybridpar.placement.piper.stage_scoring import LayerGroup, StagePlan, StageScore, score_stages
from hybridpar.placement.piper.stage_search import plan_stages

__all__ = [
    "Allowed",
    "Instance",
    "LayerGroup",
    "StagePlan",
    "StageScore",
    "is_instance",
    "make_instance",
    "plan_equal_stages",
    "plan_stages",
    "read_instance",
    "score_stages",
]
