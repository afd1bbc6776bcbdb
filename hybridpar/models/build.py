"""Build the blocks of a model that one stage holds, and check what a configuration asks of them."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from hybridpar.config import (
    AUTO,
    Config,
    KernelsConfig,
    ModelConfig,
    ModelSpec,
    ParameterGroup,
    spec_error,
)
from hybridpar.config.compression_methods import other_gradients
from hybridpar.errors import config_error
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.models.blocks import Embedding, TransformerLayer
from hybridpar.models.custom_blocks import Build, adopt, construct, context_of
from hybridpar.models.groups import (
    adapter_of,
    add_adapters,
    apply_groups,
    find_groups,
    is_adapter,
    matches,
    require_matches,
)
from hybridpar.models.heads import BertHead, GPTHead
from hybridpar.nn.context import ALONE, ContextComm
from hybridpar.nn.placement import Placement, named_placements

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
"""Types by their names in train.dtype."""
HEADS: dict[str, type[GPTHead] | type[BertHead]] = {"gpt": GPTHead, "bert": BertHead}


@dataclass(frozen=True)
class BlockOptions:
    """Options of blocks that a configuration sets besides its model.

    Attributes:
        kernels: Backends of operators.
        sequence: Whether each rank holds its rows of every sample between the split layers
            (parallel.sequence).
        groups: `optim.groups`, which are written into the placements of parameters.
        cp: The cp axis, whose ranks share the tokens of each sample.
        ep: The ep axis, whose ranks share the experts of each layer; None: a rank has all.
        cp_comm: How attention reaches the tokens of the other ranks of cp (parallel.cp_comm).
        expert_load: Largest load of a rank's experts in a round (memory.expert_load).
    """

    kernels: KernelsConfig = AUTO
    sequence: bool = False
    groups: tuple[ParameterGroup, ...] = ()
    cp: Axis = ALONE.axis
    ep: Axis | None = None
    cp_comm: ContextComm = "all_gather"
    expert_load: float = 0.0

    @classmethod
    def of(cls, config: Config, grid: ProcessGrid) -> BlockOptions:
        parallel = config.parallel
        return cls(
            config.kernels,
            parallel.sequence,
            config.optim.groups,
            grid.cp,
            grid.experts,
            parallel.cp_comm,
            config.memory.expert_load,
        )


def build_blocks(
    model: ModelSpec,
    axis: Axis,
    numbers: Iterable[int],
    *,
    options: BlockOptions = BlockOptions(),
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.float32,
) -> dict[int, nn.Module]:
    """Build blocks of `model`, without values, by number.

    Block 0 of GPT and BERT is the embedding, the last one the head. With `model.lora_rank` layers
    have adapters, and everything else is frozen. If the first and the last block
    are both built and tied, they share one parameter.

    Args:
        model: The model.
        axis: The tp axis that layers are split over.
        numbers: Numbers of the blocks.
        options: Kernels, sequence parallelism and parameter groups.
        device: The meta device by default, on which nothing is allocated.
        dtype: Type of the parameters.

    Raises:
        ConfigError: Heads do not fit the hidden size or the axis (see nn.HeadLayout).
    """
    blocks = {}
    context = context_of(model, options.cp, options.cp_comm)
    for number in numbers:
        build = Build(
            axis,
            f"blocks.{number}",
            options.kernels,
            options.sequence,
            device,
            dtype,
            context,
            options.ep,
            options.expert_load,
        )
        if isinstance(model, ModelConfig):
            blocks[number] = _transformer_block(model, number, build)
        else:
            blocks[number] = construct(model, number, build)
            adopt(blocks[number], model, number, build)
    _tie(blocks.values())
    if model.lora_adapters is not None:
        add_adapters(blocks, model.lora_adapters)
    if options.groups:
        apply_groups(blocks, options.groups, _groups_by_name(model, options.groups))
    return blocks


def global_placements(model: ModelSpec) -> Mapping[str, Placement]:
    """Return the placements of all parameters on one rank, by global name.

    A tied parameter has several names.
    """
    return _placements(model, range(model.num_blocks))


def distinct_blocks(model: ModelSpec) -> Sequence[int]:
    """Return the numbers of blocks among which every block finds its like."""
    last = model.num_blocks - 1
    return (0, 1, last) if model.layers_field and last > 2 else range(last + 1)


@lru_cache(maxsize=16)
def _placements(model: ModelSpec, numbers: Sequence[int]) -> Mapping[str, Placement]:
    """Return the placements of the parameters of some blocks, by global name."""
    found: dict[str, Placement] = {}
    for number in numbers:
        (block,) = build_blocks(model, Axis("tp"), [number]).values()
        found |= {
            f"blocks.{number}.{name}": placement for name, _, placement in named_placements(block)
        }
    return found


@lru_cache(maxsize=16)
def _groups_by_name(model: ModelSpec, groups: tuple[ParameterGroup, ...]) -> Mapping[str, int]:
    return find_groups(groups, global_placements(model))


def _transformer_block(model: ModelConfig, number: int, build: Build) -> nn.Module:
    """Build block `number` of GPT or BERT."""
    if number == 0:
        return Embedding(model, build)
    if number <= model.num_layers:
        return TransformerLayer(model, build, number - 1)
    return HEADS[model.kind](model, build)


def _tie(blocks: Iterable[nn.Module]) -> None:
    """Replace parameters of one `Placement.tied` name by a single one.

    If they are on different stages, their gradients are summed instead.
    """
    held: dict[str, nn.Parameter] = {}
    for module in (module for block in blocks for module in block.modules()):
        placements: dict[str, Placement] = getattr(
            module, "placements", {}
        )  # parameters of ordinary modules, too
        for name, placement in placements.items():
            if placement.tied:
                setattr(module, name, held.setdefault(placement.tied, getattr(module, name)))


def require_trainable(model: ModelSpec, groups: tuple[ParameterGroup, ...] = ()) -> None:
    """Require that a parameter is trained, and that each group decides on one.

    Raises:
        ConfigError: All parameters are frozen, or a tied one is frozen in one of its two blocks, or
            a group or one of model.lora_targets matches no parameter.
    """
    placed = _placements_before(model, groups)
    tied = dict[str, bool]()
    require_matches(groups, placed)
    if model.lora_adapters is not None:
        _require_adapters(model.lora_adapters.targets, placed)
    for name, placement in placed.items():
        if (
            placement.tied
            and tied.setdefault(placement.tied, placement.trainable) != placement.trainable
        ):
            rule = (
                f"the tied parameter {placement.tied!r} is frozen in one block but trained "
                f"in another ({name}); tied parameters must both be frozen or both be trained"
            )
            raise spec_error(model, rule, "requires_grad_(False) in both blocks")
    if any(_trained(model, groups)):
        return
    if any(_trained(model, ())):
        frozen = [group.pattern for group in groups if group.frozen]
        raise config_error(
            "optim.groups",
            frozen,
            "must leave at least one parameter to train; these patterns freeze all of them",
            'a pattern of fewer parameters, such as "blocks.0.*"',
        )
    rule = "must have at least one parameter to train; all are frozen (requires_grad=False)"
    raise spec_error(model, rule, "requires_grad_(True) on some module")


_LAYERS_OF_TRANSFORMERS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "*.attention.qkv.weight"),
    "o_proj": "*.attention.out.weight",
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "*.mlp.up.weight"),
    "down_proj": "*.mlp.down.weight",
}
"""Patterns of the layers that PEFT's target_modules names."""


