"""Says when sites exchange which fragment of the weights: by the version's number alone.

    every = 6, fragments = 2, delay = 2

    version       1   2   3   4   5   6   7   8   9  10  11  12  13  14
    fragment 0            *---------->*           *---------->*               * its differences leave
    fragment 1                        *---------->*           *------ ..      > the averages are taken

UPDATE(v - 1) makes version v. Differences that leave at v are taken by version v + delay as it is
made.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridpar.config import OuterConfig
from hybridpar.state.residency.chunks import block_of


@dataclass(frozen=True)
class OuterTimeline:
    """The timeline of these settings. since: the version since which sites have trained apart in
    this way; nothing left up to then."""

    every: int
    fragments: int
    delay: int
    since: int = 0

    @staticmethod
    def of(settings: OuterConfig, since: int = 0) -> OuterTimeline:
        """The timeline of a configuration."""
        return OuterTimeline(settings.every, settings.fragments, settings.delay, since)

    def leaving(self, version: int) -> int | None:
        """The fragment whose differences leave as a version is made."""
        phase = version % self.every or self.every
        found = [
            f for f in range(self.fragments) if (f + 1) * self.every // self.fragments == phase
        ]
        return found[0] if found and version > self.since else None

    def taken(self, version: int) -> int | None:
        """The fragment whose averages a version takes as it is made."""
        return self.leaving(version - self.delay)

    def under_way(self, version: int) -> int | None:
        """The fragment that has left by a version, and that a later one takes."""
        starts = (self.leaving(v) for v in range(max(version - self.delay + 1, 1), version + 1))
        return next((fragment for fragment in starts if fragment is not None), None)

    def is_common(self, version: int, mix: float = 0.0) -> bool:
        """Whether all sites have the same weights at a version."""
        at_once = self.fragments == 1 and self.delay == 0 and mix == 0
        return version <= self.since or (at_once and self.leaving(version) is not None)

    def next_common(self, version: int, mix: float = 0.0) -> int | None:
        """The next version that all sites have in common; None: there will be none."""
        return next(
            (v for v in range(version + 1, version + self.every + 1) if self.is_common(v, mix)),
            None,
        )


def fragment_of(parameter: str, tied: str, fragments: int) -> int:
    """The fragment of a parameter: blocks take turns; a tied parameter is in the embedding's."""
    return 0 if tied else max(block_of(parameter), 0) % fragments
