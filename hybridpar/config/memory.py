"""The section [memory]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hybridpar.config.typed import Count


@dataclass(frozen=True)
class MemoryConfig:
    """Where the state of training is kept: weights, gradients, master copy and the optimizer's
    state.

    With a budget, what is needed soon is in memory and the rest in a file (of a GPU: in memory of
    the host). What comes when is known from the plan, so the least is moved, ahead of its use.
    Losses and weights stay the same to the bit if `parts` do.
    """

    budget: Count = 0
    """Bytes of memory that the state of a process may take; 0: as much as it needs."""
    folder: str = ""
    """Folder of that file, on a fast disk of the machine; empty: the run's."""
    parts: Count = 0
    """Parts that a stage's blocks are cut into; one is computed with at a time. 0: each block is a
    part with a budget, a host optimizer, or parallel.zero 2 or 3; else the stage is whole. Another
    number changes the order in which three replicas or more sum gradients, and so bits; with
    parallel.zero 1 that of the gradient norm."""
    host_optimizer: bool = False
    """The optimizer's state and the master copy are in the host's memory, and the host updates them
    beside training: gradients go there, weights come back. Under 2bw training waits for neither if
    a batch is long enough; `hybridpar check` says. Muon's matrices stay. Losses and weights stay
    the same to the bit if `parts` do."""
    offload_activations: int | tuple[int, ...] | Literal["auto"] = 0
    """Number of a rank's micro-batches whose activations wait for their backward in a file in
    `folder`, or, of a GPU, in pinned memory of its host; at most two fewer than it has in flight.
    Losses and weights stay the same to the bit. A rank's CUDA graphs do not run if any of its
    micro-batches leave. A list has a number for each rank of a pipeline. "auto": as many on each as
    cost no time, measured at the start; the loss of CUDA graphs counts as a cost."""

    @property
    def num_away(self) -> int | tuple[int, ...]:
        """offload_activations; "auto" counts as 0 until it is measured."""
        return 0 if self.offload_activations == "auto" else self.offload_activations

    def on_another_grid(self) -> MemoryConfig:
        """The same without numbers of micro-batches by rank, which are those of one grid."""
        if not isinstance(self.offload_activations, tuple):
            return self
        return replace(self, offload_activations=0 if self.budget else "auto")
