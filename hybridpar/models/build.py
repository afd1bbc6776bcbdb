"""Builds the blocks of a model that one stage holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from hybridpar.config import AUTO, KernelsConfig, ModelConfig, ModelSpec, ParameterGroup, spec_error
from hybridpar.config.compression_methods import other_gradients
from hybridpar.errors import config_error
from hybridpar.grid import Axis
from hybridpar.models.blocks import BertHead, Embedding, GPTHead, TransformerLayer
from hybridpar.models.groups import apply_groups, find_groups, require_matches
from hybridpar.models.own import Build, adopt, construct
from hybridpar.nn.placement import Placement, named_placements

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
"""Types by their names in train.dtype."""
HEADS: dict[str, type[GPTHead] | type[BertHead]] = {"gpt": GPTHead, "bert": BertHead}


def build_blocks(
    model: ModelSpec,
    axis: Axis,
    numbers: Iterable[int],
    *,
    kernels: KernelsConfig = AUTO,
    sequence: bool = False,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.float32,
    groups: tuple[ParameterGroup, ...] = (),
) -> dict[int, nn.Module]:
    """The blocks with these numbers of `model`: of GPT and BERT, 0 is the embedding, the last one
    the head.

    `sequence`: between the layers' split parts, each rank holds part of every sample's rows
    (parallel.sequence). `groups`: of optim.groups; they are written into the placements of
    parameters. Built on the meta device unless told otherwise: nothing is allocated for blocks that
    live elsewhere. Where the first and the last are both here and tied, they share one parameter.

    Raises: ConfigError where heads do not fit the hidden size or the axis (see nn.HeadLayout).
    """
    blocks = {}
    for number in numbers:
        build = Build(axis, f"blocks.{number}", kernels, sequence, device, dtype)
        if isinstance(model, ModelConfig):
            blocks[number] = _transformer_block(model, number, build)
        else:
            blocks[number] = construct(model, number, build)
            adopt(blocks[number], model, number, dtype, kernels)
    _tie(blocks.values())
    if groups:
        apply_groups(blocks, groups, _groups_by_name(model, groups))
    return blocks


@lru_cache(maxsize=16)
def global_placements(model: ModelSpec) -> Mapping[str, Placement]:
    """Return the placements of all parameters on one rank, by global name; a tied one has several
    names."""
    found: dict[str, Placement] = {}
    for number in range(model.num_blocks):
        (block,) = build_blocks(model, Axis("tp"), [number]).values()
        found |= {
            f"blocks.{number}.{name}": placement for name, _, placement in named_placements(block)
        }
    return found


@lru_cache(maxsize=16)
def _groups_by_name(model: ModelSpec, groups: tuple[ParameterGroup, ...]) -> Mapping[str, int]:
    return find_groups(groups, global_placements(model))


def _transformer_block(model: ModelConfig, number: int, build: Build) -> nn.Module:
    """Block `number` of GPT or BERT."""
    if number == 0:
        kind: type[nn.Module] = Embedding
    elif number <= model.num_layers:
        kind = TransformerLayer
    else:
        kind = HEADS[model.kind]
    return kind(
        model, build.axis, build.name, build.kernels, sequence=build.sequence, **build.factory
    )


def _tie(blocks: Iterable[nn.Module]) -> None:
    """Makes one parameter of those of one `Placement.tied` name (across stages their gradients are
    summed instead)."""
    held: dict[str, nn.Parameter] = {}
    for module in (module for block in blocks for module in block.modules()):
        placements: dict[str, Placement] = getattr(
            module, "placements", {}
        )  # those of ordinary modules, too
        for name, placement in placements.items():
            if placement.tied:
                setattr(module, name, held.setdefault(placement.tied, getattr(module, name)))


def require_trainable(model: ModelSpec, groups: tuple[ParameterGroup, ...] = ()) -> None:
    """Raises: ConfigError if all parameters are frozen, or one that is tied is frozen in one of its
    two blocks of a custom model, or a group decides on no parameter."""
    if isinstance(model, ModelConfig) and not groups:
        return
    placed = global_placements(model)
    tied = dict[str, bool]()
    require_matches(groups, placed)
    for name, placement in placed.items():
        if (
            placement.tied
            and tied.setdefault(placement.tied, placement.trainable) != placement.trainable
        ):
            rule = (
                f"has a tied parameter {placement.tied!r} that is frozen in one block and trained "
                "in another "
                f"({name}); it is one parameter"
            )
            raise spec_error(model, rule, "requires_grad_(False) in both blocks")
    if any(_trained(model, groups)):
        return
    if any(_trained(model, ())):
        frozen = [group.pattern for group in groups if group.frozen]
        raise config_error(
            "optim.groups",
            frozen,
            "must leave a parameter to train; these patterns freeze all of them",
            'a pattern of fewer parameters, such as "blocks.0.*"',
        )
    rule = "must have a parameter to train; all of its parameters are frozen (requires_grad=False)"
    raise spec_error(model, rule, "requires_grad_(True) on some module")


@lru_cache(maxsize=16)
def require_tied_ends(model: ModelSpec, pp: int) -> None:
    """Require that modules which share a parameter are the first and the last, or that there is one
    stage.

    Raises: ConfigError.
    """
    if isinstance(model, ModelConfig) or pp == 1:
        return
    last = model.num_blocks - 1
    for number in range(model.num_blocks):
        for name, (first, _) in model.shared_parameters(number).items():
            if (first, number) not in ((0, 0), (0, last)):
                own = name.removeprefix("layer.")
                rule = (
                    "requires that modules which share a parameter are the first and the last, and "
                    "module "
                    f"{number} shares {own} with others. To keep them in one stage, make one "
                    "module of them and "
                    "of those between them (nn.Sequential)"
                )
                raise config_error("parallel.pp", pp, rule, "1")


def _trained(model: ModelSpec, groups: tuple[ParameterGroup, ...]) -> Iterator[Placement]:
    """Yield the placements of the parameters that neither the model nor a group freezes."""
    found = _groups_by_name(model, groups)
    for name, placement in global_placements(model).items():
        if placement.trainable and not (name in found and groups[found[name]].frozen):
            yield placement


def require_factors(model: ModelSpec, method: str, groups: tuple[ParameterGroup, ...] = ()) -> None:
    """Raises: ConfigError if a model has no weight whose gradient `method`, a value of
    compression.gradients, takes as factors."""
    if isinstance(model, ModelConfig) and not groups:
        return
    if any(place.factored and place.matrices for place in _trained(model, groups)):
        return
    rule = (
        "requires hidden matrices of hybridpar's linear layers (ColumnParallelLinear(.., "
        "matrices=..)), whose "
        f"gradients come as factors; {model.kind} trains none, and torch's layers give whole "
        "gradients"
    )
    other = other_gradients(lambda row: not row.takes_factors)
    raise config_error("compression.gradients", method, rule, other)


@dataclass(frozen=True)
class Recomputation:
    """The blocks that a stage runs again in its backward, each from its own input; whole: all from
    the stage's.

    selective: blocks that make outputs of norms and activations again, and keep the rest.
    """

    blocks: frozenset[int] = frozenset()
    whole: bool = False
    selective: frozenset[int] = frozenset()


def recomputed_blocks(
    text: str, model: ModelSpec, split: Sequence[range]
) -> tuple[Recomputation, ...]:
    """The recomputation of each stage, by `pipeline.recompute`. split: the blocks of each stage.

    Raises: ConfigError as parse_recompute, and where blocks of one's own cannot be recomputed
        selectively.
    """
    again = parse_recompute(text, max(0, model.num_blocks - 2), len(split))
    if again.what == "stage":
        return tuple(
            Recomputation(frozenset(blocks), whole=True)
            if stage in again.numbers
            else Recomputation()
            for stage, blocks in enumerate(split)
        )
    layers = frozenset(layer + 1 for layer in again.numbers)
    if again.what == "selective":
        _require_remake(model, layers)
        return tuple(Recomputation(selective=layers.intersection(blocks)) for blocks in split)
    return tuple(Recomputation(layers.intersection(blocks)) for blocks in split)


def _require_remake(model: ModelSpec, numbers: Iterable[int]) -> None:
    """Raises: ConfigError where a block cannot make anything again."""
    if isinstance(model, ModelConfig):
        return
    blocks = build_blocks(model, Axis("tp"), numbers).values()
    if odd := next((type(block).__name__ for block in blocks if not hasattr(block, "remake")), ""):
        raise config_error(
            "pipeline.recompute",
            "selective",
            "needs blocks with a method remake(), which has outputs "
            f"made again that are cheap to make; {odd} has none",
            "all",
        )


class Again(NamedTuple):
    """The layers ('') or stages ('stage') that are recomputed, or the layers of which what is cheap
    ('selective')."""

    what: str
    numbers: frozenset[int]


def parse_recompute(text: str, num_layers: int, num_stages: int) -> Again:
    """Reads `pipeline.recompute`: 'none', 'all', 'selective', 'stage', or a list of layers or
    stages, counted from 0, such as '0,2-5', 'selective:0,2-5' or 'stage:0,2-3'.

    Raises: ConfigError where the text is something else or names what is not there.
    """
    counts = {"": num_layers, "selective": num_layers, "stage": num_stages}
    if text in ("none", "all"):
        return Again("", frozenset(range(num_layers if text == "all" else 0)))
    if text and text in counts:
        return Again(text, frozenset(range(counts[text])))
    what, _, numbers = text.rpartition(":")
    found = _parse_numbers(numbers, counts.get(what, 0))
    if found is not None:
        return Again(what, found)
    if what == "stage":
        rule = (
            f"must name stages from 0 to {num_stages - 1} (parallel.pp, times pipeline.chunks = "
            f"{num_stages}), "
            "such as 'stage:0'"
        )
        raise config_error("pipeline.recompute", text, rule, "'stage'")
    rule = (
        f"must be 'none', 'all', 'selective', 'stage', layers from 0 to {num_layers - 1} such as "
        "'0,2-5' or "
        "'selective:0,2-5', or stages such as 'stage:0,2-3'"
    )
    raise config_error("pipeline.recompute", text, rule, "'all'")


def _parse_numbers(text: str, count: int) -> frozenset[int] | None:
    """Reads '0,2-5' as numbers below `count`; None where it is something else."""
    parts = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in text.split(",")]
    ranges = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part]
    if not all(parts) or not all(ranges) or max(r.stop for r in ranges) > count:
        return None
    return frozenset(number for numbers in ranges for number in numbers)
