"""Metrics of a custom model: numbers beside its losses, which are reported and train nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hybridpar.config import ModelSpec, spec_error
from hybridpar.config.row_names import NAME_RULE, ROW_NAMES, VALID, is_name
from hybridpar.errors import ConfigError, Problem, config_error


class LossesAndMetrics(dict[str, Tensor]):
    """The partial losses of a micro-batch by name, with its metrics.

    Metrics are in float64 and outside of autograd's graph.
    """

    def __init__(self, losses: Mapping[str, Tensor], metrics: Mapping[str, Tensor]):
        super().__init__(losses)
        self.metrics = {name: value.detach().double() for name, value in metrics.items()}


def metrics_of(losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the metrics that came with the losses of a micro-batch."""
    return losses.metrics if isinstance(losses, LossesAndMetrics) else {}


def each(losses: Mapping[str, Tensor], function: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return `function` of each loss of a micro-batch, and of each of its metrics."""
    made = {name: function(loss) for name, loss in losses.items()}
    if isinstance(losses, LossesAndMetrics):
        return LossesAndMetrics(
            made, {name: function(metric) for name, metric in losses.metrics.items()}
        )
    return made


def require_names(model: ModelSpec) -> None:
    """Check the names of a model's metrics. Raises: ConfigError naming each that cannot be
    reported."""
    problems = []
    for name in model.metric_names:
        if not is_name(name):
            rule = f"the name of a metric {NAME_RULE}"
        elif name in ROW_NAMES or name in model.losses or name.startswith(VALID):
            rule = "must not be the name of a number that metrics.jsonl has already"
        else:
            continue
        problems.append(Problem("model.metric_names", name, rule, '"accuracy"'))
    if problems:
        raise ConfigError(*problems)


def require_metrics(model: ModelSpec, metrics: Any, where: str) -> None:
    """Check the metrics of a micro-batch.

    Args:
        model: The model.
        metrics: The metrics.
        where: Names the code that returned them in the error.

    Raises:
        ConfigError: They are not a dict of numbers (0-d tensors), or have other names than the
            model says.
    """
    require_values(model, metrics, where)
    if set(metrics) != set(model.metric_names):
        rule = f"does not match the metrics that {where} returns: {list(metrics)}"
        raise config_error(
            "model.metric_names",
            list(model.metric_names),
            rule,
            f"{tuple(metrics)}, or the same names each time",
        )


def require_values(model: ModelSpec, metrics: Any, where: str) -> None:
    """Check that metrics are numbers. Arguments and errors: see `require_metrics`."""
    if not isinstance(metrics, Mapping):
        raise _wrong(
            model,
            f"{where} must return metrics as a dict of numbers by name, not a "
            f"{type(metrics).__name__}",
            '{"accuracy": ..}',
        )
    for name, value in metrics.items():
        if isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex():
            continue
        found = (
            f"a tensor of shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else f"a {type(value).__name__}"
        )
        works = "no .item()" if isinstance(value, int | float) else "the .mean() of it"
        raise _wrong(
            model,
            f"{where} must return a number (0-d tensor) as metric {name!r}, not {found}",
            works,
        )


def is_ghost(x: object) -> bool:
    """Whether a tensor belongs to a prediction (prediction/ghost.py), and so has no values."""
    return hasattr(x, "stands_for_cuda")


def _wrong(model: ModelSpec, rule: str, works: str) -> ConfigError:
    return spec_error(model, rule, works)
