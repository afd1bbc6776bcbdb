"""Build the operator graph of a hybridpar model in the workload format of Tarnawski et al., which
`place` reads.

Every kind of block is exported once (operators.py), and the blocks are chained. For training, each
forward node has a backward node of the same colour class, with all edges reversed; the losses join
the two halves. If several nodes read an output, a node without cost adds up its gradients on the
device of the first.

time    a node's share of its block's profiled time, forward and backward: by the time of its
        operations or of its bytes, whichever is longer
size    an operator's parameters, for training with all versions, gradients and optimizer state;
        and its share, by output size, of what a micro-batch leaves in the block: the tensors
        saved for backward, or without a backward all outputs
edge    the time of the output on the slowest link; for a backward node, of its largest gradient

So the nodes of a block add up to the block's cost in `hybridpar plan`. The format cannot express
updates, costs of a stage in addition to its blocks, several micro-batches in flight, or tied
weights that are held once if both ends are on one device.

Units: milliseconds and bytes, as in the paper's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hybridpar.config import Config, ParallelConfig
from hybridpar.errors import config_error
from hybridpar.job import JobPlan
from hybridpar.models.build import DTYPES, Recomputation
from hybridpar.placement.operators import INPUT, block_operators
from hybridpar.planner.machines.hardware import DEVICES, Device
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.measuring.profile import Hardware
from hybridpar.prediction.footprint import Buffers, trace_stage
from hybridpar.prediction.work import block_kinds
from hybridpar.schedules.schedule_table import PipelineShape

CPU_SLOWDOWN = 23.0
"""Slowdown of a node on a CPU if nothing was measured, as in the paper's operator graphs."""
_MS = 1e3
_CORE = Device("a core", 1e11, 1.0, 1e10, 1.0, 1.0)
"""A device that does ten operations in the time of a byte, as most CPUs do."""
_OTHER = DEVICES["a100-80gb"]


@dataclass(frozen=True, slots=True)
class _Node:
    """An operator and its costs: milliseconds, bytes.

    `reads`: numbers of its inputs. `leaves`: whether it is its block's output.
    """

    name: str
    block: int
    reads: tuple[int, ...]
    leaves: bool
    output: float
    forward: float
    backward: float
    size: int


def operator_graph(config: Config, machine: Machine, *, training: bool) -> dict[str, Any]:
    """Return the graph as a document for `make_workload`, with the machine's devices as
    accelerators and without CPUs.

    Its `about` says what was costed, and whether costs are estimates.

    Raises:
        ConfigError: The configuration splits layers, the profile has no unsplit ones, or there is
            only one device.
    """
    if config.parallel.tp > 1:
        raise config_error("parallel.tp", config.parallel.tp, "operators are placed whole", "1")
    if machine.num_devices < 2:
        raise config_error(
            "accelerators", machine.num_devices, "with one there is nothing to place", "2"
        )
    config = replace(
        config,
        parallel=ParallelConfig(dp=1),
        pipeline=replace(config.pipeline, split=(), recompute="none"),
    )
    nodes, ends = _stitched(config, machine, training)
    hardware = machine.profile.hardware
    link = machine.link(range(machine.num_devices))
    sent = [_MS * link.transfer_time(node.output) for node in nodes]
    rows = [_row(i, node.name, node, node.forward, size=node.size) for i, node in enumerate(nodes)]
    edges = [_edge(u, v, sent[u]) for v, node in enumerate(nodes) for u in node.reads]
    if training:
        backward_rows, backward_edges = _mirrored(nodes, sent)
        rows += backward_rows
        edges += [_edge(v, len(nodes) + v, sent[v]) for v in ends] + backward_edges
    return {
        "maxSizePerFPGA": max(1, int(machine.memory_limit)),
        "maxFPGAs": machine.num_devices,
        "maxCPUs": 0,
        "about": {
            "kind": config.model.kind,
            "layers": config.transformer.num_layers,
            "training": training,
            "micro_batch": config.train.micro_batch_size,
            "dtype": config.train.dtype,
            "device": hardware.name,
            "estimated": machine.profile.estimated,
            "unit": "ms",
        },
        "nodes": rows,
        "edges": edges,
    }


