"""The memory of one pipeline stage, found by running its own code on ghosts (tensors without
memory), so that no formula here repeats what a layer does.

built       weights, master, gradients, optimizer                      allocated from start to end
forward     [ input ][ kept by autograd ........ ][ more at its peak ]
backward    [ input ][ kept, ever less ][ its own ][ gradient out ]
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hybridpar.autograd import backward_from
from hybridpar.config import Config
from hybridpar.data.mapped import rehearsal
from hybridpar.job import JobPlan
from hybridpar.models.blocks import with_sequences
from hybridpar.models.build import BlockOptions, Recomputation, build_blocks
from hybridpar.models.custom_blocks import context_of
from hybridpar.models.heads import LABELLED
from hybridpar.nn.context import CUT
from hybridpar.prediction.fake_neighbours import silent_axis, silent_grid
from hybridpar.prediction.ghost import Tracker
from hybridpar.prediction.ghost_chunks import GHOSTS
from hybridpar.random import RandomKey
from hybridpar.runtime.activation_offloader import Notes
from hybridpar.runtime.stage import Stage
from hybridpar.runtime.stage_transport import Packed, StageTransport
from hybridpar.state import RankState
from hybridpar.state.policy import cut_into_parts
from hybridpar.state.residency.chunks import Memory
from hybridpar.state.residency.segments import Segments


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a stage takes.

    Args:
        weights: All weight versions.
        gradients: All gradient buffers.
        optimizer: The optimizer's state, and kinds of state without a column of their own.
        kept: A micro-batch's tensors between forward and backward, in addition to its input.
        input: The part of a micro-batch's input that is kept.
        output: The part of its output that is sent and not kept anyway.
        message: An activation that it sends.
        received: An activation that a rank receives.
        returned: The gradient of its output that a rank receives.
        returning: The gradient of its input that a rank sends.
        forward: Peak of a forward above the memory at its start; likewise for the other actions.
        first_backward: Peak of the first backward of a batch.
        backward: Peak of a later backward.
        norm: Peak of the gradient norm.
        update: Peak of the update.
        weight_gradients: Peak of W. With a split backward, first_backward and backward are the
            peaks of I.
        whole_backward: Peak of a backward that stays unsplit.
        waiting: What a micro-batch keeps between I and W.
        early: 1 if I leaves gradients in chunks that replicas shard, else 0.
        late: 1 if W leaves gradients in such chunks, else 0.
        factors: Inputs of a micro-batch's weight gradients, if these wait until its block of
            micro-batches, or its batch, is reduced.
        num_blocks: Blocks of a batch whose factors are exchanged one after the other; 0: all wait
            until the batch is reduced.
        ending: Peak of the backward that ends a block, with a split backward of its W. At most: if
            the block has more than two micro-batches.
        ended: The part of the block's factors that is left until the next backward.
        stepping: Peak of freeing these, at the start of that backward.
        whole_weights: Most bytes of gathered chunks of weights (ZeRO-3).
        whole_gradients: Most bytes of unsharded chunks of gradients (ZeRO-2 and 3).
        moved: The part of `kept` and the input that is moved if activations are offloaded.
    """

    weights: int
    master: int
    gradients: int
    optimizer: int
    kept: int
    input: int
    output: int
    message: int
    received: int
    returned: int
    returning: int
    forward: int
    first_backward: int
    backward: int
    norm: int
    update: int
    waiting: int = 0
    weight_gradients: int = 0
    whole_backward: int = 0
    factors: int = 0
    num_blocks: int = 0
    ending: int = 0
    ended: int = 0
    stepping: int = 0
    whole_weights: int = 0
    whole_gradients: int = 0
    moved: int = 0
    early: int = 0
    late: int = 0


@dataclass(frozen=True, slots=True)
class Buffers:
    """Requirements of the schedule that affect a stage's buffers.

    Args:
        weights: Number of weight versions.
        gradients: Number of gradient buffers.
        offloads: Whether activations are offloaded, so autograd saves them through hooks.
        handed: Whether input and output pass within the rank, as between segments of a stage.
        allocates_each_time: Whether gradients that replicas shard are allocated for every backward.
        wants_gradient: Whether the input needs a gradient, as something before it is trained.
    """

    versions: int
    gradients: int
    offloads: bool = False
    handed: tuple[bool, bool] = (False, False)
    allocates_each_time: bool = False
    wants_gradient: bool = True


