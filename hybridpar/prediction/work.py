"""The operators of a block, recorded by running its own code on ghosts: how much work a pass is,
and which blocks are equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpar.autograd import QuietMode
from hybridpar.config import (
    Config,
    DataConfig,
    ModelConfig,
    ModelSpec,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from hybridpar.grid import Axis
from hybridpar.models.build import Recomputation
from hybridpar.models.cost import document_share
from hybridpar.prediction.footprint import Buffers, TracedStage, local_microbatch, on_device
from hybridpar.prediction.ghost import Ghost, Tracker, tensors_in
from hybridpar.prediction.operators import Operator

KINDS = ("embedding", "layer", "head")
"""Kinds of the blocks of a GPT or BERT whose layers are alike."""


class Op(NamedTuple):
    """One call of an operator.

    Args:
        shapes: Shapes of its tensor arguments.
        num_bytes: Bytes that it reads and writes.
        flops: Operations of matrix products, two for a multiplication and an addition; 0 for other
            operators.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    flops: int


class _Noting(QuietMode):
    """A mode that records the operators on ghosts; must be entered after their tracker."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # imports Triton, which takes 0.3 s

        super().__init__()
        self.ops: list[Op] = []
        self._operators: dict[int, Operator] = {}
        self._formulas = flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        operator = self._operators.setdefault(id(func), Operator(func))
        given = tensors_in((args, tuple(kwargs.values())))
        made = tensors_in(out)
        is_none = operator.is_view or operator.is_fresh or operator.operation == "_unsafe_view"
        if is_none or not any(isinstance(x, Ghost) for x in (*given, *made)):
            return out
        use = operator.use(args, kwargs)
        touched = [
            *use.reads,
            *use.writes,
            *(x for x in made if not any(x is one for one in use.writes)),
        ]
        shapes = tuple(tuple(x.shape) for x in given)
        counted = self._formulas.get(func.overloadpacket)
        flops = (
            counted(*args, **kwargs, out_val=out)
            if counted
            else _attention_flops(operator.operation, shapes)
        )
        self.ops.append(Op(operator.name, shapes, sum(map(_num_bytes, touched)), int(flops)))
        return out


def _num_bytes(x: Tensor) -> int:
    return 0 if x.layout is not torch.strided else x.numel() * x.element_size()


def _attention_flops(operation: str, shapes: tuple[tuple[int, ...], ...]) -> float:
    """Return the FLOPs of hybridpar's attention operator, whose first tensors are [b, n, s, d]: two
    products in forward, five in backward."""
    if operation not in ("attention", "attention_backward"):
        return 0
    q, k = shapes[:2]
    return 2 * prod(q) * k[-2] * (2 if operation == "attention" else 5)


@dataclass(frozen=True)
class BlockWork:
    """Operators of a forward and a backward of one block on the first of its tp ranks.

    Args:
        parameters: Number of trained parameters.
        forward_messages: Collectives over tp in forward, each as the bytes of an all-reduce with
            equal traffic.
        backward_messages: The same in backward.
    """

    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    forward_messages: tuple[int, ...]
    backward_messages: tuple[int, ...]
    parameters: int
    kept: int


def block_work(config: Config, number: int, device: torch.device) -> BlockWork:
    """Return the work of block `number` on a device type that this machine need not have, without
    computing anything.

    Args:
        config: Its tp size, micro-batch size and dtype count.
        number: Number of the block.
        device: The device.
    """
    with _one_block(config, number, device) as (traced, batch):
        with _Noting() as noted:
            kept, *_ = traced.forward(batch)
        messages = _messages(traced.axis)
        with _Noting() as noted_back:
            traced.backward(first=False)
        parameters = sum(p.numel() for p in traced.stage.parameters() if p.requires_grad)
        return BlockWork(
            tuple(noted.ops),
            tuple(noted_back.ops),
            messages,
            _messages(traced.axis),
            parameters,
            kept,
        )


def block_messages(
    config: Config, number: int, device: torch.device
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return only the messages of `block_work`, forward and backward."""
    with _one_block(config, number, device) as (traced, batch):
        traced.forward(batch)
        messages = _messages(traced.axis)
        traced.backward(first=False)
        return messages, _messages(traced.axis)


def context_traffic(config: Config, number: int, device: torch.device) -> tuple[int, int]:
    """Return the bytes that the first rank of cp receives in the forward and the backward of a
    block.

    Transfers count as they are. A gather hands on what every rank contributes, of which the first
    has the most, and an exchange of all with all (c - 1) / c of the full tensor.
    """
    with _one_block(config, number, device) as (traced, batch):
        axis = traced.context_axis
        found = []
        axis.traffic.clear()
        for run in (lambda: traced.forward(batch), lambda: traced.backward(first=False)):
            run()
            sent = axis.traffic.num_bytes
            others = axis.size - 1
            exchanged = sent["all_to_all"] * others // axis.size
            found.append(others * sent["all_gather"] + exchanged + sent["recv"])
            axis.traffic.clear()
        return found[0], found[1]


