"""`hybridpar check`: everything wrong with a configuration at once, for any world size, without a process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from difflib import get_close_matches
from math import isfinite
from pathlib import Path

from hybridpar.checkpoint.compatible import CONTINUABLE
from hybridpar.config import STOP_SIGNALS, Config, to_mapping
from hybridpar.errors import ConfigError, Problem
from hybridpar.grid import Axis
from hybridpar.models.build import parse_recompute
from hybridpar.models.cost import stage_split
from hybridpar.nn.attention import rotary_features
from hybridpar.ops.registry import select
from hybridpar.optim import build_optimizer
from hybridpar.pipeline.plan.schedules import Sizes, schedule_of

POSITIVE = (
    "model.num_layers", "model.hidden_size", "model.num_heads", "model.seq_length", "model.vocab_size",
    "parallel.tp", "parallel.pp", "pipeline.num_microbatches", "train.num_steps", "train.micro_batch_size",
    "train.timeout_s", "train.log_interval", "checkpoint.keep", "checkpoint.max_failed_saves", "train.eval_batches",
    "optim.loss_scale", "optim.eps", "model.rotary_base", "model.rotary_fraction",
    "faults.timeout_s", "faults.start_timeout_s", "faults.save_timeout_s", "anomalies.window",
)
NOT_NEGATIVE = (
    "model.num_kv_heads", "model.ffn_hidden_size", "model.norm_eps", "model.init_std", "model.logits_chunk",
    "model.max_positions",
    "parallel.dp", "pipeline.chunks", "optim.lr", "optim.min_lr", "optim.warmup_steps", "optim.decay_steps",
    "optim.weight_decay", "optim.clip_grad", "optim.momentum", "optim.staleness_steps", "train.seed", "train.threads",
    "train.eval_interval", "train.save_interval", "checkpoint.keep_best", "plan.step_ms", "plan.cores_taken",
    "faults.restarts", "faults.min_ranks", "anomalies.loss_spike", "anomalies.norm_spike", "anomalies.audit_interval",
    "anomalies.limit",
)
LARGEST = {
    "model.num_layers": 10_000, "model.hidden_size": 2**20, "model.num_heads": 2**16, "model.num_kv_heads": 2**16,
    "model.ffn_hidden_size": 2**24, "model.seq_length": 2**24, "model.max_positions": 2**24,
    "model.rotary_fraction": 1, "model.vocab_size": 2**28, "parallel.tp": 2**16,
    "parallel.pp": 2**16, "parallel.dp": 2**20, "pipeline.num_microbatches": 2**20, "pipeline.sync_steps": 2**40,
    "train.num_steps": 2**40, "train.micro_batch_size": 2**20, "train.threads": 2**10, "train.timeout_s": 1e8,
    "train.eval_batches": 2**30, "train.seed": 2**64 - 1, "anomalies.window": 10**6,
}
"""What no machine has, or will train: no sum or product of these is too much work to look at."""
BELOW_ONE = ("model.dropout", "model.attention_dropout", "model.label_smoothing", "data.split")


def resolve(config: Config, world_size: int) -> Config:
    """`config` with parallel.dp filled in for `world_size` processes. Raises: ConfigError with every problem."""
    if found := problems(config, world_size):
        raise ConfigError(*found)
    parallel = config.parallel
    dp = parallel.dp or world_size // (parallel.tp * parallel.pp)
    return replace(config, parallel=replace(parallel, dp=dp))


def problems(config: Config, world_size: int) -> list[Problem]:
    """Everything that keeps `config` from running in a job of `world_size` processes; empty where it can run."""
    found = [*_ranges(config)]
    if not found:  # what follows divides by these numbers
        found = [
            *_grid(config, world_size), *_model(config), *_pipeline(config), *_staleness(config), *_data(config),
            *_devices(config), *_kernels(config), *_checkpoints(config), *_anomalies(config)]
    return found


def _value(config: Config, name: str) -> float:
    section, key = name.split(".")
    return getattr(getattr(config, section), key)


def _ranges(config: Config) -> Iterator[Problem]:
    impossible = [*_impossible(config)]
    yield from impossible
    said = {problem.field for problem in impossible}  # which no range says better
    yield from (problem for problem in _outside(config) if problem.field not in said)


def _outside(config: Config) -> Iterator[Problem]:
    for name in POSITIVE:
        if not (value := _value(config, name)) > 0:
            yield Problem(name, value, "must be positive", "1")
    for name in NOT_NEGATIVE:
        if not (value := _value(config, name)) >= 0:
            yield Problem(name, value, "must not be negative", "0")
    for name, most in LARGEST.items():
        if not (value := _value(config, name)) <= most:
            yield Problem(name, value, f"must be at most {most}", str(most))
    yield from _run_folder(config)
    signals = list(config.train.stop_signals)
    if not set(signals) <= set(STOP_SIGNALS):
        yield Problem("train.stop_signals", signals, f"must each be one of {', '.join(STOP_SIGNALS)}",
                      '["INT", "TERM", "HUP", "USR1"]')
    for name in BELOW_ONE:
        if not 0 <= (value := _value(config, name)) < 1:
            yield Problem(name, value, "must be at least 0 and below 1", "0.1")
    betas = list(config.optim.betas)
    if not all(0 <= beta < 1 for beta in betas):
        yield Problem("optim.betas", betas, "must each be at least 0 and below 1", "[0.9, 0.999]")


def _run_folder(config: Config) -> Iterator[Problem]:
    name = config.run.name
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or not name.isprintable():
        yield Problem("run.name", name, "must be the name of a folder in run.dir", "run")
    elif os.path.abspath(config.run.folder) == os.path.abspath(config.cache_folder):
        yield Problem("run.name", name, "must not name the folder of prepared corpora (data.cache)", "run")


def _impossible(config: Config) -> Iterator[Problem]:
    usual = to_mapping(Config())
    for section, table in to_mapping(config).items():
        for key, value in table.items():
            parts = value if isinstance(value, list) else [value]
            if any(isinstance(part, float) and not isfinite(part) for part in parts):
                yield Problem(f"{section}.{key}", value, "must be finite", str(usual[section][key]))
            elif any(isinstance(part, int) and abs(part) >= 2**64 for part in parts):
                yield Problem(f"{section}.{key}", value, "is too large", str(usual[section][key]))
            elif any(isinstance(part, str) and "\0" in part for part in parts):
                yield Problem(f"{section}.{key}", value, "must not hold a zero byte", str(usual[section][key]))


def _grid(config: Config, world_size: int) -> Iterator[Problem]:
    tp, pp, dp = config.parallel.tp, config.parallel.pp, config.parallel.dp
    if dp and tp * pp * dp != world_size:
        yield Problem(
            "parallel", f"tp={tp} pp={pp} dp={dp}", f"tp * pp * dp is {tp * pp * dp} but the job has {world_size} "
            "processes", f"{tp * pp * dp} processes (--ranks, or torchrun's --nproc-per-node), or parallel.dp = 0 to "
            "fill the job")
    elif not dp and world_size % (tp * pp):
        works = [f"tp={t} pp={p}" for t in range(1, tp + 1) for p in range(1, pp + 1) if world_size % (t * p) == 0]
        rule = f"tp * pp = {tp * pp} must divide the number of processes, {world_size}"
        yield Problem("parallel", f"tp={tp} pp={pp}", rule,
                      f"{tp * pp} processes (--ranks, or torchrun's --nproc-per-node), or {works[-1]}")
    if tp > config.model.num_heads:
        yield Problem("parallel.tp", tp, f"must be at most model.num_heads = {config.model.num_heads}",
                      str(config.model.num_heads))


def _model(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.hidden_size % model.num_heads:
        divisors = [n for n in range(1, model.hidden_size + 1) if model.hidden_size % n == 0]
        yield Problem("model.num_heads", model.num_heads, f"must divide model.hidden_size = {model.hidden_size}",
                      str(min(divisors, key=lambda n: abs(n - model.num_heads))))
    elif model.position == "rotary" and model.rotary_fraction == 1 and model.hidden_size // model.num_heads % 2:
        yield Problem("model.position", "rotary", "needs an even head size, and model.hidden_size / model.num_heads is "
                      f"{model.hidden_size // model.num_heads}", '"learned"')
    elif model.position == "rotary":
        try:
            rotary_features(model.hidden_size // model.num_heads, model.rotary_fraction)
        except ConfigError as error:
            yield from error.problems
    if model.position == "learned" and 0 < model.max_positions < model.seq_length:
        yield Problem("model.seq_length", model.seq_length, "must be at most model.max_positions = "
                      f"{model.max_positions}, the rows of the position table", str(model.max_positions))
    if model.parallel_residual and model.post_norm:
        yield Problem("model.parallel_residual", True, "needs the norms before attention and MLP, and "
                      f"model.norm_position is {model.norm_position} ({model.kind})", 'model.norm_position = "pre"')
    if model.num_heads % model.kv_heads:
        divisors = [n for n in range(1, model.num_heads + 1) if model.num_heads % n == 0]
        yield Problem("model.num_kv_heads", model.num_kv_heads, f"must divide model.num_heads = {model.num_heads}",
                      str(min(divisors, key=lambda n: abs(n - model.kv_heads))))
    if model.kind == "bert" and model.seq_length < 8:
        rule = "must leave room for [CLS], two segments and two [SEP]"
        yield Problem("model.seq_length", model.seq_length, rule, "8")


def _pipeline(config: Config) -> Iterator[Problem]:
    pipeline, pp, chunks = config.pipeline, config.parallel.pp, config.pipeline.num_chunks
    for attempt in (
        lambda: stage_split(config.model, pp, pipeline.split, chunks),
        lambda: parse_recompute(pipeline.recompute, config.model.num_layers, pp * chunks),
        lambda: build_optimizer(config.optim, [], Axis("tp")),
        lambda: schedule_of(pipeline).check_sizes(Sizes.of(config)),
    ):
        try:
            attempt()
        except ConfigError as error:
            yield from error.problems
    if pipeline.early_switch == "auto" and pipeline.schedule != "2bw":
        rule = f"schedule {pipeline.schedule} has no such option, only 2bw"
        yield Problem("pipeline.early_switch", "auto", rule, "off")


def _staleness(config: Config) -> Iterator[Problem]:
    schedule, staleness = config.pipeline.schedule, config.optim.staleness
    works = {"extrapolation": ("2bw",), "prediction": ("2bw",), "lr_rescale": ("2bw", "pipedream")}.get(staleness)
    if works and schedule not in works:
        yield Problem("optim.staleness", staleness, "makes up for old gradients as pipeline.schedule = "
                      f"{' or '.join(works)} has them, not {schedule}", '"none"')


def _checkpoints(config: Config) -> Iterator[Problem]:
    train, best = config.train, config.checkpoint.keep_best
    if wrong := [name for name in train.continue_with if name not in CONTINUABLE]:
        near = get_close_matches(wrong[0], CONTINUABLE, 1, 0.0)[0]
        yield Problem("train.continue_with", wrong, f"can only name {', '.join(CONTINUABLE)}", f'["{near}"]')
    if best and not train.eval_interval:
        yield Problem("checkpoint.keep_best", best, "needs validation losses, and train.eval_interval is 0", "0")
    elif best and train.save_interval % train.eval_interval:
        yield Problem("train.save_interval", train.save_interval, "must be a multiple of train.eval_interval = "
                      f"{train.eval_interval}, so that checkpoint.keep_best can tell which checkpoint is best",
                      str(-(-train.save_interval // train.eval_interval) * train.eval_interval))


def _anomalies(config: Config) -> Iterator[Problem]:
    settings = config.anomalies
    if settings.window < 8 and (settings.loss_spike or settings.norm_spike):
        yield Problem("anomalies.window", settings.window, "is too short to tell a spike from noise", "64")
    for name, found in (("on_non_finite", True), ("on_loss_spike", settings.loss_spike > 0),
                        ("on_norm_spike", settings.norm_spike > 0)):
        if found and getattr(settings, name) == "skip" and not config.norms_first:
            rule = ("pipedream without clipping updates before the norm is known, so no update can be skipped; set "
                    "optim.clip_grad, or")
            yield Problem(f"anomalies.{name}", "skip", rule, '"roll_back" or "stop"')
    if settings.rolls_back and not config.train.save_interval:
        rule = "must be positive: anomalies are to be rolled back to a checkpoint"
        yield Problem("train.save_interval", 0, rule, "100")


def _devices(config: Config) -> Iterator[Problem]:
    if config.train.share_gpus and config.train.device == "cpu":
        yield Problem("train.share_gpus", "true", "needs GPUs, and train.device is cpu", "false")


def _kernels(config: Config) -> Iterator[Problem]:
    device = None if config.train.device == "auto" else config.train.device
    for op, choice in asdict(config.kernels).items():
        try:
            select(op, choice, device)
        except ConfigError as error:
            yield from error.problems


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    equal = str([1.0] * len(data.corpus))
    if not all(data.corpus):
        yield Problem("data.corpus", list(data.corpus), "must name a source in each entry", '["stdlib"]')
    if not data.corpus:
        yield Problem("data.corpus", [], "must name at least one source", '["stdlib"]')
    if data.weights and len(data.weights) != len(data.corpus):
        rule = f"must have one weight for each of the {len(data.corpus)} corpora"
        yield Problem("data.weights", list(data.weights), rule, equal)
    elif data.weights and not (min(data.weights) >= 0 and sum(data.weights) > 0):
        yield Problem("data.weights", list(data.weights), "must not be negative, and not all zero", equal)
    if both := sorted({*data.corpus} & {*data.valid_corpus} - {""}):
        yield Problem("data.valid_corpus", both, "must not be trained on: it is in data.corpus", "[]")
    if not all(data.valid_corpus):
        yield Problem("data.valid_corpus", list(data.valid_corpus), "must name a source in each entry", "[]")
    if not data.text_key:
        yield Problem("data.text_key", "", "must name a field or a column", '"text"')
    if data.split == 0 and not data.valid_corpus and config.train.eval_interval:
        rule = "must hold something out when train.eval_interval > 0 and there is no data.valid_corpus"
        yield Problem("data.split", data.split, rule, "0.02")
