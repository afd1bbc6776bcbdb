"""Models that are a row of ordinary modules, each of which takes the output of the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from hybridpar.config import ModelSpec, spec_error
from hybridpar.errors import ConfigError, described, first_line, raised_at
from hybridpar.models.custom_blocks import Build, Shape, making, require_same_everywhere
from hybridpar.models.dropout import DropoutCalls
from hybridpar.models.metrics import is_ghost, require_metrics, require_values
from hybridpar.models.watched import RefuseDraws


class SequentialSpec(ModelSpec):
    """A model of modules in a row: a Sequential, a list, or a generator of them.

        @dataclass(frozen=True)
        class Net(hybridpar.SequentialSpec):
            width: int = 64

            def layers(self):
                yield nn.Sequential(nn.Linear(3, self.width), nn.Tanh())
                yield nn.Linear(self.width, 5)

            def loss(self, out, batch):
                return nn.functional.cross_entropy(out, batch["label"])

            def sample(self, number, seed): ...

    Each is a unit that a split into stages can separate. Shapes between them are found on the meta
    device, with a sample. A generator that makes one module after the other lets a process hold no
    more than its own.

    The first and the last module may share parameters, as an embedding and a head do
    (`head.weight = table.weight`): they are one parameter on every grid. Other modules that share
    parameters must be one module.
    """

    inputs: ClassVar[str] = "x"
    """The name of the array of a sample that the first module takes."""

    def layers(self) -> Iterable[nn.Module]:
        """The modules, newly made, in their order."""
        raise self._undefined("def layers(self): ...")

    def loss(self, out: Any, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a micro-batch, from the last module's output.

        It is the mean over the samples of the micro-batch. Where the model defines `num_targets`,
        it is the sum over the labels that count instead, and is divided by their number in the
        whole batch: a micro-batch may have any number of them, or none. Shapes: a number (0-d).
        """
        raise self._undefined("def loss(self, out, batch): ...")

    def metrics(self, out: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the metrics of a micro-batch by name, such as {"accuracy": ..}; they are reported
        and train nothing.

        Each is a mean over the samples of the micro-batch, or a sum over the labels that count, as
        the loss is. It is called without gradients. Names are the same for every micro-batch.
        Shapes: numbers (0-d).
        """
        return {}

    @property
    def metric_names(self) -> tuple[str, ...]:  # type: ignore[override]  # found, where a ModelSpec says them
        """The names of the numbers that `metrics` returns."""
        return () if type(self).metrics is SequentialSpec.metrics else _metric_names(self)

    @property
    def num_blocks(self) -> int:
        """One for each module."""
        return len(_shapes(self)[0]) + 1

    def activation_shape(self, number: int) -> Shape:
        """Return the shape of one sample of module `number`'s output."""
        return _shapes(self)[0][number]

    @property
    def tie_embeddings(self) -> bool:  # type: ignore[override]  # found, where another model says it
        """Whether the first module and the last one share a parameter."""
        return any(first == 0 for first, _ in self.shared_parameters(self.num_blocks - 1).values())

    def shared_parameters(self, number: int) -> Mapping[str, tuple[int, str]]:
        """Return the parameters that several modules of the row hold.

        That is a module that comes twice, or a tied weight.
        """
        return _shared(self)[number]

    def block(self, number: int, build: Build) -> nn.Module:
        """Return module `number`.

        If `layers` makes one module after the other, the earlier ones are made without memory. A
        generator that makes a module before it yields an earlier one makes all modules up to it in
        full.
        """
        module = self._module(number, torch.device("meta"))
        device = torch.get_default_device()
        if device.type != "meta" and _has_meta_tensors(module):
            module = self._module(number, device)
        return _Layer(module, self, number)

    def _module(self, number: int, earlier: torch.device) -> nn.Module:
        """Make module `number`, after making the earlier ones on the device `earlier`."""
        row = iter(self.layers())
        for _ in range(number):
            with earlier:
                next(row)
        return next(row)


class _Layer(nn.Module):
    """A module as a block.

    The first takes its input from the batch, the last returns the loss and metrics.
    """

    NAME = "layer"
    """Name of the module in names of parameters."""

    def __init__(self, layer: nn.Module, model: SequentialSpec, number: int):
        super().__init__()
        self.layer = layer
        self._model = model
        self._is_last = number == model.num_blocks - 1

    def _get_name(self) -> str:
        return type(self.layer).__name__

    def forward(self, x: Any, batch: dict[str, Tensor], key: object) -> Any:
        if x is None:
            x = batch[self._model.inputs]
        out = self.layer(x)
        if not self._is_last:
            return out
        if not isinstance(loss := self._model.loss(out, batch), Tensor):
            raise _wrong(
                self._model,
                f"loss() must return a number (0-d tensor), not a {type(loss).__name__}",
                "nn.functional.mse_loss(out, batch['y'])",
            )
        metrics = (
            self._metrics(out, batch, has_values=not is_ghost(loss))
            if self._model.metric_names
            else {}
        )
        if self._model.counts_targets:
            losses = {"loss": loss / batch["num_targets"]}
            return losses, {name: metric / batch["num_targets"] for name, metric in metrics.items()}
        share = len(batch[self._model.inputs]) / batch["num_samples"]
        return {"loss": loss * share}, {name: metric * share for name, metric in metrics.items()}

    @torch.no_grad()
    def _metrics(
        self, out: Any, batch: dict[str, Tensor], *, has_values: bool
    ) -> dict[str, Tensor]:
        """Return the metrics of a micro-batch.

        Args:
            out: The last module's output.
            batch: The micro-batch.
            has_values: Whether tensors have values. If not, metrics that depend on them are 0.

        Raises:
            ConfigError: They are not numbers, or have other names than before.
        """
        try:
            found = self._model.metrics(out, batch)
        except Exception:
            if has_values:
                raise
            return {
                name: torch.zeros(()) for name in self._model.metric_names
            }  # they depend on values
        require_metrics(self._model, found, "metrics()")
        return {name: value.double() for name, value in found.items()}


def forget_shapes() -> None:
    """Forget the shapes of all models, whose samples may have changed."""
    _shapes.cache_clear()


def _has_meta_tensors(module: nn.Module) -> bool:
    own = [
        value
        for one in module.modules()
        for value in vars(one).values()
        if isinstance(value, Tensor)
    ]
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers(), *own))