def trace_stage(
    config: Config,
    blocks: range,
    recompute: Recomputation,
    buffers: Buffers,
    device: torch.device,
    results: dict[Any, Any] | None = None,
) -> Footprint:
    """Build the stage of `blocks`, run two micro-batches and one update, and return its footprint,
    without allocating or computing anything.

    The footprint is for the first tp rank and the first replica, whose shard is the largest if a
    split is uneven.

    Args:
        config: The configuration.
        blocks: Numbers of the blocks.
        recompute: Which blocks are recomputed.
        buffers: What the schedule needs.
        device: The device, whose type this machine need not have.
        results: A cache of operator results; see `Tracker`.
    """
    batch = local_microbatch(config)
    with Tracker(device, results) as tracker:
        traced = TracedStage(config, blocks, recompute, buffers, tracker)
        batch = on_device(batch, tracker.device)
        # a forward reads the values of integers only in the micro-batch
        tracker.make_ghosts_of_integers(True)
        kept, output, forward = traced.forward(batch)
        first_backward, waiting = traced.backward(first=True)
        missing = traced.missing()
        weight_gradients, factors = traced.apply()
        filled = missing < traced.shared, traced.missing() < missing
        traced.forward(batch)
        backward, _ = traced.backward(first=False)
        weight_gradients = max(weight_gradients, traced.apply()[0])
        whole_backward = 0
        if config.pipeline.split_backward:
            traced.forward(batch)
            whole_backward, _ = traced.backward(first=False, split=False)
        ending, ended, stepping = traced.block(batch)
        tracker.make_ghosts_of_integers(False)
        whole_weights, whole_gradients = traced.state.unsharded_bytes()
        return Footprint(
            **traced.static(),
            kept=kept,
            output=output,
            **traced.messages(),
            forward=forward,
            first_backward=first_backward,
            backward=backward,
            norm=traced.norm(),
            update=traced.update(),
            waiting=waiting,
            weight_gradients=weight_gradients,
            whole_backward=whole_backward,
            factors=factors,
            num_blocks=traced.num_blocks,
            ending=ending,
            ended=ended,
            stepping=stepping,
            whole_weights=whole_weights,
            whole_gradients=whole_gradients,
            moved=traced.moved,
            early=int(filled[0]),
            late=int(filled[1]),
        )


