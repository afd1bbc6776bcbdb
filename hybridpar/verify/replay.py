"""`hybridpar replay`: repeat one step of a run in one CPU process, and find where its numbers stop
being finite.

The checkpoint before the step is loaded and the steps up to it are trained again, with all stages
and replicas in one process. The micro-batches of the replicas become one larger micro-batch each,
so every schedule gives each micro-batch the weights that it had (in pipedream a different version
for each stage: staged.py). If the weights and the data produced the recorded numbers, the repeated
ones agree up to the order of summation. If not, a fault of the machine, or of another rank's
memory, is the more likely cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar import checkpoint
from hybridpar.checkpoint.finding import MOST_TRIES
from hybridpar.checkpoint.folders import HeldError, Hold, folder_of
from hybridpar.config import (
    Config,
    KernelsConfig,
    MemoryConfig,
    import_beside_user,
    read_run_config,
    unloaded_code,
)
from hybridpar.data import BatchLoader, Data, open_data
from hybridpar.errors import CheckpointError, DataError, config_error
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.state.residency.chunks import block_of
from hybridpar.train import folder as run_folder
from hybridpar.train.batches.batch_policy import BatchPolicy
from hybridpar.train.bundle import Bundle, content_hash, read_bundle
from hybridpar.train.continued import settings_of
from hybridpar.train.engine import Engine, StepResult
from hybridpar.train.faults.anomalies import DIVERGENCE, RecordedAnomalies
from hybridpar.train.reporting.run_metrics import stream_metrics
from hybridpar.validate import resolve
from hybridpar.verify.boundaries import add_boundaries
from hybridpar.verify.staged import StagedPolicy, staged_engine

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
"""Largest relative difference of loss and gradient norm: rounding, in another order, over the
steps since the checkpoint (fp32: about 1e-7 a step, which training amplifies)."""
_SHOWN = 3

Say = Callable[[str], None]


@dataclass
class Report:
    """Outcome of a repeated step. `recorded`: the outcome in the run.

    `weights`: the first weight that is not finite ("" if all are). `activation`, `gradient`: the
    first block output of a micro-batch, and the first parameter gradient in the order of the
    backward pass, that are not finite. `largest`: the blocks and parameters with the largest
    outputs (root mean square) and gradient norms.
    """

    bundle: Bundle
    result: StepResult
    stage_norms: tuple[float, ...]
    weights: str = ""
    activation: str = ""
    gradient: str = ""
    largest: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.bundle.config.train.dtype]

    @property
    def agrees(self) -> bool:
        """Return whether loss and norm match the record; a value that is not finite matches one
        that is not."""
        pairs = (
            (self.bundle.loss, self.result.loss),
            (self.bundle.grad_norm, self.result.grad_norm),
        )
        return all(_close(recorded, replayed, self.tolerance) for recorded, replayed in pairs)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        bundle = self.bundle
        result = self.result
        return {
            "ok": self.agrees,
            "step": bundle.step,
            "kind": bundle.kind,
            "what": bundle.what,
            "tolerance": self.tolerance,
            "loss": [bundle.loss, result.loss],
            "grad_norm": [bundle.grad_norm, result.grad_norm],
            "stage_norms": [list(bundle.stage_norms), list(self.stage_norms)],
            "first_not_finite": {
                "weight": self.weights or None,
                "activation": self.activation or None,
                "gradient": self.gradient or None,
            },
            "largest": self.largest,
        }

    def lines(self) -> list[str]:
        """Return lines for the user."""
        bundle = self.bundle
        result = self.result
        rows: list[tuple[str, float | None, float]] = [
            ("loss", bundle.loss, result.loss),
            ("gradient norm", bundle.grad_norm, result.grad_norm),
        ]
        part = JobPlan(bundle.config).shape.rank_name
        rows += [
            (f"  of {part} {i}", recorded, replayed)
            for i, (recorded, replayed) in enumerate(
                zip(
                    bundle.stage_norms or [None] * len(self.stage_norms),
                    self.stage_norms,
                    strict=True,
                )
            )
        ]
        why = f": {bundle.what} ({bundle.policy.replace('_', ' ')})" if bundle.what else ""
        lines = [f"step {bundle.step}{why}", f"{'':<16}{'recorded':>16}{'replayed':>16}"]
        for name, recorded, replayed in rows:  # metrics do not have norms by stage
            lines.append(
                f"{name:<16}{'-' if recorded is None else f'{recorded:.8g}':>16}{replayed:>16.8g}"
            )
        for what, first in (
            ("weight", self.weights),
            ("activation", self.activation),
            ("gradient", self.gradient),
        ):
            if first:
                lines.append(f"first {what} that is not finite: {first}")
        for what, found in self.largest.items():
            lines.append(
                f"largest {what}: "
                + ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            )
        lines.append(
            "the numbers are those that were recorded"
            if self.agrees
            else f"these are other numbers than were recorded (tolerance {self.tolerance:g}): "
            "neither the weights "
            "of the checkpoint nor the data explain them"
        )
        return lines


def _close(a: float, b: float, tolerance: float) -> bool:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isfinite(a) == math.isfinite(b)
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


def replay(path: Path, step: int, say: Say, *, trust: bool = False) -> Report:
    """Repeat a step: the step of a bundle, or step `step` of a run folder.

    A custom model's code is imported from the working folder or from installed packages, never from
    the run folder.

    Args:
        trust: Also import code from the folders that the run has noted.

    Raises:
        ConfigError: This run cannot be replayed.
        DataError: The bundle is damaged, or the data has changed.
        CheckpointError: There is no checkpoint to start from.
    """
    folder = path if path.is_dir() else path.parent.parent
    with suppress(FileNotFoundError):  # reading the bundle reports the unknown model
        import_beside_user(read_run_config(folder / run_folder.CONFIG, trust=trust), folder)
    for tries_left in reversed(range(MOST_TRIES)):
        bundle = bundle_of_step(path, step) if path.is_dir() else read_bundle(path)
        with _Held(folder, bundle) as held:
            try:
                engine, loader = _prepare(bundle, folder, say)
                break
            except CheckpointError:
                if held.is_there or not path.is_dir() or not tries_left:
                    raise
        say(
            f"{folder}: the checkpoint of step {bundle.checkpoint} was removed before it was read; "
            "starting over"
        )
    between = bundle.step - 1 - engine.batches_done
    say(f"replaying step {bundle.step} from step {engine.batches_done}, on one CPU process")
    if between:
        engine.train(loader, between, lambda result: None)
    return _probe(engine, loader, bundle)


class _Held:
    """A context in which a job that saves in the run folder does not remove the checkpoint that
    a bundle needs."""

    def __init__(self, folder: Path, bundle: Bundle):
        self._hold: Hold | None = None
        if bundle.checkpoint is not None:
            with suppress(OSError, HeldError):  # it does not exist; loading reports that
                self._hold = Hold(folder_of(folder / run_folder.CHECKPOINTS, bundle.checkpoint))
        self.is_needed = bundle.checkpoint is not None

    @property
    def is_there(self) -> bool:
        """Return whether everything that the bundle needs still exists."""
        return not self.is_needed or (self._hold is not None and self._hold.is_there)

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *error: object) -> None:
        if self._hold is not None:
            self._hold.close()


def _prepare(bundle: Bundle, folder: Path, say: Say) -> tuple[Engine, BatchLoader]:
    """Return an engine with the state before the bundle's step, or some steps before that, and its
    data.

    Raises:
        HybridparError: As for `replay`.
    """
    if (error := unloaded_code(bundle.config)) is not None:
        raise error
    if bundle.config.feeds_back:
        raise config_error(
            "compression.gradients",
            bundle.config.compression.gradients,
            "not supported by replay: every replica keeps an unsent part of its gradients, and "
            "replay runs one process",
            "none",
        )
    config = alone(bundle.config)
    data = open_data(config)
    _check_data(bundle, data)
    judge = RecordedAnomalies(bundle.skipped)
    job = JobPlan(config)
    original = JobPlan(bundle.config)
    staged = None
    if bundle.config.pipeline.schedule == "pipedream" and bundle.config.parallel.pp > 1:
        staged = StagedPolicy(job, original, judge)
        engine = staged_engine(job, original, staged)
    else:
        policy = BatchPolicy(job, judge)
        engine = Engine(job, ProcessGrid(), torch.device("cpu"), policy=policy)
    add_boundaries({int(number): block for number, block in engine.stage.blocks.items()}, original)
    _load(engine, bundle, folder, data, say)
    if staged is not None:
        staged.resume_at(engine.batches_done)
        _check_versions(bundle, staged.versions_of(bundle.step - 1))
    return engine, BatchLoader(
        data.train,
        micro_batch_size=config.train.micro_batch_size,
        num_microbatches=config.pipeline.num_microbatches,
        start=engine.data_start,
    )


def _check_versions(bundle: Bundle, versions: tuple[tuple[int, ...], ...]) -> None:
    """Raise a DataError if the pipeline cannot have drained when the configuration says."""
    if bundle.versions not in ((), versions):
        raise DataError(
            f"step {bundle.step} ran on weight versions {bundle.versions} (by stage and "
            f"micro-batch), but would run on {versions} here: the pipeline drained at steps "
            f"that do not follow from train.eval_interval, train.save_interval and "
            f"anomalies.audit_interval, for example when a signal stopped the run"
        )


def alone(config: Config) -> Config:
    """Return the configuration of the same training on one CPU process."""
    parallel = config.parallel
    pipeline = config.pipeline
    train = config.train
    if parallel.sites > 1:
        raise config_error(
            "parallel.sites",
            parallel.sites,
            "not supported by replay: each site trains its own weights between exchanges",
            "a run with parallel.sites = 1",
        )
    early = pipeline.early_switch
    if pipeline.schedule in ("naive", "gpipe", "interleaved", "own"):
        pipeline = replace(pipeline, schedule="1f1b", virtual_stages=0, order=())
    if isinstance(early, int):
        early += parallel.pp - 1
    one = replace(
        config,
        parallel=replace(parallel, tp=1, cp=1, pp=1, dp=1, ep=1, zero=0),
        kernels=KernelsConfig(),
        memory=MemoryConfig(),
        pipeline=replace(
            pipeline,
            split=(),
            recompute="none",
            warmup="depth",
            gradient_buffers=0,
            early_switch=early,
            split_backward=False,
            zero_bubble=False,
            stage_layout="loop",
            activations="full",
        ),
        train=replace(train, device="cpu", micro_batch_size=train.micro_batch_size * parallel.dp),
    )
    return resolve(one, 1)


def bundle_of_step(folder: Path, step: int) -> Bundle:
    """Return a bundle for any step in a run's metrics. Raises: ConfigError, DataError."""
    saved = next(
        (s for s in checkpoint.saved_steps(folder / run_folder.CHECKPOINTS) if s < step), None
    )
    row: dict[str, Any] | None = None
    known = range(0)
    back = dict[int, int]()
    unused = list[int]()
    for one in stream_metrics(
        folder / run_folder.METRICS
    ):  # a long run has more rows than fit into memory
        at = one["step"]
        if "loss" in one:
            known = range(known.start if known else at, at + 1)
            row = one if row is None and at == step else row
        if row is not None and at > step:
            break
        if (saved or 0) <= at < step:
            rolled_back_to = one.get("rolled_back_to")
            if isinstance(rolled_back_to, int) and one.get("anomaly") != DIVERGENCE:
                back[at] = rolled_back_to  # the last one says where training resumed
            if one.get("skipped") is True:
                unused.append(at)
    if row is None:
        raise config_error(
            "step",
            step,
            f"{folder / run_folder.METRICS} has no such step",
            f"{known.start} to {known.stop - 1}" if known else "a run that has made steps",
        )
    start = max(back, default=saved or 0)
    if back and back[start] != saved:
        raise config_error(
            "step",
            step,
            f"comes after a roll back to the checkpoint of step {back[start]}, which has been "
            f"removed",
            "a larger checkpoint.keep next time",
        )
    skipped = tuple(at for at in unused if at > start)
    config, corpus = settings_of(folder, step, start)
    config = resolve(config, config.parallel.num_ranks)
    names = config.model.losses
    losses = row.get("losses")
    by_name = losses if isinstance(losses, dict) else {}
    values = {name: _number(by_name.get(name) if len(names) > 1 else row["loss"]) for name in names}
    return Bundle(
        config,
        step,
        values,
        _number(row.get("grad_norm")),
        corpus,
        saved,
        start,
        skipped,
        lr=_number(row.get("lr")),
    )


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer with too many digits
        return math.nan


