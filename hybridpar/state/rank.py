"""All that one rank keeps of training, built in one place: to train with, to predict its memory, or to measure it.

    batch     begin .. bind .. (backward) .. bind .. close, bind, (backward) .. reduce .. square_norm .. update
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn

from hybridpar.grid import ProcessGrid
from hybridpar.nn.init import initialize
from hybridpar.nn.placement import reduce_shared_gradients
from hybridpar.optim import ParameterSlot, build_optimizer
from hybridpar.optim.norm import counted, sum_of_squares
from hybridpar.state import kinds
from hybridpar.state.gradients import GradientAccumulator
from hybridpar.state.partition import Partition, make_routes
from hybridpar.state.policy import StatePolicy
from hybridpar.state.reducer import GradientReducer
from hybridpar.state.weights import StageParameters, WeightStore


class RankState:
    """Weights, gradients, their reduction, and the optimizer, of the parameters of `stage`.

    `stage`: all blocks of the rank, built on the meta device; its parameters have global names. `partition`: which part
    of them this rank updates. `slots`: those parts. `kinds`: what it keeps, by kind.
    Until `initialize`, `weights.fill` or `load` all weights are zero.
    """

    def __init__(self, stage: nn.Module, grid: ProcessGrid, policy: StatePolicy, device: torch.device):
        self.grid, self._backend = grid, policy.backend
        parameters = StageParameters(stage, policy.dtype)
        self.placements = parameters.placements
        self.partition = Partition(parameters.layout, make_routes(policy, self.placements, grid))
        self.slots = [ParameterSlot(o.name, self.placements[o.name], grid.place, o.part, o.shared)
                      for o in self.partition.owned]
        self.weights = WeightStore(parameters, self.partition, policy.num_versions, device, predict=policy.predicts)
        self.gradients = GradientAccumulator(
            parameters.layout, device, num_buffers=policy.num_gradient_buffers, defers=policy.defers)
        self.reducer = GradientReducer(self.partition)
        self.optimizer = build_optimizer(policy.optim, self.slots, grid.tp, policy.backend)
        self.kinds = tuple(kind(self) for kind in kinds.KINDS)
        self._owned = [self.weights.owned_views(buffer) for buffer in self.gradients.buffers]
        self._counted = [parameters.layout.joined(counted(views, self.slots)) for views in self._owned]
        self._await_copy: Callable[[], object] = lambda: None

    @cached_property
    def whole_slots(self) -> dict[str, ParameterSlot]:
        """Slots of all that this rank has of its parameters, by name."""
        return {name: ParameterSlot(name, place, self.grid.place) for name, place in self.placements.items()}

    def initialize(self, seed: int) -> None:
        """Gives the weights their starting values, which are the same on every grid."""
        self.weights.fill(lambda tensors: initialize(
            [(name, tensors[name], place) for name, place in self.placements.items()], seed, self.grid.place))

    def allocate(self) -> None:
        """Takes the memory of the optimizer's state now; else its first step does."""
        self.optimizer.allocate(self.gradients.buffers[0].device, self.weights.master_dtype)

    # -- a batch -----------------------------------------------------------------------------------------------------

    def begin(self, batch: int) -> None:
        """Before the first backward of a batch: what its gradient buffer holds is void."""
        self.gradients.begin(self.gradients.buffer_index(batch))

    def close(self, batch: int) -> None:
        """Before the last backward of a batch: what is final from now on may be reduced."""
        self.reducer.arm(self.gradients.buffers[self.gradients.buffer_index(batch)])

    def bind(self, batch: int, versions: Sequence[int], *, last: bool = False) -> None:
        """The next backward, through these versions, adds to the gradients of a batch. `last`: it makes them final."""
        for version in versions:
            self.gradients.bind(self.weights.leaves_of(version), self.gradients.buffer_index(batch))
        # a tied weight may be of two versions, and is final only with both of them
        self.gradients.arm(self.reducer.ready if last and len(versions) == 1 else None)

    def collect(self, key: Hashable) -> None:
        """Before a backward without weights' gradients: what these are made of waits for `apply(key)`."""
        self.gradients.collect(key)

    def apply(self, key: Hashable, *, last: bool = False) -> None:
        """Adds the weights' gradients of a backward that waited. `last`: they are final then."""
        self.gradients.arm(self.reducer.ready if last else None)
        self.gradients.apply(key)

    def reduce(self, batch: int) -> None:
        """After the last backward of a batch: starts what has not been started."""
        self.gradients.finish(self.gradients.buffer_index(batch))
        self.reducer.flush()

    def square_norm(self, batch: int) -> Tensor:
        """This rank's share of the squared norm of the reduced gradients of a batch; a float64 scalar.

        Collectives: one all-reduce over tp where its ranks share rows.
        """
        index = self.gradients.buffer_index(batch)
        reduce_shared_gradients(
            zip(self._owned[index], (slot.placement for slot in self.slots), strict=True), self.grid.tp)
        return sum_of_squares(self._counted[index], self._backend)

    def update(self, batch: int, lr: float, factor: float | None, *, predict: bool = True) -> None:
        """Makes the next version of the weights, from the gradients of a batch times `factor`; None: an equal one.

        `predict`: micro-batches are to run on a prediction of it, where weights are predicted.
        Collectives: as Optimizer.step and WeightStore.advance.
        """
        self.await_copy()
        if factor is None:
            self.weights.advance(None)
            return
        gradients = self._owned[self.gradients.buffer_index(batch)]
        self.weights.advance(lambda weights: self.optimizer.step(
            weights, gradients, lr=lr, gradient_scale=factor), predict=predict)

    def full_gradients(self, batch: int) -> dict[str, Tensor]:
        """The reduced gradients of a batch, of all parameters; read only.

        Collectives: an all-gather where replicas share the update.
        """
        flat = self.gradients.buffers[self.gradients.buffer_index(batch)]
        if self.partition.is_sharded:
            flat = flat.clone()
            self.partition.gather(flat).wait()
        return self.partition.layout.views(flat)

    # -- copies of it ------------------------------------------------------------------------------------------------

    def hold(self, until: Callable[[], object]) -> None:
        """Nothing changes `tensors` before `until` has returned: they are being copied."""
        self._await_copy = until

    def await_copy(self) -> None:
        """Returns once `tensors` may be changed."""
        self._await_copy()

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Elements of the local tensor that this rank updates, of the parameters that it updates in part."""
        return {o.name: o.part for o in self.partition.owned if o.part is not None}

    def tensors(self) -> dict[str, Tensor]:
        """The state that checkpoints have, by key (see kinds); live, so copy or write it before going on."""
        return {key: tensor for kind in self.kinds if kind.saved for key, tensor in kind.tensors().items()}

    def placed(self) -> Iterator[tuple[str, Tensor, ParameterSlot]]:
        """The state that checkpoints have: each tensor with its key, and the slot of what it is part of."""
        owned = {slot.name: slot for slot in self.slots}
        for key, tensor in self.tensors().items():
            kind, parameter, _ = kinds.parse_key(key)
            yield key, tensor, (self.whole_slots if kind.whole else owned)[parameter]

    def num_bytes(self) -> dict[str, int]:
        """Memory of the state, by column of the memory report. Units: bytes."""
        sizes = {kind.column: 0 for kind in self.kinds}
        for kind in self.kinds:
            sizes[kind.column] += sum(tensor.numel() * tensor.element_size() for tensor in kind.memory())
        return sizes

    def load(self, tensors: Mapping[str, Tensor], versions: list[int], num_updates: int) -> None:
        """Takes tensors by key. Each is asked for once; an optimizer's are kept as they are.

        `versions`: of the weights, oldest first. `num_updates`: steps that the optimizer has taken.
        Raises: CheckpointError naming the first tensor that is missing or of another shape.
        """
        self.await_copy()
        for kind in self.kinds:
            if kind.saved:
                kind.load(kinds.Under(f"{kind.name}/", tensors), versions, num_updates)

    @contextmanager
    def unpredicted(self) -> Iterator[None]:
        """While in it, the newest weights are not predicted. Collectives: as WeightStore.unpredicted."""
        self.await_copy()
        with self.weights.unpredicted():
            yield
