"""The kinds of state that a rank keeps: name, content, and what a load does if a checkpoint has
none.

    key                            tensors                                    if a load finds none
    weights/<version>/<parameter>  complete local parameters, on all          (always present)
                                   replicas; frozen ones once, with the
                                   newest version
    shares/<version>/<parameter>   this rank's shards of weights that         the weights
                                   replicas shard (ZeRO-3)
    master/<parameter>             this rank's shards                         the weights
    optimizer/<parameter>.<state>  this rank's shards                         zero
    anchor/<parameter>             this rank's shards of the weights that     the weights
                                   all sites last had in common
    outer/<parameter>              this rank's shards of the outer momentum   zero
    sent/<parameter>               this rank's shards of differences that     (there are none)
                                   were sent to other sites, not yet applied
    remainder/<parameter>          this rank's shards of the quantization     zero
                                   error of messages to other sites
    feedback/<parameter>           complete local parameters, different on    zero; if the number of replicas
                                   every replica                              changes, their sum is preserved
    learned/<parameter>.<what>     what compression has learned, different    zero: it restarts
                                   on every replica
    basis/<parameter>.<what>       what compression has learned, equal on     zero: it restarts
                                   all replicas
    gradients                      complete local parameters; never saved
    messages                       buffers of compressed gradients; never saved
    host                           buffers of copies to and from the host; never saved
    fp8                            quantized hidden matrices of every live version; never saved

Checkpoints, copies of the state, audits and the prediction of memory go through `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from hybridpar.optim import ParameterSlot
from hybridpar.state.kind import OuterKind, RoomKind, StateKind, Stored, Under
from hybridpar.state.residency.chunks import Buffer, BufferUsage
from hybridpar.state.weights import copy_all


class WeightVersions(StateKind):
    """Every live version of the weights, in the working precision; frozen parameters once."""

    name = "weights"
    column = "weights"
    whole = True
    form = "{what}/{parameter}"
    what = r"\d+"

    @classmethod
    def restate(cls, stored: Stored, slot: ParameterSlot, what: str) -> Tensor | None:
        return stored.version(slot, int(what))

    def tensors(self) -> dict[str, Tensor]:
        store = self.holder.weights
        return {
            self.key(name, str(version)): leaf.detach()
            for version in store.live_versions
            for name, leaf in store.kept(version).items()
        } | {self.key(name, str(store.newest)): leaf for name, leaf in store.frozen.kept().items()}

    def memory(self) -> list[Tensor]:
        store = self.holder.weights
        return _kept(store.buffers, store.is_kept) + _kept(
            store.frozen.buffers, store.frozen.is_kept
        )

    def places(self) -> dict[str, Tensor]:
        store = self.holder.weights
        return {
            self.key(name, str(slot)): leaf
            for slot, leaves in enumerate(store.leaves)
            for name, leaf in leaves.items()
        } | {self.key(name, "frozen"): leaf for name, leaf in store.frozen.leaves.items()}

    def load(self, tensors: Mapping[str, Tensor], versions: list[int], num_updates: int) -> None:
        for version in versions:
            self.holder.weights.restore(version, Under(f"{version}/", tensors))
        self.holder.weights.restore_frozen(Under(f"{versions[-1]}/", tensors))


class WeightShares(WeightVersions):
    """This rank's shards of every live version of the weights (ZeRO-3)."""

    name = "shares"
    whole = False

    def tensors(self) -> dict[str, Tensor]:
        store = self.holder.weights
        return {
            self.key(name, str(version)): view
            for version in store.live_versions
            if store.shares
            for name, view in store.shares[store.slot(version)].views.items()
        } | {
            self.key(name, str(store.newest)): view for name, view in store.frozen.shared().items()
        }

    def memory(self) -> list[Tensor]:
        store = self.holder.weights
        return [
            tensor
            for shares in (*store.shares, *store.frozen.shares)
            for tensor in shares.buffer.tensors
        ]

    def places(self) -> dict[str, Tensor]:
        store = self.holder.weights
        return {
            self.key(name, str(slot)): view
            for slot, shares in enumerate(store.shares)
            for name, view in shares.views.items()
        } | {self.key(name, "frozen"): view for name, view in store.frozen.shared().items()}

    def load(self, tensors: Mapping[str, Tensor], versions: list[int], num_updates: int) -> None:
        store = self.holder.weights
        for version in versions if store.shares else ():
            copy_all(
                store.shares[store.slot(version)].views,
                Under(f"{version}/", tensors),
                f"shares of version {version}",
                self.holder.memory,
            )
        copy_all(
            store.frozen.shared(),
            Under(f"{versions[-1]}/", tensors),
            "shares of frozen weights",
            self.holder.memory,
        )


