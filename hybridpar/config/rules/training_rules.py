"""Rules of the sections about training steps and their memory: [optim], [train] and [memory]."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hybridpar.config.all_sections import Config
from hybridpar.config.typed import broken_rules
from hybridpar.config.unused import schedules_with_staleness
from hybridpar.errors import Problem


def optim(config: Config) -> Iterator[Problem]:
    section = config.optim
    if any(step <= before for (before, _), (step, _) in pairwise(section.lr_points)):
        ordered = [list(point) for point in sorted(dict(section.lr_points).items())]
        given = [list(point) for point in section.lr_points]
        rule = (
            "must be points [update, learning rate] in the order of updates, with one point for "
            "each update"
        )
        yield Problem("optim.lr_points", given, rule, str(ordered))
    if section.restarts and section.decay != "cosine":
        rule = f'requires optim.decay = "cosine"; it is "{section.decay}"'
        yield Problem("optim.restarts", section.restarts, rule, "0")
    for number, group in enumerate(section.groups):
        for name, value, broken in broken_rules(group):
            yield Problem(f"optim.groups[{number}].{name}", value, broken.rule, "1.0")
    yield from _staleness(config)
    if (section.name == "own") != bool(section.spec):
        works = 'optim.name = "own"'
        if section.name == "own":
            works = '"my_package.my_module:MyRule", or optim.name = "adamw"'
        rule = f'must be set with optim.name = "own", and only then; optim.name is "{section.name}"'
        yield Problem("optim.spec", section.spec, rule, works)
    nesterov = section.nesterov or section.staleness == "nesterov"
    if section.name in ("sgd", "muon") and nesterov and section.momentum <= 0:
        rule = "must be above 0 with Nesterov momentum"
        yield Problem("optim.momentum", section.momentum, rule, "0.9")


def _staleness(config: Config) -> Iterator[Problem]:
    section = config.optim
    schedule = config.pipeline.schedule
    works = schedules_with_staleness(section.staleness)
    if works and schedule not in works:
        rule = (
            f"requires pipeline.schedule = {' or '.join(works)}, whose stale gradients it "
            f"corrects; this configuration has {schedule}"
        )
        yield Problem("optim.staleness", section.staleness, rule, '"none"')
    if section.staleness == "nesterov" and section.name in ("lamb", "own"):
        rule = f"not supported with optim.name = {section.name}, which has no Nesterov form"
        other = '"extrapolation"' if schedule == "2bw" else '"none"'
        yield Problem("optim.staleness", "nesterov", rule, other)


def train(config: Config) -> Iterator[Problem]:
    section = config.train
    if section.gradient_dtype == "bf16" and section.dtype != "bf16":
        rule = f'requires train.dtype = "bf16", not "{section.dtype}"'
        yield Problem("train.gradient_dtype", "bf16", rule, '"fp32"')
    if section.gradient_dtype == "bf16" and config.compression.gradients != "none":
        rule = (
            f'not supported with compression.gradients = "{config.compression.gradients}", which '
            "adds what was left unsent to gradients in fp32"
        )
        yield Problem("train.gradient_dtype", "bf16", rule, '"fp32"')
    for rule, works in _fp8(config) if section.fp8 else ():
        yield Problem("train.fp8", "true", rule, works)
    experts = config.model.routed_experts
    if section.dtype == "fp16" and experts is not None and experts.has_losses:
        rule = (
            "not supported with model.router_balance_loss or model.router_z_loss above 0, whose "
            "gradients the loss scale does not multiply"
        )
        yield Problem("train.dtype", "fp16", rule, '"bf16"')
    if section.share_gpus and section.device == "cpu":
        yield Problem("train.share_gpus", "true", 'requires GPUs; train.device is "cpu"', "false")
    yield from _evaluation(config)


def _evaluation(config: Config) -> Iterator[Problem]:
    section = config.train
    text = config.model.text_format
    if section.eval_metrics and (text is not config.model or not config.model.can_generate):
        rule = "requires a GPT (model.kind), whose loss is of the next token"
        yield Problem("train.eval_metrics", list(section.eval_metrics), rule, "[]")
    if section.stop_patience and not section.eval_interval:
        rule = "requires evaluations; train.eval_interval is 0"
        yield Problem("train.stop_patience", section.stop_patience, rule, "0")
    number, _, valid_set = section.stop_by.partition("/")
    names = ["loss", *section.eval_metrics, *config.model.metric_names]
    sets = config.data.valid_sets
    if section.stop_patience and number not in names:
        rule = f"must be one of {', '.join(names)}; train.eval_metrics adds others"
        yield Problem("train.stop_by", section.stop_by, rule, '"loss"')
    elif section.stop_patience and sets and valid_set not in sets:
        rule = f"must name a validation set (data.valid_sets): {', '.join(sets)}"
        yield Problem("train.stop_by", section.stop_by, rule, f'"{number}/{next(iter(sets))}"')


def _fp8(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the rules that train.fp8 breaks, each with a value that works."""
    parallel = config.parallel
    if config.train.dtype != "bf16":
        yield f'requires train.dtype = "bf16", not "{config.train.dtype}"', "false"
    if config.model.routed_experts is not None:
        yield "not supported with model.num_experts above 0", "false"
    if parallel.tp > 1:
        rule = (
            f"not supported with parallel.tp = {parallel.tp}: each scale belongs to a full row, "
            "which tensor parallelism splits"
        )
        yield rule, "false, or parallel.tp = 1"
    if parallel.zero == 3 and parallel.dp_cp > 1:
        rule = (
            "not supported with parallel.zero = 3, which releases the weights that are quantized "
            "once per version"
        )
        yield rule, "false, or parallel.zero = 2"
    if config.memory.is_limited:
        limit, _ = config.memory.limiting
        rule = (
            f"not supported with {limit}, which moves the weights that are quantized once "
            "per version"
        )
        yield rule, f"false, or {limit} = 0"


