"""Activations and gradients between neighbouring stages, and the axes that carry them.

    tp rank 0    [ a | b ]   sends a    ---- link ---->    receives a   [ a | b ]   gathered over tp,
    tp rank 1    [ a | b ]   sends b    ---- link ---->    receives b   [ a | b ]   behind the link

With a codec (codecs.py) slices are whole rows, and are gathered as bytes. If a codec of gradients
follows the codec of activations, they are gathered as numbers: a rank knows only the features of
its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from hybridpar.autograd import once_differentiable
from hybridpar.comm import all_gather
from hybridpar.comm.p2p import connect
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.models.custom_blocks import context_of, local_message_shape
from hybridpar.nn.placement import Range, split_ranges, split_sizes
from hybridpar.runtime.codecs import Codecs
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.state.compression.codec import Codec


@dataclass(frozen=True)
class StageTransport:
    """The axes to a pipeline's neighbours, and the tensor between them: an activation of `shape`,
    or its gradient.

    Attributes:
        pp: Axis of activations.
        reverse: Axis of gradients.
        shape: Shape of an activation.
        dtype: Its type.
        device: Its device.
        slicing: Axis whose ranks all hold the same activation, so each sends a slice. None: each
            rank sends all that it holds.
        codecs: Codecs between the stages of `split`.
        split: Blocks of each stage; empty: nothing is encoded.
        shapes: Shape of the activation into each stage, if they differ.
        turns: With stage_layout "v", both axes for each pass through the ranks after the first.
        send_window: Number of sends that may be unfinished; after one more the rank waits for the
            oldest one.
    """

    pp: Axis
    reverse: Axis
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    slicing: Axis | None = None
    codecs: Codecs = field(default_factory=Codecs)
    split: Sequence[range] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    turns: tuple[tuple[Axis, Axis], ...] = ()
    send_window: int = 0

    @classmethod
    def of(
        cls,
        job: JobPlan,
        grid: ProcessGrid,
        dtype: torch.dtype,
        device: torch.device,
        split: Sequence[range] = (),
    ) -> StageTransport:
        """Create the transport of a rank of `grid`, between the stages of `split` (empty: of the
        job).

        Shapes: an activation is [b, s, h] (`ModelSpec.activation_shape`), equal on all ranks of tp;
        with parallel.sequence each has its own rows, and so has each rank of cp.
        Collectives: with stage_layout "v" as `ProcessGrid.again`; with NCCL a byte over each link
        (`connect`).
        Raises: PlanError as `JobPlan.send_window`.
        """
        config = job.config
        split = split or job.split
        sequence = config.parallel.sequence
        model = config.model
        b = config.train.micro_batch_size
        context = context_of(model, grid.cp)
        shape, *each = (
            (b, *local_message_shape(model, number, grid.tp, sequence, context))
            for number in (0, *(max(0, blocks.start - 1) for blocks in split))
        )
        shapes = tuple(each) if len({shape, *each}) > 1 else ()
        slicing = None if sequence else grid.tp
        turns: tuple[tuple[Axis, Axis], ...] = ()
        if config.pipeline.stage_layout == "v":
            turns = tuple(
                (grid.again("pp", turn), grid.again("pp_reverse", turn))
                for turn in range(1, config.pipeline.num_virtual_stages)
            )
        if has_connections(grid):
            for turn, pair in enumerate(((grid.pp, grid.pp_reverse), *turns)):
                for axis, flow in zip(pair, (1, -1), strict=True):
                    connect(axis, links_of(job.shape, turn, flow), device)
        return cls(
            grid.pp,
            grid.pp_reverse,
            shape,
            dtype,
            device,
            slicing,
            Codecs.of(job),
            split,
            shapes,
            turns,
            job.send_window if grid.pp.size > 1 else 0,
        )

    def into(self, stage: int) -> StageTransport:
        """Return the transport between that stage and the previous one."""
        return replace(self, shape=self.shapes[stage], shapes=()) if self.shapes else self

    def codec(self, flow: int, into: int, *, training: bool = True) -> Codec | None:
        """Return the codec on the link between stage `into` and the previous one. flow: 1 for
        activations, -1 for gradients.
        """
        return (
            self.codecs.on(flow, self.split[into].start, training=training) if self.split else None
        )

    def whole(self) -> Tensor:
        """Allocate a complete activation."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def room(self, codec: Codec | None = None) -> Tensor:
        """Allocate a tensor for the part of an activation that this rank receives.

        Shapes: `shape`, or [n] if it is sliced; with a codec uint8 [rows, bytes of a row].
        """
        if codec is not None:
            start, stop = self._rows
            return self._bytes(codec, stop - start)
        if self._slice is None:
            return self.whole()
        start, stop = self._slice
        return torch.empty(stop - start, dtype=self.dtype, device=self.device)

    def cut(self, x: Tensor, codec: Codec | None = None) -> Tensor:
        """Return the part of `x` that this rank sends: a copy of its slice, or its encoded bytes,
        or `x` itself. The bytes do not keep `x` alive.
        """
        if codec is not None:
            start, stop = self._rows
            return codec.encode(x.reshape(-1, x.shape[-1])[start:stop])
        if self._slice is None:
            return x
        start, stop = self._slice
        return x.flatten()[start:stop].clone()

    def join(self, part: Tensor, codec: Codec | None = None) -> Tensor:
        """Return the activation that `part`, received by this rank, belongs to.

        Shapes: as `room` -> `shape`. Collectives: one all-gather over `slicing`.
        """
        if codec is not None and codec.follows:
            rows = torch.empty((len(part), self.shape[-1]), dtype=self.dtype, device=self.device)
            codec.decode_(rows, part)
            return self.gather(rows).view(self.shape)
        if codec is not None:
            return self.decode(self.gather(part), codec)
        if self._slice is None or self.slicing is None:
            return part
        return all_gather(
            part, self.slicing, 0, split_sizes(prod(self.shape), self.slicing.size)
        ).view(self.shape)

    def gather(self, part: Tensor) -> Tensor:
        """Return all rows of the activation that `part` belongs to. Collectives: one all-gather as
        `join`.
        """
        if self.slicing is None:
            return part
        return all_gather(part, self.slicing, 0, split_sizes(self._num_rows, self.slicing.size))

    def decode(self, message: Tensor, codec: Codec) -> Tensor:
        """Return the activation that these bytes encode."""
        x = self.whole()
        codec.decode_(x.view(-1, x.shape[-1]), message)
        return x

    def message(self, codec: Codec) -> Tensor:
        """Allocate a tensor for all bytes of an activation."""
        return self._bytes(codec, self._num_rows)

    def _bytes(self, codec: Codec, rows: int) -> Tensor:
        return torch.empty(
            (rows, codec.row_bytes(self.shape[-1])), dtype=torch.uint8, device=self.device
        )

    @property
    def _num_rows(self) -> int:
        return prod(self.shape[:-1])

    @cached_property
    def _rows(self) -> Range:
        """The rows that this rank sends."""
        if self.slicing is None:
            return 0, self._num_rows
        return split_ranges(self._num_rows, self.slicing.size)[self.slicing.rank]

    @cached_property
    def _slice(self) -> Range | None:
        """The range of the flattened activation that this rank sends; None: it sends all."""
        if self.slicing is None or self.slicing.size == 1:
            return None
        return split_ranges(prod(self.shape), self.slicing.size)[self.slicing.rank]


