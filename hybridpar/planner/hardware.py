"""Devices, links and clusters, and how long the blocks of a model and their messages take on them: estimates.

Nothing here is measured on the machine at hand. Peaks are the vendors'; shares of them are what well-tuned kernels and
collectives are known to reach, and good for a tenth or two; `dataclasses.replace` puts in what was measured.

    time of a block      operations / (peak_flops * matmul_share) + bytes / (memory_bandwidth * memory_share)
    time of a message    latency + bytes * flows / (bandwidth * share)
    ring all-reduce      2 (n-1) steps of bytes / n each, over the slowest link of the ring

Matrix products and the kernels between them run one after the other, so their times add up.

Legend: b micro-batch, s sequence, h hidden, f ffn, n heads, v vocabulary, t tp size. Units: seconds, bytes, bytes/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from hybridpar.config import ModelConfig
from hybridpar.errors import config_error
from hybridpar.models.cost import LABELLED, forward_flops_per_token

T = TypeVar("T")
GIB = 2**30
GIGABIT = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. `peak_flops`: dense fp16 or bf16 with fp32 sums. Source: the vendor's data sheet."""

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float
    matmul_share: float
    """Share of `peak_flops` that the matrix products of a wide transformer layer reach. An estimate."""
    memory_share: float = 0.8
    """Share of `memory_bandwidth` that element-wise kernels reach. An estimate."""

    def matmul_time(self, flops: float) -> float:
        return flops / (self.peak_flops * self.matmul_share)

    def memory_time(self, num_bytes: float) -> float:
        return num_bytes / (self.memory_bandwidth * self.memory_share)


@dataclass(frozen=True, slots=True)
class Link:
    """What joins devices, or servers. `bandwidth`: one direction, the other being free of it.

    back_bandwidth: from a later device or server to an earlier one; 0: the same.
    """

    name: str
    bandwidth: float
    latency: float
    share: float = 0.8
    """Share of `bandwidth` that a large message reaches. An estimate: protocol and packets cost about a fifth."""
    pair_bandwidth: float = 0.0
    """Between two devices alone, where a device's links lead to several others; 0: all of it."""
    call: float = 0.0
    """What a rank takes to issue a message."""
    back_bandwidth: float = 0.0

    def transfer_time(self, num_bytes: float, flows: float = 1, way: int = 1) -> float:
        """A message to one neighbour, while `flows` equal ones share this link in the same direction.

        way: 1 to a later device or server, -1 to an earlier one.
        """
        one_way = self.bandwidth if way > 0 else self.back_bandwidth or self.bandwidth
        return self.latency + num_bytes * flows / (min(one_way, self.pair_bandwidth or one_way) * self.share)

    def ring_time(self, num_bytes: float, ranks: int, rings: float = 1) -> float:
        """A ring all-reduce over `ranks`, while `rings` of them share this link. Source: Patarasuk and Yuan, 2009."""
        if ranks == 1:
            return 0.0
        steps = 2 * (ranks - 1)
        slower = min(self.bandwidth, self.back_bandwidth or self.bandwidth)
        return steps * (self.latency + num_bytes / ranks * rings / (slower * self.share))

    def half_ring(self, op: str, num_bytes: float, ranks: int, rings: float = 1) -> tuple[float, float]:
        """A gather or a reduce-scatter, half of an all-reduce each: seconds, and CPU time."""
        return self.ring_time(num_bytes, ranks, rings) / 2, 0.0

    def transfer_work(self, num_bytes: float) -> float:
        """CPU time for a message: none, devices send on their own."""
        return 0.0

    def ring_work(self, num_bytes: float, ranks: int) -> float:
        """CPU time for an all-reduce."""
        return 0.0


DEVICES = {
    device.name: device
    for device in (
        Device("v100-16gb", 125e12, 16 * GIB, 900e9, 0.65),
        Device("v100-32gb", 125e12, 32 * GIB, 900e9, 0.65),
        Device("a100-40gb", 312e12, 40 * GIB, 1555e9, 0.75),
        Device("a100-80gb", 312e12, 80 * GIB, 2039e9, 0.75),
        Device("h100-80gb", 989e12, 80 * GIB, 3350e9, 0.65),
        Device("h200-141gb", 989e12, 141e9, 4800e9, 0.65),
    )
}

LINKS = {
    link.name: link
    for link in (
        # a V100 has 6 links of 25 GB/s, one or two of them to any one neighbour; later ones meet in a switch
        Link("nvlink2", 150e9, 5e-6, pair_bandwidth=25e9),
        Link("nvlink3", 300e9, 5e-6),
        Link("nvlink4", 450e9, 5e-6),
        Link("pcie3", 15.75e9, 10e-6),
        Link("pcie4", 31.5e9, 10e-6),
        Link("pcie5", 63e9, 10e-6),
        Link("infiniband-edr", 100 * GIGABIT, 5e-6, 0.9),
        Link("infiniband-hdr", 200 * GIGABIT, 5e-6, 0.9),
        Link("infiniband-ndr", 400 * GIGABIT, 5e-6, 0.9),
        # TCP through the host's memory
        Link("ethernet-25", 25 * GIGABIT, 30e-6, 0.6),
        Link("ethernet-100", 100 * GIGABIT, 30e-6, 0.6),
    )
}


