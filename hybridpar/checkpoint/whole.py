"""A model whose weights are all in this process."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridpar.config import ModelConfig
from hybridpar.errors import CheckpointError
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks
from hybridpar.pipeline.run.stage import Stage


def whole_model(model: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Stage:
    """All blocks in one stage, on the CPU, with these weights. Raises: CheckpointError if one is missing."""
    stage = Stage(build_blocks(model, Axis("tp"), range(model.num_blocks), device="cpu", dtype=dtype))
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if name not in weights:
                raise CheckpointError(f"the checkpoint has no {name}")
            parameter.copy_(weights[name])
    return stage
