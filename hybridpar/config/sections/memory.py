"""The section [memory]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from hybridpar.config.typed import Bytes, Count, Within


@dataclass(frozen=True)
class MemoryConfig:
    """The section [memory]: where weights, gradients, master weights and optimizer state are kept.

    With a limit or a budget, the state that is needed soon is in memory and the rest in a file (on
    a GPU: in host memory). The plan says what is needed when, so the least possible is moved, ahead
    of its use. Losses and weights stay the same to the bit for equal `parts`.
    """

    limit: Bytes = 0
    """Memory that the tensors of a process may take in all: bytes, or a size such as "8GiB". The
    training state gets at each time what activations, messages and temporary tensors leave. 0: no
    limit."""
    budget: Bytes = 0
    """Memory that the training state alone may take, at any time the same: bytes, or a size such as
    "40MiB". 0: no budget."""
    folder: str = ""
    """Folder for offloaded state, on a fast local disk. Empty: the run's folder."""
    parts: Count = 0
    """Number of segments that a stage's blocks are divided into; one at a time is computed with.
    0: one per block with a budget, a host optimizer or parallel.zero 2 or 3, else the stage is
    one segment. Another number changes the order in which three or more replicas accumulate
    gradients (with parallel.zero 1 also the gradient norm), and so the rounding."""
    host_optimizer: bool = False
    """Keep optimizer state and master weights in host memory and update them on the host,
    overlapped with training: gradients go to the host, weights come back. Under 2bw training
    waits for neither if a batch is long enough; `hybridpar check` says whether it is. Muon's
    matrices stay on the device. Losses and weights stay the same to the bit for equal `parts`."""
    offload_activations: int | tuple[int, ...] | Literal["auto"] = 0
    """Number of a rank's micro-batches whose activations are offloaded until their backward: to
    a file in `folder` or, from a GPU, to pinned host memory. At most two fewer than the rank has
    in flight. A list has one number per pipeline rank. "auto": as many on each rank as cost no
    time, measured at the start. A rank that offloads runs without CUDA graphs, which "auto"
    counts as a cost. Losses and weights stay the same to the bit."""

    expert_load: Annotated[float, Within(0, 2**16)] = 0.0
    """Most rows of tokens that a rank of parallel.ep computes at once, and keeps for the backward
    pass, over their number at balanced load, such as 1.5. Rows beyond are computed in further
    rounds, whose activations the backward pass computes again, so that memory has a bound whatever
    routers choose. 0: no bound."""

    @property
    def is_limited(self) -> bool:
        """Whether memory may be too small for all training state at once."""
        return self.limit > 0 or self.budget > 0

    @property
    def limiting(self) -> tuple[str, int]:
        """The key that limits memory, and its value."""
        return ("memory.limit", self.limit) if self.limit else ("memory.budget", self.budget)

    @property
    def num_away(self) -> int | tuple[int, ...]:
        """offload_activations; "auto" counts as 0 until it is measured."""
        return 0 if self.offload_activations == "auto" else self.offload_activations

    def on_another_grid(self) -> MemoryConfig:
        """These settings without numbers of micro-batches by rank, which fit one grid only."""
        if not isinstance(self.offload_activations, tuple):
            return self
        return replace(self, offload_activations=0 if self.is_limited else "auto")
