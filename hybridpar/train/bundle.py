"""Replay bundles: a small JSON file with all that is needed to run one step of a run again.

    runs/<name>/anomalies/step_00000120.json

It contains no paths, so it works on another machine: the starting checkpoint is given by its step.
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
    """One step of a run, and how to reproduce it.

    Attributes:
        losses: Partial losses of the step.
        corpus: Fingerprint of the data.
        checkpoint: Step of the checkpoint to start from. None: the run's initial weights.
        start: Step after which training resumed from the checkpoint; larger than `checkpoint` if
            a rollback left out batches.
        skipped: Steps since then without an update.
        kind, what, policy: The anomaly; empty if there was none.
        tokens: Hash of the batch's content; empty if not known.
        versions: Weight versions by stage and micro-batch; empty if not known.
        stage_norms: Gradient norms, as in StepResult; empty if not known.
        samples: Sample numbers of the batch in the data stream; empty if not known.
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
        """Path within the run folder."""
        return f"anomalies/step_{self.step:08d}.json"

    def to_json(self) -> str:
        """Return the bundle as JSON; a number that is not finite becomes null."""
        fields = {name: value for name, value in asdict(self).items() if name != "config"}
        shown = {"seed": self.config.train.seed, "samples": [self.samples.start, self.samples.stop]}
        return to_json({"format": FORMAT, **fields, **shown, "config": to_mapping(self.config)})


def read_bundle(path: Path) -> Bundle:
    """Read a replay bundle. Raises: DataError."""
    with errors_as(DataError, path, "is no replay bundle", ConfigError):
        document = from_plain(dict[str, Any], parse_json(read_limited(path, _MAX_BYTES)), "it")
        if document.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        return _parse(document)


def _parse(document: dict[str, Any]) -> Bundle:
    """Build a bundle from its JSON document. Raises: ValueError, ConfigError."""

    def read(name: str, kind: Any) -> Any:
        return from_plain(kind, document.get(name), name)

    config = from_mapping(read("config", dict))
    parallel = config.parallel
    if min(parallel.tp, parallel.cp, parallel.pp, parallel.dp) < 1:
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
    """Return a hash of the content of a batch."""
    digest = hashlib.sha256()
    for name, values in sorted(samples.batch(np.arange(numbers.start, numbers.stop)).items()):
        digest.update(name.encode() + np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:32]
