"""A model, or a stage of one, with the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridpar.checkpoint.load import FullWeights
from hybridpar.config import ModelConfig
from hybridpar.errors import CheckpointError
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks
from hybridpar.nn.placement import named_placements
from hybridpar.optim import ParameterSlot
from hybridpar.runtime.stage import Stage

_CPU = torch.device("cpu")


def whole_model(
    model: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> Stage:
    """Return all blocks in one stage, on the CPU, with these weights.

    Raises:
        CheckpointError: A weight is missing.
    """
    stage = Stage(
        build_blocks(model, Axis("tp"), range(model.num_blocks), device="cpu", dtype=dtype)
    )
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if name not in weights:
                raise CheckpointError(f"the checkpoint has no {name}")
            parameter.copy_(weights[name])
    return stage


def load_stage(
    full: FullWeights,
    tp: Axis,
    numbers: range,
    dtype: torch.dtype = torch.float32,
    device: torch.device = _CPU,
) -> Stage:
    """Return some blocks of a checkpoint's model, with this tp rank's shards of the weights.

    Reads only these, one parameter at a time.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    stage = Stage(build_blocks(full.manifest.config.model, tp, numbers, device=device, dtype=dtype))
    with torch.no_grad():
        for name, parameter, place in named_placements(stage):
            parameter.copy_(full.read_part(ParameterSlot(name, place, {"tp": tp.rank})))
    return stage
