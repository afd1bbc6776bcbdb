"""A model whose modules a program has made and gives to Trainer.

Training starts from the values that the modules have: their parameters are copied into the stages.
The modules themselves are not trained; `Trainer.state_dict` returns the trained weights.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.config.samples import SampleSource
from hybridpar.errors import ConfigError, Problem, config_error
from hybridpar.models.custom_blocks import constructed
from hybridpar.models.sequential import SequentialSpec

_WORKS = "nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))"


@dataclass(eq=False)
class GivenRow:
    """Modules in a row, under the names that nn.Sequential gives them, with their loss and data.

    Attributes:
        loss, metrics: See SequentialSpec.
        num_targets: See ModelSpec; None: each sample is one target.
        datasets: Data sets by part.
        samples: Samples of the training set.
    """

    modules: Mapping[str, nn.Module]
    loss: Callable[[Any, dict[str, Tensor]], Tensor]
    metrics: Callable[[Any, dict[str, Tensor]], dict[str, Tensor]] | None
    num_targets: Callable[[dict[str, Any]], int] | None
    datasets: Mapping[str, Any]
    samples: SampleSource
    row: list[nn.Module] = field(init=False)
    serial: int = field(init=False, default_factory=count().__next__)
    """A number that no other row of this process ever has."""

    def __post_init__(self) -> None:
        self.row = list(self.modules.values())

    @cached_property
    def structure(self) -> str:
        """Checksum of the kinds of modules and of the names, shapes and types of their tensors."""
        digest = hashlib.sha256()
        for name, module in self.modules.items():
            digest.update(f"{name} {type(module).__qualname__}\n".encode())
            for own, tensor in (*module.named_parameters(), *module.named_buffers()):
                digest.update(f"{own} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        return digest.hexdigest()[:16]

    @cached_property
    def inputs(self) -> str:
        """The name of the array that the first module takes: "x", or a sample's first one.

        Raises:
            ConfigError: Samples are no dicts.
        """
        sample = self.sample(0, 0)
        return "x" if "x" in sample else str(next(iter(sample)))

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        """Return a sample of the training set. Raises: ConfigError if it is no dict."""
        sample = self.samples.sample(number, seed)
        if not isinstance(sample, Mapping) or not sample:
            rule = (
                f"samples must be dicts of arrays by name; they are of type {type(sample).__name__}"
            )
            raise config_error("datasets", "train", rule, '[{"x": x, "y": y} for x, y in samples]')
        return dict(sample)

    def checksum(self, *, buffers_only: bool) -> str:
        """Return the checksum of the values of parameters and buffers, or of buffers alone."""
        digest = hashlib.sha256()
        for module in self.row:
            tensors = [] if buffers_only else list(module.parameters())
            for tensor in (*tensors, *module.buffers()):
                digest.update(
                    tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                )
        return digest.hexdigest()

    def register(self) -> None:
        """Make models of this structure use these modules in this process from now on."""
        _rows[self.structure] = self
        constructed.cache_clear()


_rows: dict[str, GivenRow] = {}
"""The rows of this process by structure. A configuration or checkpoint can hold only the
structure."""


@dataclass(frozen=True, eq=False)
class GivenModules(SequentialSpec):
    """The modules of this process that have a certain structure.

    Attributes:
        structure: See `GivenRow.structure`.
    """

    structure: str = ""
    kind = "modules"

    @property
    def given(self) -> GivenRow:
        """The modules. Raises: ConfigError if this process has none of this structure."""
        if (row := _rows.get(self.structure)) is None:
            rule = (
                "not available: these modules exist only in the program that trained them; "
                "open this run in that program, with the same modules"
            )
            raise ConfigError(
                Problem(
                    "modules", self.structure, rule, "hybridpar.Trainer(modules, ..).state_dict()"
                )
            )
        return row

    @property
    def shown_as(self) -> tuple[str, str]:
        size = len(self.given.row)
        return "modules", f"{size} module{'s' * (size != 1)}"

    @property
    def max_tp_rule(self) -> str:
        return (
            f"{self.max_tp}: modules of an nn.Sequential are not split over ranks; use "
            f"parallel.pp or parallel.dp"
        )

    @property
    def inputs(self) -> str:  # type: ignore[override]
        """The name of the array that the first module takes."""
        return self.given.inputs

    @property
    def counts_targets(self) -> bool:
        return self.given.num_targets is not None

    @property
    def metric_names(self) -> tuple[str, ...]:  # type: ignore[override]  # found, where a ModelSpec says them
        """The names of the metrics."""
        return () if self.given.metrics is None else getattr(super(), "metric_names", ())

    def layers(self) -> Iterable[nn.Module]:
        """Copies of the modules on the default device, in the default type."""
        memo: dict[int, Any] = {}
        return [_copied(module, memo, number) for number, module in enumerate(self.given.row)]

    def loss(self, out: Any, batch: dict[str, Tensor]) -> Tensor:
        return self.given.loss(out, batch)

    def metrics(self, out: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        assert self.given.metrics is not None
        return self.given.metrics(out, batch)

    def sample(self, number: int, seed: int) -> dict[str, Any]:
        return self.given.sample(number, seed)

    def dataset(self, part: str) -> Any:
        return self.given.datasets.get(part)

    def num_targets(self, sample: dict[str, Any]) -> int:
        return 1 if self.given.num_targets is None else self.given.num_targets(sample)

    def start_checksum(self, *, resumes: bool) -> str:
        return self.given.checksum(buffers_only=resumes)

    def named_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights under the names of the modules, together with their buffers."""
        found: dict[str, Tensor] = {}
        for number, (prefix, module) in enumerate(self.given.modules.items()):
            shared = self.shared_parameters(number)
            parameters = dict(module.named_parameters(remove_duplicate=False))
            first = {id(parameter): name for name, parameter in module.named_parameters()}
            for name, tensor in module.state_dict(keep_vars=True).items():
                if name not in parameters:
                    found[f"{prefix}.{name}"] = tensor.detach().clone()
                    continue
                own = f"layer.{first[id(parameters[name])]}"
                holder, there = shared.get(own, (number, own))
                saved = weights.get(f"blocks.{number}.{own}")
                if saved is None:
                    saved = weights[f"blocks.{holder}.{there}"]
                found[f"{prefix}.{name}"] = saved
        return found

    def _module(self, number: int, earlier: torch.device) -> nn.Module:
        return _copied(self.given.row[number], {}, number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GivenModules) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[str, int]:
        """The number that equality compares.

        Modules of one structure are equal only if they are the same objects, as others have other
        weights
        and another loss.
        """
        row = _rows.get(self.structure)
        return self.structure, -1 if row is None else row.serial


