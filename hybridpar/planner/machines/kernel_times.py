"""How long the kernels of a block take on a device, by their shapes: estimates, for devices that
are not at hand.

A product of m x k and k x n is cut into tiles of its result, which the device's multiprocessors
take in waves:

    time      waves * 2 * tile * (k + FILL) / rate of a multiprocessor, or the traffic's, if that is
              longer
    waves     ceil(tiles / multiprocessors)

So a last wave that is not full, an edge that fills no tile and a short k all cost their part. What
costs least is taken of some sizes of tiles, and k is split where there are few. A kernel takes a
launch besides, and all of them no less than the CPU takes to launch them. They run one after the
other, so their times add up.

Legend: b micro-batch, s sequence, h hidden, f ffn, n heads, d head dim, v vocabulary, t tp size.
Seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from hybridpar.config import ModelConfig
from hybridpar.errors import config_error
from hybridpar.models.blocks import LABELLED
from hybridpar.planner.machines.hardware import Device
from hybridpar.prediction.work import Op

# bytes of an fp16 or bf16, and of an fp32 number
HALF = 2
FULL = 4
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (64, 128, 0.75), (64, 64, 0.6))
"""Rows, columns, and the share of a large tile's rate."""
_SPLITS = (1, 2, 4, 8)
_LEAST_DEPTH = 512
_FILL = 64
"""Steps along k that a tile takes besides its own, to begin and to end."""
_SETTLED = 256
"""Length of a sequence at which fused attention reaches half of its rate."""

_MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})