def _require_adapters(targets: Sequence[str], placed: Mapping[str, Placement]) -> None:
    """Require that each target, a pattern of model.lora_targets, gives a weight an adapter. Raises: ConfigError."""
    adapted = [name for name in placed if placed.keys() & set(adapter_of(name))]
    useless = [
        pattern for pattern in targets if not any(matches(name, (pattern,)) for name in adapted)
    ]
    if not useless:
        return
    names = [name for name, place in placed.items() if place.matrices and not is_adapter(name)]
    forms = list(dict.fromkeys(re.sub(r"^blocks\.\d+", "*", name) for name in names))
    near = {
        pattern: _LAYERS_OF_TRANSFORMERS.get(pattern.rpartition(".")[2].strip("*"))
        or difflib.get_close_matches(pattern, forms, 1, cutoff=0.0)[0]
        for pattern in useless
    }
    works = dict.fromkeys(near.get(pattern, pattern) for pattern in targets)
    raise config_error(
        "model.lora_targets",
        list(targets),
        "each pattern must match a weight of a linear layer of attention or MLP, such as "
        f"{', '.join(names[:2])}; no such weight matches {', '.join(useless)}",
        json.dumps(list(works)),
    )


@lru_cache(maxsize=16)
def require_tied_ends(model: ModelSpec, pp: int) -> None:
    """Require that a parameter that several modules share belongs to the first and the last
    block alone.

    With one stage any modules may share it.

    Raises:
        ConfigError: Other modules share one.
    """
    if pp == 1:
        return
    last = model.num_blocks - 1
    for number in range(model.num_blocks):
        for name, (first, _) in model.shared_parameters(number).items():
            if (first, number) not in ((0, 0), (0, last)):
                own = name.removeprefix("layer.")
                rule = (
                    f"only the first and the last module may share a parameter across "
                    f"stages; module {number} shares {own} with another. To keep them in one "
                    f"stage, wrap them and the modules between them in one nn.Sequential"
                )
                raise config_error("parallel.pp", pp, rule, "1")


def _placements_before(
    model: ModelSpec, groups: tuple[ParameterGroup, ...]
) -> Mapping[str, Placement]:
    """Return the placements that groups have not changed yet.

    With groups these are the placements of all blocks, as groups go by name; without, of distinct
    blocks.
    """
    return global_placements(model) if groups else _placements(model, distinct_blocks(model))


def _trained(model: ModelSpec, groups: tuple[ParameterGroup, ...]) -> Iterator[Placement]:
    """Yield the placements of the parameters that neither the model nor a group freezes."""
    found = _groups_by_name(model, groups) if groups else {}
    for name, placement in _placements_before(model, groups).items():
        if placement.trainable and not (name in found and groups[found[name]].frozen):
            yield placement


