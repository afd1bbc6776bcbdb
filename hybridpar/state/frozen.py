"""The frozen parameters of a stage: one flat buffer that all versions of the weights share.

    weights/0   [ trained ]     version t
    weights/1   [ trained ]     version t+1
    frozen/0    [ frozen  ]     both versions: nothing updates it, so it has no gradients, master copy or moments

Micro-batches compute with frozen parameters in the precision of the other weights. If replicas
shard the weights (ZeRO-3), a rank keeps its shard, and unsharded chunks are gathered and dropped
together with the trained chunks of their segment.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridpar.state.parameters import StageParameters
from hybridpar.state.reduction.partition import Partition
from hybridpar.state.residency.chunks import Buffer, BufferUsage, Memory, cut
from hybridpar.state.residency.shares import FROZEN, Shares


class FrozenWeights:
    """Holds a stage's frozen parameters and binds them to the modules once.

    A stage without frozen parameters has no buffer.

    Args:
        partition: The shards of the frozen layout that this rank keeps.
        splits: Replicas shard the weights (ZeRO-3).

    Attributes:
        leaves: Unsharded parameters, by name; they require no gradient.
        shares: This rank's shard of the buffer; empty unless `splits`.
    """

    def __init__(
        self,
        parameters: StageParameters,
        partition: Partition,
        memory: Memory,
        *,
        splits: bool = False,
    ):
        layout = parameters.frozen
        self.dtype = parameters.dtype
        self.master_dtype = parameters.master_dtype
        self.partition = partition
        self.memory = memory
        self._uses = partition.uses
        self.buffers: list[Buffer] = []
        self.leaves: dict[str, Tensor] = {}
        if layout.names:
            self.buffers.append(
                Buffer(layout, self.dtype, memory, cut(layout, partition.uses), FROZEN)
            )
            self.leaves = {name: view.detach() for name, view in self.buffers[0].views().items()}
        self.shares = Shares.of(
            partition, self.buffers, memory, FROZEN.partition("/")[0], split=splits
        )
        for table, key, name in parameters.places:
            if name in self.leaves:
                table[key] = self.leaves[name]  # type: ignore[assignment]

    def is_kept(self, use: BufferUsage) -> bool:
        """Return whether chunks of a use are never sharded."""
        return use.stays or not self.shares

    def kept(self) -> dict[str, Tensor]:
        """Return the parameters that are never sharded, by name."""
        return {name: leaf for name, leaf in self.leaves.items() if self.is_kept(self._uses(name))}

    def shared(self) -> dict[str, Tensor]:
        """Return this rank's shards of the parameters that are gathered and released, by name."""
        return {name: view for shares in self.shares for name, view in shares.views.items()}

    @torch.no_grad()
    def fill(self, write: Callable[[dict[str, Tensor]], None]) -> None:
        """Set all frozen parameters: `write` fills tensors by name, in fp32 (fp64 runs: fp64)."""
        shared = self.shared()
        for name, leaf in self.leaves.items():
            with self.memory.writing(leaf, *([shared[name]] if name in shared else [])):
                full = torch.empty(leaf.shape, dtype=self.master_dtype, device=leaf.device)
                write({name: full})
                leaf.copy_(full)
                for shares in self.shares:
                    shares.take([name])

    @torch.no_grad()
    def full(self) -> dict[str, Tensor]:
        """Return all frozen parameters unsharded, by name; read only. May all-gather."""
        if not self.shares or not self.partition.is_sharded:
            return {name: self.memory.read(leaf) for name, leaf in self.leaves.items()}
        owned = map(self.memory.read, self.shares[0].owned())
        return self.partition.whole(owned, self.memory.device)
