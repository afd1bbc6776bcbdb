"""Cost of a step of a configuration on a machine: its stages, the links between them, and its
simulated time.

stages       stage_cost.py
pp           messages, a slice from each tp rank, on links that all pipelines across them share;
             their CPU time
dp x cp      ring all-reduce of the stage's gradients (ZeRO-1: a reduce-scatter, then a gather),
             or compressed messages to all; tied weights over both ends; overlapped or not, as
             the schedule decides
moves        state that is sharded over replicas (ZeRO-2 and 3), on a host, or in a file:
             transfer_costs.py

`schedules.simulate.simulator` combines these, so bubbles, slack and warm-up match the plan that
would run. All replicas and tp ranks of a stage run in step, so one pipeline represents all.

Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from hybridpar.config.compression_methods import GRADIENTS
from hybridpar.models.cost import mean_document_share, training_flops_per_token
from hybridpar.planner.costs.compressed import gradient_share
from hybridpar.planner.costs.stage_cost import StageCost, StageCosts
from hybridpar.planner.costs.transfer_costs import with_activations
from hybridpar.planner.machines.machine import AnyLink
from hybridpar.prediction.fake_neighbours import silent_grid
from hybridpar.schedules.action import Kind
from hybridpar.schedules.schedule_options import ScheduleOptions
from hybridpar.schedules.schedule_table import make_schedule
from hybridpar.schedules.simulate.costs import Costs
from hybridpar.schedules.simulate.network import Network, Route
from hybridpar.schedules.simulate.predict import extended, predict_step_time, smallest_early_switch
from hybridpar.state.reduction.partition import BUCKET_BYTES

TRANSFERS = (Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B)
_NORM_BYTES = 64
_FEWEST_MOVED = 16
"""Number of micro-batches, in addition to a full pipeline, that are simulated with moved state if a
batch has more."""


class StepCost(StageCosts):
    """Cost of a step of one configuration on a machine: stages, and traffic between ranks.

    Raises:
        ConfigError: As `StageCosts`.
    """

    # -- traffic between ranks

    def ranks_of(self, stage: int) -> range:
        """Return the replicas of a stage, each by its first tp rank."""
        size = self.replicas * self.tp
        return range(stage * size, (stage + 1) * size, self.tp)

    @cached_property
    def links(self) -> list[tuple[float, float, float]]:
        """Costs of an activation on each link between ranks: seconds of occupying the link, latency
        after that, CPU time.

        A link leads from a rank to the next one, in a ring also from the last to the first. All
        pipelines and links run in step, so messages that leave a server in one direction share its
        bandwidth.
        """
        return self._links(1)

    @cached_property
    def links_back(self) -> list[tuple[float, float, float]]:
        """Costs of a gradient on each link, from the later rank to the earlier one, as in
        `links`."""
        return self._links(-1)

    def _links(self, flow: int) -> list[tuple[float, float, float]]:
        return [
            self._link(
                flow if r + 1 < self.pp else -flow,
                self._sent_bytes(flow, r),
                self._sent_bytes(1, r),
                crossed or [(self.machine.inner, 1)],
            )
            for r, crossed in enumerate(self._crossed)
        ]

    @cached_property
    def _crossed(self) -> list[list[tuple[AnyLink, float]]]:
        """The links of the machine that each link between ranks crosses, and the number of flows
        that share each of them."""
        size = self.replicas * self.tp
        sources = np.arange(self.shape.num_links * size).reshape(-1, size)
        targets = (sources + size) % (self.pp * size)
        crossed: list[list[tuple[AnyLink, float]]] = [[] for _ in sources]
        for of_group, link, links in self.machine.borders:
            groups = sources // of_group
            others = targets // of_group
            if (crosses := groups != others).any():
                ends = (
                    np.concatenate((groups[crosses], others[crosses]))
                    if link.half_duplex
                    else groups[crosses]
                )
                most = np.where(
                    crosses, np.bincount(ends, minlength=self.pp * size)[groups], 0
                ).max(axis=1)
                for of_link, number in zip(crossed, most.tolist(), strict=True):
                    of_link += [(link, max(number / links, 1))] if number else []
        return crossed

    def _link(
        self, way: int, num_bytes: int, carried: int, crossed: Sequence[tuple[AnyLink, float]]
    ) -> tuple[float, float, float]:
        """Return the cost on the slowest of the links that a message crosses, each shared by all
        messages that leave the same group."""
        whole, link = max(
            ((link.transfer_time(num_bytes, flows, way), link) for link, flows in crossed),
            key=lambda pair: pair[0],
        )
        latency = link.transfer_time(1)
        work = link.transfer_work(carried)
        return max(0.0, whole - latency - work), min(latency, max(0.0, whole - work)), work

    def _sent_bytes(self, flow: int, r: int) -> int:
        """Return the bytes that a tp rank sends of a message between pipeline ranks r and r + 1."""
        return -(
            -self.codecs.wire_bytes(flow, self.stages[(r + 1) % self.shape.num_stages].blocks[0])
            // self.tp
        )

    def reduction(self, stage: StageCost, index: int) -> tuple[float, float]:
        """Return seconds and CPU time of reducing a rank's gradients that are reduced once per
        batch."""
        machine = self.machine
        ranks = self.ranks_of(index)
        own = (
            0
            if self.splits > 1 and not self.config.feeds_back
            else (self.gradient_bytes * (stage.parameters - stage.tied - stage.experts))
        )
        if self.config.feeds_back:
            return self._compressed(own, ranks, stage)
        seconds = self._in_buckets(own, ranks)
        work = machine.link(ranks).ring_work(own, self.replicas) if self.replicas > 1 else 0.0
        if stage.experts and own:
            seconds += self._of_experts(self.gradient_bytes * stage.experts, index)
        if stage.tied:
            ends = [*self.ranks_of(0), *self.ranks_of(self.pp - 1)]
            seconds += self._in_buckets(self.gradient_bytes * stage.tied, ends)
            work += machine.link(ends).ring_work(self.gradient_bytes * stage.tied, len(ends))
        return seconds, work

    def _of_experts(self, num_bytes: float, index: int) -> float:
        """Return the seconds of reducing the gradients of a rank's experts over the replicas that
        hold them, while ranks with other experts do the same."""
        first = index * self.replicas * self.tp
        ranks = silent_grid(self.config, first).expert_dp.ranks
        if len(ranks) == 1:
            return 0.0
        whole, rest = divmod(num_bytes, BUCKET_BYTES)
        rings = self.tp * self.config.parallel.ep
        return sum(
            times * self.machine.all_reduce(size, ranks, rings)
            for times, size in ((whole, BUCKET_BYTES), (1, rest))
        )

    def _compressed(
        self, own: float, ranks: Sequence[int], stage: StageCost
    ) -> tuple[float, float]:
        """Return seconds and CPU time of a reduction in which every replica sends compressed
        messages to all others."""
        share = gradient_share(self.config)
        method = self.config.compression.gradients
        speeds = None
        if GRADIENTS[method].coded_as_messages:
            speeds = self.machine.profile.codecs.get(method)
        groups = [(own, ranks)]
        seconds = 0.0
        work = 0.0
        if stage.tied:
            groups.append(
                (self.gradient_bytes * stage.tied, [*self.ranks_of(0), *self.ranks_of(self.pp - 1)])
            )
        for num_bytes, group in groups:
            taken, used = self.machine.half_ring(
                "gather", share * num_bytes * len(group), group, self.tp
            )
            coding = 0.0
            if speeds is not None and len(group) > 1:
                coding = num_bytes / speeds.encoded + len(group) * num_bytes / speeds.decoded
            seconds = seconds + taken + coding
            work = work + used + coding
        return seconds, work

    def _in_buckets(self, num_bytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds of bucketed all-reduces over these ranks, with all tp shards at the
        same time."""
        whole, rest = divmod(num_bytes, BUCKET_BYTES)
        return sum(
            times * self.machine.all_reduce(size, ranks, self.tp)
            for times, size in ((whole, BUCKET_BYTES), (1, rest))
        )

    # -- stages and traffic together

    @cached_property
    def schedule_options(self) -> ScheduleOptions:
        """Options of the schedule, with early_switch = "auto" resolved."""
        schedule_options = self.job.options
        if self.config.pipeline.early_switch == "auto":
            return replace(
                schedule_options,
                early_switch=smallest_early_switch(self.costs, self.shape, schedule_options),
            )
        return schedule_options

    @cached_property
    def costs(self) -> Costs:
        """Costs of the plan's actions, for `simulate`."""
        machine = self.machine
        stages = self.stages
        ranks = self.ranks
        p = self.pp
        hardware = machine.profile.hardware
        calls: dict[Kind, float | list[float]] = {Kind.NORM: [rank.norm for rank in ranks]}
        if p > 1:
            calls |= dict.fromkeys(TRANSFERS, machine.inner.call)
        reductions = [self.reduction(rank, r) for r, rank in enumerate(ranks)]
        if any(work for _, work in reductions):
            calls[Kind.REDUCE] = [min(seconds, work) for seconds, work in reductions]
        halved = (
            self.splits > 0 and not self.config.feeds_back
        )  # an all-reduce: gradients are reduced, and UPDATE gathers the updated weights
        reduce = [max(0.0, seconds - work) / (1 + halved) for seconds, work in reductions]
        gather = list(reduce) if halved else [0.0] * p
        if self.splits == 2 or (self.splits == 1 and not halved):  # UPDATE gathers the full weights
            gathers = [
                machine.half_ring("gather", self.item * rank.parameters, self.ranks_of(r), self.tp)
                for r, rank in enumerate(ranks)
            ]
            gather = [max(0.0, seconds - work) for seconds, work in gathers]
            tied = [min(seconds, work) for seconds, work in reductions]
            calls[Kind.REDUCE] = [own + work for own, (_, work) in zip(tied, gathers, strict=True)]
        if (
            not self.is_cpu
            # gradients are reduced in buckets on a separate stream, hidden behind half of the last
            # backward
        ):
            reduce = [
                max(t - 0.5 * rank.backward, min(t, t * BUCKET_BYTES / max(4 * rank.parameters, 1)))
                for t, rank in zip(reduce, ranks, strict=True)
            ]
        world = self.tp * self.pp * self.replicas
        norm = machine.all_reduce(_NORM_BYTES, range(world))
        cores = None
        if self.is_cpu:
            here = min(world, machine.devices_per_server)
            cores = (
                max(0.1, p * hardware.cores * hardware.efficiency / (here * hardware.threads))
                / self._at_work
            )
        transfer, latency, work = ([link[i] for link in self.links] for i in range(3))
        back = [taken for taken, _, _ in self.links_back]
        network = None
        if p > 1 and self._half_duplex and cores is None:
            network = Network(
                dict.fromkeys(range(len(transfer)), 1.0),
                *(
                    [Route({r: taken}, latency[r]) for r, taken in enumerate(times)]
                    for times in (transfer, back)
                ),
            )
        elif p > 1 and self._half_duplex:  # on shared cores each direction takes the time of both
            transfer = back = [a + b for a, b in zip(transfer, back, strict=True)]
        transfer_back = None if back == transfer else back
        costs = Costs(
            [s.forward for s in stages],
            [s.backward for s in stages],
            [r.update for r in ranks],
            calls,
            reduce=reduce,
            norm=norm,
            gather=gather if self.splits else 0.0,
            transfer=transfer,
            transfer_back=transfer_back,
            latency=latency,
            tied=self.config.model.tie_embeddings and p > 1 and not self.shape.is_v,
            blocking_norm=self.is_cpu,
            serial_links=not self.is_cpu,
            cores=cores,
            transfer_work=work,
            backward_input=self.backward_input,
            network=network,
        )
        if self.moves:
            costs = self.moves.added_to(costs, [self.ranks_of(r) for r in range(p)], self.tp)
        return with_activations(costs, self.job, machine)

    @property
    def _half_duplex(self) -> bool:
        """Whether activations and gradients share a link between stages."""
        return any(
            self.machine.link(
                (r * self.tp * self.replicas, (r + 1) * self.tp * self.replicas)
            ).half_duplex
            for r in range(self.pp - 1)
        )

    @property
    def backward_input(self) -> list[float] | None:
        """Seconds of the part of each stage's split backward that the previous stage waits for;
        None if not measured."""
        if not all(cost.backward_input for cost in self.kinds.values() if cost.backward):
            return None
        costs = [
            [self.block(n, self.shape.rank_of(s)) for n in stage.blocks]
            for s, stage in enumerate(self.stages)
        ]
        return [
            stage.backward - sum(cost.backward - cost.backward_input for cost in of_stage)
            for stage, of_stage in zip(self.stages, costs, strict=True)
        ]

    @property
    def _at_work(self) -> float:
        """Share of a forward and backward in which a CPU rank computes or sends instead of waiting
        for its tp group."""
        if self.tp == 1:
            return 1.0
        link = self.machine.link(range(self.tp))
        inner = self._inner
        layers = [self.kinds[kind] for kind in inner]
        sent = sum(
            link.ring_work(n, self.tp)
            for layer in layers
            for n in (*layer.forward_messages, *layer.backward_messages)
        )
        computed = sum(layer.forward + layer.backward for layer in layers)
        return min(
            1.0, (computed + sent) / (computed + sum(sum(self.waits[kind]) for kind in inner))
        )

    @cached_property
    def step_time(self) -> float:
        """Simulated time of a batch in the steady state."""
        return self.simulated(self.costs)

    def simulated(self, costs: Costs) -> float:
        """Return the simulated step time with these costs."""
        schedule_options = self.schedule_options
        moves = self.moves
        shape = self.shape
        if moves is None:
            return predict_step_time(schedule_options, shape, costs)
        few = max(2 * self.pp, make_schedule(schedule_options).warmup(shape, 0)) + _FEWEST_MOVED
        few += (shape.num_microbatches - few) % self.pp if shape.is_ring else 0

        def takes(m: int) -> float:
            return moves.step_time(schedule_options, replace(shape, num_microbatches=m), costs)

        whole = shape.num_microbatches <= 2 * few
        return extended(
            takes,
            shape,
            shape.num_microbatches if whole else few,
            max(r.compute for r in self.ranks),
        )

    @property
    def tokens_per_s(self) -> float:
        return self.config.batch_tokens / self.step_time

    @property
    def mfu(self) -> float:
        """Share of the devices' peak that the products of training take; 0 if no data sheet is
        known."""
        peak = self.machine.peak_flops
        visible = mean_document_share(self.config.model, self.config.data.document_length)
        flops = training_flops_per_token(self.config.model, visible)
        return self.tokens_per_s * flops / peak if peak else 0.0

    @property
    def price(self) -> float:
        """Price of a million tokens, in the machine's currency; 0 if unknown."""
        return self.machine.price * self.machine.num_devices / 3600 * 1e6 / self.tokens_per_s
