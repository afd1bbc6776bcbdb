"""Forecast the traffic between sites before a run starts, from ghosts of its state."""

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
    """Traffic between sites.

    Attributes:
        fragments: Bytes that each site sends to each other site, by fragment.
        every: Number of steps in which each fragment is sent once.
        delay: Number of steps that a message may take.
        step_ms: Time of a step, if the configuration gives it; otherwise 0.
        sites: Number of sites.
    """

    fragments: tuple[int, ...]
    every: int
    delay: int
    step_ms: float
    sites: int

    @property
    def a_day(self) -> float | None:
        """Bytes that each site sends to each other site per day; None if step_ms is unknown."""
        if not self.step_ms:
            return None
        return sum(self.fragments) / self.every * _DAY_S * 1e3 / self.step_ms

    @property
    def needed_mbit(self) -> float | None:
        """Mbit/s each way that every site's link must carry so that no site waits.

        None if training waits for every message. A step takes `step_ms`, or a second if unknown.
        """
        seconds = self.delay * (self.step_ms / 1e3 or 1.0)
        return 8e-6 * (self.sites - 1) * max(self.fragments) / seconds if seconds else None

    def __str__(self) -> str:
        total = sum(self.fragments) / 1e6
        largest = max(self.fragments) / 1e6
        number = len(self.fragments)
        messages = f"in {number} messages of at most {largest:,.4g} MB, " if number > 1 else ""
        often = f"{total / self.every:,.4g} GB in 1,000 steps"
        if self.a_day:
            often = f"{self.a_day / 1e9:,.4g} GB a day at {self.step_ms:,.4g} ms a step"
        pace = f"{self.step_ms:,.4g} ms" if self.step_ms else "1 s"
        hidden = "training waits for the slowest of them (outer.delay = 0)"
        if self.delay:
            hidden = (
                f"a message costs no time that arrives within {self.delay} steps: at {pace} a step "
                f"the slowest site's link must carry {self.needed_mbit:,.3g} Mbit/s each way, or "
                "all wait for it"
            )
        return (
            f"each site sends each other one {total:,.4g} MB every {self.every} steps, "
            f"{messages}{often}; {hidden}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self) | {"bytes_a_day": self.a_day, "needed_mbit": self.needed_mbit}


def site_traffic(config: Config) -> SiteTraffic | None:
    """Return the traffic between sites of a resolved configuration, or None with one site.

    Nothing is sent. Replicas share a site's messages, so that one replica's total is the site's.
    """
    if config.parallel.sites == 1:
        return None
    one = replace(config, parallel=replace(config.parallel, dp=1, ep=1))
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