class Gradients(StateKind):
    """Gradients of the batches that are being accumulated or reduced, by buffer."""

    name = "gradients"
    column = "gradients"
    whole = True
    saved = False
    form = "{what}/{parameter}"
    what = r"\d+"

    def tensors(self) -> dict[str, Tensor]:
        gradients = self.holder.gradients
        return {
            self.key(name, str(i)): view
            for i in range(len(gradients.buffers))
            for name, view in gradients.views(i).items()
        }

    def memory(self) -> list[Tensor]:
        own = [
            tensor
            for buffer in {
                id(shares.buffer): shares.buffer for shares in self.holder.shares
            }.values()
            for tensor in buffer.tensors
        ]
        return _kept(self.holder.gradients.buffers, self.holder.is_kept) + own

    def places(self) -> dict[str, Tensor]:
        shared = self.holder.shares[0].views if self.holder.shares else {}
        return self.tensors() | {self.key(name, "shard"): view for name, view in shared.items()}


def _kept(buffers: Iterable[Buffer], is_kept: Callable[[BufferUsage], bool]) -> list[Tensor]:
    """Return the memory of the chunks that are never sharded."""
    return [
        tensor
        for buffer in buffers
        for chunk, tensor in zip(buffer.chunks, buffer.tensors, strict=True)
        if is_kept(chunk.use)
    ]


class Master(StateKind):
    """The newest weights in full precision, if the working weights are rounded or predicted."""

    name = "master"
    column = "master"

    @classmethod
    def restate(cls, stored: Stored, slot: ParameterSlot, what: str) -> Tensor | None:
        return stored.newest(slot)

    def tensors(self) -> dict[str, Tensor]:
        store = self.holder.weights
        if store.master is None or not store.keeps_master:
            return {}
        return {self.key(name): tensor for name, tensor in store.parameters_of_optimizer().items()}

    def memory(self) -> list[Tensor]:
        master = self.holder.weights.master
        return [] if master is None else master.tensors

    def load(self, tensors: Mapping[str, Tensor], versions: list[int], num_updates: int) -> None:
        self.holder.weights.restore_master(tensors)


class OptimizerState(StateKind):
    """Tensors that the optimizer keeps for each parameter, such as 'exp_avg'."""

    name = "optimizer"
    form = "{parameter}.{what}"

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"{self.name}/{key}": tensor
            for key, tensor in self.holder.optimizer.state_tensors().items()
        }

    def load(self, tensors: Mapping[str, Tensor], versions: list[int], num_updates: int) -> None:
        self.holder.optimizer.load_state_tensors(tensors, num_updates)


class Anchor(OuterKind):
    """The weights that sites last had in common, in the precision of the master copy."""

    name = "anchor"
    joint = True

    @classmethod
    def restate(cls, stored: Stored, slot: ParameterSlot, what: str) -> Tensor | None:
        return stored.common(slot)


class OuterMomentum(OuterKind):
    """The momentum of the outer step."""

    name = "outer"
    joint = True


class Sent(StateKind):
    """Differences that this rank has sent to other sites, and that no version has applied yet."""

    name = "sent"

    def tensors(self) -> dict[str, Tensor]:
        outer = self.holder.outer
        sent = {} if outer is None else outer.sent(self.holder.weights.newest)
        return {self.key(name): tensor for name, tensor in sent.items()}

    def memory(self) -> list[Tensor]:
        outer = self.holder.outer
        return [] if outer is None else outer.room


