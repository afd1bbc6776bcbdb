"""The operators of a block, as torch.export finds them in the block's code.

The block is built on the meta device with the torch reference of every operator, and exported
without dropout; nothing is allocated or computed. The exported graph is simplified to about as many
operators as kernels that run:

views                              belong to the operator whose output they view
constants of the micro-batch       are computed on every device: masks, tables of rotary positions
operators with a single reader     are merged into it, unless one of the two is a matrix product,
                                   attention or an embedding; so are several operators with one
                                   final reader: bias, activation; bias, residual; the loss
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from hybridpar.config import Config, KernelsConfig
from hybridpar.grid import Axis
from hybridpar.models.blocks import IGNORE_INDEX
from hybridpar.models.build import DTYPES, BlockOptions, build_blocks
from hybridpar.prediction.footprint import sample_microbatch

INPUT = -1
"""Value in `Operator.reads` for the input of the block."""
_aten = torch.ops.aten
_COPIES = {_aten.clone.default, _aten._unsafe_view.default}
"""Operations that reorder values in memory; kernels that need the order read and write them so."""
_ALONE = {_aten.linear.default, _aten.scaled_dot_product_attention.default, _aten.embedding.default}


@dataclass(frozen=True, slots=True)
class Operator:
    """One forward operator.

    Args:
        name: Name such as attention.qkv.linear.
        reads: Numbers of the block's operators whose outputs it reads; INPUT for the block's input.
        traffic: Bytes that it reads and writes.
        parameters: Number of its parameters.
        output: Bytes of its output.
        leaves: Whether its output is the block's output.
    """

    name: str
    reads: tuple[int, ...]
    flops: float
    traffic: float
    parameters: int
    output: float
    leaves: bool


def block_operators(config: Config, number: int) -> tuple[Operator, ...]:
    """Return the operators of an unsplit block of the model for one micro-batch, in an order in
    which they can run."""
    model = replace(config.transformer, logits_chunk=0)
    dtype = DTYPES[config.train.dtype]
    kernels = KernelsConfig(**{field.name: "torch" for field in fields(KernelsConfig)})
    options = BlockOptions(kernels)
    block = build_blocks(model, Axis("tp"), [number], options=options, dtype=dtype)[number]
    batch = sample_microbatch(config)
    labelled = int((batch["labels"] != IGNORE_INDEX).sum())
    shape = (config.train.micro_batch_size, model.seq_length, model.hidden_size)
    x = torch.empty(shape, dtype=dtype, device="meta") if number else None
    on_meta = {name: tensor.to("meta") for name, tensor in batch.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # a warning inside torch
        exported = torch.export.export(block, (x, on_meta, None), strict=False).run_decompositions(
            {}
        )
    return _Graph(exported, labelled).operators()


class _Graph:
    """An exported block. `labelled`: number of micro-batch positions with a label, which the export
    cannot know."""

    def __init__(self, exported: torch.export.ExportedProgram, labelled: int):
        self.labelled = labelled
        nodes = list(exported.graph.nodes)
        named = exported.graph_signature.inputs_to_parameters
        self.parameters = {n: named[n.name] for n in nodes if n.name in named}
        self.input = next(n for n in nodes if n.op == "placeholder" and n.name == "x")
        self.depends = {self.input, *self.parameters}
        """Nodes that depend on the block's input or on parameters, and not only on the
        micro-batch."""
        self.operators_there: list[Node] = []
        for node in nodes:
            if node.op == "call_function" and not _is_view(node) and any(self._inputs(node)):
                self.depends.add(node)
                self.operators_there.append(node)
        self.outputs = {_source(n) for n in nodes[-1].all_input_nodes}
        self.last = self._join()

    def _inputs(self, node: Node) -> Iterable[Node]:
        """Return the arguments of the operator that depend on more than the micro-batch."""
        return (n for n in node.all_input_nodes if _source(n) in self.depends)

    def _join(self) -> dict[Node, Node]:
        """Return the last node of each node's merged operator, without nodes whose results are not
        used."""
        readers: dict[Node, list[Node]] = {n: [] for n in self.operators_there}
        for node in self.operators_there:
            for given in {_source(n) for n in self._inputs(node)} & set(readers):
                readers[given].append(node)
        last: dict[Node, Node] = {}
        for node in reversed(self.operators_there):
            ends = {last[reader] for reader in readers[node] if reader in last}
            joined = next(iter(ends)) if len(ends) == 1 else node
            if node in self.outputs or node.target in _ALONE or joined.target in _ALONE:
                joined = node
            if ends or node in self.outputs:
                last[node] = joined
        return last

    def operators(self) -> tuple[Operator, ...]:
        members: dict[Node, list[Node]] = {}
        for node in self.operators_there:
            if node in self.last:
                members.setdefault(self.last[node], []).append(node)
        ends = [node for node in self.operators_there if node in members]
        number = {node: i for i, node in enumerate(ends)} | {self.input: INPUT}
        left = set(self.parameters)
        found = []
        for end in ends:
            inside = set(members[end])
            given = {
                n for node in members[end] for n in self._inputs(node) if _source(n) not in inside
            }
            own = [node for node in self.parameters if node in left & {_source(n) for n in given}]
            left -= set(own)
            output = self._bytes(end)
            read = output if end.target == _aten.embedding.default else sum(map(self._bytes, given))
            found.append(
                Operator(
                    self._place(end, own),
                    tuple(sorted({number[s] for s in map(_source, given) if s in number})),
                    sum(self._flops(node) for node in members[end]),
                    read + output,
                    sum(self._count(node.meta["val"]) for node in own),
                    output,
                    end in self.outputs,
                )
            )
        return tuple(found)

    def _place(self, end: Node, own: Sequence[Node]) -> str:
        """Return the path of the operator in the block, and its name: 'attention.qkv.linear'."""
        modules = list(end.meta.get("nn_module_stack", {}).values())
        path = modules[-1][0] if modules else ""
        if own:
            path = self.parameters[own[0]].rpartition(".")[0]
        name = end.target.__name__.partition(".")[0].strip("_")  # type: ignore[union-attr]
        return f"{path}.{name}" if path else name

    def _flops(self, node: Node) -> float:
        """Return the operations of a node. The full matrix counts for causal attention, too, as in
        models.cost."""
        if (formula := _FLOPS.get(node.target)) is None:
            return 0.0
        return formula(*(self._shape(n.meta["val"]) for n in (node, *node.all_input_nodes[:2])))

    def _bytes(self, node: Node) -> float:
        value = node.meta["val"]
        tensors = value if isinstance(value, (tuple, list)) else [value]
        return sum(self._count(x) * x.element_size() for x in tensors)

    def _count(self, x: Tensor) -> int:
        return math.prod(self._shape(x))

    def _shape(self, x: Tensor) -> list[int]:
        """Return the shape of a tensor, with dimensions that depend on the number of labels filled
        in."""
        return [n if isinstance(n, int) else self._known(n) for n in x.shape]

    def _known(self, size: torch.SymInt) -> int:
        expression = size.node.expr
        return int(expression.subs(dict.fromkeys(expression.free_symbols, self.labelled)))


_FLOPS: Mapping[Any, Callable[[Sequence[int], Sequence[int], Sequence[int]], float]] = {
    _aten.linear.default: lambda out, x, weight: 2.0 * math.prod(out) * weight[1],
    _aten.scaled_dot_product_attention.default: lambda out, q, k: 4.0 * math.prod(q) * k[2],
}


def _is_view(node: Node) -> bool:
    return (
        node.target is operator.getitem
        or node.target in _COPIES
        or getattr(node.target, "is_view", False)
    )


def _source(node: Node) -> Node:
    """Return the node itself, or the node that it is a view of."""
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node