def expert_traffic(config: Config, number: int, device: torch.device) -> tuple[int, int]:
    """Return the bytes that the first rank of ep sends to others in the forward and the backward of
    a block, at balanced load."""
    with _one_block(config, number, device) as (traced, batch):
        axis = traced.expert_axis
        found = []
        for run in (lambda: traced.forward(batch), lambda: traced.backward(first=False)):
            axis.traffic.clear()
            run()
            found.append(axis.traffic.num_bytes["all_to_all"] * (axis.size - 1) // axis.size)
        return found[0], found[1]


@lru_cache(maxsize=64)
def messages_by_kind(
    model: ModelConfig, tp: int, sequence: bool = False
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the messages of GPT's or BERT's blocks by kind, forward and backward, for one sample
    in half precision."""
    config = Config(
        model=model,
        parallel=ParallelConfig(tp, 1, 1, sequence=sequence),
        pipeline=PipelineConfig(num_microbatches=1),
        data=DataConfig(),
        train=TrainConfig(micro_batch_size=1, device="cpu", dtype="bf16"),
    )
    kinds = block_kinds(model)
    cpu = torch.device("cpu")
    return {kind: block_messages(config, kinds.index(kind), cpu) for kind in dict.fromkeys(kinds)}


@contextmanager
def _one_block(
    config: Config, number: int, device: torch.device
) -> Iterator[tuple[TracedStage, dict[str, Tensor]]]:
    """Yield a block as a stage of ghosts, and a micro-batch for it."""
    batch = local_microbatch(config)
    with Tracker(device) as tracker:
        traced = TracedStage(
            config, range(number, number + 1), Recomputation(), Buffers(1, 1), tracker
        )
        batch = on_device(batch, tracker.device)
        tracker.make_ghosts_of_integers(True)
        traced.axis.traffic.clear()
        yield traced, batch


def _messages(axis: Axis) -> tuple[int, ...]:
    found = as_all_reduces(axis.traffic, axis.size)
    axis.traffic.clear()
    return found


def as_all_reduces(traffic: Any, size: int) -> tuple[int, ...]:
    """Return an axis's collectives since its traffic was cleared, each as the bytes of an
    all-reduce with equal traffic.

    An all-gather or a reduce-scatter counts as half of an all-reduce of its full size.
    """
    sizes: tuple[int, ...] = ()
    for op, share in (("all_reduce", 1.0), ("reduce", 0.5), ("all_gather", size / 2)):
        if calls := traffic.calls[op]:
            sizes += (int(traffic.num_bytes[op] * share) // calls,) * calls
    return sizes


@lru_cache(maxsize=64)
def block_kinds(model: ModelSpec) -> tuple[str, ...]:
    """Return the kind of each block; blocks of one kind run equal operators on equal shapes.

    A model with formulas (`ModelSpec.cost_model`) has embedding, layers and head; layers that differ
    by experts, windows or rotary positions are kinds of their own (`layer_kinds`). In other models a
    kind is named after its first block: blocks.1.
    """
    if (formulas := model.cost_model) is not None:
        return (KINDS[0], *layer_kinds(formulas), KINDS[2])
    found: dict[object, str] = {}
    return tuple(
        found.setdefault(form, f"blocks.{number}") for number, form in enumerate(block_forms(model))
    )


def document_shares(model: ModelSpec, document_length: float) -> dict[str, float]:
    """Return the share of the pairs of a query and a visible key that packed documents leave, by
    kind of block.

    Args:
        model: The model, whose samples are rows of text. Without formulas its windows are unknown,
            and none counts.
        document_length: Length of the documents (`data.document_length`).
    """
    s = model.tokens_per_sample
    kinds = block_kinds(model)
    if (formulas := model.cost_model) is None:
        return dict.fromkeys(kinds, document_share(s, document_length))
    windows = [formulas.layer_window(layer) for layer in range(formulas.num_layers)]
    shares = [document_share(s, document_length, window) for window in windows]
    return dict(zip(kinds, (1.0, *shares, 1.0), strict=True))


@lru_cache(maxsize=64)
def layer_kinds(model: ModelConfig) -> tuple[str, ...]:
    """Return the kind of each layer of GPT or BERT: "layer", or if only some layers have experts,
    windows or no rotary positions such as "experts with window".
    """
    layers = range(model.num_layers)
    experts = [model.layer_has_experts(layer) for layer in layers]
    windows = [model.layer_window(layer) for layer in layers]
    rotates = [model.layer_rotates(layer) for layer in layers]
    kinds = []
    for layer in layers:
        kind = "experts" if experts[layer] and not all(experts) else KINDS[1]
        if windows[layer] and len(set(windows)) > 1:
            kind += " with window"
        if not rotates[layer] and any(rotates):
            kind += " without rotary"
        kinds.append(kind)
    return tuple(kinds)


@lru_cache(maxsize=64)
def block_forms(model: ModelSpec) -> tuple[object, ...]:
    """Return for each block what identifies its kind: whether it is an end, its operators, and its
    number of parameters."""
    config = Config(
        model=model,
        parallel=ParallelConfig(dp=1),
        pipeline=PipelineConfig(num_microbatches=1),
        data=DataConfig(),
        train=TrainConfig(micro_batch_size=1, device="cpu"),
    )
    forms = []
    for number in range(model.num_blocks):
        work = block_work(config, number, torch.device("cpu"))
        forms.append(
            (
                number == 0,
                number == model.num_blocks - 1,
                work.parameters,
                tuple(
                    Counter((op.name, op.shapes) for op in (*work.forward, *work.backward)).items()
                ),
            )
        )
    return tuple(forms)
