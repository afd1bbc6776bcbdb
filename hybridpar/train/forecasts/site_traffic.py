"""What sites will send each other, before a run starts: its own state, on ghosts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from hybridpar.config import Config
from hybridpar.job import JobPlan
from hybridpar.prediction.fake_neighbours import silent_grid
from hybridpar.prediction.ghost import Tracker
from hybridpar.prediction.predict import default_device
from hybridpar.train.engine import Engine

_DAY_S = 86_400


@dataclass(frozen=True)
class SiteTraffic:
    """Bytes that each site sends to each other one, by fragment; every: steps in which all of them
    go once. delay: steps that one may take. step_ms: time of a step where a plan has told it, else
    0. sites: how many there are."""

    fragments: tuple[int, ...]
    every: int
    delay: int
    step_ms: float
    sites: int

    @property
    def a_day(self) -> float | None:
        """Bytes that each site sends to each other one in a day."""
        return (
            sum(self.fragments) / self.every * _DAY_S * 1e3 / self.step_ms if self.step_ms else None
        )

    @property
    def needed_mbit(self) -> float | None:
        """Mbit/s that the slowest link of any site must carry each way so that no site waits, at a
        step of `step_ms` (0: of a second); None where all wait for every message."""
        seconds = self.delay * (self.step_ms / 1e3 or 1.0)
        return 8e-6 * (self.sites - 1) * max(self.fragments) / seconds if seconds else None

    def __str__(self) -> str:
        total = sum(self.fragments) / 1e6
        largest = max(self.fragments) / 1e6
        number = len(self.fragments)
        messages = f"in {number} messages of at most {largest:,.4g} MB, " if number > 1 else ""
        often = (
            f"{self.a_day / 1e9:,.4g} GB a day at {self.step_ms:,.4g} ms a step"
            if self.a_day
            else f"{total / self.every:,.4g} GB in 1,000 steps"
        )
        pace = f"{self.step_ms:,.4g} ms" if self.step_ms else "1 s"
        hidden = (
            f"a message costs no time that arrives within {self.delay} steps: at {pace} a step the "
            "slowest "
            f"site's link must carry {self.needed_mbit:,.3g} Mbit/s each way, or all wait for it"
            if self.delay
            else "training waits for the slowest of them (outer.delay = 0)"
        )
        return (
            f"each site sends each other one {total:,.4g} MB every {self.every} steps, "
            f"{messages}{often}; {hidden}"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values only."""
        return asdict(self) | {"bytes_a_day": self.a_day, "needed_mbit": self.needed_mbit}


def site_traffic(config: Config) -> SiteTraffic | None:
    """The traffic between sites of a resolved configuration; None where there is one site. Nothing
    is sent.

    Replicas share a site's messages among them, so those of one stand for all.
    """
    if config.parallel.sites == 1:
        return None
    one = replace(config, parallel=replace(config.parallel, dp=1))
    job = JobPlan(one)
    totals = [0] * config.outer.fragments
    for rank in range(one.parallel.num_ranks // one.parallel.sites):
        with Tracker(default_device(config)) as tracker:
            outer = Engine(job, silent_grid(one, rank), tracker.device).state.outer
            assert outer is not None
            totals = [total + outer.message_bytes(f) for f, total in enumerate(totals)]
    return SiteTraffic(
        tuple(totals),
        config.outer.every,
        config.outer.delay,
        config.plan.step_ms,
        config.parallel.sites,
    )
