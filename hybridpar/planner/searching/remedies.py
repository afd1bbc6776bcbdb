"""Settings that make a configuration fit into memory, their cost in time, and the largest model
that fits with each.

Everything is predicted: peaks by `prediction.predict`, and times by simulation of the plan
(`StepCost`), if there is a profile. If no single setting is enough, the most effective ones are
combined. Units: bytes, seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from hybridpar.config import Config, from_mapping
from hybridpar.errors import ConfigError
from hybridpar.job import JobPlan
from hybridpar.planner.costs.candidate_memory import TIGHT, largest_budget
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.measuring.profile import check_settings
from hybridpar.prediction import Footprints, predict
from hybridpar.prediction.knobs import Changes, Knob, knobs
from hybridpar.validate import problems

_TOGETHER = 4
_MOST_LAYERS = 4096
_USUAL_LENGTH = 2048
_LONGEST = 2**24
"""Sequence that is tried first, and the longest one."""
_CLOSE = 0.01
"""Share by which the reported longest sequence may be too low."""
UNCHANGED = "unchanged"


@dataclass(frozen=True)
class Remedy:
    """Effect of some settings.

    Args:
        peak: Bytes of the fullest process.
        step_time: Step time; None if unknown.
        slower: Step time relative to the time without the settings; None if unknown.
    """

    settings: str
    peak: int
    step_time: float | None = None
    slower: float | None = None

    def __str__(self) -> str:
        time = "" if self.slower is None else f", and a step takes {self.slower - 1:+.0%} time"
        return f"{self.settings}: {self.peak / 1e9:.3g} GB{time}"


class Fitting:
    """A search for settings that make configurations fit into `limit` bytes of a process's device.

    Args:
        machine: The machine whose profile gives times; None if times are unknown.
    """

    def __init__(self, limit: float, device: torch.device, machine: Machine | None = None):
        self.limit = limit
        self._device = device
        self._machine = machine
        self._trace = Footprints()

    def peak(self, config: Config) -> int:
        """Return the bytes of the fullest process."""
        return max(
            stage.needed
            for stage in predict(JobPlan(config), device=self._device, trace=self._trace)
        )

    def remedies(self, config: Config) -> list[Remedy]:
        """Return single settings that make a resolved configuration fit, ordered by time, then by
        memory.

        If no single setting is enough, return a combination of the most effective ones, or [] if
        that does not fit either.
        """
        before = self._time(config)
        tried = [(knob, changed, self.peak(changed)) for knob, changed in self._changes(config)]
        found = [
            self._remedy(knob, changed, peak, before)
            for knob, changed, peak in tried
            if peak <= self.limit
        ]
        if not found and (together := self._together(config)) is not None:
            found = [self._remedy(*together, before)]
        return sorted(
            found, key=lambda remedy: (remedy.slower is None, remedy.slower or 0.0, remedy.peak)
        )

    def smallest(self, config: Config) -> Remedy | None:
        """Return the single setting with which a resolved configuration needs the least memory, or
        None if no setting saves any."""
        tried = [Remedy(str(knob), self.peak(changed)) for knob, changed in self._changes(config)]
        best = min(tried, key=lambda remedy: remedy.peak, default=None)
        return best if best is not None and best.peak < self.peak(config) else None

    def largest(self, config: Config) -> list[tuple[str, int]]:
        """Return the largest numbers of layers of this width that fit on the grid, with the current
        settings and with each setting; 0 if not even the smallest model fits. The largest come
        first."""
        config = replace(config, pipeline=replace(config.pipeline, split=()))
        found = [(UNCHANGED, self._most_layers(lambda sized: sized, config))]
        for knob, _ in self._changes(config):
            if "memory.limit" not in str(knob):
                found.append(
                    (str(knob), self._most_layers(partial(from_mapping, knob.changes), config))
                )
        if not config.memory.is_limited and not config.memory.host_optimizer:
            found.append(
                ("memory.limit, as much as there is", self._most_layers(self._in_file, config))
            )
        return sorted(found, key=lambda one: -one[1])

    def longest(self, config: Config) -> int:
        """Return the longest sequence with which a resolved configuration fits, to 1 %; 0 if not
        even the shortest does, or if its model has no length that can be changed."""

        def fits(length: int) -> bool:
            model = config.model.with_length(length)
            if model is None:
                return False
            sized = replace(config, model=model)
            return not problems(sized, sized.parallel.num_ranks) and self.peak(sized) <= self.limit

        return _most(fits, _USUAL_LENGTH, 2 * config.parallel.cp, _LONGEST, _CLOSE)

    # -- internals

    def _changes(self, config: Config) -> Iterator[tuple[Knob, Config]]:
        """Yield the settings to try, and the configuration with each."""
        stages = predict(JobPlan(config), device=self._device, trace=self._trace)
        fullest = max(range(len(stages)), key=lambda rank: stages[rank].needed)
        more: list[dict[str, dict[str, Any]]] = []
        if config.train.dtype == "fp32":
            more.append({"train": {"dtype": "bf16"}})
        split: dict[str, Any] = {"split": []} if config.pipeline.split else {}
        if config.parallel.dp % 2 == 0:
            away = config.memory.on_another_grid().offload_activations
            moved = (
                {"memory": {"offload_activations": away}}
                if away != config.memory.offload_activations
                else {}
            )
            more.append(
                {
                    "parallel": {"pp": 2 * config.parallel.pp, "dp": config.parallel.dp // 2},
                    "pipeline": {"num_microbatches": 2 * config.pipeline.num_microbatches, **split},
                    **moved,
                }
            )
            more.append(
                {
                    "parallel": {"cp": 2 * config.parallel.cp, "dp": config.parallel.dp // 2},
                    "pipeline": {"num_microbatches": 2 * config.pipeline.num_microbatches},
                    **moved,
                }
            )
        if not config.memory.is_limited and self._in_file(config) is not None:
            more.append({"memory": {"limit": f"{self._limit_in_file() >> 20}MiB"}})
        for knob in [
            *knobs(config, fullest, stages[fullest]),
            *(Knob(changes, 0) for changes in more),
        ]:
            changed = from_mapping(knob.changes, config)
            refused = self._device.type != "cpu" and (
                changed.parallel.zero > 1 or changed.memory.is_limited
            )
            if not refused and not problems(changed, changed.parallel.num_ranks):
                yield knob, changed

    def _together(self, config: Config) -> tuple[str, Config, int] | None:
        """Return a combination of settings that is enough, built by adding the most effective one
        in each round."""
        rounds: list[Changes] = []
        peak = self.peak(config)
        for _ in range(_TOGETHER):
            tried = [
                (self.peak(changed), knob.changes, changed)
                for knob, changed in self._changes(config)
            ]
            best = min(tried, key=lambda one: one[0], default=None)
            if best is None or best[0] >= peak:
                return None
            peak, changes, config = best
            rounds.append(changes)
            if peak <= self.limit:
                return " with ".join(map(str, last_values(rounds))), config, peak
        return None

    def _remedy(self, settings: object, changed: Config, peak: int, before: float | None) -> Remedy:
        time = self._time(changed)
        return Remedy(str(settings), peak, time, time / before if time and before else None)

    def _time(self, config: Config) -> float | None:
        """Return the predicted step time, or None if the profile lacks the needed times."""
        if self._machine is None:
            return None
        try:
            check_settings(self._machine.profile, config)
            return StepCost(config, self._machine).step_time
        except ConfigError:
            return None

    def _most_layers(self, change: Callable[[Config], Config | None], config: Config) -> int:
        """Return the most layers with which the configuration fits after `change`, by bisection."""

        def fits(number: int) -> bool:
            sized = replace(config, model=config.model.with_layers(number))
            changed = None if problems(sized, sized.parallel.num_ranks) else change(sized)
            return (
                changed is not None
                and not problems(changed, changed.parallel.num_ranks)
                and (self.peak(changed) <= self.limit)
            )

        least = max(1, 2 * config.parallel.pp * config.pipeline.num_virtual_stages - 2)
        return _most(fits, least, least, _MOST_LAYERS)

    def _in_file(self, config: Config) -> Config | None:
        """Return the configuration with memory.limit, or None if it does not fit even so."""
        if not largest_budget(config, self.limit, self._device, self._trace):
            return None
        limit = self._limit_in_file()
        return replace(config, memory=replace(config.memory, limit=limit))

    def _limit_in_file(self) -> int:
        return int(TIGHT * self.limit) >> 20 << 20


def last_values(rounds: Sequence[Changes]) -> list[Knob]:
    """Return the settings of several rounds of changes, each without the keys that a later round
    changes again."""
    found: list[Knob] = []
    later: set[tuple[str, str]] = set()
    for changes in reversed(rounds):
        kept = {
            section: {key: value for key, value in keys.items() if (section, key) not in later}
            for section, keys in changes.items()
        }
        later |= {(section, key) for section, keys in changes.items() for key in keys}
        if any(kept.values()):
            found.insert(0, Knob(kept, 0))
    return found


def _most(
    fits: Callable[[int], bool], start: int, least: int, most: int, accuracy: float = 0.0
) -> int:
    """Return the largest number from `least` to `most` that fits, found by doubling or halving from
    `start` and then by bisection; 0 if `least` does not fit.

    Args:
        accuracy: Share of the result by which it may be too low.
    """
    low = start
    while not fits(low):
        if low == least:
            return 0
        low = max(least, low // 2)
    high = 2 * low
    while high <= most and fits(high):
        low = high
        high = 2 * high
    while high - low > max(1, accuracy * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
