"""Weights of a run by their global names, for the program that has trained them."""

from __future__ import annotations

from torch import Tensor

from hybridpar import checkpoint
from hybridpar.config import Config
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks
from hybridpar.nn.init import initialize
from hybridpar.nn.placement import named_placements
from hybridpar.train import folder as run_folder

Tensors = dict[str, Tensor]


def trained_weights(config: Config) -> Tensors:
    """Return the weights of a run's newest checkpoint, or its initial weights if it has none.

    A program's own modules keep their names and buffers (`ModelSpec.named_weights`).

    Shapes: unsharded.
    Raises: CheckpointError.
    """
    weights = _saved(config) or _initial(config)
    return config.model.named_weights(weights)


def _saved(config: Config) -> Tensors:
    if not checkpoint.saved_steps(config.run.folder / run_folder.CHECKPOINTS):
        return {}
    with checkpoint.hold_start(config.run.folder, config.model) as hold:
        return checkpoint.load_full(hold.folder)[1]


def _initial(config: Config) -> Tensors:
    blocks = build_blocks(config.model, Axis("tp"), range(config.model.num_blocks), device="cpu")
    named = [
        (f"blocks.{number}.{name}", parameter, placement)
        for number, block in blocks.items()
        for name, parameter, placement in named_placements(block)
    ]
    initialize(named, config.train.seed)
    return {name: parameter.detach() for name, parameter, _ in named}