class TracedStage:
    """A stage of ghosts with its state, and the passes of an executor over it."""

    def __init__(
        self,
        config: Config,
        blocks: range,
        recompute: Recomputation,
        buffers: Buffers,
        tracker: Tracker,
    ):
        model = config.model
        device = tracker.device
        self.config = config
        self.tracker = tracker
        self._buffers = buffers
        grid = silent_grid(config)
        self.axis = grid.tp
        self.context_axis = grid.cp
        self.expert_axis = grid.experts
        job = JobPlan(config)
        policy = job.state_policy(buffers.versions, buffers.gradients)
        self.stage = Stage(
            build_blocks(
                model,
                grid.tp,
                blocks,
                options=BlockOptions.of(config, grid),
                dtype=policy.dtype,
            ),
            recompute,
            model,
        )
        segments = Segments({0: cut_into_parts(config, blocks)}, is_divided=policy.moves)
        self.state = RankState(self.stage, grid, policy, Memory(device), segments=segments)
        self.state.allocate()
        self._last_microbatch = config.pipeline.num_microbatches - 1
        self.shared = frozenset(
            name
            for name in self.state.gradients.layout.names
            if not self.state.is_kept(self.state.uses(name))
        )
        """Parameters whose gradients are allocated and released."""
        ends = blocks, range(min(blocks.stop, model.num_blocks - 1), model.num_blocks)
        transport = StageTransport.of(job, grid, policy.dtype, device, ends)
        self.transport = transport.into(0)
        self.next = transport.into(1)
        into, out = (
            _no_codec if handed else partial(transport.codecs.on, first=first)
            for handed, first in zip(buffers.handed, (blocks.start, blocks.stop), strict=True)
        )
        self._codecs = {
            "received": into(1),
            "sent": out(1),
            "returned": out(-1),
            "returning": into(-1),
        }
        self.receives = 0 not in blocks
        self.sends = model.num_blocks - 1 not in blocks
        self.moved = 0  # bytes in the newest forward
        self._input: Tensor | Packed | None
        self._places: list[Tensor | None]  # of messages that are received and sent
        self._empty: int
        self._input_bytes: int
        self._edge: GradientEdge | None  # None: nothing here needs a gradient
        self._loss_dtype: torch.dtype

    def static(self) -> dict[str, int]:
        """Return the bytes that are always allocated, by name."""
        return self.state.num_bytes()

    def messages(self) -> dict[str, int]:
        """Return the bytes of received and sent tensors by name, of an activation, and of a
        micro-batch's kept input."""
        transports = {
            "received": self.transport,
            "returned": self.next,
            "returning": self.transport,
        }
        parts = {
            name: transport.room(self._codecs[name]).nbytes
            for name, transport in transports.items()
        }
        return {"message": self.next.whole().nbytes, "input": self._input_bytes, **parts}

    def _received(self) -> Tensor | Packed | None:
        if not self.receives:
            return None
        codec = self._codecs["received"]
        if codec is not None and self.stage.recompute.whole:
            packed = Packed(self.transport, self.transport.message(codec), codec)
            packed.leaf.requires_grad_(self._buffers.wants_gradient)
            return packed
        return self.transport.whole().requires_grad_(self._buffers.wants_gradient)

    def _places_of(self, forth: str, back: str) -> Tensor | None:
        """Return the tensor that an executor keeps of a message with the codec `forth` for the
        gradient's codec `back`."""
        codec = self._codecs[forth]
        gradients = self._codecs[back]
        if codec is None or gradients is None or not gradients.follows:
            return None
        return codec.places(self.transport.room(codec), self.transport.shape[-1])

    def forward(self, batch: dict[str, Tensor]) -> tuple[int, int, int]:
        """Run an executor's forward.

        Returns:
            Bytes kept after it, bytes of the output in addition, and the peak.
        """
        self._empty = self.tracker.read().current
        self._input = self._received()
        self._places = [self._places_of("received", "returning")] if self.receives else []
        before = self._start()
        self._input_bytes = before - self._empty
        batch = {name: tensor.clone() for name, tensor in batch.items()}
        key = RandomKey.of(self.config.train.seed, 0, 0, device=self.tracker.device)
        notes = Notes(GHOSTS)
        leaf = self._input.leaf if isinstance(self._input, Packed) else self._input
        with notes.noting(leaf) if self._buffers.offloads else nullcontext():
            out: Any = self.stage(self._input, batch, key)
        if isinstance(out, dict):
            out = sum(out.values())
            self._loss_dtype = out.dtype
        sent = out.detach()
        if not self._buffers.handed[1]:
            sent = self.next.cut(sent, self._codecs["sent"] if self.sends else None)
        self._places += [self._places_of("sent", "returned")] if self.sends else []
        self._edge = get_gradient_edge(out) if out.requires_grad else None
        peak = self.tracker.read().peak - before
        del out, batch, key
        with_output = self.tracker.read().current
        self.moved = notes.num_bytes()
        notes.forget()
        del sent
        kept = self.tracker.read().current
        return kept - before, with_output - kept, peak

    @property
    def num_blocks(self) -> int:
        """Number of blocks of a batch that are exchanged one after the other, or 0."""
        compression = self.state.compression
        return len(compression.blocks) if compression.packed else 0

    def block(self, batch: dict[str, Tensor]) -> tuple[int, int, int]:
        """Run the end of a block of micro-batches, and return the peak of its last weight gradients,
        the bytes of factors that it leaves, and the peak of freeing them.
        """
        if not self.num_blocks:
            return 0, 0, 0
        stop = self.state.compression.blocks[0][1]
        self.state.begin(0)
        # of another block, because a batch's first gradients overwrite, and later ones are added
        self._microbatch(batch, self._last_microbatch)
        empty = self._start()
        peak = 0
        for microbatch in range(max(stop - 2, 0), stop):
            peak = self._microbatch(batch, microbatch)
        left = self._start() - empty
        self.state.bind(0, (0,), microbatch=self._last_microbatch)
        return peak, left, self.tracker.read().peak - left - empty

    def _microbatch(self, batch: dict[str, Tensor], number: int) -> int:
        """Run forward and backward, and return the peak of the weight gradients."""
        self.forward(batch)
        peak, _ = self.backward(first=False, microbatch=number)
        return self.apply(number)[0] if self.config.pipeline.split_backward else peak

    def backward(
        self, first: bool, *, split: bool = True, microbatch: int | None = None
    ) -> tuple[int, int]:
        """Run an executor's backward, and return its peak and the bytes that wait for W afterwards.

        Args:
            first: Whether it is the first backward of a batch.
            split: Whether to run only I, if the backward is split.
            microbatch: Number of the micro-batch; None: the last one.
        """
        number = self._last_microbatch if microbatch is None else microbatch
        gradient = self.next.whole() if self.sends else None
        if first:
            self.state.begin(0)
        elif self._buffers.allocates_each_time:
            self.state.gradients.renew(0, self.shared)
        before = self._start()
        if gradient is None:
            gradient = torch.full((), 1.0, dtype=self._loss_dtype, device=self.tracker.device)
        self.state.bind(0, (0,), microbatch=number)
        split = split and self.config.pipeline.split_backward
        if split:
            self.state.collect(None)
        if self._edge is not None:
            backward_from(self._edge, gradient)
        if not split:
            self.state.end_backward()
        del self._edge, self._input, self._places, gradient
        left = self.tracker.read()
        return left.peak - before, left.current - self._empty

    def missing(self) -> frozenset[str]:
        """Return the parameters of `shared` that have no gradient yet."""
        return self.shared & self.state.gradients.missing(0)

    def apply(self, microbatch: int | None = None) -> tuple[int, int]:
        """Run an executor's W, and return its peak and the bytes that the micro-batch still
        keeps."""
        before = self._start()
        if self.config.pipeline.split_backward:
            number = self._last_microbatch if microbatch is None else microbatch
            self.state.apply(None, microbatch=number)
            self.state.end_backward()
        left = self.tracker.read()
        return (
            left.peak - before,
            left.current - self._empty if self.state.gradients.rules.factored else 0,
        )

    def norm(self) -> int:
        """Return the peak of the gradient norm."""
        before = self._start()
        self.state.square_norm(0)
        return self.tracker.read().peak - before

    def update(self) -> int:
        """Return the peak of an update."""
        before = self._start()
        self.state.update(0, lr=1.0, factor=0.5)
        return self.tracker.read().peak - before

    def _start(self) -> int:
        """Return the current bytes, and restart the peak."""
        self.tracker.restart_peak()
        return self.tracker.read().current


