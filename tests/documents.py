"""Rows of several documents, and a model in float64 that runs them without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridpar.config import Config
from hybridpar.data.sample_rules import document_entries
from hybridpar.grid import ProcessGrid
from hybridpar.models.build import BlockOptions, build_blocks
from hybridpar.nn.init import initialize
from hybridpar.nn.placement import named_placements


class Model:
    """A GPT on the axes tp and cp of a grid, float64, whose losses and gradients can be looked at."""

    def __init__(self, config: Config, grid: ProcessGrid):
        self.config = config.model
        self.blocks = build_blocks(
            self.config,
            grid.tp,
            range(self.config.num_blocks),
            options=BlockOptions.of(config, grid),
            device="cpu",
            dtype=torch.float64,
        )
        for number, block in self.blocks.items():
            initialize(
                [
                    (f"blocks.{number}.{name}", parameter.data, placement)
                    for name, parameter, placement in named_placements(block)
                ],
                3,
                {"tp": grid.tp.rank},
            )

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the sum over all labels."""
        one = torch.ones((), dtype=torch.float64)
        batch = batch | {"num_targets": one, "num_samples": one}
        x: Any = None
        for block in self.blocks.values():
            x = block(x, batch, None)
        return x["lm"]

    def gradients(self, batch: dict[str, Tensor]) -> list[Tensor]:
        parameters = [p for block in self.blocks.values() for p in block.parameters()]
        return list(torch.autograd.grad(self.loss(batch), parameters))


def documents(*lengths: int) -> list[np.ndarray]:
    random = np.random.default_rng(len(lengths))
    return [random.integers(0, 61, n + 1) for n in lengths]


def row_of(texts: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Return a row with all tokens but the last of each text, whose last label is that one."""
    starts: list[int] = []
    for text in texts:
        starts += [len(starts)] * (len(text) - 1)
    entries = {
        "tokens": np.concatenate([text[:-1] for text in texts])[None],
        "labels": np.concatenate([text[1:] for text in texts])[None],
        **document_entries(np.array(starts)[None]),
    }
    return {name: torch.from_numpy(array) for name, array in entries.items()}


def alone(text: np.ndarray) -> dict[str, Tensor]:
    """Return a row with one document, as without packing."""
    row = row_of([text])
    return {name: row[name] for name in ("tokens", "labels")}