def memory(config: Config) -> Iterator[Problem]:
    section = config.memory
    away = section.offload_activations
    for rule in _offloaded_activations(config) if away != 0 else ():
        given = list(away) if isinstance(away, tuple) else away
        yield Problem("memory.offload_activations", given, rule, "0")
    limit, most = section.limiting
    if section.limit and section.budget:
        rule = "not supported with memory.budget: the limit also bounds the training state"
        yield Problem("memory.limit", section.limit, rule, "memory.budget = 0")
    if section.is_limited and config.optim.staleness == "prediction":
        rule = (
            'not supported with optim.staleness = "prediction", which keeps a second copy of all '
            "weights for evaluations"
        )
        yield Problem(limit, most, rule, "0")
    if section.host_optimizer:
        yield from _host_optimizer(config)
    if section.expert_load and config.parallel.ep == 1:
        rule = "requires parallel.ep above 1: without it the rows of all experts are always as many"
        yield Problem("memory.expert_load", section.expert_load, rule, "0.0")
    elif 0 < section.expert_load < 1:
        rule = "must be at least 1, the balanced load, or 0"
        yield Problem("memory.expert_load", section.expert_load, rule, "1.0")


def _offloaded_activations(config: Config) -> Iterator[str]:
    """Yield the rules that memory.offload_activations breaks: about its numbers, and about other
    settings."""
    section = config.memory
    numbers = (section.num_away,) if isinstance(section.num_away, int) else section.num_away
    pp = config.parallel.pp
    if min(numbers, default=0) < 0:
        yield "must not be negative"
    if section.num_away == numbers and len(numbers) != pp:
        yield f"must have {pp} numbers, one for each pipeline rank (parallel.pp)"
    if section.is_limited and section.offload_activations == "auto":
        limit, most = section.limiting
        yield (f"not supported with {limit} = {most}, which uses the same disk or link")


def _host_optimizer(config: Config) -> Iterator[Problem]:
    if config.optim.name == "lamb":
        rule = (
            "not supported with memory.host_optimizer: LAMB needs the norms of full parameters, "
            "which lie on several ranks"
        )
        yield Problem("optim.name", "lamb", rule, "adamw")
    if not config.norms_first:
        rule = (
            "must be above 0 with memory.host_optimizer and schedule pipedream: the host updates "
            "after the gradient norm is known"
        )
        yield Problem("optim.clip_grad", config.optim.clip_grad, rule, "1.0")