def _copied(module: nn.Module, memo: dict[int, Any], number: int) -> nn.Module:
    """Return a copy of a module on the default device, with floats in the default type.

    Args:
        memo: The `memo` of deepcopy.
    """
    device = torch.get_default_device()
    dtype = torch.get_default_dtype()

    def moved(tensor: Tensor, kind: torch.dtype) -> Tensor:
        if device.type == "meta":
            return torch.empty_like(tensor, device=device, dtype=kind)
        return tensor.detach().to(device, kind, copy=True)

    for parameter in module.parameters():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        memo.setdefault(
            id(parameter), nn.Parameter(moved(parameter, kind), parameter.requires_grad)
        )
    for one in module.modules():
        for tensor in (*one.buffers(recurse=False), *filter(_is_tensor, vars(one).values())):
            memo.setdefault(
                id(tensor), moved(tensor, dtype if tensor.is_floating_point() else tensor.dtype)
            )
    try:
        return copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        rule = (
            f"a {type(module).__name__}, which copy.deepcopy cannot copy for the stage that "
            f"trains it: "
            f"{error}"
        )
        raise config_error(
            "modules", f"module {number}", rule, "a module that copy.deepcopy takes"
        ) from error


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def named_modules(modules: object) -> dict[str, nn.Module]:
    """Return the modules of a row under the names that nn.Sequential gives them.

    Raises:
        ConfigError: It is neither an nn.Sequential nor a list of modules.
    """
    if isinstance(modules, nn.Sequential) and type(modules).forward is nn.Sequential.forward:
        named = dict(modules._modules)  # a module that comes twice is there twice
    elif isinstance(modules, nn.ModuleList | list | tuple):
        named = {str(number): module for number, module in enumerate(modules)}
    else:
        rule = (
            "must be an nn.Sequential, a list of modules or a hybridpar.ModelSpec: a module "
            "with its own forward cannot be divided into pipeline stages"
        )
        raise config_error("model", f"a {type(modules).__name__}", rule, _WORKS)
    if not named:
        raise config_error(
            "modules", f"an empty {type(modules).__name__}", "must have at least one module", _WORKS
        )
    for name, module in named.items():
        if not isinstance(module, nn.Module):
            raise config_error(
                "modules", f"entry {name}: {module!r}", "must be a torch.nn.Module", "nn.Tanh()"
            )
    return {name: module for name, module in named.items() if module is not None}


def make_row(
    modules: object, loss: Any, metrics: Any, num_targets: Any, datasets: Mapping[str, Any]
) -> GivenRow:
    """Make the row that the arguments of Trainer describe. Raises: ConfigError."""
    named = named_modules(modules)
    if not callable(loss):
        rule = (
            "must be a function loss(out, batch): it gets the last module's output and the "
            "batch, and returns the mean loss"
        )
        raise config_error(
            "loss", loss, rule, "lambda out, batch: nn.functional.mse_loss(out[:, 0], batch['y'])"
        )
    for name, given in (("metrics", metrics), ("num_targets", num_targets)):
        if not (given is None or callable(given)):
            raise config_error(name, given, "must be a function", "None")
    if datasets.get("train") is None:
        raise config_error(
            "datasets",
            sorted(datasets),
            'must have samples to train on, under "train"',
            'datasets={"train": [{"x": .., "y": ..}, ..]}',
        )
    samples = SampleSource(datasets["train"])
    return GivenRow(
        named, loss, metrics, num_targets, {**datasets, "train": samples.dataset}, samples
    )
