"""Likely reasons why a grid does not train like one process, from what differs first and from each
block's behaviour.

The blocks of a custom model are run in this process on two samples: twice, together, and one sample
at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hybridpar.config import Config, ModelSpec
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.errors import HybridparError, first_line
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks
from hybridpar.nn.init import initialize
from hybridpar.nn.placement import named_placements
from hybridpar.random import RandomKey

_KINDS = {
    "replicas": "ranks that hold the same parameter have different values of it, because they "
    "got different gradients. Something depends on the rank, or a tensor-parallel layer lacks a "
    "collective",
    "init": "it starts from different values: its constructor draws from a generator other than "
    "torch's default one (numpy, random), or depends on the rank or the time",
    "choice": "a token visits other experts: scores differ, or a near tie was decided by rounding",
    "loss": "the forward differs: it draws its own random numbers, keeps state between calls, "
    "depends on the rank, or its loss is not a sum over samples divided by the size of the "
    "global batch",
    "grad_norm": "the losses agree but the gradients do not: check custom backward functions, "
    "and tensor-parallel layers for a missing collective",
    "gradient": "the losses agree but this gradient does not: check custom backward functions, "
    "tensor-parallel layers for a missing collective, and parameters whose gradient is a "
    "partial sum but is not declared as one (Placement.partial)",
    "weight": "the gradients agree but the update does not: an update rule depends on which "
    "shard of a parameter a rank has, or keeps state outside of state_names",
}
"""The likely reason for each kind of first difference."""
_EQUAL = 1e-9


def likely_causes(config: Config, what: str) -> list[str]:
    """Return likely reasons for a first difference of kind `what`: from the blocks if one is at
    fault, else from the kind."""
    found = []
    if config.model.spec:  # blocks of a custom model
        try:
            found = list(_at_fault(config.model, config.train.seed))
        except HybridparError as error:
            found = [first_line(error)]
        except Exception as error:  # a custom block may need more than two samples
            found = [
                f"its blocks cannot be run one by one ({type(error).__name__}: {first_line(error)})"
            ]
    return found or [_KINDS[what]]


@torch.no_grad()
def _at_fault(model: ModelSpec, seed: int) -> Iterator[str]:
    blocks = build_blocks(
        model, Axis("tp"), range(model.num_blocks), device="cpu", dtype=torch.float64
    )
    for number, block in blocks.items():
        initialize(
            [
                (f"blocks.{number}.{name}", parameter.data, placement)
                for name, parameter, placement in named_placements(block)
            ],
            seed,
        )
    batch = SyntheticLoader(model, 2, 1, 0, 1, seed).microbatch(0, 0)
    batch |= {
        name: torch.tensor(2.0, dtype=torch.float64) for name in ("num_targets", "num_samples")
    }
    keys = [RandomKey.of(seed, 0, sample) for sample in range(2)]
    x: Any = None
    for number, block in blocks.items():
        name = f"block {number} ({block._get_name()})"
        out = block(x, batch, keys[0])
        alone = [block(_sample(x, i), _sample(batch, i), key) for i, key in enumerate(keys)]
        if not _is_equal(out, block(x, batch, keys[0])):
            yield (
                f"{name} returns different values when it is called again with the same input: "
                f"it draws random numbers (numpy, random), or keeps state between calls"
            )
        elif number == model.num_blocks - 1:
            if not _is_equal(out, {loss: alone[0][loss] + alone[1][loss] for loss in out}):
                yield (
                    f"{name} returns losses of two samples that are not the sum of the losses of "
                    "each: divide a sum "
                    'over samples by batch["num_samples"], or over labels by batch["num_targets"]'
                )
        elif not _is_equal(out, _joined(alone)):
            yield (
                f"{name} returns different values for a sample if the micro-batch has other "
                f"samples: it mixes samples, so results depend on the micro-batch size"
            )
        x = out


def _sample(value: Any, number: int) -> Any:
    """Return sample `number` of tensors whose first dimension is samples."""
    if isinstance(value, dict):
        return {name: _sample(one, number) for name, one in value.items()}
    return value[number : number + 1] if isinstance(value, Tensor) and value.dim() else value


def _joined(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: torch.cat([value[name] for value in values]) for name in values[0]}
    return torch.cat(values)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(_is_equal(one[name], other[name]) for name in one)
    scale = float(one.abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=_EQUAL * scale, equal_nan=True)
