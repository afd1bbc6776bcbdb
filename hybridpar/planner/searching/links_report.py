"""Report the bandwidth that a configuration needs and has on its links, and what would make it
compute-bound.

stage link    a micro-batch's activation in one direction and its gradient in the other, each in
              the time that the busiest stage computes on one: bytes / (F + B). That is
              R / (36 h L/p) bytes/s in bf16 for stages of L/p layers on devices of R FLOP/s,
              for any batch; here computed from the measured times of the stage's blocks
reduction     a batch's gradients over replicas, and tied embeddings over the first and the last
              stage, in the time that the batch is computed in

A link with less bandwidth makes ranks wait under any schedule. Fewer bytes help, and so does more
work per byte: more layers in a stage, or for gradients more tokens in a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from hybridpar.config.compression_methods import MESSAGES
from hybridpar.errors import ConfigError
from hybridpar.planner.costs.compressed import gradient_share
from hybridpar.planner.costs.stage_cost import gradient_item
from hybridpar.planner.costs.step_cost import StepCost
from hybridpar.planner.searching.plan_report import parts_of, speed
from hybridpar.schedules.schedule_table import make_schedule
from hybridpar.schedules.simulate.timeline import milliseconds

CODECS = tuple(
    (name, row.bytes_per_number)
    for name, row in MESSAGES.items()
    if row.bytes_per_number is not None
)
"""Values of compression.messages with their bytes per number, from the most exact on."""
_TIED = "tied embeddings"
_WORTH = 0.9
_SPARE = 0.95
"""Usable share of a link's bandwidth: above it, any variation causes waits."""


@dataclass(frozen=True)
class LinkNeed:
    """A link, and the bandwidth that it needs.

    Args:
        name: Name such as 'stages 0 - 1'.
        rates: Bytes/s that each pipeline needs, or each replica for gradients.
        gives: Bytes/s of the link; for a stage link, in its slower direction.
        factor: Needed over available bandwidth.
        item: Bytes per number sent.
        layers: Layers of the smallest stage; 0 if this is not a stage link.
        more_layers: Layers of a stage that would make it compute-bound; 0 if none are needed.
        deepest: Largest pp at which this model's stages have that many layers; 0 if the model has
            too few for two stages.
    """

    name: str
    needs: float
    gives: float
    item: float
    layers: int = 0
    more_layers: int = 0
    deepest: int = 0
    pp: int = 1

    @property
    def factor(self) -> float:
        return self.needs / self.gives

    @property
    def is_bound(self) -> bool:
        return self.factor > 1

    @property
    def ratio(self) -> float:
        """Factor by which its messages would have to shrink; 1 if they need not."""
        return max(1.0, self.factor / _SPARE) if self.is_bound else 1.0

    @property
    def codec(self) -> str:
        """The most exact codec that shrinks the messages enough, or ""."""
        fit = (name for name, size in CODECS if size < self.item and self.item / size >= self.ratio)
        return next(fit, "") if self.is_bound and self.layers else ""

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"factor": self.factor, "ratio": self.ratio, "codec": self.codec}

    def __str__(self) -> str:
        rates = f"{self.name}: {_rate(self.needs)} needed, {_rate(self.gives)} available"
        if not self.is_bound:
            times = "over a hundred" if self.factor < 0.01 else f"{1 / self.factor:.2g}"
            return f"{rates}: compute-bound, {times} times what it needs"
        return f"{rates}: link-bound by {self.factor:.2g}: {', or '.join(self._remedies())}"

    def _remedies(self) -> Iterator[str]:
        if self.layers:
            codec = (
                f'compression.messages = "{self.codec}"'
                if self.codec
                else f"more than {CODECS[-1][0]} saves"
            )
            yield f"messages {self.ratio:.2g} times smaller ({codec})"
        else:
            yield f"gradients {self.ratio:.2g} times smaller"
        if self.name == _TIED:
            yield "model.tie_embeddings = false"
        if not self.layers:
            yield f"{self.ratio:.2g} times as many tokens in a batch"
        elif self.more_layers:
            deep = (
                f"parallel.pp = {self.deepest} instead of {self.pp} for this model"
                if self.deepest
                else "a deeper model: this one has too few for two stages"
            )
            yield f"{self.more_layers} more layers a stage ({self.layers} now; {deep})"


