"""Cost of the stages of a configuration on a machine: what ranks compute, and what passes within a
tp group.

    block        its times at this tp degree and micro-batch size, measured or estimated, and
                 collectives over tp; with cp see context.py, with ep experts.py
    stage        its blocks; recomputed ones forward once more, or in part; gathers of what comes
                 from other stages, on the slowest link within a tp group; codecs; norm and
                 optimizer of its own parameters; ZeRO-1: a share
    rank         its stages

Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hybridpar.config import Config, TrainConfig
from hybridpar.job import JobPlan
from hybridpar.models.build import DTYPES, Recomputation
from hybridpar.models.cost import untied_parameters
from hybridpar.planner.costs.context import context_waits, split_tokens
from hybridpar.planner.costs.documents import within_documents
from hybridpar.planner.costs.experts import expert_waits, own_expert_parameters, split_experts
from hybridpar.planner.costs.sequence import split_rows
from hybridpar.planner.costs.transfer_costs import Moves
from hybridpar.planner.machines.codec_costs import CodecCosts
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.measuring.profile import BlockCost, Profile
from hybridpar.prediction.work import block_kinds
from hybridpar.runtime.graphs import unsupported
from hybridpar.schedules.schedule_table import Schedule


def gradient_item(train: TrainConfig) -> int:
    """Return the bytes of an element of a gradient."""
    return max(DTYPES[train.dtype].itemsize, 2 if train.gradient_dtype == "bf16" else 4)


@dataclass(frozen=True)
class StageCost:
    """Time and parameters of a stage, or of all stages of a rank.

    Args:
        blocks: Numbers of the blocks.
        forward: Seconds of a micro-batch's forward, with collectives over tp.
        backward: Seconds of a micro-batch's backward, with recomputation and collectives over tp.
        norm: Seconds of the gradient norm of a batch.
        update: Seconds of the optimizer update of a batch.
        tied: Number of `parameters` that the other end of the model holds, too.
        experts: Number of `parameters` that the ranks of ep divide.
    """

    blocks: Sequence[int]
    forward: float
    backward: float
    norm: float
    update: float
    parameters: int
    tied: int
    idle: float = 0.0
    """Seconds of forward and backward in which the device waits for kernel launches."""
    experts: int = 0

    @property
    def compute(self) -> float:
        return self.forward + self.backward


class StageCosts:
    """Costs of the blocks, stages and ranks of one resolved configuration on a machine.

    Raises:
        ConfigError: The profile lacks this tp degree or the speed of moved state, or the split does
            not fit the model.
    """

    def __init__(self, config: Config, machine: Machine):
        self.job = JobPlan(config)
        self.config = config
        self.machine = machine
        parallel = config.parallel
        self.tp = parallel.tp
        self.pp = parallel.pp
        self.replicas = max(parallel.dp, 1) * parallel.cp
        """Ranks that hold equal parameters: dp x cp."""
        self.moves = Moves.of(self.job, machine)
        self.zero_share = self.replicas if parallel.zero else 1
        self.splits = parallel.zero if self.replicas > 1 else 0
        """ZeRO stage that shards more than the optimizer state: 2 shards gradients, 3 also weights.
        These move block by block, except compressed gradients."""
        self.updates_here = not config.memory.host_optimizer
        """Whether the update takes time of the ranks, instead of the host optimizer."""
        self.shape = self.job.shape
        profile = machine.profile
        self.is_cpu = profile.hardware.cores > 0
        self.launches_ahead = (
            not self.is_cpu and config.train.cuda_graphs and unsupported(self.job) is None
        )
        """Whether CUDA graphs remove the device's waits for kernel launches."""
        self._kind_of = block_kinds(config.model)
        self.kinds_on = self._kinds_on()
        """Cost of each kind of block by pipeline rank, on the slowest of the rank's devices."""
        self.kinds = self.kinds_on[0]
        self.item = DTYPES[config.train.dtype].itemsize
        self.gradient_bytes = gradient_item(config.train)
        self.codecs = CodecCosts(self.job, profile)
        self.message_bytes = self.codecs.message_bytes
        """Bytes of an activation between stages."""

    def _kinds_on(self) -> list[dict[str, BlockCost]]:
        machine = self.machine
        size = self.tp * self.replicas
        b = self.config.train.micro_batch_size

        def table(profile: Profile) -> dict[str, BlockCost]:
            costs = {kind: profile.block(kind, self.tp, b) for kind in dict.fromkeys(self._kind_of)}
            if self.config.data.document_length:
                costs = within_documents(costs, self.config)
            with_it = profile.settings.get("parallel", {}).get("sequence", False)
            if self.config.parallel.sequence and self.tp > 1 and not with_it:
                costs = split_rows(costs, self.config)
            if self.config.parallel.cp > 1:
                costs = split_tokens(costs, self.config)
            if self.config.parallel.ep > 1:
                costs = split_experts(costs, self.config)
            return (
                {
                    kind: replace(
                        cost,
                        forward=cost.forward - cost.forward_idle,
                        forward_idle=0.0,
                        backward=cost.backward - cost.backward_idle,
                        backward_idle=0.0,
                    )
                    for kind, cost in costs.items()
                }
                if self.launches_ahead
                else costs
            )

        if not machine.others:
            return [table(machine.profile)] * self.pp
        return [
            max(
                map(table, machine.profiles(range(r * size, (r + 1) * size))), key=self._layers_time
            )
            for r in range(self.pp)
        ]

    @property
    def _inner(self) -> tuple[str, ...]:
        """The kinds of the blocks between the ends; if there are none, of all blocks."""
        return self._kind_of[1:-1] or self._kind_of

    def _layers_time(self, costs: dict[str, BlockCost]) -> float:
        return sum(costs[kind].forward + costs[kind].backward for kind in self._inner)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of the configuration."""
        return self.job.schedule

    @cached_property
    def slowness(self) -> list[float]:
        """Time of each stage's layers relative to the first rank."""
        if not self.machine.others:
            return [1.0] * self.shape.num_stages
        times = [
            self._layers_time(self.kinds_on[self.shape.rank_of(stage)])
            for stage in range(self.shape.num_stages)
        ]
        return [time / times[0] for time in times]

    @cached_property
    def limits(self) -> list[float]:
        """Bytes that training may use, by pipeline rank: the smallest limit of the rank's
        devices."""
        machine = self.machine
        size = self.tp * self.replicas
        if not machine.others:
            return [machine.memory_limit] * self.pp
        return [min(machine.memory_limits(range(r * size, (r + 1) * size))) for r in range(self.pp)]

    @cached_property
    def waits(self) -> dict[str, tuple[float, float]]:
        """Seconds of a block's collectives over tp, forward and backward, by kind."""
        return {kind: self._waits(cost) for kind, cost in self.kinds.items()}

    @cached_property
    def context_waits(self) -> dict[str, tuple[float, float]]:
        """Seconds of a block's exchange over cp, forward and backward, by kind; empty without
        cp."""
        if self.config.parallel.cp == 1:
            return {}
        return context_waits(self.config, self.machine)

    @cached_property
    def expert_waits(self) -> dict[str, tuple[float, float]]:
        """Seconds of a block's exchanges of rows over ep, forward and backward, by kind; empty
        without ep."""
        if self.config.parallel.ep == 1:
            return {}
        return expert_waits(self.config, self.machine)

    @cached_property
    def _expert_parameters(self) -> dict[str, int]:
        """Parameters of a rank's experts that ranks of ep divide, by kind of block."""
        return own_expert_parameters(self.config) if self.config.parallel.ep > 1 else {}

    def _waits(self, cost: BlockCost) -> tuple[float, float]:
        if self.tp == 1:
            return 0.0, 0.0
        group = range(self.tp)
        machine = self.machine
        was_measured = cost.forward_wait + cost.backward_wait > 0
        if was_measured and machine.measured and machine.link(group) is machine.inner:
            return cost.forward_wait, cost.backward_wait
        own = machine.profile.links.get("local") or machine.profile.links.get("network")

        # a reduce-scatter or an all-gather is half of an all-reduce
        part = 2 if self.config.parallel.sequence else 1

        def on_this_machine(wait: float, messages: Sequence[int]) -> float:
            here = sum(machine.all_reduce(part * n, group, self._groups) for n in messages) / part
            there = (
                sum(own.ring_time(part * n, self.tp) for n in messages) / part
                if own and was_measured
                else 0.0
            )
            return max(here, wait + here - there)

        return (
            on_this_machine(cost.forward_wait, cost.forward_messages),
            on_this_machine(cost.backward_wait, cost.backward_messages),
        )

    @property
    def _groups(self) -> int:
        """Number of tp groups that send out of a server at the same time."""
        return min(self.machine.devices_per_server, self.tp * self.replicas * self.pp)

    def gathers(self, blocks: Sequence[int]) -> tuple[float, float]:
        """Return the seconds in which tp ranks gather a stage's input, and the gradient of its
        output: the second half of a ring all-reduce."""
        # with sequence parallelism ranks compute on the shard that they receive
        if self.config.parallel.sequence:
            return 0.0, 0.0

        def gather(flow: int, first: int) -> float:
            sent = self.codecs.gathered_bytes(flow, first)
            return self.machine.all_reduce(sent, range(self.tp), self._groups) / 2

        first = blocks[0]
        behind = blocks[-1] + 1
        forward = gather(1, first) if first else 0.0
        backward = gather(-1, behind) if behind < self.config.model.num_blocks else 0.0
        return forward, backward

    def kind(self, number: int) -> str:
        """Return the kind of a block, by its number in the model."""
        return self._kind_of[number]

    def block(self, number: int, rank: int = 0) -> BlockCost:
        """Return the cost of a block on a rank of the pipeline, by its number in the model."""
        return self.kinds_on[rank][self.kind(number)]

    def block_time(self, number: int, rank: int = 0) -> tuple[float, float]:
        """Return the seconds of forward and backward of a block, including collectives over tp, cp
        and ep.

        The CPU launches kernels while the device waits for a collective, so of both waits the
        longer counts.
        """
        cost = self.block(number, rank)
        forward, backward = self._all_waits(number)
        return (
            cost.forward - cost.forward_idle + max(cost.forward_idle, forward),
            cost.backward - cost.backward_idle + max(cost.backward_idle, backward),
        )

    def block_idle(self, number: int, rank: int = 0) -> tuple[float, float]:
        """Return the seconds of forward and backward of a block in which the device waits for
        launches alone."""
        cost = self.block(number, rank)
        forward, backward = self._all_waits(number)
        return max(0.0, cost.forward_idle - forward), max(0.0, cost.backward_idle - backward)

    def _all_waits(self, number: int) -> tuple[float, float]:
        """Return the seconds of a block's collectives over tp, cp and ep, forward and backward."""
        kind = self.kind(number)
        forward, backward = self.waits[kind]
        for waits in (self.context_waits, self.expert_waits):
            there, back = waits.get(kind, (0.0, 0.0))
            forward = forward + there
            backward = backward + back
        return forward, backward

    @cached_property
    def stages(self) -> list[StageCost]:
        """Cost of every stage."""
        found = []
        known = dict[object, StageCost]()
        for stage, (blocks, one) in enumerate(
            zip(self.job.split, self.job.recomputed, strict=True)
        ):
            rank = self.shape.rank_of(stage)
            ends = (blocks.start, blocks.stop)
            key = (
                self._kind_of[blocks.start : blocks.stop],
                0 in ends,
                self.config.model.num_blocks in ends,
                one.whole,
                tuple((n in one.blocks, n in one.selective) for n in blocks),
                tuple(n in self.codecs.exact for n in ends),
                rank if self.machine.others else 0,
            )
            if key not in known:  # most stages are equal
                known[key] = self._stage(blocks, one, rank)
            found.append(replace(known[key], blocks=blocks))
        return found

    def _stage(self, blocks: range, recompute: Recomputation, rank: int) -> StageCost:
        """Return the cost of these blocks on a rank, with some of them recomputed fully or
        selectively."""
        again = set(blocks) if recompute.whole else set(recompute.blocks)
        selective = recompute.selective
        model = self.config.model
        profile = self.machine.profile
        last = self.config.model.num_blocks - 1
        costs = [self.block(n, rank) for n in blocks]
        times = [self.block_time(n, rank) for n in blocks]
        idle = [self.block_idle(n, rank) for n in blocks]
        gather_input, gather_gradient = self.gathers(blocks)
        coding, coding_back = self.codecs.times(blocks, recompute.whole)
        embedding = self.block(0, rank)
        tied = (
            max(0, embedding.parameters - untied_parameters(model)) if model.tie_embeddings else 0
        )
        both = 0 in blocks and last in blocks
        ends = 0 in blocks or last in blocks
        # a tied weight is held and updated once
        twice = both and model.tie_embeddings
        twice_norm = embedding.norm if twice else 0.0
        twice_update = embedding.update if twice else 0.0
        twice_parameters = tied if twice else 0
        other_end = ends and not both and not self.shape.is_v
        return StageCost(
            blocks,
            sum(f for f, _ in times) + profile.per_microbatch + gather_input + coding,
            sum(b for _, b in times)
            + sum(times[n - blocks.start][0] for n in again)
            + gather_gradient
            + coding_back
            + sum(self.block(n, rank).remake for n in selective),
            sum(c.norm for c in costs) - twice_norm,
            (sum(c.update for c in costs) - twice_update) / self.zero_share * self.updates_here
            + profile.per_batch,
            sum(c.parameters for c in costs) - twice_parameters,
            tied if other_end else 0,
            sum(
                forward * (1 + (n in again)) + backward
                for n, (forward, backward) in zip(blocks, idle, strict=True)
            ),
            sum(self._expert_parameters.get(self.kind(n), 0) for n in blocks),
        )

    @cached_property
    def ranks(self) -> list[StageCost]:
        """Cost of every rank of the pipeline, for all its stages."""
        return [
            self._together([self.stages[stage] for stage in self.shape.stages_of(r)])
            for r in range(self.pp)
        ]

    def _together(self, stages: Sequence[StageCost]) -> StageCost:
        """Return the cost of stages on one rank, which pays once for the part of a batch that does
        not depend on its parameters."""
        if len(stages) == 1:
            return stages[0]
        more_than_once = (len(stages) - 1) * self.machine.profile.per_batch
        return StageCost(
            [number for stage in stages for number in stage.blocks],
            sum(s.forward for s in stages),
            sum(s.backward for s in stages),
            sum(s.norm for s in stages),
            sum(s.update for s in stages) - more_than_once,
            sum(s.parameters for s in stages),
            sum(s.tied for s in stages),
            sum(s.idle for s in stages),
            sum(s.experts for s in stages),
        )