def _mirrored(
    nodes: Sequence[_Node], sent: Sequence[float]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return backward nodes and the edges between them.

    Args:
        nodes: The forward nodes.
        sent: Seconds of each output, and so of its gradient, on a link.
    """
    n = len(nodes)
    readers: list[list[int]] = [[] for _ in nodes]
    for v, node in enumerate(nodes):
        for u in node.reads:
            readers[u].append(v)
    rows = [
        _row(n + i, f"{node.name}.backward", node, node.backward, colour=i)
        for i, node in enumerate(nodes)
    ]
    returned = [max((sent[u] for u in node.reads), default=0.0) for node in nodes]
    edges = []
    for u, read_by in enumerate(readers):
        to = n + u
        if len(read_by) > 1:
            to = len(rows) + n
            rows.append(
                _row(to, f"{nodes[u].name}.gradients", nodes[read_by[0]], 0.0, colour=read_by[0])
            )
            edges.append(_edge(to, n + u, sent[u]))
        edges += [_edge(n + v, to, returned[v]) for v in read_by]
    return rows, edges


def _row(
    number: int, name: str, node: _Node, time: float, *, size: int = 0, colour: int | None = None
) -> dict[str, Any]:
    """Return a node of the document. A backward node has a colour; a forward node's colour is its
    number."""
    return {
        "id": number,
        "name": name,
        "supportedOnFpga": True,
        "cpuLatency": CPU_SLOWDOWN * time,
        "fpgaLatency": time,
        "isBackwardNode": colour is not None,
        "colorClass": number if colour is None else colour,
        "size": size,
        "layerId": node.block,
    }


def _edge(source: int, to: int, cost: float) -> dict[str, Any]:
    return {"sourceId": source, "destId": to, "cost": cost}


def _stitched(config: Config, machine: Machine, training: bool) -> tuple[list[_Node], list[int]]:
    """Return the forward nodes of the model in an order in which they can run, and the numbers of
    its losses."""
    known: dict[str, list[_Node]] = {}
    nodes: list[_Node] = []
    leaving: list[int] = []  # nodes whose outputs are the next block's input
    for number, kind in enumerate(block_kinds(config.model)):
        first = len(nodes)
        if kind not in known:
            known[kind] = _of_block(config, machine, kind, number, training)
        for node in known[kind]:
            reads = [
                u for read in node.reads for u in (leaving if read == INPUT else [first + read])
            ]
            nodes.append(
                replace(node, name=f"blocks.{number}.{node.name}", block=number, reads=tuple(reads))
            )
        leaving = [i for i in range(first, len(nodes)) if nodes[i].leaves]
    return nodes, leaving


def _of_block(
    config: Config, machine: Machine, kind: str, number: int, training: bool
) -> list[_Node]:
    """Return the nodes of a block, with `reads` numbered as in `Operator`."""
    operators = block_operators(config, number)
    time = machine.profile.block(kind, 1, config.train.micro_batch_size)
    device = _balance(machine.profile.hardware)
    shares = _shares(
        [max(device.matmul_time(op.flops), device.memory_time(op.traffic)) for op in operators]
    )
    of_output = _shares([op.output for op in operators])
    of_parameters = _shares([op.parameters for op in operators])
    if training:
        schedule = JobPlan(config).schedule
        sizes = PipelineShape(machine.num_devices, config.pipeline.num_microbatches)
        buffers = Buffers(schedule.max_live_versions(sizes, 0), schedule.num_gradient_buffers)
        blocks = range(number, number + 1)
        found = trace_stage(
            config,
            blocks,
            Recomputation(),
            buffers,
            torch.device(machine.profile.hardware.device_type),
        )
        state = found.weights + found.master + found.gradients + found.optimizer
        kept = float(found.kept)
    else:
        state = DTYPES[config.train.dtype].itemsize * sum(op.parameters for op in operators)
        kept = sum(op.output for op in operators)
    return [
        _Node(
            op.name,
            number,
            op.reads,
            op.leaves,
            op.output,
            _MS * time.forward * shares[i],
            _MS * time.backward * shares[i],
            round(state * of_parameters[i] + kept * of_output[i]),
        )
        for i, op in enumerate(operators)
    ]


def _balance(hardware: Hardware) -> Device:
    """Return a device with about the same ratio of operations to bytes, which is all that shares
    within a block depend on."""
    return _CORE if hardware.cores else DEVICES.get(hardware.name, _OTHER)


def _shares(values: Sequence[float]) -> list[float]:
    """Return the values divided by their sum."""
    total = sum(values)
    return [value / total for value in values]
