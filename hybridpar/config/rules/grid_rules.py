"""Rules of the sections about ranks and what they send to each other: [parallel], [pipeline],
[outer] and [compression]."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from math import gcd

from hybridpar.config.all_sections import Config
from hybridpar.config.compression_methods import GRADIENTS
from hybridpar.config.sections.model import ModelConfig
from hybridpar.config.sections.pipeline import FOUND
from hybridpar.errors import Problem


def parallel(config: Config) -> Iterator[Problem]:
    section = config.parallel
    if section.tp > (most := config.model.max_tp):
        yield Problem(
            "parallel.tp", section.tp, f"must be at most {config.model.max_tp_rule}", str(most)
        )
    if section.sequence and not config.model.sequence_parallel:
        rule = f"requires blocks that support it ({config.model.kind}.sequence_parallel = True)"
        yield Problem("parallel.sequence", True, rule, "false")
    if section.cp > 1:
        yield from _context(config)
    if section.ep > 1:
        yield from _experts(config)


def _experts(config: Config) -> Iterator[Problem]:
    """Yield what keeps replicas from sharing the experts of each layer."""
    section = config.parallel
    ep = section.ep
    experts = config.model.routed_experts
    if experts is None:
        rule = "requires experts (model.num_experts), which ranks of ep share"
        yield Problem("parallel.ep", ep, rule, "1")
        return
    if ep > experts.number:
        rule = f"must be at most model.num_experts = {experts.number}: each rank holds an expert"
        yield Problem("parallel.ep", ep, rule, str(experts.number))
    if section.dp_cp % ep:  # 0 is filled in, and checked then
        axes = f"parallel.dp * cp = {section.dp} * {section.cp}"
        axes = axes if section.cp > 1 else f"parallel.dp = {section.dp}"
        rule = f"must divide {axes}: neighbouring ranks share experts"
        yield Problem("parallel.ep", ep, rule, str(gcd(ep, section.dp_cp)))
    if section.sites > 1:
        rule = f"not supported with parallel.sites = {section.sites}"
        yield Problem("parallel.ep", ep, rule, "1")


def _context(config: Config) -> Iterator[Problem]:
    """Yield what keeps ranks from sharing the tokens of a sample."""
    cp = config.parallel.cp
    model = config.model
    if rule := model.context_parallel_rule:
        yield Problem("parallel.cp", cp, rule, "1")
        return
    shape = model.activation_shape(0)
    if isinstance(shape, dict):
        rule = "requires that blocks return one tensor, whose rows are tokens"
        yield Problem("parallel.cp", cp, rule, "1")
    elif 2 * cp > (tokens := shape[0]):
        rule = f"must be at most half of a sample's {tokens} tokens: each rank has two pieces"
        yield Problem("parallel.cp", cp, rule, str(max(tokens // 2, 1)))
    formulas = model.cost_model
    if config.parallel.cp_comm == "ulysses" and formulas is not None:
        heads = _fewest_key_heads(formulas, config.parallel.tp)
        if heads < cp:
            rule = (
                f"requires a key head for each of the {cp} ranks of parallel.cp, and a rank of tp "
                f"has {heads}"
            )
            yield Problem("parallel.cp_comm", "ulysses", rule, "ring")


def _fewest_key_heads(model: ModelConfig, tp: int) -> int:
    """Return the key heads of the rank of tp that has the fewest. Ranks have contiguous query
    heads, as evenly as possible, and the key heads that these take."""
    shared = max(model.num_heads // max(model.kv_heads, 1), 1)
    each, more = divmod(model.num_heads, tp)
    starts = [rank * each + min(rank, more) for rank in range(tp + 1)]
    return min((stop - 1) // shared - start // shared + 1 for start, stop in pairwise(starts))


def pipeline(config: Config) -> Iterator[Problem]:
    section = config.pipeline
    if section.schedule == "auto":
        rule = 'must be left out with pipeline.schedule = "auto", which chooses it'
        yield from (
            Problem(f"pipeline.{f.name}", getattr(section, f.name), rule, json.dumps(f.default))
            for f in fields(section)
            if f.name in FOUND and getattr(section, f.name) != f.default
        )
        return
    if section.early_switch == "auto" and section.schedule != "2bw":
        rule = f'requires pipeline.schedule = "2bw"; this configuration has "{section.schedule}"'
        yield Problem("pipeline.early_switch", "auto", rule, "off")
    if not section.split_backward:
        for rule in _needs_split_backward(config):
            yield Problem("pipeline.split_backward", "false", rule, "true")
    if section.num_virtual_stages > 1 and section.early_switch == "auto":
        rule = (
            f"requires one stage per rank; this configuration has {section.num_virtual_stages} "
            "(pipeline.stage_layout, pipeline.virtual_stages)"
        )
        yield Problem("pipeline.early_switch", "auto", rule, "off")
    on_v = section.stage_layout == "v" and section.schedule != "own"
    if section.activations != "full" and not on_v:
        rule = 'requires pipeline.stage_layout = "v", and schedule 1f1b or 2bw'
        yield Problem("pipeline.activations", section.activations, rule, "full")


def _needs_split_backward(config: Config) -> Iterator[str]:
    section = config.pipeline
    if section.zero_bubble:
        yield (
            "must be true with pipeline.zero_bubble = true, which delays the weight part (W) of "
            "each backward"
        )
    if section.stage_layout == "v":
        yield (
            'must be true with pipeline.stage_layout = "v", whose schedule orders both parts of '
            "each backward"
        )
    if any(word[0] in "IW" for line in section.order for word in line.split()):
        yield "must be true if pipeline.order has I or W, the two parts of a backward"


def outer(config: Config) -> Iterator[Problem]:
    section = config.outer
    if config.parallel.sites == 1:
        return
    if section.fragments > (most := min(section.every, config.model.num_blocks)):
        which = "outer.every" if most == section.every else "the number of blocks"
        yield Problem(
            "outer.fragments", section.fragments, f"must be at most {which} = {most}", str(most)
        )
    elif section.delay > (most := section.every // section.fragments):
        rule = (
            f"must be at most outer.every / outer.fragments = {most}, so that one exchange ends "
            "before the next begins"
        )
        yield Problem("outer.delay", section.delay, rule, str(most))
    experts = config.model.routed_experts
    if experts is not None and experts.bias_rate:
        rule = "not supported with parallel.sites above 1: an outer step would average the biases"
        yield Problem("model.router_bias_rate", experts.bias_rate, rule, "0.0")
    for field, value, rule, works in _NOT_WITH_SITES:
        name, _, key = field.partition(".")
        found = getattr(getattr(config, name), key)
        if value(found):
            yield Problem(field, found, rule, works)
    if not config.norms_first:
        rule = (
            "must be above 0 with several sites and schedule pipedream: sites exchange their "
            "status with the gradient norm"
        )
        yield Problem("optim.clip_grad", config.optim.clip_grad, rule, "1.0")
    if config.anomalies.rolls_back:
        rule = (
            "not supported with parallel.sites above 1: each site would go back over steps of "
            "its own"
        )
        yield from (
            Problem(f"anomalies.{name}", "roll_back", rule, '"stop"')
            for name in ("on_non_finite", "on_loss_spike", "on_norm_spike", "on_divergence")
            if getattr(config.anomalies, name) == "roll_back"
        )


_NOT_WITH_SITES = (
    ("parallel.zero", lambda zero: zero > 1, "not supported with parallel.sites above 1", "1"),
    ("memory.parts", lambda parts: parts > 1, "not supported with parallel.sites above 1", "0"),
    ("memory.budget", bool, "not supported with parallel.sites above 1", "0"),
    ("memory.limit", bool, "not supported with parallel.sites above 1", "0"),
    ("memory.host_optimizer", bool, "not supported with parallel.sites above 1", "false"),
    (
        "optim.staleness",
        lambda remedy: remedy == "prediction",
        "not supported with parallel.sites above 1: an outer step cannot be predicted",
        '"none"',
    ),
)
"""Fields, what they must not be, the rule, and a value that works."""


def compression(config: Config) -> Iterator[Problem]:
    section = config.compression
    experts = config.model.routed_experts
    if section.gradients != "none" and experts is not None and experts.bias_rate:
        rule = (
            f'not supported with compression.gradients = "{section.gradients}", which changes the '
            "sign of small gradients"
        )
        yield Problem("model.router_bias_rate", experts.bias_rate, rule, "0.0")
    for rule in _compressed_gradients(config) if section.gradients != "none" else ():
        yield Problem("compression.gradients", section.gradients, rule, "none")
    shapes = [config.model.activation_shape(n) for n in range(config.model.num_blocks - 1)]
    if section.both_ways != ("none", "none") and any(
        isinstance(shape, dict) or shape != shapes[0] for shape in shapes
    ):
        rule = (
            "requires that every block returns one tensor, all of the same shape; blocks of "
            f"{config.model.kind} do not"
        )
        yield Problem("compression.messages", section.messages, rule, "none")
    known = section.value_types
    if known and section.gradients_values not in known:
        others = " or ".join(
            f'"{name}"'
            for name, row in GRADIENTS.items()
            if section.gradients_values in row.value_types
        )
        rule = (
            f'not supported with compression.gradients = "{section.gradients}", only with {others}'
        )
        yield Problem("compression.gradients_values", section.gradients_values, rule, known[0])


def _compressed_gradients(config: Config) -> Iterator[str]:
    if config.parallel.sites > 1:
        yield (
            f"not supported with parallel.sites = {config.parallel.sites}; outer.precision "
            "compresses the traffic between sites"
        )
    if not config.memory.is_limited:
        return
    limit, most = config.memory.limiting
    if config.parallel.zero > 1 and config.parallel.dp_cp > 1:
        reason = (
            "a batch's gradients are also its unsent rest, so all of them are needed until its update"
            if config.compression.replicas_differ
            else "shards of its reduced gradients cannot leave the device"
        )
        yield (
            f"not supported with {limit} = {most} and parallel.zero = {config.parallel.zero}: "
            f"{reason}; use parallel.zero = 1, or no compression"
        )
    if config.train.dtype == "fp16":
        yield (
            f'not supported with {limit} = {most} and train.dtype = "fp16": a new loss scale '
            "rescales all unsent gradients at once"
        )