def _check_data(bundle: Bundle, data: Data) -> None:
    corpus = bundle.corpus
    found = data.train.fingerprint
    if corpus and corpus != found:
        raise DataError(
            f"data.corpus = {list(bundle.config.data.corpus)} has changed since the run "
            f"(fingerprint then {corpus}, now {found}), or this version of hybridpar computes "
            f"fingerprints differently"
        )
    if bundle.tokens and bundle.tokens != content_hash(data.train, bundle.samples):
        raise DataError(
            f"samples {bundle.samples.start} to {bundle.samples.stop - 1} have changed since "
            f"the run"
        )


def _load(engine: Engine, bundle: Bundle, folder: Path, data: Data, say: Say) -> None:
    """Load the bundle's checkpoint. Raises: CheckpointError."""
    root = folder / run_folder.CHECKPOINTS
    if bundle.checkpoint is not None:
        back = checkpoint.resume(
            root,
            engine,
            data.train.fingerprint,
            say,
            up_to=bundle.checkpoint,
            go_on_at=bundle.start if bundle.start > bundle.checkpoint else 0,
        )
        if engine.batches_done != bundle.start and (bundle.start > bundle.checkpoint or back == 0):
            raise CheckpointError(
                f"{root}: the checkpoint of step {bundle.checkpoint} has been removed; a run "
                f"keeps the newest checkpoint.keep checkpoints"
            )
    elif start := bundle.config.train.start_from:
        with checkpoint.hold_start(start, bundle.config.model) as hold:
            checkpoint.start_from(hold.folder, engine)


