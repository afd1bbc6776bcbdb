"""Executes one rank's action list. The plan says what happens when; this file says only how.

    F       wait for its receive, bind the version, run the stage, keep the graph
    B       wait for its receive, bind the version (recomputation), run backward, keep the input's gradient
    I       as B, but the inputs of the weight gradients are kept        W   adds these gradients
    RECV_*  post the receive        SEND_*  start the send        REDUCE NORM HOST UPDATE   passed to the batch actions
    FETCH RELEASE DROP  OFFLOAD EVICT RELOAD    start to move state or activations; every action
                                                waits for what it accesses

Segments of a stage, and consecutive stages on a rank, hand each other activations and gradients
directly. Only this file waits for other stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hybridpar.autograd import backward_from
from hybridpar.comm import Work, irecv, isend
from hybridpar.grid import Axis
from hybridpar.models.blocks import Losses, MicroBatch
from hybridpar.models.metrics import metrics_of
from hybridpar.random import RandomKey
from hybridpar.runtime.graphs import MicroBatchGraphs
from hybridpar.runtime.message_traffic import MessageTraffic
from hybridpar.runtime.recording import Recording
from hybridpar.runtime.stage import Stage
from hybridpar.runtime.stage_transport import Packed, StageTransport
from hybridpar.runtime.state_moves import StateMoves
from hybridpar.schedules.action import Action
from hybridpar.schedules.kinds import ACTION_SPECS, MOVES, Kind
from hybridpar.schedules.pipeline_shape import PipelineShape
from hybridpar.state.compression.codec import Codec
from hybridpar.state.weights import WeightStore


class Source(Protocol):
    """Source of micro-batches; every stage reads the same ones."""

    def microbatch(self, number: int) -> tuple[MicroBatch, RandomKey | None]: ...


class BatchActions(Protocol):
    """Work of the layer above the pipeline, once a batch or around a backward."""

    def run(self, action: Action) -> None:
        """Carry out a REDUCE, NORM, HOST or UPDATE."""

    def before_backward(self, action: Action) -> float:
        """Point gradients at the right buffer; return the loss's own gradient (the loss scale)."""

    def add_weight_gradients(self, action: Action) -> None:
        """Add the weight gradients that the micro-batch's I has deferred."""

    def after_backward(self, action: Action) -> None:
        """Note that a segment's gradients of a micro-batch have been added."""


@dataclass(slots=True)
class InFlight:
    """A micro-batch between its forward and its backward."""

    input: Tensor | None  # a leaf, whose gradient is sent if it requires one
    # The output's place in the graph, without the output. None: nothing needs a gradient.
    edge: GradientEdge | None

    def back(self, gradient: Tensor) -> Tensor | None:
        """Run the backward; return the gradient of the input, if there is one."""
        if self.edge is None:
            return None
        backward_from(self.edge, gradient)
        if self.input is None or not self.input.requires_grad:
            return None
        made = self.input.grad
        self.input.grad = None
        assert made is not None
        return made


