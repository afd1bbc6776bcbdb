"""Find everything wrong with a configuration at once (`hybridpar check`), for any world size,
without a process group.

Rules of the settings themselves are in hybridpar.config.rules. This module has the rules that need
the job, and asks the parts of the program that know what they can run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from functools import partial
from math import gcd, isfinite
from pathlib import Path

from hybridpar.checkpoint.compatible import CONTINUABLE
from hybridpar.config import Config, ParameterGroup, UnloadedModel, broken_rules
from hybridpar.config.rules import conflicts
from hybridpar.errors import ConfigError, Problem, not_utf8
from hybridpar.job import JobPlan
from hybridpar.models.build import (
    requested_recomputation,
    require_factors,
    require_tied_ends,
    require_trainable,
)
from hybridpar.models.metrics import require_names
from hybridpar.ops.backends.registry import SCALED, select
from hybridpar.optim.custom_rule import find_rule
from hybridpar.runtime.codecs import Codecs


def resolve(config: Config, world_size: int) -> Config:
    """Return `config` with parallel.dp filled in for `world_size` processes. Raises: ConfigError
    with every problem.
    """
    if found := problems(config, world_size):
        raise ConfigError(*found)
    parallel = config.parallel
    dp = parallel.dp or world_size // replace(parallel, dp=1).num_ranks
    return replace(config, parallel=replace(parallel, dp=dp))


def problems(config: Config, world_size: int) -> list[Problem]:
    """Return everything that keeps `config` from running in a job of `world_size` processes; empty
    if it can run.
    """
    return [*value_problems(config)] or [  # what follows divides by these numbers
        *_grid(config, world_size),
        *conflicts(config),
        *_refused(config),
        *_continued(config),
        *(_known_family(config) if config.checkpoint.family else ()),
    ]


def value_problems(config: Config) -> Iterator[Problem]:
    """Yield values that no configuration can have, such as numbers out of range. A model that has
    not been imported has none.
    """
    for section in (f.name for f in fields(config)):
        settings = getattr(config, section)
        if isinstance(settings, UnloadedModel):
            continue
        usual = type(settings)()
        rules = {name: rule for name, _, rule in broken_rules(settings)}
        for name, value in vars(settings).items():
            parts = list(_leaves(value))
            given = list(value) if isinstance(value, tuple) else value
            default = getattr(usual, name)
            if any(isinstance(part, float) and not isfinite(part) for part in parts):
                rule = "must be finite"
                works = default
            elif any(isinstance(part, int) and abs(part) >= 2**64 for part in parts):
                rule = "is too large"
                works = default
            elif any(isinstance(part, str) and "\0" in part for part in parts):
                rule = "must not contain a zero byte"
                works = default
            elif flaws := [
                flaw for part in parts if isinstance(part, str) and (flaw := not_utf8(part))
            ]:
                rule = f"must be UTF-8 text, since config.toml stores it; {flaws[0]}"
                works = default
            elif any(isinstance(part, str) and part.startswith("~/") for part in parts):
                home = [str(Path(str(part)).expanduser()) for part in parts]
                rule = (
                    "must not contain ~, which a shell expands only at the start of a word; "
                    "write the full path"
                )
                works = home if isinstance(value, tuple) else f'"{home[0]}"'
            elif any(not isinstance(part, bool | int | float | str) for part in parts):
                rule = (
                    "must be a string, a number, a boolean or a list of these, the types "
                    "that TOML has"
                )
                works = 0
            elif name in rules:
                rule = rules[name].rule
                works = rules[name].works(value, default)
            else:
                continue
            works = list(works) if isinstance(works, tuple) else works
            yield Problem(f"{section}.{name}", given, rule, str(works))


def _leaves(value: object) -> Iterator[object]:
    """Yield the strings and numbers in a value: in lists and parameter groups, and in tables with
    their keys.
    """
    if isinstance(value, ParameterGroup):
        value = tuple(vars(value).values())
    if isinstance(value, tuple):
        for entry in value:
            yield from _leaves(entry)
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield name
            yield from _leaves(entry)
    else:
        yield value


def _grid(config: Config, world_size: int) -> Iterator[Problem]:
    tp = config.parallel.tp
    pp = config.parallel.pp
    dp = config.parallel.dp
    cp = config.parallel.cp
    sites = config.parallel.sites
    least = replace(config.parallel, dp=1).num_ranks
    if sites > 1 and config.parallel.zero == 0 and world_size > tp * pp * sites:
        rule = (
            "must be at least 1 with parallel.sites > 1 and parallel.dp > 1: each replica "
            "exchanges the part of the model that it updates"
        )
        yield Problem("parallel.zero", 0, rule, "1")
    ep = config.parallel.ep
    replicas = world_size // least
    if not dp and world_size % least == 0 and replicas * cp % ep:
        times = f", times cp = {cp}" if cp > 1 else ""
        rule = f"must divide the {replicas} replicas that {world_size} processes are{times}"
        yield Problem("parallel.ep", ep, rule, str(gcd(ep, replicas * cp)))
    context = f" cp={cp}" if cp > 1 else ""
    given = f" sites={sites}" if sites > 1 else ""
    product = f"tp{' * cp' if cp > 1 else ''} * pp * dp{' * sites' if sites > 1 else ''}"
    if dp and config.parallel.num_ranks != world_size:
        fills = ", or parallel.dp = 0" if world_size % least == 0 else ""
        yield Problem(
            "parallel",
            f"tp={tp}{context} pp={pp} dp={dp}{given}",
            f"{product} = {config.parallel.num_ranks} does not match the job's {world_size} "
            f"processes",
            f"{config.parallel.num_ranks} processes (--ranks, or torchrun's "
            f"--nproc-per-node){fills}",
        )
    elif not dp and world_size % least:
        outer = sites * cp
        each = world_size // outer if world_size % outer == 0 else 0  # processes of each site
        works = [
            f"tp={t}{context} pp={p}" for t in _divisors(each, tp) for p in _divisors(each // t, pp)
        ] or ["parallel.cp = 1" if cp > 1 else "parallel.sites = 1"]
        rule = (
            f"{product.replace(' * dp', '')} = {least} must divide the number of processes, "
            f"{world_size}"
        )
        yield Problem(
            "parallel",
            f"tp={tp}{context} pp={pp}{given}",
            rule,
            f"{least} processes (--ranks, or torchrun's --nproc-per-node), or {works[-1]}",
        )


def _divisors(number: int, most: int) -> list[int]:
    """Return the divisors of `number` up to `most`, ascending; none for 0."""
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]


def _refused(config: Config) -> Iterator[Problem]:
    """Yield the problems that parts of the program find in the settings."""
    model = config.model
    pipeline = config.pipeline
    pp = config.parallel.pp
    chunks = config.pipeline.num_virtual_stages
    device = None if config.train.device == "auto" else config.train.device
    said = {problem.field for problem in model.conflicts()}
    # groups name parameters of a model, so they are checked only if it can be built
    groups = () if said else config.optim.groups
    job = JobPlan(config)
    num_stages = min(pp * chunks, model.num_blocks)
    attempts: list[Callable[[], object]] = [lambda: job.split]
    if not said:
        attempts.append(partial(require_trainable, model, groups))
    attempts += [lambda: require_tied_ends(model, pp), lambda: require_names(model)]
    if config.compression.takes_factors:
        attempts.append(partial(require_factors, model, config.compression.gradients, groups))
    attempts += [
        lambda: requested_recomputation(pipeline.recompute, model, num_stages),
        lambda: job.schedule.check_shape(job.shape),
        lambda: Codecs.of(job),
    ]
    if config.optim.name == "own" and config.optim.spec:
        attempts.append(partial(find_rule, config.optim))
    for op, choice in asdict(config.kernels).items():
        attempts.append(partial(select, op, choice, device, needs=needed_features(config, op)))
    found: list[Problem] = []
    for attempt in attempts:
        try:
            attempt()
        except ConfigError as error:
            found += [
                problem
                for problem in error.problems
                if problem not in found and f"model.{problem.field}" not in said
            ]  # a layer names its argument without the section
    yield from found


def needed_features(config: Config, op: str) -> tuple[str, ...]:
    """Return what the model needs of an operation, and not all of its backends have."""
    layers = config.model.cost_model
    if layers is None:
        return ()
    is_scaled = op == "rotary" and layers.rotary_scaling != "none"
    return SCALED if is_scaled else ()


def _known_family(config: Config) -> Iterator[Problem]:
    from hybridpar.checkpoint.huggingface.families import FAMILIES  # imports safetensors

    name = config.checkpoint.family
    if name not in FAMILIES:
        near = get_close_matches(name, FAMILIES, 1, 0.0)[0]
        rule = f"must be one of {', '.join(FAMILIES)}"
        yield Problem("checkpoint.family", name, rule, f'"{near}"')


def _continued(config: Config) -> Iterator[Problem]:
    if wrong := [name for name in config.train.continue_with if name not in CONTINUABLE]:
        near = get_close_matches(wrong[0], CONTINUABLE, 1, 0.0)[0]
        yield Problem(
            "train.continue_with", wrong, f"must be one of {', '.join(CONTINUABLE)}", f'["{near}"]'
        )