class BlockTime(NamedTuple):
    """Seconds of one micro-batch. Recomputation adds another `forward` to the backward pass.

    forward_idle, backward_idle: the parts of these in which the device waits for the CPU to launch
    kernels.
    """

    forward: float
    backward: float
    forward_idle: float = 0.0
    backward_idle: float = 0.0


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels of a framework. fused: attention never writes its scores, norms take in what is added
    before them, and products of weights' gradients add to these.

    forward_launches, backward_launches: of a layer. gap: between two that are waiting. issue: CPU
    time to launch one.
    """

    fused: bool = True
    forward_launches: int = 16
    backward_launches: int = 36
    gap: float = 1e-6
    issue: float = 5e-6

    def time(self, working: float, launches: int) -> tuple[float, float]:
        """Time of so many kernels that work so long, launched ahead or waited for; and the part
        that is waiting."""
        ahead = working + launches * self.gap
        idle = max(0.0, launches * self.issue - ahead)
        return ahead + idle, idle


OURS = Kernels()
MEGATRON_2020 = Kernels(fused=False, forward_launches=30, backward_launches=50)
"""Those of Megatron-LM of 2020 and 2021, and so of PipeDream-2BW's code. Source: arXiv 1909.08053,
section 3."""


class Product(NamedTuple):
    """`copies` products of m x k and k x n at once."""

    m: int
    n: int
    k: int
    copies: int = 1

    @property
    def backward(self) -> tuple[Product, Product]:
        """The gradients of the first factor, and of the second, the weights."""
        return Product(self.m, self.k, self.n, self.copies), Product(
            self.n, self.k, self.m, self.copies
        )


@lru_cache(maxsize=4096)
def product_time(device: Device, product: Product, result_bytes: int = HALF) -> float:
    """Seconds of a product in half precision. result_bytes: traffic for each number of the
    result."""
    m, n, k, copies = product
    rate = device.peak_flops * device.matmul_share / device.units
    working = min(
        -(-copies * split * -(-m // rows) * -(-n // columns) // device.units)
        * 2
        * rows
        * columns
        * (k / split + _FILL)
        / (rate * share)
        for rows, columns, share in _TILES
        for split in _SPLITS
        if split == 1 or k >= split * _LEAST_DEPTH
    )
    return max(working, device.memory_time(copies * (HALF * k * (m + n) + result_bytes * m * n)))


def block_times(
    model: ModelConfig, micro_batch_size: int, device: Device, tp: int = 1, kernels: Kernels = OURS
) -> tuple[BlockTime, ...]:
    """Each block (embedding, layers, head) on one of `tp` devices, without their collectives; an
    estimate.

    Raises: ConfigError if tp is less than 1.
    """
    if tp < 1:
        raise config_error("parallel.tp", tp, "must be at least 1", "1")
    layer = _layer(model, micro_batch_size, device, tp, kernels)
    return (
        BlockTime(0.0, 0.0),
        *[layer] * model.num_layers,
        _head(model, micro_batch_size, device, tp, kernels),
    )


def _layer(model: ModelConfig, b: int, device: Device, tp: int, kernels: Kernels) -> BlockTime:
    h = model.hidden_size
    f = model.ffn_size
    tokens = b * model.seq_length
    gates = 2 if model.activation == "swiglu" else 1
    joined = h + 2 * model.kv_heads * (h // model.num_heads)
    forward, backward = _products(
        device,
        (
            Product(tokens, -(-joined // tp), h),
            Product(tokens, h, h // tp),
            Product(tokens, gates * f // tp, h),
            Product(tokens, h, f // tp),
        ),
        kernels,
    )
    attention = (_fused_attention if kernels.fused else _written_attention)(model, b, device, tp)
    # norm and sum before it: two in, two out; biases' gradients are sums; q, k, v are joined again
    if kernels.fused:
        whole = 2.0 * 4 * h
        split = (gates + 1.0) * f
        whole_back = 2.0 * 4 * h + 2 * h
        split_back = (2.0 * gates + 1) * f + joined + gates * f + 2 * joined
    # two norms; two times bias, dropout and residual in one kernel (and a mask); activation; heads
    # put in order
    else:
        whole = 2 * 2 * h + 2 * (3 * h + (model.dropout > 0) * h / HALF)
        split = (gates + 1) * f + 2 * h
        whole_back = 2 * whole
        split_back = 2 * split
    forward += device.memory_time(HALF * tokens * (whole + split / tp)) + attention.forward
    backward += (
        device.memory_time(HALF * tokens * (whole_back + split_back / tp)) + attention.backward
    )
    forward, forward_idle = kernels.time(forward, kernels.forward_launches)
    backward, backward_idle = kernels.time(backward, kernels.backward_launches)
    return BlockTime(forward, backward, forward_idle, backward_idle)


def _products(
    device: Device, products: Iterable[Product], kernels: Kernels | None
) -> tuple[float, float]:
    """Forward and backward. kernels: the second factor is weights; their gradient is added to in
    full precision by the product itself, or in half precision by a kernel that follows it, as
    autograd does. None: it is not added.
    """
    forward = backward = 0.0
    fused = kernels is not None and kernels.fused
    for product in products:
        of_input, of_weights = product.backward
        forward += product_time(device, product)
        backward += product_time(device, of_input) + product_time(
            device, of_weights, 2 * FULL if fused else HALF
        )
        if kernels is not None and not fused:
            backward += device.memory_time(3 * HALF * product.k * product.n)
    return forward, backward


def _fused_attention(model: ModelConfig, b: int, device: Device, tp: int) -> BlockTime:
    """Of a causal matrix half counts. With fewer features a head, exponentials weigh more; a
    backward has five products for two. Source: FlashAttention-2, arXiv 2307.08691, section 3.1 and
    figures 5 and 6."""
    s = model.seq_length
    h = model.hidden_size
    flops = 4 * s * h / tp * b * s * (0.5 if model.kind == "gpt" else 1.0)
    reached = s / (s + _SETTLED) * min(1.0, (h / model.num_heads / 128) ** 0.5)
    rates = (
        device.peak_flops * share * reached
        for share in (device.attention_share, device.attention_back_share)
    )
    forward, backward = (n * flops / rate for n, rate in zip((1, 2.5), rates, strict=True))
    return BlockTime(forward, backward)


def _written_attention(model: ModelConfig, b: int, device: Device, tp: int) -> BlockTime:
    """Products of each head; the whole matrix of scores written and read between them, by softmax
    and dropout.

    Source: arXiv 2205.05198, section 4.
    """
    s = model.seq_length
    d = model.hidden_size // model.num_heads
    heads = -(-b * model.num_heads // tp)
    forward, backward = _products(device, (Product(s, s, d, heads), Product(s, d, s, heads)), None)
    scores = device.memory_time(
        heads * s * s * (HALF * 2 + (model.attention_dropout > 0) * (HALF * 2 + 1))
    )
    return BlockTime(forward + scores, backward + 2 * scores)


def _head(model: ModelConfig, b: int, device: Device, tp: int, kernels: Kernels) -> BlockTime:
    """Product and cross-entropy: fused, the logits are read, and turned into their gradient in
    place. Else in fp32 out of separate kernels: cast, maximum, subtract, exp, sum and divide in
    place; backward: subtract the target and scale in place, cast back."""
    rows = max(1, round(LABELLED[model.kind] * b * model.seq_length))
    products = [Product(rows, -(-model.vocab_size // tp), model.hidden_size)]
    if model.kind == "bert":
        products.append(Product(rows, model.hidden_size, model.hidden_size))
    forward, backward = _products(device, products, kernels)
    whole = (
        (HALF, 2 * HALF) if kernels.fused else ((HALF + FULL) + 8 * FULL, 2 * FULL + FULL + HALF)
    )
    logits = rows * model.vocab_size / tp
    return BlockTime(
        forward + device.memory_time(whole[0] * logits),
        backward + device.memory_time(whole[1] * logits),
    )


def remake_time(model: ModelConfig, micro_batch_size: int, device: Device, tp: int = 1) -> float:
    """Outputs of a layer's norms and of its activation, once more: each reads its input and writes
    as much, or half."""
    activation = (3 if model.activation == "swiglu" else 2) * model.ffn_size
    elements = micro_batch_size * model.seq_length * (4 * model.hidden_size + activation / tp)
    return device.memory_time(HALF * elements)


def work_time(ops: Sequence[Op], device: Device, kernels: Kernels = OURS) -> tuple[float, float]:
    """Seconds of a pass of any model's block, whose operators were noted (prediction.work), and of
    waiting for launches.

    Each takes the time of its product or of its traffic, whichever is longer.
    """
    return kernels.time(sum(_op_time(op, device) for op in ops), len(ops))


def _op_time(op: Op, device: Device) -> float:
    computing = device.matmul_time(op.flops)
    if op.name in _MATRIX_PRODUCTS:
        (*copies, m, k), (*_, n) = op.shapes[-2:]
        computing = product_time(device, Product(m, n, k, prod(copies)))
    elif "attention" in op.name:
        s = op.shapes[0][-2]
        share = device.attention_back_share if "backward" in op.name else device.attention_share
        computing = op.flops / (device.peak_flops * share * s / (s + _SETTLED))
    return max(computing, device.memory_time(op.num_bytes))


def activation_bytes(model: ModelConfig, micro_batch_size: int) -> int:
    """The tensor between two blocks, and so what one stage sends to the next, in half precision."""
    return HALF * micro_batch_size * model.seq_length * model.hidden_size
