"""Replay bundles: what it takes to run one step of a run again, elsewhere, as a small JSON file.

    runs/<name>/anomalies/step_00000120.json

It names no file: the checkpoint to start from is one of the run's own, by its step.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from hybridpar.config import FINITE, Config, Within, from_mapping, from_plain, span, to_mapping
from hybridpar.data import Samples
from hybridpar.errors import ConfigError, DataError
from hybridpar.reading import errors_as, parse_json, read_limited, to_json
from hybridpar.validate import problems

FORMAT = "hybridpar replay 1"
_MAX_BYTES = 16 << 20
_MOST = 2**40
_MOST_SAMPLES = 2**62


@dataclass(frozen=True)
class Bundle:
    """One step, and how to get there. `step`: the number it is reported under, from 1.

    `checkpoint`: its step; None: the run's initial weights. `start`: the step after which training
    went on from it; later than `checkpoint` where batches were gone over. `skipped`: steps since
    then without an update. `kind`, `what`, `policy`: of the anomaly; empty where there was none.
    `tokens`: a hash of the batch's content. `versions`: of the weights, by stage and micro-batch.
    `stage_norms`: as in StepResult. `samples`: those of the stream that the batch is. These four
    are empty where they are not known.
    """

    config: Config
    step: int
    losses: dict[str, float]
    grad_norm: float
    corpus: str
    checkpoint: int | None
    start: int
    skipped: tuple[int, ...] = ()
    kind: str = ""
    what: str = ""
    policy: str = ""
    lr: float = math.nan
    loss_scale: float = 1.0
    tokens: str = ""
    versions: tuple[tuple[int, ...], ...] = ()
    stage_norms: tuple[float, ...] = ()
    samples: range = range(0)

    @property
    def loss(self) -> float:
        return sum(self.losses.values())

    @property
    def name(self) -> str:
        """Its place in the folder of its run."""
        return f"anomalies/step_{self.step:08d}.json"

    def to_json(self) -> str:
        """Numbers that are not finite are null."""
        fields = {name: value for name, value in asdict(self).items() if name != "config"}
        shown = {"seed": self.config.train.seed, "samples": [self.samples.start, self.samples.stop]}
        return to_json({"format": FORMAT, **fields, **shown, "config": to_mapping(self.config)})


def read_bundle(path: Path) -> Bundle:
    """Raises: DataError if the file is missing, no bundle, or its parts do not fit each other."""
    with errors_as(DataError, path, "is no replay bundle", ConfigError):
        document = from_plain(dict[str, Any], parse_json(read_limited(path, _MAX_BYTES)), "it")
        if document.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        return _parse(document)


def _parse(document: dict[str, Any]) -> Bundle:
    """Raises: ValueError, ConfigError."""

    def read(name: str, kind: Any) -> Any:
        return from_plain(kind, document.get(name), name)

    config = from_mapping(read("config", dict))
    parallel = config.parallel
    if min(parallel.tp, parallel.pp, parallel.dp) < 1:
        raise ValueError("its grid is empty")
    if found := problems(config, parallel.num_ranks):
        raise ConfigError(*found)
    step = read("step", Annotated[int, Within(1, _MOST)])
    start = read("start", Annotated[int, Within(0, step - 1)])
    checkpoint = read("checkpoint", Annotated[int | None, Within(0, start)])
    if checkpoint is None and start:
        raise ValueError("it starts after the first step without a checkpoint")
    losses = read("losses", Annotated[dict[str, float | None], FINITE])
    if set(losses) != set(config.model.losses):
        raise ValueError(f"its losses are not {', '.join(config.model.losses)}")
    samples = span(document.get("samples"), "samples", _MOST_SAMPLES)
    if samples[1] - samples[0] != config.global_batch_size:
        raise ValueError(f"its samples are not one batch of {config.global_batch_size}")
    versions = read("versions", Annotated[tuple[tuple[int, ...], ...], Within(0, step)])
    norms = read("stage_norms", Annotated[tuple[float | None, ...], FINITE])
    stages = parallel.pp * config.pipeline.num_virtual_stages
    if len(versions) not in (0, stages) or len(norms) not in (0, parallel.pp):
        raise ValueError(f"it does not have {stages} stages on {parallel.pp} ranks")
    numbers: dict[str, Any] = {
        name: _number(read(name, Annotated[float | None, FINITE]))
        for name in ("grad_norm", "lr", "loss_scale")
    }
    texts = {name: read(name, str) for name in ("corpus", "kind", "what", "policy", "tokens")}
    return Bundle(
        config,
        step,
        {key: _number(loss) for key, loss in losses.items()},
        checkpoint=checkpoint,
        start=start,
        skipped=read("skipped", Annotated[tuple[int, ...], Within(0, step)]),
        versions=versions,
        stage_norms=tuple(map(_number, norms)),
        samples=range(*samples),
        **numbers,
        **texts,
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def content_hash(samples: Samples, numbers: range) -> str:
    """Stands for all that a batch holds."""
    digest = hashlib.sha256()
    for name, values in sorted(samples.batch(np.arange(numbers.start, numbers.stop)).items()):
        digest.update(name.encode() + np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:32]