class OuterRemainder(OuterKind):
    """Quantization error of messages to other sites; of one under way: its numbers."""

    name = "remainder"


class Unsent(StateKind):
    """The unsent rest of the gradients, in the units of their sum over replicas."""

    name = "feedback"
    whole = True
    differs = True

    @classmethod
    def restate(cls, stored: Stored, slot: ParameterSlot, what: str) -> Tensor | None:
        return stored.share(slot, cls.name)

    def tensors(self) -> dict[str, Tensor]:
        feedback = self.holder.compression.feedback
        return {self.key(name): tensor for name, tensor in feedback.kept.items()}

    def memory(self) -> list[Tensor]:
        return self.holder.compression.feedback.memory[0]


class Learned(StateKind):
    """Tensors that gradient compression has learned. `Unsent` counts their memory."""

    name = "learned"
    form = "{parameter}.{what}"
    whole = True
    differs = True
    shaped = False

    @classmethod
    def restate(cls, stored: Stored, slot: ParameterSlot, what: str) -> Tensor | None:
        return stored.same(slot, cls.name, what)

    def tensors(self) -> dict[str, Tensor]:
        compression = self.holder.compression
        if compression.takes_factors == self.differs:
            return {}
        return {
            f"{self.name}/{name}": tensor for name, tensor in compression.feedback.learned.items()
        }

    def memory(self) -> list[Tensor]:
        return []

    def load(self, tensors: Mapping[str, Tensor], versions: list[int], num_updates: int) -> None:
        for key, own in self.tensors().items():
            found = tensors[key.partition("/")[2]]
            own.copy_(found) if found.shape == own.shape else own.zero_()


class Bases(Learned):
    """Learned tensors of methods that learn from the sum over all replicas."""

    name = "basis"
    differs = False

    @classmethod
    def restate(cls, stored: Stored, slot: ParameterSlot, what: str) -> Tensor | None:
        return stored.alike(slot, cls.name, what)


class Messages(RoomKind):
    """Buffers of the compressed gradients of all replicas, and of their remainders."""

    name = "messages"
    column = "gradients"

    def memory(self) -> list[Tensor]:
        compression = self.holder.compression
        return compression.feedback.memory[1] + compression.rooms


class HostRoom(RoomKind):
    """Buffers on the host for gradients that arrive and weights that leave."""

    name = "host"

    def memory(self) -> list[Tensor]:
        return [
            tensor
            for buffer in (self.holder.host.staging, self.holder.weights.made)
            if buffer
            for tensor in buffer.tensors
        ]


class QuantizedWeights(RoomKind):
    """Quantized copies of hidden matrices (train.fp8). They are recomputed from the weights."""

    # Checkpoints do not include these copies, so they do not belong in the column of weights.
    name = "fp8"
    column = "gradients"

    def memory(self) -> list[Tensor]:
        return self.holder.weights.fp8.tensors()


KINDS: tuple[type[StateKind], ...] = (
    WeightVersions,
    WeightShares,
    Gradients,
    Master,
    OptimizerState,
    Anchor,
    OuterMomentum,
    Sent,
    OuterRemainder,
    Unsent,
    Learned,
    Bases,
    Messages,
    HostRoom,
    QuantizedWeights,
)
"""All kinds, in the order of checkpoints."""


def saved_kind(name: str) -> type[StateKind]:
    """Return the saved kind of that name. Raises: ValueError."""
    for kind in KINDS:
        if kind.saved and kind.name == name:
            return kind
    raise ValueError(f"{name!r} is not a kind of state")


def parse_key(key: str) -> tuple[type[StateKind], str, str]:
    """Return the kind, the parameter and `what` of a checkpoint's key. Raises: ValueError."""
    name, _, rest = key.partition("/")
    try:
        kind = saved_kind(name)
        return kind, *kind.parse(rest)
    except ValueError:
        raise ValueError(f"{key!r} is not the name of a checkpoint's tensor") from None
