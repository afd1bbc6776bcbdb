"""The section [outer]: how sites that train apart (parallel.sites) are brought together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridpar.config.typed import AtLeastOne, Count, Positive, Share


@dataclass(frozen=True)
class OuterConfig:
    """Outer optimizer that several sites share, and when they exchange; no effect if parallel.sites
    is 1.

    Each site trains by itself. Every `every` steps, the difference between its weights and the last
    common weights is averaged over the sites and applied as a gradient by SGD with Nesterov
    momentum.
    Source: DiLoCo, arXiv 2311.08105; fragments, delay and mix: Streaming DiLoCo, arXiv 2501.18512.
    """

    every: AtLeastOne = 30
    """Steps between two exchanges of the same weights."""
    lr: Positive = 0.7
    """Learning rate of the outer SGD."""
    momentum: Share = 0.9
    """Nesterov momentum of the outer SGD."""
    fragments: AtLeastOne = 1
    """Fragments of the model that are exchanged one after the other within `every` steps; each
    has every n-th block. Messages become smaller and more frequent."""
    delay: Count = 0
    """Steps that an exchange may take while training continues. 0: training waits for it."""
    mix: Share = 0.0
    """Share of a site's own weights in the weights that it continues with. 0: it takes the
    common weights. With a delay, 0.5 keeps half of what the site has trained meanwhile."""
    precision: Literal["full", "bf16", "int8", "int4"] = "full"
    """Type of the numbers that sites send. full: the type of the master weights. int8, int4:
    with one scale per 64 numbers; rounding errors are kept and added to the next exchange."""
