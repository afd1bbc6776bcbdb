"""The section [pipeline], and which rank has which stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridpar.config.typed import Count, Within


def rank_of_stage(stage: int, num_ranks: int, stage_layout: str) -> int:
    """The rank that holds a stage. loop: round and round; v: there and back, and there again where
    it has more."""
    turn, rank = divmod(stage, num_ranks)
    return num_ranks - 1 - rank if stage_layout == "v" and turn % 2 else rank


FOUND = (
    "split",
    "virtual_stages",
    "warmup",
    "early_switch",
    "split_backward",
    "stage_layout",
    "activations",
    "order",
    "zero_bubble",
)
"""Settings of the pipeline that pipeline.schedule = "auto" finds."""


@dataclass(frozen=True)
class PipelineConfig:
    schedule: Literal[
        "naive", "gpipe", "1f1b", "interleaved", "2bw", "pipedream", "own", "auto"
    ] = "1f1b"
    """Pipeline schedule. own: a custom order, given in `order`. auto: the fastest of all
    schedules that train the same and fit into memory, with its virtual stages, stage layout,
    warm-up, split backwards and order, measured and simulated before the first step."""
    num_microbatches: Annotated[int, Within(1, 2**20)] = 4
    """Micro-batches per batch of each replica (gradient accumulation if pp = 1)."""
    split: tuple[int, ...] = ()
    """Number of blocks of each stage, embedding and head included. Empty: balance the estimated
    time of a whole step, with embedding, head and optimizer. The estimate depends on the
    configuration alone."""
    virtual_stages: Count = 0
    """Virtual pipeline stages per rank (interleaved, 2bw, own, and stage_layout v, which requires
    an even number). 0: 2 for interleaved and stage_layout v, else 1. The other schedules have
    one."""
    recompute: str = "none"
    """Layers whose activations are recomputed in the backward pass: 'none', 'all', or a list
    such as '0,2-5'. 'stage', 'stage:0,2-3': a stage keeps only its input. 'selective',
    'selective:0,2-5': recompute only the outputs of norms and activations, which takes little
    time."""
    warmup: Literal["depth", "latency", "bandwidth"] = "depth"
    """Forwards that stage r runs ahead. depth: p-1-r. latency: 2(p-1-r), which hides transfers
    that take up to half a forward and backward. bandwidth (2bw only): 3(p-1-r), which hides
    transfers of up to a whole forward and backward."""
    early_switch: int | Literal["off", "auto"] = "off"
    """2bw: when a batch switches to the newer weights. 'off': never, as in the paper. L: the
    first pp-1+L micro-batches use the older weights, the others the newer. 'auto': the smallest
    L that costs no time, measured before the first step."""
    gradient_buffers: Literal[0, 1, 2] = 0
    """2bw: gradient buffers per rank. 2: a batch accumulates while the one before is reduced and
    applied. 1: saves that memory and waits. 0: as many as the schedule can use."""
    split_backward: bool = False
    """Run each backward in two parts: the gradient of a stage's input (I) is sent while the
    gradients of its weights (W) are still computed. Losses and weights stay the same to the bit;
    each part keeps its inputs for longer."""
    stage_layout: Literal["loop", "v"] = "loop"
    """Stages that a rank holds, if several. loop: rank r has stages r, pp + r, 2 * pp + r and so
    on. v: rank r has stages r and 2 * pp - 1 - r, so embedding and head are on one rank; requires
    1f1b, 2bw or own, and split_backward. With virtual_stages = 4 and more the stages go there and
    back again, which 2bw does not support."""
    activations: Literal["full", "half", "min"] = "full"
    """stage_layout v: most activations that a rank keeps for its backwards. full: as many as
    1f1b's first rank (ZB-V, the smallest bubble). half: about half of that (V-Half). min: about a
    third (V-Min), with bubbles if I or W takes longer than F."""
    order: tuple[str, ...] = ()
    """own: the order in which each rank computes a batch, such as "F0 F1 B0 B1": forwards (F)
    and backwards (B) of its micro-batches. With split_backward, I and W may replace B. F0b, F0c,
    .. run on the rank's second, third, .. stage."""
    zero_bubble: bool = False
    """1f1b and interleaved, with split_backward: delay W to fill the bubble of the drain
    (ZB-H1); each rank delays as many micro-batches as it holds fewer than the first rank."""
    sync_steps: Annotated[int, Within(0, 2**40)] = 0
    """2bw, pipedream: number of first steps that run as 1f1b, without stale gradients."""

    @property
    def num_virtual_stages(self) -> int:
        """Stages of the model on each rank."""
        if self.stage_layout == "v":
            return self.virtual_stages or 2
        if self.schedule in ("naive", "gpipe", "1f1b", "pipedream"):
            return 1
        return self.virtual_stages or (2 if self.schedule == "interleaved" else 1)
