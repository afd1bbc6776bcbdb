"""The complete training state of a rank, built in one place: to train, to predict its memory, or to
measure it.

Order of calls for one batch:

    first micro-batches     begin, bind, (backward), end_backward, bind, (backward), ..
    last micro-batch        close, bind, (backward), end_backward, reduce
    update on the device    square_norm, update
    update on the host      square_norm, send, begin_update, update
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from hybridpar.comm import Waitable
from hybridpar.grid import ProcessGrid
from hybridpar.nn.binding import ParameterBinding
from hybridpar.nn.init import initialize
from hybridpar.nn.placement import ParallelModule
from hybridpar.ops.update import Weights
from hybridpar.optim import GroupedOptimizer, ParameterSlot, build_optimizer, divisible
from hybridpar.schedules.passes.segments import WHOLE, Division
from hybridpar.state import kinds
from hybridpar.state.compression import BatchGradients, Compression
from hybridpar.state.factored import FactoredGradient, multiplied_out, runs_of
from hybridpar.state.gradients import AccumulationRules, GradientAccumulator
from hybridpar.state.host import HostUpdates, HostWork
from hybridpar.state.kind import Under
from hybridpar.state.parameters import StageParameters, move_buffers
from hybridpar.state.policy import StatePolicy
from hybridpar.state.reduction.outer import OuterStep, Wait, wait_here
from hybridpar.state.reduction.partition import Partition, frozen_routes, make_routes
from hybridpar.state.reduction.reducer import GradientReducer
from hybridpar.state.reduction.squares import Squares
from hybridpar.state.residency.chunks import Buffer, BufferUsage, Memory, cut
from hybridpar.state.residency.segments import UNDIVIDED, Segments
from hybridpar.state.residency.shares import Shares, room
from hybridpar.state.residency.uses import uses_of
from hybridpar.state.weights import WeightStore


class RankState:
    """Weights, gradients, reduction and optimizer of the parameters of a rank's stages.

    All weights are zero until `initialize`, `fill` or `load`.

    Args:
        policy: How much state to keep.
        segments: Blocks that compute at a time. An update has `num_groups` parts.
        host_work: Runs the host's work, with a host optimizer.

    Attributes:
        partition: The shards of the trained parameters that this rank updates.
        slots: Placement of each of these shards.
        shares: Shards of each gradient buffer, if replicas shard gradients.
    """

    def __init__(
        self,
        stage: nn.Module,
        grid: ProcessGrid,
        policy: StatePolicy,
        memory: Memory,
        *,
        segments: Segments = UNDIVIDED,
        host_work: HostWork | None = None,
    ):
        config = policy.config
        self.grid = grid
        self.segments = segments
        parts = segments.ranges
        self.memory = memory
        move_buffers(stage, memory.device)
        parameters = StageParameters(
            stage, policy.dtype, rounds_gradients=config.train.gradient_dtype == "bf16"
        )
        self.placements = parameters.placements
        trained = {name: place for name, place in self.placements.items() if place.trainable}
        elementwise = policy.divides_updates and all(
            divisible(config.optim, self.whole_slots[name]) for name in trained
        )
        tied = frozenset(name for name, placement in trained.items() if placement.tied)
        self._in_both_ends = frozenset() if policy.ends_apart else tied
        self.uses = uses_of(
            parts,
            self.placements,
            parameters.blocks,
            elementwise=elementwise,
            alone=grid.pp.size == 1,
        )
        self.partition = Partition(
            parameters.layout, make_routes(policy, trained, grid), uses=self.uses
        )
        frozen = Partition(
            parameters.frozen,
            frozen_routes(
                policy, {name: self.placements[name] for name in parameters.frozen.names}, grid
            ),
            uses=self.uses,
        )
        self.slots, self.frozen_slots = (
            [
                ParameterSlot(o.name, self.placements[o.name], grid.place, o.part, o.shared)
                for o in partition.owned
            ]
            for partition in (self.partition, frozen)
        )
        hosted = {
            slot.name for slot in self.slots if policy.on_host and divisible(config.optim, slot)
        }
        self.weights = WeightStore(
            parameters,
            self.partition,
            frozen,
            policy,
            memory,
            hosted,
        )
        self.compression = Compression(self.partition, self.placements, policy, self.memory)
        rules = AccumulationRules(
            config.pipeline.split_backward,
            tied,
            self.compression.factored,
            self.compression.absent,
            config.compression.gradients,
        )
        self.gradients = GradientAccumulator(
            parameters.layout,
            memory,
            policy.num_gradient_buffers,
            chunks=cut(parameters.layout, self.uses, rules.absent),
            rules=rules,
        )
        self.shares = Shares.of(
            self.partition,
            self.gradients.buffers,
            self.memory,
            "gradients",
            split=policy.moves_gradients
            or (policy.splits_gradients and bool(self.compression.packed)),
            of_all=not policy.moves_gradients,
        )
        self._bind_layers(parameters)
        self._moves_gradients = policy.moves_gradients
        self.reducer = GradientReducer(self.partition, self.compression, self.is_kept)
        self.num_parts = max(len(parts), 1)
        self.num_groups = self.num_parts if elementwise else 1
        num_hosted = self.num_groups if policy.on_host else 0
        self._sends_at_once = num_hosted > 0 and not segments.late
        self._groups = [
            [
                i
                for i, slot in enumerate(self.slots)
                if self.uses(slot.name).group == group and (slot.name in hosted) == policy.on_host
            ]
            for group in range(self.num_groups)
        ]
        # a second group for the weights that the device updates
        if policy.on_host and not elementwise:
            self._groups.append([i for i, slot in enumerate(self.slots) if slot.name not in hosted])
        factored = self.compression.kept_as_factors
        self._factored_groups = runs_of(self.slots, factored)
        if factored:
            assert len(self._groups) == 1, "gradients that are kept as factors, in segments"
            self._groups[0] = [i for i in self._groups[0] if self.slots[i].name not in factored]
        self.optimizer = GroupedOptimizer(
            [
                build_optimizer(
                    config.optim, [self.slots[i] for i in group], grid.tp, config.kernels.optimizer
                )
                for group in (*self._groups, *self._factored_groups)
            ],
            self.memory.for_optimizer(self.uses),
        )
        self.outer: OuterStep | None = None
        if grid.site.size > 1:
            self.outer = OuterStep(
                config.outer, grid.site, self.slots, self.weights.master_dtype, self.memory
            )
        self.kinds = tuple(kind(self) for kind in kinds.KINDS)
        dense: list[list[Tensor]] = [shares.owned() for shares in self.shares] or [
            list(self.partition.owned_views(buffer, without=factored))
            for buffer in self.gradients.buffers
        ]
        self._owned = [self._with_factored(views, factored) for views in dense]
        where: Sequence[Buffer | Shares] = self.shares or self.gradients.buffers
        for optimizer in self.optimizer.groups[: num_hosted * self.weights.copies]:
            optimizer.keep_in(None)
        self.host = HostUpdates(
            self.weights, self.optimizer, self._groups[:num_hosted], dense, host_work
        )
        self._squares = [
            Squares(
                gradients,
                self.partition,
                self.slots,
                views,
                grid.tp,
                config.kernels.optimizer,
                factored=rules.factored,
            )
            for gradients, views in zip(where, self._owned, strict=True)
        ]
        self._await_copy: Callable[[], object] = lambda: None
        self.memory.seal(self.allocate, sum(self.unsharded_bytes()))

    def _with_factored(
        self, dense: Sequence[Tensor], factored: frozenset[str]
    ) -> list[Tensor | FactoredGradient]:
        """Return this rank's shards of the reduced gradients by slot; dense: without the factored."""
        views = iter(dense)
        total = self.compression.total
        return [
            FactoredGradient(total, slot.name, slot.part) if slot.name in factored else next(views)
            for slot in self.slots
        ]

    def _bind_layers(self, parameters: StageParameters) -> None:
        """Have parallel layers hand gradients to the accumulator, and use quantized weights."""
        for module, key, name in parameters.holders:
            if isinstance(module, ParallelModule):
                trained = self.placements[name].trainable
                consumer = self.gradients.consumer(name) if trained else None
                module.bind_parameter(key, ParameterBinding(consumer, self.weights.fp8.by_leaf))

    @cached_property
    def whole_slots(self) -> dict[str, ParameterSlot]:
        """Slots of this rank's parts of its parameters, by name."""
        return {
            name: ParameterSlot(name, place, self.grid.place)
            for name, place in self.placements.items()
        }

    @cached_property
    def division(self) -> Division:
        """How to cut this rank's plan."""
        segments = self.segments
        if not segments.is_divided:
            return WHOLE
        norms = self.num_groups > 1 and not all(map(self.is_alone, range(1, self.num_parts)))
        return Division(
            {stage: len(parts) for stage, parts in segments.of_stage.items()},
            self.num_groups,
            norms=norms,
            hosts=segments.late,
            spreads=self.weights.copies,
            part_major=segments.part_major,
            late=segments.late,
        )

    def initialize(self, seed: int) -> None:
        """Set the weights to their initial values, which are the same on every grid."""
        self.fill(
            lambda tensors: initialize(
                [(name, tensor, self.placements[name]) for name, tensor in tensors.items()],
                seed,
                self.grid.place,
            )
        )

    def fill(self, write: Callable[[dict[str, Tensor]], None]) -> None:
        """Set the newest weights, as WeightStore.fill; all sites start from them."""
        self.weights.fill(write)
        if self.outer is not None:
            self.outer.begin(list(self.weights.parameters_of_optimizer().values()))

    def allocate(self) -> None:
        """Allocate the optimizer's state now, instead of at its first step."""
        for number, optimizer in enumerate(self.optimizer.groups):
            is_hosted = number < self.host.num_groups
            device = torch.device("cpu") if is_hosted else self.memory.device
            optimizer.allocate(device, self.weights.master_dtype)

    # -- a batch

    def begin(self, batch: int, scale: float = 1.0) -> None:
        """Begin a batch, before its first backward: the content of its gradient buffer is void.
        scale: the loss scale.
        """
        index = self.gradients.buffer_index(batch)
        self.gradients.begin(index)
        gradients = BatchGradients(
            batch,
            self.gradients.parts(index),
            scale,
            self.gradients.views(index),
            self.shares[index] if self.shares else None,
        )
        self.compression.expect(gradients)

    def close(self, batch: int) -> None:
        """Call before the last backward of a batch: gradients may be reduced once final."""
        self.compression.open()
        self.reducer.arm(self.gradients.buffers[self.gradients.buffer_index(batch)])

    def bind(
        self,
        batch: int,
        versions: Sequence[int],
        *,
        last: bool = False,
        part: int = 0,
        microbatch: int = 0,
    ) -> None:
        """Make the next backward, of a segment at these versions, add to a batch's gradients.

        Args:
            batch: Number of the batch.
            versions: The versions.
            last: It is the last backward of the segment in this batch.
            part: The segment.
            microbatch: Number of the micro-batch within the batch.
        """
        self.reducer.proceed()
        for version in versions:
            self.gradients.bind(self.weights.leaves_of(version), self.gradients.buffer_index(batch))
        # The gradient of a tied weight of two versions is final only after both.
        self._arm(microbatch, part, last=last and len(versions) == 1)

    def collect(self, key: Hashable) -> None:
        """Call before a backward to inputs only: `apply(key)` computes the weight gradients."""
        self.gradients.collect(key)
        self.compression.stream.disarm()

    def apply(
        self, key: Hashable, *, last: bool = False, part: int = 0, microbatch: int = 0
    ) -> None:
        """Add the weight gradients that were deferred since `collect(key)`. `last`: they are then
        final. Others: as in `bind`.
        """
        self._arm(microbatch, part, last=last)
        self.gradients.apply(key)

    def _arm(self, microbatch: int, part: int, *, last: bool) -> None:
        """Prepare for the weight gradients of a micro-batch in a segment."""
        report = self._reporter(part) if last else None
        block, ends_block = self.compression.block_of(microbatch)
        if ends_block:
            self.compression.stream.arm(part)
            report = self.compression.stream.ready
        self.gradients.arm(report, block)

    def end_backward(self) -> None:
        """Call after a backward and its weight gradients: a block of micro-batches may be complete."""
        self.compression.stream.end()

    def is_kept(self, use: BufferUsage) -> bool:
        """Return whether gradients of a use are never sharded, and reduced once a batch."""
        return use.stays or not self._moves_gradients

    def _is_final(self, name: str, part: int) -> bool:
        """Return whether a segment's last backward makes a gradient final, to be reduced once."""
        use = self.uses(name)
        return use.parts[0] == part and self.is_kept(use)

    def _reporter(self, part: int) -> Callable[[str], None]:
        """Return a function that takes the names of gradients that a last backward finished."""
        if self.num_parts > 1 or self._moves_gradients:
            return lambda name: self.reducer.ready(name) if self._is_final(name, part) else None
        if not part or not self._in_both_ends:
            return self.reducer.ready
        # The rank's first stage has its backward last, so the tied weights that its last stage
        # shares with it are not final yet.
        return lambda name: None if name in self._in_both_ends else self.reducer.ready(name)

    def finish(self, batch: int, part: int) -> None:
        """End a segment of a batch after its last backward; missing gradients become zero."""
        index = self.gradients.buffer_index(batch)
        final = [name for name in self.gradients.layout.names if self._is_final(name, part)]
        self.gradients.settle(index, final)
        self.reducer.complete(final)
        if self.is_alone(part):
            self._squares[index].add(part)

    def is_alone(self, part: int) -> bool:
        """Return whether the gradients of a segment's last backward need no other rank."""
        return self.partition.is_alone(part) and (part > 0 or self.grid.tp.size == 1)

    def reduce(self, batch: int) -> None:
        """Start the reductions that have not started, after the last backward of a batch."""
        kept = [name for name in self.gradients.layout.names if self.is_kept(self.uses(name))]
        self.gradients.finish(self.gradients.buffer_index(batch), kept)
        self.reducer.flush()

    def await_sums(self, batch: int) -> None:
        """Wait for the reductions of a batch, the oldest under way."""
        self.reducer.wait()
        if self.shares and not self._moves_gradients:
            index = self.gradients.buffer_index(batch)
            for name in self.shares[index].views.keys() - self.compression.packed:
                self.shares[index].put(name, self.gradients.views(index)[name])

    def square(self, batch: int, part: int) -> None:
        """Compute the squared norm of a segment's reduced gradients, ahead of `square_norm`."""
        self._squares[self.gradients.buffer_index(batch)].add(part)

    def square_norm(self, batch: int) -> Tensor:
        """Return this rank's share of the squared norm of a batch's reduced gradients: a float64
        scalar.

        Collectives: one all-reduce over tp if its ranks share rows.
        """
        return self._squares[self.gradients.buffer_index(batch)].total()

    def send(self, batch: int) -> None:
        """Send a batch's gradients to the host, if it does not fetch each group when it begins with
        it; call after `square_norm`.
        """
        if self._sends_at_once:
            self.host.send(self.gradients.buffer_index(batch))

    def is_hosted(self, group: int) -> bool:
        """Return whether the host updates all weights of a group."""
        return self.host.num_groups + group >= len(self._groups)

    def begin_update(
        self,
        batch: int,
        lr: float,
        factor: float | None,
        *,
        predict: bool = True,
        group: int | None = None,
    ) -> list[Waitable]:
        """Start the host on a group (None: all) of the next version of the weights, as `update`
        would make it; return what is done once it has arrived.
        """
        if not group:
            self.await_copy()
            self.compression.close(made=factor is not None)
        version = batch + 1

        def make(number: int, gradients: Sequence[Tensor]) -> None:
            step = None if factor is None else self._step_of(number, gradients, lr, factor)
            self.weights.make_on_host(version, step, predict=predict, group=number)

        index = self.gradients.buffer_index(batch)
        return self.host.begin(index, version, make, None if group is None else [group])

    def _step_of(
        self, group: int, gradients: Sequence[Tensor], lr: float, factor: float
    ) -> Callable[[Weights], None]:
        """Return a function that steps a group of the optimizer."""

        def step(weights: Weights) -> None:
            masters = self.weights.as_masters(gradients)
            self.optimizer.step(group, weights, masters, lr=lr, gradient_scale=factor)

        return step

    def update(
        self,
        batch: int,
        lr: float,
        factor: float | None,
        *,
        predict: bool = True,
        group: int = 0,
        wait: Wait = wait_here,
    ) -> None:
        """Make the next version of the weights, from the gradients of a batch times `factor`.

        With a host optimizer, `begin_update` and `host.wait` come first, and `factor` only says
        whether there is a step.

        Args:
            factor: Multiplies the gradients; None: the next version equals the current one.
            predict: Predict this version, if weights are predicted.
            group: Which part of the update to make.
            wait: Called with a function that waits for other sites.

        Collectives: as Optimizer.step and WeightStore.advance; with several sites, as
        OuterStep.step.
        """
        self.await_copy()
        version = self.weights.newest + 1
        outer = self.outer if self.outer is not None and self.outer.concerns(version) else None
        if factor is None and outer is None:
            self.weights.advance(None, group=group)
            self._settle_here(made=False)
            return
        owned = self._owned[self.gradients.buffer_index(batch)]
        number = self.host.num_groups + group  # the device's groups follow the host's

        def step(weights: Weights) -> None:
            if factor is None:
                with weights.updating():
                    pass
            elif number < len(self._groups):
                dense = self._groups[number]
                for i, members in enumerate((dense, *self._factored_groups)):
                    gradients = [multiplied_out(owned[slot]) for slot in members]
                    own = weights.only(members) if self._factored_groups else weights
                    self._step_of(number + i, gradients, lr, factor)(own)
            if outer is not None:
                outer.step(version, weights, wait)

        self.weights.advance(step, predict=predict, group=group)
        self._settle_here(made=factor is not None)

    def _settle_here(self, *, made: bool) -> None:
        """Tell the compression of an update on the device, which has multiplied factors out."""
        if not self.host.num_groups:
            self.compression.close(made=made)

    def full_gradients(self, batch: int) -> dict[str, Tensor]:
        """Return the reduced gradients of a batch, for all trained parameters; read only.

        Collectives: an all-gather if replicas shard the update.
        """
        index = self.gradients.buffer_index(batch)
        if not self.partition.is_sharded:
            return {
                slot.name: self.memory.read(multiplied_out(own))
                for slot, own in zip(self.slots, self._owned[index], strict=True)
            }
        own = (self.memory.read(multiplied_out(own)) for own in self._owned[index])
        return self.partition.whole(own, self.memory.device)

    # -- copies of the state

    def hold(self, until: Callable[[], object]) -> None:
        """Keep `tensors`, which are being copied, unchanged until `until` has returned."""
        self._await_copy = until

    def await_copy(self) -> None:
        """Return once `tensors` may be changed."""
        self._await_copy()

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Elements (start, stop) that this rank owns of parameters that it owns in part."""
        return {
            slot.name: slot.part
            for slot in (*self.slots, *self.frozen_slots)
            if slot.part is not None
        }

    @cached_property
    def owned_slots(self) -> dict[str, ParameterSlot]:
        """Slots of the parts that this rank owns, by name, of trained and frozen parameters."""
        return {slot.name: slot for slot in (*self.slots, *self.frozen_slots)}

    def tensors(self) -> dict[str, Tensor]:
        """Return the state that checkpoints have, by key (see kinds).

        The tensors are live: copy or write them before training continues. `memory.read` returns
        their content.
        """
        return {
            key: tensor
            for kind in self.kinds
            if kind.saved
            for key, tensor in kind.tensors().items()
        }

    def placed(self) -> Iterator[tuple[str, Tensor, ParameterSlot]]:
        """Yield the tensors that checkpoints have, with keys and the slots of their parameters."""
        for key, tensor in self.tensors().items():
            kind, parameter, _ = kinds.parse_key(key)
            slot = (self.whole_slots if kind.whole else self.owned_slots)[parameter]
            slot = replace(slot, joint=True) if kind.joint else slot
            yield key, tensor, replace(slot, shared=False) if kind.differs else slot

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes of the state, by column of the memory report."""
        sizes = {kind.column: 0 for kind in self.kinds}
        for kind in self.kinds:
            sizes[kind.column] += sum(
                tensor.numel() * tensor.element_size() for tensor in kind.memory()
            )
        return sizes

    def unsharded_bytes(self, gradients: int = 2) -> tuple[int, int]:
        """Return upper bounds of the bytes of unsharded chunks: of the weights of two consecutive
        segments, so that the next one is gathered while a segment computes, and of so many
        segments' gradients: by default of one segment and of another that is being reduced.
        """

        def of(buffers: Sequence[Buffer], consecutive: int) -> int:
            chunks = [
                (chunk.use, (chunk.stop - chunk.start) * buffer.dtype.itemsize)
                for buffer in buffers
                for chunk in buffer.chunks
            ]
            return room(chunks, consecutive)

        weights = self.weights
        buffers = [weights.buffers[0], *weights.frozen.buffers] if weights.shares else []
        moves_gradients = self.shares and self._moves_gradients
        return of(buffers, 2), of(self.gradients.buffers[: 1 if moves_gradients else 0], gradients)

    def load(
        self, tensors: Mapping[str, Tensor], versions: list[int], num_updates: int, since: int = 0
    ) -> None:
        """Load tensors by key. Each tensor is read once; optimizer tensors are kept without a copy.

        Args:
            versions: Versions of the weights, oldest first.
            num_updates: Steps that the optimizer has taken.
            since: The version since which sites have trained apart.

        Raises:
            CheckpointError: Names the first tensor that is missing or of another shape.
        """
        self.await_copy()
        if self.outer is not None:
            self.outer.begin_at(since)
        for kind in self.kinds:
            if kind.saved:
                kind.load(Under(f"{kind.name}/", tensors), versions, num_updates)

    @contextmanager
    def unpredicted(self) -> Iterator[None]:
        """Replace the newest weights by unpredicted ones in this context. May all-gather."""
        self.await_copy()
        with self.weights.unpredicted():
            yield
