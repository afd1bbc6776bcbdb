"""Turn a checkpoint of a dense model into one with experts, to train on from there.

Every expert starts as a copy of its layer's MLP, and routers as in a new model. A token's gates sum
to 1, so the new model computes what the dense one does, up to rounding.

Source: sparse upcycling, arXiv 2212.05055.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hybridpar.checkpoint.finding import read_held
from hybridpar.checkpoint.format.files import new_folder, write_text
from hybridpar.checkpoint.load import MergedWeights
from hybridpar.checkpoint.save import save_weights
from hybridpar.config import Config, ModelConfig, ParallelConfig, to_short_toml
from hybridpar.data.tokenizer import Tokenizer
from hybridpar.data.tokenizer_folder import TOKENIZER
from hybridpar.errors import ConfigError, config_error
from hybridpar.models.build import DTYPES, global_placements
from hybridpar.nn.init import initialize

_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class Upcycled:
    """The folder of a model with experts.

    Attributes:
        source: The dense checkpoint.
        folder: The new folder, with config.toml and a checkpoint.
        checkpoint: The new checkpoint.
        num_parameters: Number of parameters.
        num_active: Number of parameters that a token visits.
        notes: Remarks for the user.
    """

    source: Path
    folder: Path
    checkpoint: Path
    num_parameters: int
    num_active: int
    notes: tuple[str, ...]


def upcycle(
    path: str | Path,
    output: str | Path,
    *,
    num_experts: int,
    topk: int = 2,
    layers: str = "1",
    say: Callable[[str], None] = print,
) -> Upcycled:
    """Create `output` with config.toml and a checkpoint of step 0 of a model with experts, from the
    newest weights of a run folder or checkpoint of any grid.

    `train.start_from` in that config.toml is `output`, so training from it runs on any grid. One
    parameter is in memory at a time.

    Args:
        path: Run folder or checkpoint of a dense model.
        output: Folder to create.
        num_experts: Number of experts of a layer (model.num_experts).
        topk: Number of experts of a token (model.router_topk).
        layers: Layers that get experts (model.moe_layers).
        say: Called with lines for the user.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
        ConfigError: The model cannot have experts, or `output` exists.
        DataError: The tokenizer is damaged.
    """

    def make(folder: Path) -> Upcycled:
        full = MergedWeights(folder)
        model = with_experts(full.manifest.config.transformer, num_experts, topk, layers)
        return _make(full, model, Path(output))

    return read_held(path, say, make)


def with_experts(model: ModelConfig, num_experts: int, topk: int, layers: str) -> ModelConfig:
    """Return a dense model with copies of its MLPs as experts.

    Raises:
        ConfigError: It has experts, its MLPs have biases, or the experts are not valid.
    """
    if model.num_experts:
        rule = "must be 0 in the checkpoint: its layers have experts"
        raise config_error("model.num_experts", model.num_experts, rule, "a dense checkpoint")
    if model.bias:
        rule = "must be false in the checkpoint: experts have no biases, and its MLPs do"
        raise config_error("model.bias", True, rule, "false")
    if num_experts < 1:
        raise config_error("num_experts", num_experts, "must be at least 1", "8")
    made = replace(model, num_experts=num_experts, router_topk=topk, moe_layers=layers)
    problems = tuple(made.conflicts())
    if problems:
        raise ConfigError(*problems)
    return made


def _make(full: MergedWeights, model: ModelConfig, output: Path) -> Upcycled:
    train = full.manifest.config.train
    placements = global_placements(model)
    tokenizer_path = full.folder.parent.parent / TOKENIZER
    tokenizer = Tokenizer.load(tokenizer_path) if tokenizer_path.exists() else None
    config = Config(model, ParallelConfig(dp=1))
    config = replace(
        config,
        train=replace(config.train, dtype=train.dtype, start_from=str(output.resolve())),
        data=replace(config.data, tokenizer=str(output.resolve() / TOKENIZER) if tokenizer else ""),
        run=replace(config.run, name=f"{output.name}-trained"),
    )
    dtype = DTYPES[train.dtype]

    def read(name: str) -> Tensor:
        placement = placements[name]
        source = full.find_tied(_EXPERT.sub(".", name), placement.tied)
        if source is not None:
            return full.read(source).to(dtype)
        weight = torch.empty(placement.shape, dtype=dtype)
        initialize([(name, weight, placement)], config.train.seed)
        return weight

    with new_folder(output) as aside:
        write_text(aside / "config.toml", to_short_toml(config))
        for name, text in (tokenizer.files() if tokenizer else {}).items():
            (aside / name).parent.mkdir(exist_ok=True)
            write_text(aside / name, text)
        shapes = {
            name: torch.empty(placement.shape, dtype=dtype, device="meta")
            for name, placement in placements.items()
        }
        saved = save_weights(aside / "checkpoints", config, shapes, placements, read)
    sizes = {
        name: shape.numel() for name, shape in shapes.items() if not _is_tied_copy(model, name)
    }
    of_experts = sum(size for name, size in sizes.items() if _EXPERT.search(name))
    idle = of_experts * (model.num_experts - model.router_topk) // model.num_experts
    notes = () if tokenizer else (f"{tokenizer_path} is missing, so the folder has no tokenizer",)
    return Upcycled(
        full.folder,
        output,
        output / "checkpoints" / saved.name,
        sum(sizes.values()),
        sum(sizes.values()) - idle,
        notes,
    )


def _is_tied_copy(model: ModelConfig, name: str) -> bool:
    """Return whether a name is the second one of the tied embedding."""
    head = f"blocks.{model.num_blocks - 1}."
    return model.tie_embeddings and name.startswith(head) and "projection.weight" in name