def has_connections(grid: ProcessGrid) -> bool:
    """Return whether two ranks connect at the first transfer between them, as with NCCL. Gloo
    connects when the group is created.
    """
    return grid.device_type == "cuda" and not grid.pp.via_host and grid.pp.size > 1


def links_of(shape: PipelineShape, turn: int, flow: int) -> list[tuple[int, int]]:
    """Return sender and receiver, as ranks of the pipeline, of all transfers of one turn and flow.

    Args:
        shape: The shape of the pipeline.
        turn: The number of the pass through the ranks; 0, except with stage_layout "v".
        flow: 1 for activations, -1 for gradients.
    """
    links: dict[tuple[int, int], None] = {}
    for stage in range(shape.num_stages):
        receiver = shape.peer(stage, flow)
        if receiver is not None and shape.turn(stage) == turn:
            links[shape.rank_of(stage), receiver] = None
    return list(links)


class Packed:
    """An activation as bytes, for a recomputed stage, which decodes them in its forward and again
    in its backward.

    Attributes:
        leaf: Takes the activation's gradient; it uses the memory of one element.
    """

    def __init__(self, transport: StageTransport, message: Tensor, codec: Codec):
        self._transport = transport
        self._message = message
        self._codec = codec
        self.leaf = (
            torch.empty((), dtype=transport.dtype, device=transport.device)
            .expand(transport.shape)
            .requires_grad_()
        )

    def __call__(self) -> Tensor:
        """Return the activation; its gradient flows to the leaf."""
        unpacked: Tensor = _Unpacked.apply(self.leaf, self._transport, self._message, self._codec)
        return unpacked


class _Unpacked(Function):
    """Decodes the bytes; the gradient passes through."""

    @staticmethod
    def forward(
        ctx: Any, leaf: Tensor, transport: StageTransport, message: Tensor, codec: Codec
    ) -> Tensor:
        return transport.decode(message, codec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy, None, None, None
