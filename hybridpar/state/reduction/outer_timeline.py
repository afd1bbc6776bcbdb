"""Decide when sites exchange which fragment of the weights, by the version's number alone.

    every = 6, fragments = 2, delay = 2

    version       1   2   3   4   5   6   7   8   9  10  11  12  13  14
    fragment 0            *---------->*           *---------->*               * its differences leave
    fragment 1                        *---------->*           *------ ..      > the averages are applied

UPDATE(v - 1) makes version v. Differences that leave at v are applied while version v + delay is
made.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridpar.config import OuterConfig
from hybridpar.state.residency.chunks import block_of


@dataclass(frozen=True)
class OuterTimeline:
    """The timeline of these settings. since: the version since which sites have trained apart;
    nothing leaves up to then.
    """

    settings: OuterConfig
    since: int = 0

    def leaving(self, version: int) -> int | None:
        """Return the fragment whose differences leave while a version is made."""
        every = self.settings.every
        fragments = self.settings.fragments
        phase = version % every or every
        found = [f for f in range(fragments) if (f + 1) * every // fragments == phase]
        return found[0] if found and version > self.since else None

    def taken(self, version: int) -> int | None:
        """Return the fragment whose averages are applied while a version is made."""
        return self.leaving(version - self.settings.delay)

    def under_way(self, version: int) -> int | None:
        """Return the fragment that has left by a version, and that a later version applies."""
        first = max(version - self.settings.delay + 1, 1)
        starts = (self.leaving(v) for v in range(first, version + 1))
        return next((fragment for fragment in starts if fragment is not None), None)

    def is_common(self, version: int) -> bool:
        """Return whether all sites have the same weights at a version."""
        settings = self.settings
        at_once = settings.fragments == 1 and settings.delay == 0 and settings.mix == 0
        return version <= self.since or (at_once and self.leaving(version) is not None)

    def next_common(self, version: int) -> int | None:
        """Return the next version that all sites have in common; None if there will be none."""
        following = range(version + 1, version + self.settings.every + 1)
        return next(filter(self.is_common, following), None)


def fragment_of(parameter: str, tied: str, fragments: int) -> int:
    """Return the fragment of a parameter: blocks round-robin, tied ones with the embedding."""
    return 0 if tied else max(block_of(parameter), 0) % fragments