def require_factors(model: ModelSpec, method: str, groups: tuple[ParameterGroup, ...] = ()) -> None:
    """Require a weight whose gradient `method`, a value of compression.gradients, takes as factors.

    Raises:
        ConfigError: The model trains none.
    """
    if any(place.factored and place.matrices for place in _trained(model, groups)):
        return
    rule = (
        f"requires hybridpar's linear layers (ColumnParallelLinear(.., matrices=..)), whose "
        f"gradients are available as factors; {model.kind} trains none, and torch's layers "
        f"compute full gradients"
    )
    other = other_gradients(lambda row: not row.takes_factors)
    raise config_error("compression.gradients", method, rule, other)


@dataclass(frozen=True)
class Recomputation:
    """The blocks of a stage that run a second time in its backward pass, each from its own input.

    Attributes:
        blocks: Blocks that run again as a whole.
        whole: Whether the stage runs again as a whole, from its own input.
        selective: Blocks that recompute outputs of norms and activations, and keep the rest.
    """

    blocks: frozenset[int] = frozenset()
    whole: bool = False
    selective: frozenset[int] = frozenset()


def recomputed_blocks(
    text: str, model: ModelSpec, split: Sequence[range]
) -> tuple[Recomputation, ...]:
    """Return the recomputation of each stage.

    Raises:
        ConfigError: See `requested_recomputation`.
    """
    spec = requested_recomputation(text, model, len(split))
    if spec.what == "stage":
        return tuple(
            Recomputation(frozenset(blocks), whole=True)
            if stage in spec.numbers
            else Recomputation()
            for stage, blocks in enumerate(split)
        )
    layers = frozenset(layer + 1 for layer in spec.numbers)
    if spec.what == "selective":
        return tuple(Recomputation(selective=layers.intersection(blocks)) for blocks in split)
    return tuple(Recomputation(layers.intersection(blocks)) for blocks in split)


def requested_recomputation(text: str, model: ModelSpec, num_stages: int) -> RecomputeSpec:
    """Return the layers or stages that `pipeline.recompute` names.

    Raises:
        ConfigError: See `parse_recompute`; or a block cannot recompute selectively.
    """
    spec = parse_recompute(text, max(0, model.num_blocks - 2), num_stages)
    if spec.what == "selective":
        _require_recompute(model, frozenset(layer + 1 for layer in spec.numbers))
    return spec


def has_selective_recompute(model: ModelSpec) -> bool:
    """Whether all blocks but the first and the last can recompute selectively."""
    return not _without_recompute(model, frozenset(range(1, model.num_blocks - 1)))


def _require_recompute(model: ModelSpec, numbers: frozenset[int]) -> None:
    """Require blocks that can recompute selectively. Raises: ConfigError."""
    if name := _without_recompute(model, numbers):
        raise config_error(
            "pipeline.recompute",
            "selective",
            "requires blocks with a method recompute() (its old name: remake()), which recomputes their cheap outputs; "
            f"{name} has none",
            "all",
        )


@lru_cache(maxsize=16)
def _without_recompute(model: ModelSpec, numbers: frozenset[int]) -> str:
    """Return the class of a block without a method `recompute`; empty if all have one."""
    alike = numbers.intersection(distinct_blocks(model)) if model.layers_field else numbers
    for number in sorted(alike or numbers):
        (block,) = build_blocks(model, Axis("tp"), [number]).values()
        if not hasattr(block, "recompute"):
            return type(block).__name__
    return ""


class RecomputeSpec(NamedTuple):
    """`pipeline.recompute`, parsed.

    Attributes:
        what: '' for layers, 'stage' for stages, 'selective' for what is cheap in layers.
        numbers: Numbers of the layers or stages.
    """

    what: str
    numbers: frozenset[int]


def parse_recompute(text: str, num_layers: int, num_stages: int) -> RecomputeSpec:
    """Parse `pipeline.recompute`.

    It is 'none', 'all', 'selective', 'stage', or a list of layers or stages, counted from 0, such
    as '0,2-5', 'selective:0,2-5' or 'stage:0,2-3'.

    Raises:
        ConfigError: The text is something else, or names a layer or stage that does not exist.
    """
    counts = {"": num_layers, "selective": num_layers, "stage": num_stages}
    if text in ("none", "all"):
        return RecomputeSpec("", frozenset(range(num_layers if text == "all" else 0)))
    if text and text in counts:
        return RecomputeSpec(text, frozenset(range(counts[text])))
    what, _, numbers = text.rpartition(":")
    found = _parse_numbers(numbers, counts.get(what, 0))
    if found is not None:
        return RecomputeSpec(what, found)
    if what == "stage":
        rule = (
            f"must name stages from 0 to {num_stages - 1} (parallel.pp, times "
            "pipeline.virtual_stages = "
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
    """Parse '0,2-5' as numbers below `count`; return None for any other text."""
    parts = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in text.split(",")]
    ranges = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part]
    if not all(parts) or not all(ranges) or max(r.stop for r in ranges) > count:
        return None
    return frozenset(number for numbers in ranges for number in numbers)