def find_device(name: str) -> Device:
    """Raises: ConfigError if the table has no such device."""
    return _find("device", name, DEVICES, "a100-80gb")


def find_link(name: str) -> Link:
    """Raises: ConfigError if the table has no such link."""
    return _find("link", name, LINKS, "nvlink3")


def _find(field: str, name: str, known: Mapping[str, T], works: str) -> T:
    if name not in known:
        raise config_error(field, name, f"must be one of {', '.join(known)}", works)
    return known[name]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal servers of equal devices, numbered server by server: `inner` joins those of a server, `outer` the servers.

    `outer_links`: how many `outer` links a server has; its devices share them evenly.
    """

    device: Device
    devices_per_server: int
    num_servers: int
    inner: Link
    outer: Link
    outer_links: int = 1

    @property
    def num_devices(self) -> int:
        return self.devices_per_server * self.num_servers

    def server(self, device: int) -> int:
        assert 0 <= device < self.num_devices, f"device {device} of {self.num_devices}"
        return device // self.devices_per_server


# -- blocks ------------------------------------------------------------------------------------------------------------

HALF, FULL = 2, 4  # bytes of an fp16 or bf16, and of an fp32 number


class BlockTime(NamedTuple):
    """Seconds of one micro-batch. Recomputation adds another `forward` to the backward pass."""

    forward: float
    backward: float


class _Work(NamedTuple):
    """A block's forward pass for one token: operations and bytes that tp divides, and bytes that it does not."""

    flops: float = 0.0
    split_bytes: float = 0.0
    whole_bytes: float = 0.0
    backward_bytes: float = 2.0  # bytes of the backward pass over those of the forward pass


def _layer(model: ModelConfig, flops: float) -> _Work:
    """Traffic of half-precision activations, each kernel reading its inputs and writing its outputs.

    Not split by tp: two norms (2 h each), two times bias, dropout and residual in one kernel (3 h and a mask of h
    bytes). Split: activation function (2 f, for swiglu 3 f), the heads' outputs put in order (2 h), softmax and dropout
    of the scores (s n each in and out, and a mask).
    Source: Megatron-LM, arXiv 1909.08053, section 3; arXiv 2205.05198, section 4.
    """
    h, s, n = model.hidden_size, model.seq_length, model.num_heads
    dropout = model.dropout > 0
    whole = 2 * HALF * 2 * h + 2 * (HALF * 3 * h + dropout * h)
    gelu = HALF * (3 if model.activation == "swiglu" else 2) * model.ffn_size
    scores = HALF * 2 * s * n + (model.attention_dropout > 0) * (HALF * 2 + 1) * s * n
    return _Work(flops, gelu + HALF * 2 * h + scores, whole)


def _head(model: ModelConfig, flops: float) -> _Work:
    """Cross-entropy in fp32 out of separate kernels: cast, maximum, subtract, exp, sum and divide in place.

    Backward: subtract the target and scale in place, cast back.
    """
    logits = LABELLED[model.kind] * model.vocab_size
    forward = (HALF + FULL) + FULL + 2 * FULL + 2 * FULL + FULL + 2 * FULL
    backward = 2 * FULL + FULL + HALF
    return _Work(flops, logits * forward, 0.0, backward / forward)


def block_times(model: ModelConfig, micro_batch_size: int, device: Device, tp: int = 1) -> tuple[BlockTime, ...]:
    """Each block (embedding, layers, head) on one of `tp` devices, without their collectives; an estimate.

    Raises: ConfigError if tp is less than 1.
    """
    if tp < 1:
        raise config_error("parallel.tp", tp, "must be at least 1", "1")
    flops = forward_flops_per_token(model)
    layer = _layer(model, flops[1])
    works = (_Work(), *[layer] * model.num_layers, _head(model, flops[-1]))
    tokens = micro_batch_size * model.seq_length
    times = []
    for work in works:
        matmul = device.matmul_time(tokens * work.flops / tp)
        memory = device.memory_time(tokens * (work.split_bytes / tp + work.whole_bytes))
        times.append(BlockTime(matmul + memory, 2 * matmul + work.backward_bytes * memory))
    return tuple(times)


def remake_time(model: ModelConfig, micro_batch_size: int, device: Device, tp: int = 1) -> float:
    """Outputs of a layer's norms and of its activation, once more: each reads its input and writes as much, or half."""
    activation = (3 if model.activation == "swiglu" else 2) * model.ffn_size
    elements = micro_batch_size * model.seq_length * (4 * model.hidden_size + activation / tp)
    return device.memory_time(HALF * elements)


def activation_bytes(model: ModelConfig, micro_batch_size: int) -> int:
    """The tensor between two blocks, and so what one stage sends to the next, in half precision."""
    return HALF * micro_batch_size * model.seq_length * model.hidden_size
