"""All rules about settings that do not go together; each value alone is allowed by its type.

`conflicts` yields every broken rule. Rules that need the job or ask what the program can run are in
hybridpar.validate.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

from hybridpar.config.compression_methods import GRADIENTS
from hybridpar.config.pipeline import FOUND
from hybridpar.config.row_names import NAME_RULE, is_name
from hybridpar.config.sections import Config
from hybridpar.config.typed import broken_rules
from hybridpar.config.unused import schedules_with_staleness
from hybridpar.errors import Problem


def conflicts(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with settings that do not go together, whatever the job."""
    yield from config.model.conflicts()
    for rules in _RULES:
        yield from rules(config)


def _parallel(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.tp > (most := config.model.max_tp):
        yield Problem(
            "parallel.tp", parallel.tp, f"must be at most {config.model.max_tp_rule}", str(most)
        )
    if parallel.sequence and not config.model.sequence_parallel:
        rule = f"requires blocks that support it ({config.model.kind}.sequence_parallel = True)"
        yield Problem("parallel.sequence", True, rule, "false")
    if parallel.zero > 1 and config.memory.host_optimizer:
        yield Problem(
            "parallel.zero", parallel.zero, "does not go with memory.host_optimizer = true", "1"
        )


def _pipeline(config: Config) -> Iterator[Problem]:
    pipeline = config.pipeline
    if pipeline.schedule == "auto":
        rule = 'must be left out with pipeline.schedule = "auto", which finds it'
        yield from (
            Problem(f"pipeline.{f.name}", getattr(pipeline, f.name), rule, json.dumps(f.default))
            for f in fields(pipeline)
            if f.name in FOUND and getattr(pipeline, f.name) != f.default
        )
        return
    if pipeline.early_switch == "auto" and pipeline.schedule != "2bw":
        rule = f"schedule {pipeline.schedule} has no such option, only 2bw"
        yield Problem("pipeline.early_switch", "auto", rule, "off")
    if pipeline.zero_bubble and not pipeline.split_backward:
        yield Problem(
            "pipeline.split_backward",
            "false",
            "must be true with pipeline.zero_bubble, which moves the second part of a backward",
            "true",
        )
    if pipeline.stage_layout == "v" and not pipeline.split_backward:
        yield Problem(
            "pipeline.split_backward",
            "false",
            "must be true with pipeline.stage_layout = v, whose order is of both parts of a "
            "backward",
            "true",
        )
    if not pipeline.split_backward and any(
        word[0] in "IW" for line in pipeline.order for word in line.split()
    ):
        yield Problem(
            "pipeline.split_backward",
            "false",
            "must be true where pipeline.order has I and W",
            "true",
        )
    if pipeline.num_virtual_stages > 1 and pipeline.early_switch == "auto":
        rule = (
            f"is of one stage on each rank, and each has {pipeline.num_virtual_stages} "
            "(pipeline.stage_layout, pipeline.virtual_stages)"
        )
        yield Problem("pipeline.early_switch", "auto", rule, "off")
    if pipeline.activations != "full" and (
        pipeline.stage_layout != "v" or pipeline.schedule == "own"
    ):
        rule = "needs pipeline.stage_layout = v and schedule 1f1b or 2bw"
        yield Problem("pipeline.activations", pipeline.activations, rule, "full")


def _optim(config: Config) -> Iterator[Problem]:
    optim = config.optim
    if any(step <= before for (before, _), (step, _) in pairwise(optim.lr_points)):
        ordered = [list(point) for point in sorted(dict(optim.lr_points).items())]
        given = [list(point) for point in optim.lr_points]
        yield Problem(
            "optim.lr_points",
            given,
            "must be points [update, learning rate], each of a later update than the one before",
            str(ordered),
        )
    for number, group in enumerate(optim.groups):
        for name, value, broken in broken_rules(group):
            yield Problem(f"optim.groups[{number}].{name}", value, broken.rule, "1.0")
    schedule = config.pipeline.schedule
    works = schedules_with_staleness(optim.staleness)
    if works and schedule not in works:
        yield Problem(
            "optim.staleness",
            optim.staleness,
            "makes up for old gradients as pipeline.schedule = "
            f"{' or '.join(works)} has them, not {schedule}",
            '"none"',
        )
    if optim.staleness == "nesterov" and optim.name in ("lamb", "own"):
        yield Problem(
            "optim.staleness",
            "nesterov",
            f"{optim.name} has no Nesterov form",
            '"extrapolation"' if schedule == "2bw" else '"none"',
        )
    if (optim.name == "own") != bool(optim.spec):
        yield Problem(
            "optim.spec",
            optim.spec,
            f"goes with optim.name = own, and optim.name is {optim.name}",
            '"my_package.my_module:MyRule", or optim.name = "adamw"'
            if optim.name == "own"
            else 'optim.name = "own"',
        )
    if (
        optim.name in ("sgd", "muon")
        and (optim.nesterov or optim.staleness == "nesterov")
        and optim.momentum <= 0
    ):
        yield Problem("optim.momentum", optim.momentum, "Nesterov needs momentum above 0", "0.9")


def _train(config: Config) -> Iterator[Problem]:
    train = config.train
    if train.fp8 and train.dtype != "bf16":
        yield Problem(
            "train.fp8", "true", f'requires train.dtype = "bf16", not "{train.dtype}"', "false"
        )
    if train.fp8 and config.parallel.tp > 1:
        yield Problem(
            "train.fp8",
            "true",
            f"not supported with parallel.tp = {config.parallel.tp}: each "
            "scale is of a full row, and tensor parallelism splits rows",
            "false, or parallel.tp = 1",
        )
    if train.fp8 and config.parallel.zero == 3 and config.parallel.dp > 1:
        yield Problem(
            "train.fp8",
            "true",
            "not supported with parallel.zero = 3, which releases the weights that "
            "are quantized once a version",
            "false, or parallel.zero = 2",
        )
    if train.fp8 and config.memory.budget:
        yield Problem(
            "train.fp8",
            "true",
            "not supported with memory.budget, which moves the weights that are "
            "quantized once a version",
            "false, or memory.budget = 0",
        )
    if train.share_gpus and train.device == "cpu":
        yield Problem("train.share_gpus", "true", "needs GPUs, and train.device is cpu", "false")


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    equal = str([1.0] * len(data.corpus))
    if not all(data.corpus):
        yield Problem(
            "data.corpus", list(data.corpus), "must name a source in each entry", '["stdlib"]'
        )
    if not data.corpus:
        yield Problem("data.corpus", [], "must name at least one source", '["stdlib"]')
    together = " ".join(data.corpus)
    if len(data.corpus) > 1 and Path(together).is_file():
        rule = (
            "are several sources, and together the name of one file, which needs quotation "
            "marks in a shell"
        )
        yield Problem("data.corpus", list(data.corpus), rule, f'["{together}"]')
    if data.weights and len(data.weights) != len(data.corpus):
        rule = f"must have one weight for each of the {len(data.corpus)} corpora"
        yield Problem("data.weights", list(data.weights), rule, equal)
    elif data.weights and not (min(data.weights) >= 0 and sum(data.weights) > 0):
        yield Problem(
            "data.weights", list(data.weights), "must not be negative, and not all zero", equal
        )
    yield from _validation_sets(config)
    if not data.text_key:
        yield Problem("data.text_key", "", "must name a field or a column", '"text"')
    if data.split == 0 and not data.valid_sources and config.train.eval_interval:
        rule = (
            "must hold something out when train.eval_interval > 0 and there is neither "
            "data.valid_corpus nor "
            "data.valid_sets"
        )
        yield Problem("data.split", data.split, rule, "0.02")


def _validation_sets(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.valid_corpus and data.valid_sets:
        rule = (
            "is one validation set without a name, and data.valid_sets has others: name it "
            "there, too"
        )
        sets = {"other": data.valid_corpus, **data.valid_sets}
        named = ", ".join(f"{name} = {json.dumps(sources)}" for name, sources in sets.items())
        yield Problem(
            "data.valid_corpus",
            list(data.valid_corpus),
            rule,
            f"[], and data.valid_sets = {{{named}}}",
        )
    for name, sources in data.valid_sources.items():
        key = f"data.valid_sets.{name}" if name else "data.valid_corpus"
        if both := sorted({*data.corpus} & {*sources} - {""}):
            yield Problem(key, both, "must not be trained on: it is in data.corpus", "[]")
        if not all(sources) or not sources:
            yield Problem(
                key,
                list(sources),
                "must name a source in each entry",
                '["other.txt"]' if name else "[]",
            )
        if name and not is_name(name):
            yield Problem(
                "data.valid_sets", name, f"is the name of a set, which {NAME_RULE}", '"other"'
            )


def _memory(config: Config) -> Iterator[Problem]:
    memory = config.memory
    away = memory.offload_activations
    for reason in _offloaded_activations(config) if away != 0 else ():
        yield Problem(
            "memory.offload_activations",
            list(away) if isinstance(away, tuple) else away,
            reason,
            "0",
        )
    if memory.budget and config.optim.staleness == "prediction":
        yield Problem(
            "memory.budget",
            memory.budget,
            "does not go with optim.staleness = prediction, which keeps a "
            "second copy of all weights for evaluations",
            "0",
        )
    if memory.host_optimizer:
        yield from _host_optimizer(config)


def _offloaded_activations(config: Config) -> Iterator[str]:
    """What is wrong with activations in a file: their number, and settings that they do not go
    with."""
    memory = config.memory
    numbers = (memory.num_away,) if isinstance(memory.num_away, int) else memory.num_away
    pp = config.parallel.pp
    if min(numbers, default=0) < 0:
        yield "must not be negative"
    if memory.num_away == numbers and len(numbers) != pp:
        yield f"must have a number for each of the {pp} ranks of a pipeline"
    if memory.budget and memory.offload_activations == "auto":
        yield f"does not go with memory.budget = {memory.budget}, whose moves take the time of the same disk or link"


def _host_optimizer(config: Config) -> Iterator[Problem]:
    memory = config.memory
    optim = config.optim
    if memory.budget:
        yield Problem(
            "memory.budget",
            memory.budget,
            "does not go with memory.host_optimizer, which keeps in memory all that it updates",
            "0",
        )
    if optim.name == "lamb":
        yield Problem(
            "optim.name",
            "lamb",
            "does not go with memory.host_optimizer: it takes norms of whole "
            "parameters, over ranks",
            "adamw",
        )
    if not config.norms_first:
        yield Problem(
            "optim.clip_grad",
            optim.clip_grad,
            "must be above 0 with memory.host_optimizer and schedule "
            "pipedream: the host waits for the norm",
            "1.0",
        )


def _run(config: Config) -> Iterator[Problem]:
    run = config.run
    parts = Path(run.name).parts
    if not parts or Path(run.name).is_absolute() or ".." in parts or not run.name.isprintable():
        yield Problem("run.name", run.name, "must be the name of a folder in run.dir", "run")
    elif os.path.abspath(run.folder) == os.path.abspath(config.cache_folder):
        yield Problem(
            "run.name",
            run.name,
            "must not name the folder of prepared corpora (data.cache)",
            "run",
        )
    for name in run.trackers:
        if importlib.util.find_spec(name) is None:
            yield Problem("run.trackers", name, "is not installed", f"pip install {name}")


def _checkpoint(config: Config) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    train = config.train
    sets = config.data.valid_sets
    if checkpoint.best_by and sets and checkpoint.best_by not in sets:
        rule = f"must be the name of a validation set, and data.valid_sets has {', '.join(sets)}"
        yield Problem("checkpoint.best_by", checkpoint.best_by, rule, f'"{next(iter(sets))}"')
    if checkpoint.keep_best and not train.eval_interval:
        rule = "needs validation losses, and train.eval_interval is 0"
        yield Problem("checkpoint.keep_best", checkpoint.keep_best, rule, "0")
    elif checkpoint.keep_best and train.save_interval % train.eval_interval:
        yield Problem(
            "train.save_interval",
            train.save_interval,
            "must be a multiple of train.eval_interval = "
            f"{train.eval_interval}, so that checkpoint.keep_best can tell which checkpoint is "
            "best",
            str(-(-train.save_interval // train.eval_interval) * train.eval_interval),
        )


def _anomalies(config: Config) -> Iterator[Problem]:
    anomalies = config.anomalies
    if anomalies.window < 8 and (anomalies.loss_spike or anomalies.norm_spike):
        yield Problem(
            "anomalies.window", anomalies.window, "is too short to tell a spike from noise", "64"
        )
    for name, found in (
        ("on_non_finite", True),
        ("on_loss_spike", anomalies.loss_spike > 0),
        ("on_norm_spike", anomalies.norm_spike > 0),
    ):
        if found and getattr(anomalies, name) == "skip" and not config.norms_first:
            rule = (
                "pipedream without clipping updates before the norm is known, so no update can "
                "be skipped; set "
                "optim.clip_grad, or"
            )
            yield Problem(f"anomalies.{name}", "skip", rule, '"stop"')
    if anomalies.rolls_back and not config.train.save_interval:
        rule = "must be positive: anomalies are to be rolled back to a checkpoint"
        yield Problem("train.save_interval", 0, rule, "100")


def _outer(config: Config) -> Iterator[Problem]:
    outer = config.outer
    if config.parallel.sites == 1:
        return
    if outer.fragments > (most := min(outer.every, config.model.num_blocks)):
        which = "outer.every" if most == outer.every else "the number of blocks"
        yield Problem(
            "outer.fragments", outer.fragments, f"must be at most {which} = {most}", str(most)
        )
    elif outer.delay > (most := outer.every // outer.fragments):
        rule = (
            f"must be at most outer.every / outer.fragments = {most}: one message is under way "
            "at a time"
        )
        yield Problem("outer.delay", outer.delay, rule, str(most))
    for field, value, rule, works in _NOT_WITH_SITES:
        section, _, key = field.partition(".")
        found = getattr(getattr(config, section), key)
        if value(found):
            yield Problem(field, found, rule, works)
    if not config.norms_first:
        yield Problem(
            "optim.clip_grad",
            config.optim.clip_grad,
            "must be above 0 with several sites and schedule "
            "pipedream: what a site tells the others is known with the norm",
            "1.0",
        )
    if config.anomalies.rolls_back:
        rule = (
            "does not go with parallel.sites above 1, where each site has steps of its own to "
            "go back over"
        )
        anomalies = config.anomalies
        yield from (
            Problem(f"anomalies.{name}", "roll_back", rule, '"stop"')
            for name in ("on_non_finite", "on_loss_spike", "on_norm_spike", "on_divergence")
            if getattr(anomalies, name) == "roll_back"
        )


def _compression(config: Config) -> Iterator[Problem]:
    compression = config.compression
    for reason in _compressed_gradients(config) if compression.gradients != "none" else ():
        yield Problem("compression.gradients", compression.gradients, reason, "none")
    shapes = [config.model.activation_shape(n) for n in range(config.model.num_blocks - 1)]
    if compression.both_ways != ("none", "none") and any(
        isinstance(s, dict) or s != shapes[0] for s in shapes
    ):
        yield Problem(
            "compression.messages",
            compression.messages,
            f"needs one tensor of one shape between all blocks, and {config.model.kind} has others",
            "none",
        )
    known = compression.value_types
    if known and compression.gradients_values not in known:
        others = " or ".join(
            f'"{name}"'
            for name, row in GRADIENTS.items()
            if compression.gradients_values in row.value_types
        )
        yield Problem(
            "compression.gradients_values",
            compression.gradients_values,
            f'not supported with compression.gradients = "{compression.gradients}", '
            f"only with {others}",
            known[0],
        )


def _compressed_gradients(config: Config) -> Iterator[str]:
    if config.parallel.sites > 1:
        yield (
            f"does not go with parallel.sites = {config.parallel.sites}, within which links "
            "are fast: "
            "outer.precision is for what sites send"
        )
    if config.memory.budget:
        yield (
            f"does not go with memory.budget = {config.memory.budget}: what a replica has not "
            "sent is needed "
            "whole, once a batch"
        )


_NOT_WITH_SITES = (
    ("parallel.zero", lambda zero: zero > 1, "does not go with parallel.sites above 1", "1"),
    ("memory.parts", lambda parts: parts > 1, "does not go with parallel.sites above 1", "0"),
    ("memory.budget", bool, "does not go with parallel.sites above 1", "0"),
    ("memory.host_optimizer", bool, "does not go with parallel.sites above 1", "false"),
    (
        "optim.staleness",
        lambda remedy: remedy == "prediction",
        "does not go with parallel.sites above 1, whose outer "
        "step is no update that could be predicted",
        '"none"',
    ),
)
"""Fields, what they must not be, the rule, and a value that works."""

_RULES = (
    _parallel,
    _pipeline,
    _optim,
    _train,
    _data,
    _memory,
    _run,
    _checkpoint,
    _anomalies,
    _outer,
    _compression,
)
"""The rules of each section."""
