"""Small GPTs for tests, and engines that train them on random samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybridpar.config import Config, from_mapping
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.grid import ProcessGrid, sizes_of
from hybridpar.train.engine import Engine

Sections = Mapping[str, dict[str, Any]]


def gpt(sizes: tuple[int, int, int, int, int], *each: Sections) -> Config:
    """A GPT of so many layers, features, heads, tokens and words, trained on batches of 3 micro-batches of 2 samples
    where no section says otherwise; of several that name a key the last counts."""
    model = dict(zip(("num_layers", "hidden_size", "num_heads", "seq_length", "vocab_size"), sizes, strict=True))
    every: list[Sections] = [
        {"model": model, "pipeline": {"num_microbatches": 3}, "train": {"micro_batch_size": 2, "num_steps": 20},
         "optim": {"lr": 1e-2}}, *each]
    names = dict.fromkeys(name for sections in every for name in sections)
    return from_mapping({name: {k: v for sections in every for k, v in sections.get(name, {}).items()}
                         for name in names})


def start(config: Config, device_type: str = "cpu", **of_engine: Any) -> tuple[Engine, SyntheticLoader]:
    """This rank's engine and its samples."""
    grid, train = ProcessGrid(sizes_of(config.parallel), device_type=device_type), config.train
    return Engine(config, grid, torch.device("cpu"), **of_engine), SyntheticLoader(
        config.model, train.micro_batch_size, config.pipeline.num_microbatches, grid.replica, grid.num_replicas)
