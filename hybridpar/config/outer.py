"""The section [outer]: how sites that train apart (parallel.sites) are brought together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridpar.config.typed import AtLeastOne, Count, Positive, Share


@dataclass(frozen=True)
class OuterConfig:
    """The outer optimizer of several sites, and when its messages go; without effect where
    parallel.sites is 1.

    Each site trains by itself. Every so many steps the differences between its weights and those
    that it had last in common with the others are averaged over the sites, and taken as a gradient
    by SGD with Nesterov momentum.
    Source: DiLoCo, arXiv 2311.08105; fragments, delay and mix: Streaming DiLoCo, arXiv 2501.18512.
    """

    every: AtLeastOne = 30
    """Steps between two exchanges of the same weights."""
    lr: Positive = 0.7
    """Learning rate of the outer SGD."""
    momentum: Share = 0.9
    """Nesterov momentum of the outer SGD."""
    fragments: AtLeastOne = 1
    """Parts of the model, each of every so-many-th block, that are exchanged one after the other
    within `every` steps. Messages are smaller, and come more often."""
    delay: Count = 0
    """Steps that a message may take while training goes on. 0: training waits."""
    mix: Share = 0.0
    """Share of a site's own weights in the weights that it goes on with; 0: it takes the common
    ones. With a delay, 0.5 keeps half of what was trained meanwhile."""
    precision: Literal["full", "bf16", "int8", "int4"] = "full"
    """Numbers in messages. full: as the weights' master copy. int8, int4: with a scale for each 64;
    rounding errors are kept, and added to the next message."""