def step_line(cost: StepCost) -> str:
    """Return the predicted step as one line."""
    return (
        f"predicted time of a step: {milliseconds(cost.step_time)} ms, {speed(cost)}; "
        f"{parts_of(cost).bound_by}"
    )


def link_lines(cost: StepCost) -> list[str]:
    """Return lines about needed and available bandwidth. If links are fast enough but ranks wait,
    the lines name a schedule that hides the transfers."""
    needs = link_needs(cost)
    lines = [str(need) for need in needs]
    if cost.pp > 1 and not any(need.is_bound for need in needs):
        lines += _hidden(cost)
    return lines


def _hidden(cost: StepCost) -> Iterator[str]:
    """Yield the shortest warm-up of 2bw that makes the step 10 % faster, if there is one."""
    now = cost.config.pipeline
    split = now.split if cost.shape.virtual_stages == 1 else ()
    for warmup in ("latency", "bandwidth"):
        pipeline = replace(
            now,
            schedule="2bw",
            warmup=warmup,
            virtual_stages=0,
            split=split,
            stage_layout="loop",
            activations="full",
        )
        then = StepCost(replace(cost.config, pipeline=pipeline), cost.machine)
        try:
            make_schedule(then.schedule_options).check_shape(then.shape)
            seconds = then.step_time
        except ConfigError:  # too few micro-batches for that many in flight
            return
        if seconds < _WORTH * cost.step_time:
            yield (
                f'pipeline.schedule = "2bw", pipeline.warmup = "{warmup}": {milliseconds(seconds)} ms '
                "a step, "
                f"{milliseconds(cost.step_time)} ms now"
            )
            return


def link_needs(cost: StepCost) -> list[LinkNeed]:
    """Return the stage link and the reduction with the largest shortage of bandwidth, if there are
    any."""
    found = []
    if cost.pp > 1:
        found.append(_stage_link(cost))
    if cost.replicas > 1 or cost.costs.tied:
        found.append(_reduction(cost))
    return found


def _stage_link(cost: StepCost) -> LinkNeed:
    busy = _period(cost)
    chunks = cost.shape.virtual_stages
    ways = [max(there[0], back[0]) for there, back in zip(cost.links, cost.links_back, strict=True)]
    worst = max(range(len(ways)), key=ways.__getitem__)
    taken = max(ways[worst], 1e-12) * chunks
    inner = range(1, cost.config.model.num_blocks - 1) or range(1)
    layer = sum(sum(cost.block_time(n)) for n in inner) / len(inner) or 1e-12
    layers = max(
        1, min(sum(n in inner for n in rank.blocks) for rank in cost.ranks)
    )  # the output projection may be alone on its stage
    more = math.ceil(max(0.0, taken / _SPARE - busy) / layer)
    deepest = len(inner) // (-(-len(inner) // cost.pp) + more) if more else 0
    into = cost.stages[(worst + 1) % cost.shape.num_stages].blocks[0]
    wire = max(cost.codecs.wire_bytes(flow, into) for flow in (1, -1))
    item = cost.item * wire / cost.message_bytes
    num_bytes = wire * chunks
    name = f"{cost.shape.rank_name}s {worst} - {(worst + 1) % cost.pp}"
    return LinkNeed(
        name,
        num_bytes / busy,
        num_bytes / taken,
        item,
        layers,
        more,
        deepest if deepest > 1 else 0,
        cost.pp,
    )


def _reduction(cost: StepCost) -> LinkNeed:
    seconds, rank = max((cost.reduction(stage, r)[0], r) for r, stage in enumerate(cost.ranks))
    stage = cost.ranks[rank]
    batch = cost.shape.num_microbatches * _period(cost)
    item = gradient_share(cost.config) * gradient_item(cost.config.train)
    num_bytes = item * (stage.parameters if cost.replicas > 1 else stage.tied)
    name = f"replicas of {cost.shape.rank_name} {rank}" if cost.replicas > 1 else _TIED
    return LinkNeed(name, num_bytes / batch, num_bytes / max(seconds, 1e-12), item)


def _period(cost: StepCost) -> float:
    """Return the seconds that the busiest rank computes on a micro-batch."""
    return max(rank.compute for rank in cost.ranks)


def _rate(bytes_per_s: float) -> str:
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
