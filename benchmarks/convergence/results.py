"""The result of one run: a small JSON file, results/<model>/<variant>-s<seed>.json, there
completely or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.convergence.study import comparable
from hybridpar.checkpoint.format.files import write_text
from hybridpar.config import Config, from_mapping, to_mapping
from hybridpar.errors import ConfigError
from hybridpar.reading import to_json

RESULTS = Path(__file__).parent / "results"
BIN_STEPS = 10
_CURVES = ("val_loss", "train_loss")
Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class Result:
    """Numbers of a finished run. `train_loss`: (last step of a bin of BIN_STEPS, mean loss of the
    bin)."""

    model: str
    variant: str
    seed: int
    changes: dict[str, Any]
    """'section.key' -> value, where the run differs from its model's baseline."""
    final_val_loss: float
    val_loss: Curve
    train_loss: Curve
    tokens: int
    eval_tokens: int
    skipped_steps: int
    seconds: float
    machine: dict[str, Any]
    config: dict[str, Any]
    """The whole configuration, without paths."""


def path_of(folder: Path, model: str, variant: str, seed: int) -> Path:
    """Path of the result of a run, whether it is there or will be."""
    return folder / model / f"{variant}-s{seed}.json"


def harvest(
    rows: Sequence[Mapping[str, Any]],
    config: Config,
    changes: Mapping[str, Any],
    machine: Mapping[str, Any],
    variant: str,
) -> Result:
    """The result of a finished run from the lines of its metrics.jsonl.

    Raises: ValueError if they do not reach the last step, or a validation loss is missing or not
        finite.
    """
    steps = [row for row in rows if "loss" in row]
    val = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
    num_steps = config.train.num_steps
    if [row["step"] for row in steps] != list(range(1, num_steps + 1)):
        raise ValueError(f"{variant}: the metrics have {len(steps)} steps, not {num_steps}")
    if not val or val[-1][0] != num_steps or val[-1][1] is None:
        raise ValueError(f"{variant}: no finite validation loss after step {num_steps}")
    batch = (
        config.train.micro_batch_size * config.pipeline.num_microbatches * config.model.seq_length
    )
    return Result(
        model=config.model.kind,
        variant=variant,
        seed=config.train.seed,
        changes=dict(changes),
        final_val_loss=val[-1][1],
        val_loss=val,
        train_loss=binned([row["loss"] for row in steps]),
        tokens=num_steps * batch,
        eval_tokens=config.train.eval_batches * batch,
        skipped_steps=sum(row.get("skipped", False) for row in steps),
        seconds=round(sum(row["step_ms"] for row in steps) / 1e3, 1),
        machine=dict(machine),
        config=to_mapping(comparable(config)),
    )


def binned(losses: Sequence[float | None]) -> Curve:
    """Means over bins of BIN_STEPS steps, by the last step of each; losses that are not finite
    (None) are left out."""
    curve = []
    for start in range(0, len(losses), BIN_STEPS):
        part = losses[start : start + BIN_STEPS]
        if finite := [loss for loss in part if loss is not None]:
            curve.append((start + len(part), round(sum(finite) / len(finite), 5)))
    return curve


def write(result: Result, folder: Path) -> Path:
    """Writes one line a field; a reader never meets half a file."""
    path = path_of(folder, result.model, result.variant, result.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f' "{name}": {to_json(value)}' for name, value in asdict(result).items()]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


def read(path: Path) -> Result:
    """Raises: ValueError if the file is not a result."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        curves = {
            name: [(int(step), float(loss)) for step, loss in fields[name]] for name in _CURVES
        }
        return Result(**fields | curves)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: is not a result of this study ({error})") from None


def read_all(folder: Path, model: str) -> list[Result]:
    """All results of a model."""
    return [read(path) for path in sorted((folder / model).glob("*.json"))]


def is_of(result: Result, config: Config) -> bool:
    """Whether a run of `config` would give this very result. Keys that are newer than it count as
    defaults."""
    try:
        return from_mapping(result.config) == comparable(config)
    except ConfigError:
        return False
