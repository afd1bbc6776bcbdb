"""Patterns of global names: which entry of `optim.groups` decides on each parameter, and which
layers get adapters.

[[optim.groups]]                  blocks.0.words.weight            frozen
pattern = "blocks.0.*"            blocks.1.attention.qkv.weight    lr 0.1
frozen = true                     blocks.1.mlp.down.weight         as optim says

[[optim.groups]]
pattern = "*.attention.*"
lr = 0.1
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from torch import nn

from hybridpar.config import OptimConfig, ParameterGroup
from hybridpar.config.capabilities import Adapters
from hybridpar.errors import ConfigError, Problem
from hybridpar.nn.linear import AdaptableLinear
from hybridpar.nn.placement import Placement, named_placements

ADAPTER = ("lora_A", "lora_B")
"""Names of the parameters of an adapter in its layer."""


def is_adapter(name: str) -> bool:
    """Return whether a parameter, given by its name, belongs to an adapter."""
    return name.rpartition(".")[2] in ADAPTER


def adapter_of(weight: str) -> tuple[str, ...]:
    """Return the names of the parameters that the adapter of a weight has, if there is one."""
    layer, _, key = weight.rpartition(".")
    return tuple(f"{layer}.{name}" for name in ADAPTER) if key == "weight" else ()


Placed = Mapping[str, Placement]
"""Placements by global name; a tied parameter has several names."""


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a global name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def add_adapters(blocks: Mapping[int, nn.Module], adapters: Adapters) -> None:
    """Give the matching linear layers of blocks adapters, and freeze all other parameters.

    Layers of embeddings and output heads, whose weights are no hidden matrices, get none.
    """
    for number, block in blocks.items():
        for name, module in list(block.named_modules()):
            if (
                isinstance(module, AdaptableLinear)
                and module.placements["weight"].matrices
                and matches(f"blocks.{number}.{name}.weight", adapters.targets)
            ):
                module.add_adapter(adapters.rank, adapters.alpha)
        for name, parameter, placement in list(named_placements(block)):
            if is_adapter(name):
                continue
            module_name, _, key = name.rpartition(".")
            placements: Any = block.get_submodule(module_name).placements
            placements[key] = replace(placement, trainable=False)
            parameter.requires_grad_(False)


def find_groups(groups: Sequence[ParameterGroup], placed: Placed) -> dict[str, int]:
    """Return the number of the first group that matches each parameter, by name.

    Parameters that no group matches are absent. A tied parameter is one parameter with several
    names: the first group that matches any of them decides.
    """
    found: dict[str, int] = {}
    of_tied: dict[str, int] = {}
    for name, placement in placed.items():
        number = next(
            (i for i, group in enumerate(groups) if fnmatchcase(name, group.pattern)), None
        )
        if number is None:
            continue
        found[name] = number
        if placement.tied:
            of_tied[placement.tied] = min(number, of_tied.get(placement.tied, number))
    return found | {
        name: of_tied[place.tied] for name, place in placed.items() if place.tied in of_tied
    }


def apply_groups(
    blocks: Mapping[int, nn.Module], groups: Sequence[ParameterGroup], found: Mapping[str, int]
) -> None:
    """Write the groups into the placements of blocks.

    Args:
        blocks: Blocks by number.
        groups: `optim.groups`.
        found: The result of `find_groups`.
    """
    for number, block in blocks.items():
        for name, parameter, placement in list(named_placements(block)):
            if (index := found.get(f"blocks.{number}.{name}")) is None:
                continue
            module, _, key = name.rpartition(".")
            placements: Any = block.get_submodule(module).placements
            placements[key] = _in_group(placement, groups[index])
            if groups[index].frozen:
                parameter.requires_grad_(False)


def _in_group(placement: Placement, group: ParameterGroup) -> Placement:
    return replace(
        placement,
        lr=placement.lr * group.lr,
        weight_decay=placement.weight_decay * group.weight_decay,
        trainable=placement.trainable and not group.frozen,
    )


def require_matches(groups: Sequence[ParameterGroup], placed: Placed) -> None:
    """Require that every group decides on a parameter. Raises: ConfigError."""
    found = find_groups(groups, placed)
    problems = [
        _without_effect(i, groups, placed) for i in range(len(groups)) if i not in found.values()
    ]
    if problems:
        raise ConfigError(*problems)


def _without_effect(number: int, groups: Sequence[ParameterGroup], placed: Placed) -> Problem:
    pattern = groups[number].pattern
    field = f"optim.groups[{number}].pattern"
    matched = [name for name in placed if fnmatchcase(name, pattern)]
    if matched:
        earlier = find_groups(groups, placed)[matched[0]]
        rule = (
            f"has no effect: every parameter that it matches, such as {matched[0]}, also "
            f"matches optim.groups[{earlier}], and the first match counts"
        )
        return Problem(field, pattern, rule, f"moving this group before optim.groups[{earlier}]")
    forms = dict.fromkeys(
        re.sub(r"^blocks\.\d+", "blocks.*", name) for name in placed
    )  # of all blocks alike
    near = difflib.get_close_matches(pattern, list(forms), 3, cutoff=0.0)
    rule = (
        f"matches no parameter; similar names are {', '.join(near)} (* stands for any characters)"
    )
    return Problem(field, pattern, rule, f'"{near[0]}"')


@dataclass(frozen=True)
class GroupSummary:
    """The effect of a parameter group.

    Attributes:
        pattern: The pattern; empty for the parameters that no group matches.
        parameters: Number of their elements, without parameters that the model itself freezes.
        lr: The highest learning rate; 0 if frozen.
        weight_decay: The decay of the parameters that decay at all; 0 if frozen or if none does.
    """

    pattern: str
    parameters: int
    lr: float
    weight_decay: float
    frozen: bool


def summarize(optim: OptimConfig, placed: Placed) -> list[GroupSummary]:
    """Return the effect of each group, and last of the parameters that no group matches."""
    found = find_groups(optim.groups, placed)
    rest = ParameterGroup("")
    sizes = [0] * (len(optim.groups) + 1)
    decays = [0.0] * len(sizes)
    tied = set[str]()
    for name, placement in placed.items():
        if placement.tied in tied:
            continue
        if placement.tied:
            tied.add(placement.tied)
        number = found.get(name, -1)
        if not placement.trainable and not (number >= 0 and optim.groups[number].frozen):
            continue
        sizes[number] += prod(placement.shape)
        decays[number] = max(decays[number], placement.weight_decay)
    return [
        GroupSummary(
            group.pattern,
            size,
            0.0 if group.frozen else optim.highest_lr * group.lr,
            0.0 if group.frozen else optim.weight_decay * group.weight_decay * decay,
            group.frozen,
        )
        for group, size, decay in zip((*optim.groups, rest), sizes, decays, strict=True)
    ]


def table(summaries: Sequence[GroupSummary]) -> str:
    """Return the summaries as lines for people."""
    rows = [("pattern", "parameters", "learning rate", "weight decay")]
    for one in summaries:
        values = ("frozen", "") if one.frozen else (f"{one.lr:.4g}", f"{one.weight_decay:.4g}")
        rows.append((one.pattern or "all others", f"{one.parameters:,}", *values))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    )