class Executor:
    """Runs the actions of one rank.

    Args:
        stages: Segments of each stage of the rank, by number of the stage.
        weights: The rank's weights.
        transport: Sends and receives between stages.
        shape: The shape of the pipeline.
        moves: Moves state and activations.
        graphs: Replays the micro-batches that it can; None: all run kernel by kernel.
    """

    def __init__(
        self,
        stages: Mapping[int, Sequence[Stage]],
        weights: WeightStore,
        transport: StageTransport,
        shape: PipelineShape,
        moves: StateMoves,
        *,
        graphs: MicroBatchGraphs | None = None,
    ):
        self.stages = stages
        self.weights = weights
        self.transport = transport
        self.moves = moves
        self.graphs = graphs
        self.shape = shape
        self.num_microbatches = shape.num_microbatches
        self._transports = {into: transport.into(into) for into in range(len(transport.shapes))}
        self.losses: dict[int, Losses] = {}
        """Sums of each batch's partial losses and metrics so far (last stage only). The reader of
        an entry removes it."""
        self.loads: dict[int, dict[int, Tensor]] = {}
        """Tokens of each batch so far that each expert got, by block. The reader of an entry
        removes it."""
        self.traffic = MessageTraffic()
        """Counts what this rank sends to other stages."""
        self.recording: Recording | None = None
        """Records what is executed; set by `record`."""
        self.current: Action | None = None
        """The action being executed."""
        self.listeners: list[Callable[[Action | None], None]] = []
        """Called with every action before it is executed, and with None at the end."""
        self._source: Source | None = None
        self._batch_actions: BatchActions | None = None
        self._loss_dtype: torch.dtype | None = None
        self._flight: dict[tuple[int, int, int], InFlight] = {}  # by stage, part and micro-batch
        # activations and gradients for a segment from its neighbour, by kind and as in _flight
        self._handed: dict[tuple[Kind, int, int, int], Tensor] = {}
        # by kind, stage and micro-batch
        self._received: dict[tuple[Kind, int, int], tuple[Work, Tensor]] = {}
        self._outputs: dict[tuple[Kind, int, int], Tensor] = {}
        # features of gradients that will be sent or received, as above
        self._places: dict[tuple[Kind, int, int], Tensor] = {}
        self._sends: deque[tuple[Action, Work]] = deque()  # unfinished, from the oldest on
        self._table: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._weight_gradients,
            Kind.REDUCE: self._run_batch_action,
            Kind.NORM: self._run_batch_action,
            Kind.HOST: self._run_batch_action,
            Kind.UPDATE: self._run_batch_action,
        }
        self._table |= {
            kind: self._send if row.matching_recv else self._post_receive
            for kind, row in ACTION_SPECS.items()
            if row.peer_offset
        }
        self._table |= dict.fromkeys(MOVES, self._move)

    def run(
        self, actions: Iterable[Action], source: Source, batch_actions: BatchActions | None = None
    ) -> None:
        """Execute the actions in order; at the end nothing is in flight. `batch_actions`: None: the
        plan is forward only.
        """
        self._source = source
        self._batch_actions = batch_actions
        for action in actions:
            self._turn_to(action)
            self._note(action)
            if (recording := self.recording) is not None:
                recording.begin()
            if recording is None or self.moves.are_here(action):
                self.moves.access(action)
            else:
                recording.wait_for_state(partial(self.moves.access, action))
            self._table[action.kind](action)
            if recording is not None:
                recording.end(action)
        while self._sends:
            sent, work = self._sends.popleft()
            self._note(sent)
            work.wait()
        self._turn_to(None)
        left = [
            *self._flight,
            *self._handed,
            *self._received,
            *self._outputs,
            *self._places,
            *self.moves.activations.left,
        ]
        assert not left, f"the plan left micro-batches in flight: {left}"

    def _note(self, action: Action) -> None:
        """Write to the flight record what this rank does, or which of its sends it waits for."""
        self.transport.pp.flight.action(
            action.kind, action.stage, action.microbatch, action.version
        )

    def _turn_to(self, action: Action | None) -> None:
        self.current = action
        for listener in self.listeners:
            listener(action)

    def wait(self, wait: Callable[[], None]) -> None:
        """Call `wait`, which waits for other ranks, as a part of an action."""
        if self.recording is None or self.current is None:
            wait()
        else:
            self.recording.wait(wait)

    def watch(self, is_done: Callable[[], bool]) -> None:
        """Record when the work that the current action has started is complete."""
        if self.recording is not None and self.current is not None:
            self.recording.watch(self.current, is_done)

    def record(self, recording: Recording | None) -> None:
        """Record executed actions from now on; None: stop."""
        self.recording = recording

    @property
    def _batch(self) -> BatchActions:
        assert self._batch_actions is not None, "a forward-only plan has no batch actions"
        return self._batch_actions

    def _run_batch_action(self, action: Action) -> None:
        self._batch.run(action)

    def _forward(self, action: Action) -> None:
        stage = action.stage
        part = action.part
        k = action.microbatch
        assert self._source is not None
        batch, key = self._source.microbatch(k)
        grad = torch.is_grad_enabled()
        here = self.stages[stage][part]
        x: Tensor | Packed | None
        if part or stage - 1 in self.stages:
            x = self._handed.pop((Kind.F, stage, part, k))
        else:
            x = self._take(Kind.RECV_F, stage, k, packed=grad and here.recompute.whole)
        if self.weights.is_arriving(action.version):
            self.wait(partial(self.weights.await_version, action.version))
        self.weights.bind(action.version)
        leaf = x.leaf if isinstance(x, Packed) else x
        out: Any = None
        trains = stage >= self.shape.num_frozen
        if self.graphs is not None and grad and trains and not isinstance(x, Packed):
            out = self.graphs.forward(stage, k, self.weights.slot(action.version), x, batch, key)
        wants_gradient = self._wants_gradient(stage, part)
        if (kept := grad and out is None) and leaf is not None:
            leaf.requires_grad_(wants_gradient)
        if out is None:
            with self.moves.activations.noting(action, leaf) if grad else nullcontext():
                out = here(x, batch, key)
        if isinstance(out, dict):
            self._add_losses(k // self.num_microbatches, out)
            out = sum(out.values())
        elif part + 1 < len(self.stages[stage]):
            self._handed[Kind.F, stage, part + 1, k] = out.detach()
        elif stage + 1 in self.stages:
            self._handed[Kind.F, stage + 1, 0, k] = out.detach()
        else:
            transport, codec = self._link(Kind.SEND_F, stage, k)
            self._outputs[Kind.SEND_F, stage, k] = sent = transport.cut(out.detach(), codec)
            self.traffic.add(stage + 1, 1, codec, out, sent)
            self._keep_places(Kind.RECV_B, stage, k, sent, codec)
        if kept:
            self._flight[stage, part, k] = InFlight(
                leaf if trains else None, get_gradient_edge(out) if out.requires_grad else None
            )

    def _wants_gradient(self, stage: int, part: int) -> bool:
        """Return whether the input of a segment needs a gradient: something before it is trained."""
        first = self.shape.num_frozen
        return stage > first or (stage == first and part > 0)

    def _backward(self, action: Action) -> None:
        stage = action.stage
        part = action.part
        k = action.microbatch
        factor = self._batch.before_backward(action)
        flight = self._flight.pop((stage, part, k), None)
        is_last = part + 1 == len(self.stages[stage]) and stage + 1 not in self.stages
        gradient = (
            self._take(Kind.RECV_B, stage, k)
            if is_last
            else self._handed.pop((Kind.B, stage, part, k), None)
        )
        if gradient is None and not is_last:
            assert stage < self.shape.num_frozen, "a trained stage hands on a gradient"
        if gradient is None:
            gradient = torch.full(
                (), factor, dtype=self._loss_dtype, device=self.transport.device
            )  # torch.tensor waits
        self.weights.bind(action.version)
        if flight is None:
            assert self.graphs is not None
            made = self.graphs.backward(stage, k, gradient)
        else:
            made = flight.back(gradient)
        if made is not None and self._wants_gradient(stage, part):
            if part:
                self._handed[Kind.B, stage, part - 1, k] = made
            elif stage - 1 in self.stages:
                self._handed[Kind.B, stage - 1, len(self.stages[stage - 1]) - 1, k] = made
            else:
                transport, codec = self._link(Kind.SEND_B, stage, k)
                self._outputs[Kind.SEND_B, stage, k] = sent = transport.cut(made, codec)
                self.traffic.add(stage, -1, codec, made, sent)
        self._add_loads(k // self.num_microbatches, self.stages[stage][part])
        if part == 0:
            for kind in (Kind.RECV_B, Kind.SEND_B):
                self._places.pop((kind, stage, k), None)
        if action.kind is Kind.B:
            self._batch.after_backward(action)

    def _weight_gradients(self, action: Action) -> None:
        self._batch.add_weight_gradients(action)
        self._batch.after_backward(action)

    def _move(self, action: Action) -> None:
        if (is_done := self.moves.move(action)) is not None:
            self.watch(is_done)

    def _add_losses(self, batch: int, losses: Losses) -> None:
        total = self.losses.setdefault(batch, {})
        for name, value in (*losses.items(), *metrics_of(losses).items()):
            total[name] = total[name] + value.detach() if name in total else value.detach()
        self._loss_dtype = next(iter(losses.values())).dtype

    def _add_loads(self, batch: int, segment: Stage) -> None:
        for block, layer in segment.counters.items():
            if (load := layer.take_loads()) is not None:
                total = self.loads.setdefault(batch, {})
                total[block] = total[block] + load if block in total else load.double()

    def _post_receive(self, action: Action) -> None:
        transport, codec = self._link(action.kind, action.stage, action.microbatch)
        buffer = transport.room(codec)
        work = irecv(buffer, *self._way(action))
        self._received[action.kind, action.stage, action.microbatch] = (work, buffer)

    def _way(self, action: Action) -> tuple[int, Axis]:
        """Return the rank at the other end of a transfer, and the axis.

        Messages between two ranks on an axis have no tags: both ranks must have them in the same
        order, as NCCL requires.
        """
        transport = self.transport
        row = ACTION_SPECS[action.kind]
        turn = self.shape.turn(action.stage) if transport.turns else 0
        forth, reverse = ((transport.pp, transport.reverse), *transport.turns)[turn]
        return self.shape.rank_of(
            action.stage + row.peer_offset
        ), forth if row.flow > 0 else reverse

    def _link(self, kind: Kind, stage: int, k: int) -> tuple[StageTransport, Codec | None]:
        """Return the transport and the codec of a transfer."""
        row = ACTION_SPECS[kind]
        into = stage + (row.peer_offset > 0)
        codec = self.transport.codec(row.flow, into, training=torch.is_grad_enabled())
        places = self._places.get((kind, stage, k))
        if codec is not None and places is not None:
            codec = codec.at(places)
        return self._transports.get(into, self.transport), codec

    def _keep_places(
        self, kind: Kind, stage: int, k: int, message: Tensor, codec: Codec | None
    ) -> None:
        """Note which features `message` has, for the transfer of their gradients."""
        gradients = self._link(kind, stage, k)[1]
        if codec is None or gradients is None or not gradients.follows:
            return
        places = codec.places(message, self.transport.shape[-1])
        if places is not None:
            self._places[kind, stage, k] = places

    def _take(self, kind: Kind, stage: int, k: int, packed: bool = False) -> Any:
        """Return the received tensor once it has arrived; None if this stage receives nothing of
        that kind.

        The time of the gather over tp counts as the action's, not as a transfer's. `packed`: return
        the encoded bytes, if there is a codec.
        """
        if (entry := self._received.pop((kind, stage, k), None)) is None:
            return None
        work, buffer = entry
        self.wait(work.wait)
        transport, codec = self._link(kind, stage, k)
        if kind is Kind.RECV_F:
            self._keep_places(Kind.SEND_B, stage, k, buffer, codec)
        if codec is not None and packed:
            return Packed(transport, transport.gather(buffer), codec)
        return transport.join(buffer, codec)

    def _send(self, action: Action) -> None:
        tensor = self._outputs.pop((action.kind, action.stage, action.microbatch)).contiguous()
        self._sends.append((action, isend(tensor, *self._way(action))))
        if len(self._sends) > self.transport.send_window:
            oldest, work = self._sends.popleft()
            self._note(oldest)
            self.wait(work.wait)
            self._note(action)
