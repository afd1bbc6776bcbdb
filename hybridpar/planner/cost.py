"""What a configuration takes on a machine: the costs of its stages, its step time by simulation, and a bound on that.

    stage        its blocks' times at this tp degree and micro-batch size; recomputed ones forward once more
    tp           collectives of every block, on the slowest link within a tp group
    pp           messages, on links that all pipelines which cross them share; CPU time that goes into them
    dp           ring all-reduce of the stage's gradients (ZeRO-1: half of it, the gather is the other); tied weights
                 over both ends; hidden or not as the schedule has it
    update       norm and optimizer of the stage's own parameters; ZeRO-1: a share of it

`pipeline.plan.simulate` puts these together, so bubbles, slack and warm-up are those of the plan that would run. All
replicas and tp ranks of a stage run in step: one pipeline stands for all of them. Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hybridpar.config import Config
from hybridpar.models.build import DTYPES, recomputed_blocks
from hybridpar.models.cost import stage_split
from hybridpar.pipeline.plan.action import Kind
from hybridpar.pipeline.plan.costs import Costs
from hybridpar.pipeline.plan.predict import Ordering, smallest_early_switch
from hybridpar.pipeline.plan.schedules import Schedule, Sizes, schedule_of
from hybridpar.planner.machine import Machine
from hybridpar.planner.profile import KINDS, BlockCost
from hybridpar.state.partition import BUCKET_BYTES

GRADIENT_BYTES = {name: max(dtype.itemsize, 4) for name, dtype in DTYPES.items()}
_NORM_BYTES = 64
FEWEST_SIMULATED = 8
_STEADY, _MEASURED = 0.999, 0.99
_BATCHES_TO_SETTLE = 5
"""After so many batches without a drain, most pipelines repeat themselves."""


@dataclass(frozen=True)
class StageCost:
    """What a stage takes, or those of a rank; `blocks`: which it holds. Recomputation is in `backward`, collectives
    over tp in both."""

    blocks: Sequence[int]
    forward: float
    backward: float
    norm: float
    update: float
    parameters: int
    tied: int  # parameters, of `parameters`, that the other end holds too

    @property
    def compute(self) -> float:
        return self.forward + self.backward


def _sum(stages: Sequence[StageCost], per_batch: float) -> StageCost:
    """Of stages on one rank, which pays what a batch takes besides its parameters once."""
    if len(stages) == 1:
        return stages[0]
    return StageCost(
        [number for stage in stages for number in stage.blocks], sum(s.forward for s in stages),
        sum(s.backward for s in stages), sum(s.norm for s in stages),
        sum(s.update for s in stages) - (len(stages) - 1) * per_batch,
        sum(s.parameters for s in stages), sum(s.tied for s in stages))


class Model:
    """The costs of one configuration (resolved: dp is known) on a machine.

    Raises: ConfigError where the profile has nothing of its tp degree, or the split does not fit the model.
    """

    def __init__(self, config: Config, machine: Machine):
        self.config, self.machine = config, machine
        parallel = config.parallel
        self.tp, self.pp, self.dp = parallel.tp, parallel.pp, max(parallel.dp, 1)
        self.sizes = Sizes.of(config)
        profile, b = machine.profile, config.train.micro_batch_size
        self.kinds = {kind: profile.block(kind, self.tp, b) for kind in KINDS}
        self.item = DTYPES[config.train.dtype].itemsize
        self.is_cpu = profile.hardware.cores > 0

    @cached_property
    def waits(self) -> dict[str, tuple[float, float]]:
        """By kind of block: what its collectives over tp take, forward and backward."""
        return {kind: self._waits(cost) for kind, cost in self.kinds.items()}

    def _waits(self, cost: BlockCost) -> tuple[float, float]:
        if self.tp == 1:
            return 0.0, 0.0
        group, machine = range(self.tp), self.machine
        was_measured = cost.forward_wait + cost.backward_wait > 0
        if was_measured and machine.measured and machine.link(group) is machine.inner:
            return cost.forward_wait, cost.backward_wait
        own = machine.profile.links.get("local") or machine.profile.links.get("network")
        found = []
        both = ((cost.forward_wait, cost.forward_messages), (cost.backward_wait, cost.backward_messages))
        for wait, messages in both:
            here = sum(machine.all_reduce(n, group, self._groups_on_a_server()) for n in messages)
            there = sum(own.ring_time(n, self.tp) for n in messages) if own and was_measured else 0.0
            found.append(max(here, wait + here - there))
        return found[0], found[1]

    def _groups_on_a_server(self) -> int:
        """Tp groups that leave a server at the same time."""
        return min(self.machine.devices_per_server, self.tp * self.dp * self.pp)

    def kind(self, number: int) -> str:
        """The kind of a block by its number in the model."""
        last = self.config.model.num_blocks - 1
        return KINDS[0] if number == 0 else KINDS[2] if number == last else KINDS[1]

    def block(self, number: int) -> BlockCost:
        """The cost of a block by its number in the model."""
        return self.kinds[self.kind(number)]

    def block_time(self, number: int) -> tuple[float, float]:
        """Forward and backward of a block, collectives over tp included."""
        cost, (forward, backward) = self.block(number), self.waits[self.kind(number)]
        return cost.forward + forward, cost.backward + backward

    @cached_property
    def stages(self) -> list[StageCost]:
        """What every stage takes."""
        config = self.config
        split = stage_split(config.model, self.pp, config.pipeline.split, self.sizes.chunks)
        again = recomputed_blocks(config.pipeline.recompute, config.model, split)
        return [self.stage(blocks, set(blocks) if one.whole else set(one.blocks))
                for blocks, one in zip(split, again, strict=True)]

    @cached_property
    def ranks(self) -> list[StageCost]:
        """What every rank of the pipeline takes for its stages together."""
        return [_sum([self.stages[stage] for stage in self.sizes.stages_of(r)], self.machine.profile.per_batch)
                for r in range(self.pp)]

    def stage(self, blocks: range, again: set[int]) -> StageCost:
        """A stage of these blocks, of which `again` are recomputed."""
        model, last = self.config.model, self.config.model.num_blocks - 1
        costs = [self.block(n) for n in blocks]
        times = [self.block_time(n) for n in blocks]
        embedding = self.kinds["embedding"]
        tied = embedding.parameters if model.tie_embeddings else 0
        if model.position == "learned":
            tied = max(0, tied - model.num_positions * model.hidden_size)
        both, ends = 0 in blocks and last in blocks, 0 in blocks or last in blocks
        twice = embedding if both and model.tie_embeddings else None  # held once
        share = self.dp if self.config.parallel.zero else 1
        return StageCost(
            blocks, sum(f for f, _ in times) + self.machine.profile.per_microbatch,
            sum(b for _, b in times) + sum(times[n - blocks.start][0] for n in again),
            sum(c.norm for c in costs) - (twice.norm if twice else 0.0),
            (sum(c.update for c in costs) - (twice.update if twice else 0.0)) / share + self.machine.profile.per_batch,
            sum(c.parameters for c in costs) - (tied if twice else 0),
            tied if ends and not both else 0)

    def state_bytes(self, rank: int) -> float:
        """What weights, gradients and Adam's state take of a parameter on a rank of the pipeline, at least."""
        config, schedule = self.config, schedule_of(self.config.pipeline)
        mixed = config.train.dtype in ("bf16", "fp16")
        moments = {"adamw": 2, "lamb": 2}.get(config.optim.name, 0)
        return (schedule.max_live_versions(self.sizes, rank) * self.item
                + GRADIENT_BYTES[config.train.dtype] * schedule.num_gradient_buffers
                + 4 * (mixed + moments) / (self.dp if config.parallel.zero else 1))

    # -- what goes between ranks ---------------------------------------------------------------------------------------

    def ranks_of(self, stage: int, tp_rank: int = 0) -> range:
        """The replicas of a stage."""
        first = stage * self.dp * self.tp + tp_rank
        return range(first, first + self.dp * self.tp, self.tp)

    @property
    def message_bytes(self) -> int:
        """An activation between two stages."""
        config = self.config
        return self.item * config.train.micro_batch_size * config.model.seq_length * config.model.hidden_size

    def flows(self, link: int) -> int:
        """How many pipelines leave the fullest server over the link from that rank to the next, at the same time.

        Pipelines run in step, and so do all links: whatever leaves a server one way shares what the server has.
        """
        per = self.machine.devices_per_server
        size = self.dp * self.tp
        leaving: dict[int, int] = {}
        for r in range(self._num_links):
            for i in range(size):
                source, target = r * size + i, (r + 1) % self.pp * size + i
                if source // per != target // per:
                    leaving[source // per] = leaving.get(source // per, 0) + 1
        mine = {(link * size + i) // per for i in range(size)}
        return max((leaving.get(server, 0) for server in mine), default=0) or 1

    @property
    def _num_links(self) -> int:
        """From each rank to the next; in a ring also from the last to the first."""
        return self.pp if self.sizes.is_ring else self.pp - 1

    def links(self) -> list[tuple[float, float, float]]:
        """Of each link between ranks: time that it is taken, latency after that, CPU time."""
        found, size, n = [], self.dp * self.tp, self.message_bytes
        for r in range(self._num_links):
            after = (r + 1) % self.pp
            pair = (r * size, after * size)
            crosses = any(self.machine.servers((r * size + i, after * size + i)) > 1 for i in range(size))
            link = self.machine.outer if crosses and self.machine.outer else self.machine.link(pair)
            flows = max(self.flows(r) / self.machine.outer_links, 1) if crosses else 1
            latency, whole, work = link.transfer_time(1), link.transfer_time(n, flows), link.transfer_work(n)
            found.append((max(0.0, whole - latency - work), min(latency, max(0.0, whole - work)), work))
        return found

    def reduction(self, stage: StageCost, index: int) -> tuple[float, float]:
        """Seconds that the gradients of a rank's stages take to be reduced, and CPU time that goes into it."""
        machine, ranks = self.machine, self.ranks_of(index)
        size = GRADIENT_BYTES[self.config.train.dtype]
        own = size * (stage.parameters - stage.tied)
        seconds = self._in_buckets(own, ranks, self.tp)
        work = machine.link(ranks).ring_work(own, self.dp) if self.dp > 1 else 0.0
        if stage.tied:
            ends = [*self.ranks_of(0), *self.ranks_of(self.pp - 1)]
            seconds += self._in_buckets(size * stage.tied, ends, self.tp)
            work += machine.link(ends).ring_work(size * stage.tied, len(ends))
        return seconds, work

    def _in_buckets(self, num_bytes: float, ranks: Sequence[int], rings: int) -> float:
        if len(ranks) == 1 or not num_bytes:
            return 0.0
        whole, rest = divmod(num_bytes, BUCKET_BYTES)
        once = self.machine.all_reduce
        return whole * once(BUCKET_BYTES, ranks, rings) + (once(rest, ranks, rings) if rest else 0.0)

    # -- together ------------------------------------------------------------------------------------------------------

    @cached_property
    def ordering(self) -> Ordering:
        """Of the plan, with early_switch = "auto" settled."""
        ordering = Ordering.of(self.config)
        if self.config.pipeline.early_switch == "auto":
            return replace(ordering, early_switch=smallest_early_switch(
                self.costs, self.sizes, warmup=ordering.warmup, gradient_buffers=ordering.gradient_buffers,
                clip=ordering.clip, gather=ordering.gather))
        return ordering

    @cached_property
    def costs(self) -> Costs:
        """For `simulate`."""
        machine, stages, ranks, p = self.machine, self.stages, self.ranks, self.pp
        hardware = machine.profile.hardware
        links = self.links()
        calls: dict[Kind, float | list[float]] = {Kind.NORM: [rank.norm for rank in ranks]}
        if p > 1:
            calls |= dict.fromkeys((Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B), machine.inner.call)
        reductions = [self.reduction(rank, r) for r, rank in enumerate(ranks)]
        if any(work for _, work in reductions):
            calls[Kind.REDUCE] = [min(seconds, work) for seconds, work in reductions]
        sharded = self.config.parallel.zero > 0 and self.dp > 1
        reduce = [max(0.0, seconds - work) / (1 + sharded) for seconds, work in reductions]
        hidden = 0.0 if self.is_cpu else 0.5  # of a last backward, on a stream of its own, in buckets
        reduce = [max(t - hidden * rank.backward, min(t, t * BUCKET_BYTES / max(4 * rank.parameters, 1)))
                  if hidden else t for t, rank in zip(reduce, ranks, strict=True)]
        world = self.tp * self.pp * self.dp
        norm = machine.all_reduce(_NORM_BYTES, range(world)) if world > 1 else 0.0
        cores = None
        if self.is_cpu:
            here = min(world, machine.devices_per_server)
            cores = max(0.1, p * hardware.cores * hardware.efficiency / (here * hardware.threads)) / self._at_work
        return Costs(
            [s.forward for s in stages], [s.backward for s in stages], [r.update for r in ranks], calls,
            reduce=reduce, norm=norm, gather=list(reduce) if sharded else 0.0, transfer=[t for t, _, _ in links],
            latency=[t for _, t, _ in links], tied=self.config.model.tie_embeddings and p > 1,
            blocking_norm=self.is_cpu, serial_links=not self.is_cpu, cores=cores,
            transfer_work=[t for _, _, t in links])

    @property
    def _at_work(self) -> float:
        """Share of a forward and backward in which a CPU rank computes or sends, rather than waits for its tp group."""
        if self.tp == 1:
            return 1.0
        layer, link = self.kinds["layer"], self.machine.link(range(self.tp))
        sent = sum(link.ring_work(n, self.tp) for n in (*layer.forward_messages, *layer.backward_messages))
        computed = layer.forward + layer.backward
        return min(1.0, (computed + sent) / (computed + sum(self.waits["layer"])))

    @cached_property
    def bound(self) -> float:
        """Less than this no step takes: the costliest rank's work, or the slowest link's, with what cannot overlap."""
        m = self.sizes.num_microbatches
        schedule = self.ordering.make() if self.config.pipeline.early_switch != "auto" else None
        work = max(m * rank.compute + rank.update + rank.norm + self._fill(schedule, r)
                   for r, rank in enumerate(self.ranks))
        link = max((m * self._messages(r) * t for r, (t, _, _) in enumerate(self.links())), default=0.0)
        reduction = max(self.reduction(rank, r)[0] for r, rank in enumerate(self.ranks))
        in_flight = 0.0 if schedule is None or schedule.flush else self._round_trips(schedule)
        return max(work, link, reduction, in_flight)

    def _fill(self, schedule: Schedule | None, rank: int) -> float:
        """How long a rank has nothing to do at least, where the pipeline drains between batches.

        Before its first forward and after its last backward the stages before it work; once its first micro-batch has
        left, and once its last one has, those behind it, while it has what it runs ahead to do.
        """
        if schedule is None or not schedule.flush:
            return 0.0
        before = sum(stage.compute for stage in self.stages[:rank])
        if self.sizes.is_ring:  # it has other chunks to do
            return before
        own, behind = self.stages[rank], sum(stage.compute for stage in self.stages[rank + 1:])
        ahead = min(schedule.warmup(self.sizes, rank), self.sizes.num_microbatches - 1)
        return before + max(0.0, behind - ahead * min(own.forward, own.backward))

    def _messages(self, link: int) -> int:
        """How often a micro-batch takes that link one way."""
        return self.sizes.chunks - (link == self.pp - 1)

    def _round_trips(self, schedule: Schedule) -> float:
        """A stage's next forward waits for a backward once it has so many micro-batches in flight: their way to the
        last stage and back takes so long. (Of a few batches slightly less may be measured.)"""
        way, most = 0.0, 0.0
        links = [0.0, *(sum(link) for link in self.links()[::-1])]
        for r, link in zip(reversed(range(self.pp)), links, strict=True):
            way += self.stages[r].compute + 2 * link
            most = max(most, way / (schedule.warmup(self.sizes, r) + 1))
        return _MEASURED * self.sizes.num_microbatches * most

    @cached_property
    def step_time(self) -> float:
        """Of a batch in the steady state, simulated."""
        return self.simulated(self.costs)

    def simulated(self, costs: Costs) -> float:
        """The step time with these costs.

        Of many micro-batches some are simulated: once a pipeline is full, each more takes what the one before took.
        Where few of them wait for a reduction that more would hide, all are.
        """
        m = self.sizes.num_microbatches
        if (few := self._few) == m:
            return self._step(m, costs)
        more = self.pp + FEWEST_SIMULATED
        more += -more % self.pp if self.sizes.is_ring else 0  # rounds of interleaved micro-batches are then alike
        first, second = self._step(few, costs), self._step(few + more, costs)
        each = (second - first) / more
        if each < _STEADY * max(rank.compute for rank in self.ranks):
            return self._step(m, costs)
        return first + (m - few) * each

    @property
    def _few(self) -> int:
        """How many of the micro-batches are simulated, at least: a full pipeline, and some more."""
        p, m = self.pp, self.sizes.num_microbatches
        few = max(2 * p, self.ordering.make().warmup(self.sizes, 0)) + 2 * FEWEST_SIMULATED
        few += (m - few) % p if self.sizes.is_ring else 0
        return m if m <= 2 * few or self.ordering.early_switch is not None else few

    def _step(self, m: int, costs: Costs) -> float:
        ordering, sizes = self.ordering, replace(self.sizes, num_microbatches=m)
        if ordering.make().flush:
            return ordering.timeline(sizes, costs, 4).step_time(m)
        period = ordering.timeline(sizes, costs, _BATCHES_TO_SETTLE).period(m)
        return period or ordering.timeline(sizes, costs).step_time(m)

    @property
    def tokens_per_s(self) -> float:
        return self.config.batch_tokens / self.step_time
