"""The reference training for several sites: an oracle for each, and the outer step written out; in
one process.

It shares no code with hybridpar.state.reduction.outer or its timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hybridpar.config import Config
from hybridpar.data.loader import Loader
from hybridpar.verify.oracle import Oracle, OracleStep
from hybridpar.verify.rules import Tensors


@dataclass(frozen=True)
class OfSite:
    """One site's share of the batches of `loader`, which covers the replicas of all sites."""

    loader: Loader
    site: int
    sites: int
    dp: int

    def _index(self, index: int) -> int:
        number, replica = divmod(index, self.dp)
        return (number * self.sites + self.site) * self.dp + replica

    def microbatch(self, batch: int, index: int) -> dict[str, Tensor]:
        return self.loader.microbatch(batch, self._index(index))

    def first_sample(self, index: int) -> int:
        return self.loader.first_sample(self._index(index))

    def num_targets(self, batch: int) -> Any:
        """Return the mean over sites of the number of labels that count."""
        return self.loader.num_targets(batch) / self.sites


@dataclass
class SiteOracles:
    """Inner trainings of all sites, and the outer step. `make`: returns a site's oracle."""

    config: Config
    make: Callable[[], Oracle]
    sites: list[Oracle] = field(init=False)
    _sent: list[tuple[int, Tensors]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.sites = [self.make() for _ in range(self.config.parallel.sites)]
        first = self.sites[0]
        self._anchor = {
            name: w.clone()
            for name, w in first.history[0].items()
            if first.placements[name].trainable
        }
        self._momentum = {name: torch.zeros_like(w) for name, w in self._anchor.items()}

    def step(self, batch: int, loader: Loader, measured: Sequence[Tensors]) -> list[OracleStep]:
        """Train all sites on one batch, and make the outer step if it is due.

        Args:
            measured: Each site's gradients on the grid, as in `Oracle.step`.
        """
        parallel = self.config.parallel
        steps = [
            oracle.step(
                batch, OfSite(loader, s, parallel.sites, parallel.dp), parallel.dp, measured[s]
            )
            for s, oracle in enumerate(self.sites)
        ]
        self._outer(batch + 1)
        return [
            replace(step, weights=oracle.history[-1])
            for step, oracle in zip(steps, self.sites, strict=True)
        ]

    def _outer(self, done: int) -> None:
        delay = self.config.outer.delay
        arriving = self._leaving(done - delay)
        leaving = self._leaving(done)
        for fragment in arriving if delay else ():
            self._take(fragment)
        for fragment in leaving:
            self._send(fragment)
        for fragment in () if delay else arriving:
            self._take(fragment)

    def _leaving(self, done: int) -> list[int]:
        """Return the fragments whose exchange starts after `done` steps."""
        outer = self.config.outer
        return [
            f
            for f in range(outer.fragments)
            if done > 0 and (done - (f + 1) * outer.every // outer.fragments) % outer.every == 0
        ]

    def _names(self, fragment: int) -> list[str]:
        placements = self.sites[0].placements
        number = self.config.outer.fragments
        return [
            name
            for name in self._anchor
            if (0 if placements[name].tied else int(name.split(".")[1])) % number == fragment
        ]

    def _send(self, fragment: int) -> None:
        mean = {
            name: torch.stack(
                [self._anchor[name] - oracle.history[-1][name] for oracle in self.sites]
            ).mean(0)
            for name in self._names(fragment)
        }
        self._sent.append((fragment, mean))

    def _take(self, fragment: int) -> None:
        outer = self.config.outer
        (sent, mean), *self._sent = self._sent
        assert sent == fragment, (sent, fragment)
        for name, delta in mean.items():
            self._momentum[name] = outer.momentum * self._momentum[name] + delta
            self._anchor[name] = self._anchor[name] - outer.lr * (
                delta + outer.momentum * self._momentum[name]
            )
        for oracle in self.sites:
            own = oracle.history[-1]
            oracle.history[-1] = own | {
                name: outer.mix * own[name] + (1 - outer.mix) * self._anchor[name] for name in mean
            }
