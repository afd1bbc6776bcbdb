"""Match the tensors of a Hugging Face model with hybridpar's parameters, by the tables in
families.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from hybridpar.checkpoint.huggingface.families import Family
from hybridpar.checkpoint.huggingface.layouts import LAYOUTS, Layout
from hybridpar.config import ModelConfig
from hybridpar.errors import CheckpointError
from hybridpar.grid import Axis
from hybridpar.models.build import build_blocks
from hybridpar.nn.attention import HeadLayout
from hybridpar.nn.placement import Placement, named_placements
from hybridpar.runtime.stage import Stage

Shape = tuple[int, ...]
_SHOWN = 8
_EXPERT = re.compile(r"\.experts\.(\d+)")


@dataclass(frozen=True)
class Entry:
    """One hybridpar parameter of a module such as head.norm: its tensors in the files, in order,
    and their shapes."""

    ours: str
    module: str
    placement: Placement
    theirs: dict[str, Shape]
    layout: Layout


@dataclass(frozen=True)
class Plan:
    """All parameters of a model. `copies`: names that may also be in the files, and the tensor
    that each copies."""

    heads: HeadLayout
    entries: tuple[Entry, ...]
    copies: dict[str, str]
    is_tied: bool

    @property
    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every tensor in the files."""
        return {name: shape for entry in self.entries for name, shape in entry.theirs.items()}

    @property
    def num_parameters(self) -> int:
        return sum(prod(entry.placement.shape) for entry in self.entries)


def plan_of(model: ModelConfig, family: Family) -> Plan:
    """Return how a hybridpar model maps to that family; allocates nothing. Raises: ConfigError
    for sizes that do not fit."""
    heads = HeadLayout(model.hidden_size, model.num_heads, model.kv_heads, 1, model.head_dim)
    stage = Stage(build_blocks(model, Axis("tp"), range(model.num_blocks)))
    entries = tuple(
        _entry(name, place, model, family, heads) for name, _, place in named_placements(stage)
    )
    copies = dict(family.copies)
    if model.tie_embeddings:
        (projection,) = _names(
            f"blocks.{model.num_layers + 1}.language_model.projection.weight", model, family
        )[0]
        (words,) = _names("blocks.0.tokens.weight", model, family)[0]
        copies[projection] = words
    return Plan(heads, entries, copies, model.tie_embeddings)


def _entry(
    name: str, place: Placement, model: ModelConfig, family: Family, heads: HeadLayout
) -> Entry:
    names, layout = _names(name, model, family)
    module = _place(name, model)[1]
    parts = LAYOUTS[layout].split(torch.empty(place.shape, device="meta"), heads)
    return Entry(
        name,
        module,
        place,
        {n: tuple(p.shape) for n, p in zip(names, parts, strict=True)},
        LAYOUTS[layout],
    )


def _place(ours: str, model: ModelConfig) -> tuple[int, str, str]:
    """Return the block of a parameter, its module in the tables, and its own name there."""
    _, number, rest = ours.split(".", 2)
    part = {0: "embedding", model.num_layers + 1: "head"}.get(int(number), "layer")
    module, leaf = rest.rsplit(".", 1)
    return int(number), f"{part}.{module}", leaf


def _names(ours: str, model: ModelConfig, family: Family) -> tuple[list[str], str]:
    number, module, leaf = _place(ours, model)
    expert = _EXPERT.search(module)
    if expert is not None:
        module = _EXPERT.sub(".experts.{expert}", module)
    if exact := family.tensors.get(f"{module}.{leaf}"):
        return list(exact.names), exact.layout
    rule = family.tensors.get(module)
    assert rule is not None, f"{family.model_type} has no rule for {ours}"
    numbers = {"layer": number - 1, "expert": expert[1] if expert else ""}
    return [f"{name.format(**numbers)}.{leaf}" for name in rule.names], rule.layout


@dataclass(frozen=True)
class Match:
    """Tensors of files, matched with a plan.

    `names`: the name in the files of each tensor of the plan. `copies`: pairs of names in the files
    that must be equal. `unused`: tensors that take no part, such as masks. `absent`: parameters of
    heads that a bare model lacks.
    """

    names: dict[str, str]
    copies: dict[str, str]
    unused: list[str]
    absent: list[str]


def match(found: Mapping[str, Shape], plan: Plan, family: Family) -> Match:
    """Match the tensors of both sides. Raises: CheckpointError naming all that do not match."""
    known = {_current(name, plan, family): name for name in found}
    if len(known) < len(found):
        twice = sorted(set(found) - set(known.values()))
        raise CheckpointError(
            f"the tensors {', '.join(twice[:_SHOWN])} appear under a second name too"
        )
    wanted = plan.shapes
    names = {name: known[name] for name in wanted if name in known}
    copies: dict[str, str] = {}
    unused: list[str] = []
    for copy, original in plan.copies.items():
        if copy not in known or copy in wanted:
            continue
        if original in names and plan.is_tied:
            copies[known[copy]] = names[original]
            continue
        # without the original, or untied, transformers computes with the copy
        unused += [names[original]] if original in names else []
        names[original] = known[copy]
    used = {*names.values(), *copies, *unused}
    unused += [
        name
        for now, name in known.items()
        if name not in used and any(re.fullmatch(pattern, now) for pattern in family.computed)
    ]
    absent = _absent_heads(plan, family, names)
    needed = {name for entry in plan.entries if entry.ours not in absent for name in entry.theirs}
    wrong = [
        f"{name} is missing; its shape would be {list(shape)}"
        for name, shape in wanted.items()
        if name in needed and name not in names
    ]
    wrong += [
        f"{names[name]} has shape {list(found[names[name]])}, {family.settings} makes it "
        f"{list(shape)}"
        for name, shape in wanted.items()
        if name in names and found[names[name]] != shape
    ]
    wrong += [
        f"{name} {list(found[name])} is no tensor of this {family.model_type}; remove it from the "
        "files if it "
        "has no part in the language model"
        for name in found
        if name not in used and name not in unused
    ]
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise CheckpointError(
            f"the tensors do not match {family.settings}:\n  - "
            + "\n  - ".join(wrong[:_SHOWN] + more)
        )
    return Match(names, copies, unused, absent)


def _absent_heads(plan: Plan, family: Family, names: Mapping[str, str]) -> list[str]:
    """Return the parameters of heads that the files have no tensor of."""
    groups = [
        [entry for entry in plan.entries if entry.module in modules] for modules in family.heads
    ]
    return [
        entry.ours
        for group in groups
        if not any(name in names for entry in group for name in entry.theirs)
        for entry in group
    ]


def _current(name: str, plan: Plan, family: Family) -> str:
    """Return the name that a tensor has today in a full model; older endings and names of the
    bare base model are known."""
    for old, new in family.renamed.items():
        if name.endswith(old):
            name = name.removesuffix(old) + new
    whole = family.prefix + name
    if name.startswith(family.prefix) or name in plan.copies:
        return name
    is_base = whole in plan.shapes or any(
        re.fullmatch(pattern, whole) for pattern in family.computed
    )
    return whole if is_base else name