def _wrong(model: SequentialSpec, rule: str, works: str) -> ConfigError:
    return spec_error(model, rule, works)


@lru_cache(maxsize=16)
def _shared(model: SequentialSpec) -> tuple[dict[str, tuple[int, str]], ...]:
    """Return, for each block, the parameters that it shares with others and their first holder."""
    with making("meta", torch.float32):
        row = list(model.layers() or ())
    first: dict[int, tuple[int, str]] = {}
    found: tuple[dict[str, tuple[int, str]], ...] = tuple({} for _ in row)
    for number, module in enumerate(row):
        for name, parameter in module.named_parameters(prefix=_Layer.NAME):
            holder, own = first.setdefault(id(parameter), (number, name))
            if holder != number:
                found[number][name] = found[holder][own] = holder, own
    return found


@lru_cache(maxsize=16)
def _metric_names(model: SequentialSpec) -> tuple[str, ...]:
    """Find the names of a model's metrics with a sample and an output of 0.5 everywhere.

    Raises:
        ConfigError: The metrics are no numbers, or need a gradient.
    """
    with (
        _disable_current_modes(),
        making("cpu", torch.float32),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
    ):
        out = _each_tensor(_shapes(model)[1], _half)
        batch = {
            name: torch.as_tensor(np.asarray(value))[None]
            for name, value in model.sample(0, 0).items()
        }
        batch = {
            name: one.float() if one.is_floating_point() else one for name, one in batch.items()
        }
        counts = {"num_samples": 1, "num_targets": max(model.num_targets(model.sample(0, 0)), 1)}
        batch |= {
            name: torch.tensor(number, dtype=torch.float64) for name, number in counts.items()
        }
        try:
            found = model.metrics(out, batch)
        except Exception as error:
            rule = (
                f"its metrics() fails when tried on one sample and an output of 0.5 everywhere: "
                f"{type(error).__name__}: {first_line(error)}. It is called without gradients"
            )
            raise _wrong(
                model, rule, '{"accuracy": (out.argmax(-1) == batch["label"]).float().mean()}'
            ) from error
    require_values(model, found, "metrics()")
    return tuple(found)


def _half(x: Tensor) -> Tensor:
    return torch.full(x.shape, 0.5 if x.is_floating_point() else 0, dtype=x.dtype)


def _each_tensor(x: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a module's output with `function` applied to each tensor in it."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, dict):
        return {name: _each_tensor(one, function) for name, one in x.items()}
    return tuple(_each_tensor(one, function) for one in x) if isinstance(x, tuple | list) else x


def _identity(x: Tensor, p: float, by_channel: bool) -> Tensor:
    return x


@lru_cache(maxsize=16)
def _shapes(model: SequentialSpec) -> tuple[tuple[Shape, ...], Any]:
    """Find the shapes of the modules' outputs by running one sample on the meta device.

    Returns:
        For each module but the last, the shape of one sample of its output; and the last module's
            output.

    Raises:
        ConfigError: There is no module, or one does not take the output of the module before.
    """
    with making("meta", torch.float32):
        row = list(model.layers() or ())
    if not row:
        raise _wrong(model, "layers() must yield at least one module", "yield nn.Linear(8, 8)")
    for number, module in enumerate(row):
        if not isinstance(module, nn.Module):
            rule = f"layers() must yield torch.nn.Modules; number {number} is {described(module)}"
            raise _wrong(model, rule, "nn.Tanh()")
        require_same_everywhere(module, model, number)
    if not isinstance(sample := model.sample(0, 0), dict):
        rule = f"samples must be dicts of arrays by name; they are of type {type(sample).__name__}"
        raise _wrong(model, rule, '{"x": .., "y": ..}')
    if model.inputs not in sample:
        rule = (
            f"its input {model.inputs!r} is missing in the samples, which have {', '.join(sample)}"
        )
        raise _wrong(model, rule, f"inputs = {next(iter(sample), '')!r}")
    x: Any = torch.as_tensor(np.asarray(sample[model.inputs])).to("meta")[None]
    x = x.float() if x.is_floating_point() else x
    shapes: list[Shape] = []
    with torch.no_grad():
        for number, module in enumerate(row):
            given = x
            try:
                where = f"module {number} ({type(module).__name__})"
                with RefuseDraws(model, where), DropoutCalls(_identity, model, where):
                    x = module(x)
                if number < len(row) - 1:
                    shapes.append(
                        {part: tuple(one.shape[1:]) for part, one in x.items()}
                        if isinstance(x, dict)
                        else tuple(x.shape[1:])
                    )
            except ConfigError:
                raise
            except Exception as error:
                what = (
                    tuple(given.shape) if isinstance(given, Tensor) else f"a {type(given).__name__}"
                )
                rule = (
                    f"module {number} ({type(module).__name__}) fails on {what}: "
                    f"{error}{raised_at(error)}"
                )
                raise _wrong(
                    model, rule, "a module that takes what the one before returns"
                ) from error
    return tuple(shapes), x