def _no_codec(flow: int) -> None:
    """Return no codec: a tensor within a rank is passed uncompressed."""


def on_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return a micro-batch on a device, but for its cut, which is read on the CPU."""
    return {name: x if name == CUT else x.to(device) for name, x in batch.items()}


def local_microbatch(config: Config) -> dict[str, Tensor]:
    """Return a micro-batch as the first rank of cp has it, whose tokens are the most."""
    context = context_of(config.model, silent_axis("cp", config.parallel.cp))
    return context.cut(sample_microbatch(config))


def sample_microbatch(config: Config) -> dict[str, Tensor]:
    """Return a micro-batch of full sequences; for BERT, the usual share of positions has a
    label."""
    b = config.train.micro_batch_size
    if (model := config.model.text_format) is None:
        return rehearsal(config.model, b)
    shape = (b, model.seq_length)
    batch = {
        "tokens": torch.zeros(shape, dtype=torch.int64),
        "labels": torch.zeros(shape, dtype=torch.int64),
    }
    for name in ("num_targets", "num_samples"):
        batch[name] = torch.ones((), dtype=torch.float64)
    if model.kind == "bert":
        batch["labels"][:, round(LABELLED[model.kind] * model.seq_length) :] = -100
        batch["token_types"] = torch.zeros(shape, dtype=torch.int64)
        batch["padding_mask"] = torch.ones(shape, dtype=torch.bool)
        batch["sentence_labels"] = torch.zeros(b, dtype=torch.int64)
    if config.data.is_packed:
        batch["document_start"] = torch.zeros(shape, dtype=torch.int32)
        batch["positions"] = torch.zeros(shape, dtype=torch.int64)
    return with_sequences(batch) if model.num_experts else batch
