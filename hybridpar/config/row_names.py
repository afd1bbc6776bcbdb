"""Names of the numbers in a row of metrics.jsonl: names that every run uses, and names that a model or a
user chooses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

ROW_NAMES = frozenset(
    {
        "step",
        "loss",
        "losses",
        "max_vio",
        "expert_loads",
        "grad_norm",
        "lr",
        "counts",
        "tokens_per_s",
        "step_ms",
        "consumed_tokens",
        "mfu",
        "memory_mib",
        "sent_gb_a_day",
        "received_gb_a_day",
        "traffic",
        "loss_scale",
        "skipped",
        "unlabelled_steps",
        "anomaly",
        "policy",
        "rolled_back_to",
        "sites_loss",
        "sites_skipped",
        "val_loss",
        "val_losses",
    }
)
"""Names that every run may write. Metrics need other names."""
VALID = "val_"
"""Prefix of the names of validation numbers."""
NAME_RULE = "must begin with a letter and consist of letters, digits, _, - and ."
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,99}")


def is_name(name: object) -> bool:
    """Whether metrics or a validation set may have this name (NAME_RULE): trackers and pictures can
    show it."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def valid_name(name: str, valid_set: str) -> str:
    """Return the name in a row of a validation number: val_loss, or val_loss/wiki where the set has
    a name."""
    return f"{VALID}{name}/{valid_set}" if valid_set else f"{VALID}{name}"


def metrics_in(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row of a training step that are metrics of the model, by name."""
    for name, value in row.items():
        if (
            name not in ROW_NAMES
            and is_name(name)
            and not name.startswith(VALID)
            and _is_number(value)
        ):
            yield name, value


def valid_numbers_in(row: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield the validation numbers of a row: "loss" or the name of a metric, the set ("": it has no
    name), the value."""
    for name, value in row.items():
        if name.startswith(VALID) and _is_number(value):
            number, _, valid_set = name.removeprefix(VALID).partition("/")
            if is_name(number) and (not valid_set or is_name(valid_set)):
                yield number, valid_set, value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