class _Outputs:
    """Observes the outputs of blocks: the first one that is not finite, and how large they are."""

    def __init__(self, blocks: Mapping[str, nn.Module]):
        self.first = ""
        self.sizes: dict[str, float] = {}
        self._calls: dict[str, int] = {}
        self._hooks = [
            block.register_forward_hook(self._hook(f"blocks.{number}"))
            for number, block in blocks.items()
        ]

    def _hook(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, out: Tensor | dict[str, Tensor]) -> None:
            micro_batch = self._calls[name] = self._calls.get(name, -1) + 1
            tensors = out.values() if isinstance(out, dict) else (out,)
            values = torch.cat([t.detach().reshape(-1).double() for t in tensors])
            if not self.first and not values.isfinite().all():
                self.first = f"{name}, micro-batch {micro_batch}"
            self.sizes[name] = max(self.sizes.get(name, 0.0), float(values.square().mean().sqrt()))

        return look

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _probe(engine: Engine, loader: BatchLoader, bundle: Bundle) -> Report:
    """Train the step under observation."""
    store = engine.state.weights
    weights = next(
        (
            f"{name} of version {v}"
            for v in store.live_versions
            for name, w in store.leaves_of(v).items()
            if not w.isfinite().all()
        ),
        "",
    )
    outputs = _Outputs(dict(engine.stage.blocks.items()))
    gradients: dict[str, Tensor] = {}
    results: list[StepResult] = []
    engine.train(
        loader,
        1,
        results.append,
        lambda batch, found: gradients.update(
            {name: gradient.detach().clone() for name, gradient in found.items()}
        ),
    )
    outputs.close()
    result = results[0]
    squares = {
        name: float(g.double().square().sum()) / result.loss_scale**2
        for name, g in gradients.items()
    }
    backward = sorted(gradients, key=block_of, reverse=True)
    wrong = next((name for name in backward if not gradients[name].isfinite().all()), "")
    job = JobPlan(bundle.config)
    held = [
        {block for blocks in job.held(rank).values() for block in blocks}
        for rank in range(job.shape.num_ranks)
    ]
    norms = tuple(
        math.sqrt(sum(square for name, square in squares.items() if block_of(name) in mine))
        for mine in held
    )
    return Report(
        bundle,
        result,
        norms,
        weights,
        outputs.first,
        wrong,
        {
            "activations": _largest(outputs.sizes),
            "gradient norms": _largest(
                {name: math.sqrt(square) for name, square in squares.items()}
            ),
        },
    )


def _largest(sizes: Mapping[str, float]) -> dict[str, float]:
    names = sorted(
        (name for name in sizes if math.isfinite(sizes[name])), key=lambda name: -sizes[name]
    )
    return {name: sizes[name] for name in names[:_SHOWN]}
