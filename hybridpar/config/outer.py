"""The section [outer]: how sites that train apart (parallel.sites) are brought together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hybridpar.config.typed import AtLeastOne, Count, Positive, Share
from hybridpar.errors import Problem

if TYPE_CHECKING:
    from hybridpar.config.sections import Config


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

    def conflicts(self, config: Config) -> Iterator[Problem]:
        """Settings that do not go together, or not with those of other sections."""
        if config.parallel.sites == 1:
            return
        if self.fragments > (most := min(self.every, config.model.num_blocks)):
            which = "outer.every" if most == self.every else "the number of blocks"
            yield Problem(
                "outer.fragments", self.fragments, f"must be at most {which} = {most}", str(most)
            )
        elif self.delay > (most := self.every // self.fragments):
            rule = (
                f"must be at most outer.every / outer.fragments = {most}: one message is under way "
                "at a time"
            )
            yield Problem("outer.delay", self.delay, rule, str(most))
        for field, value, rule, works in _CONFLICTS:
            section, _, key = field.partition(".")
            found = getattr(getattr(config, section), key)
            if value(found):
                yield Problem(field, found, rule, works)
        if not config.norms_first:
            yield Problem(
                "optim.clip_grad",
                config.optim.clip_grad,
                "must be above 0 with several sites and schedule "
                "pipedream: what a site tells the others is known with the norm",
                "1.0",
            )
        if config.anomalies.rolls_back:
            rule = (
                "does not go with parallel.sites above 1, where each site has steps of its own to "
                "go back over"
            )
            anomalies = config.anomalies
            yield from (
                Problem(f"anomalies.{name}", "roll_back", rule, '"stop"')
                for name in ("on_non_finite", "on_loss_spike", "on_norm_spike", "on_divergence")
                if getattr(anomalies, name) == "roll_back"
            )


_CONFLICTS = (
    ("parallel.zero", lambda zero: zero > 1, "does not go with parallel.sites above 1", "1"),
    ("memory.parts", lambda parts: parts > 1, "does not go with parallel.sites above 1", "0"),
    ("memory.budget", bool, "does not go with parallel.sites above 1", "0"),
    ("memory.host_optimizer", bool, "does not go with parallel.sites above 1", "false"),
    (
        "optim.staleness",
        lambda remedy: remedy == "prediction",
        "does not go with parallel.sites above 1, whose outer "
        "step is no update that could be predicted",
        '"none"',
    ),
)
"""Fields, what they must not be, the rule, and a value that works."""
