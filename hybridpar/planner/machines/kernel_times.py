"""Time of a block's kernels on a device, estimated from their shapes, for devices that are not at
hand.

A product of m x k and k x n is cut into tiles of its result, which the multiprocessors compute in
waves:

time      waves * 2 * tile * (k + FILL) / rate of a multiprocessor, or the time of the memory
          traffic if that is longer
waves     ceil(tiles / multiprocessors)

So a partial last wave, a partial edge tile and a short k all cost time. The cheapest of several
tile sizes is used, and k is split if there are few tiles. Kernels run one after the other, so their
times add up. All kernels of a block together take no less than the CPU takes to launch them
(`Device.launch`), which is what bounds small micro-batches.

Legend: b micro-batch, s sequence, h hidden, f ffn, n heads, d head dim, v vocabulary, t tp size.
Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from hybridpar.config import ModelConfig
from hybridpar.errors import config_error
from hybridpar.models.cost import layer_attention_flops
from hybridpar.models.heads import LABELLED
from hybridpar.ops.backends.libraries import OLDEST_GPU
from hybridpar.planner.machines.hardware import Device
from hybridpar.prediction.work import Op, layer_kinds

# bytes of an fp16 or bf16 number, and of an fp32 number
HALF = 2
FULL = 4
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (64, 128, 0.75), (64, 64, 0.6))
"""Rows, columns, and rate relative to a large tile."""
_SPLITS = (1, 2, 4, 8)
_LEAST_DEPTH = 512
_FILL = 64
"""Extra steps along k that a tile costs for its prologue and epilogue."""
_SETTLED = 256
"""Sequence length at which fused attention reaches half of its rate."""

_DENSE_PRODUCTS = 4
"""Products in the forward of a layer without experts, which `Kernels` count."""
_HEAD_LAUNCHES = (9, 12)
"""Kernels of the head's forward and backward: norm, output projection and cross-entropy."""

_CONVOLUTION_BACKWARD = "aten::convolution_backward"
_CONVOLUTIONS = frozenset({"aten::convolution", _CONVOLUTION_BACKWARD})
_MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})


class BlockTime(NamedTuple):
    """Seconds of one micro-batch. Recomputation adds another `forward` to the backward pass.

    Args:
        forward_idle: Part of the forward in which the device waits for the CPU to launch kernels.
        backward_idle: The same part of the backward.
        forward_attention: Part of the forward that is in proportion to the pairs of a query and a
            visible key.
        backward_attention: The same part of the backward.
    """

    forward: float
    backward: float
    forward_idle: float = 0.0
    backward_idle: float = 0.0
    forward_attention: float = 0.0
    backward_attention: float = 0.0


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels of a framework.

    Args:
        fused: Whether attention never writes its scores, norms include the preceding addition, and
            products accumulate into weight gradients.
        forward_launches: Kernels in a layer's forward.
        backward_launches: Kernels in a layer's backward.
        gap: Seconds between two kernels that are already queued.
    """

    fused: bool = True
    forward_launches: int = 16
    backward_launches: int = 36
    gap: float = 1e-6

    def time(self, working: float, launches: int, device: Device) -> tuple[float, float]:
        """Return the seconds of `launches` kernels that compute for `working` seconds, and the part
        in which the device waits for launches."""
        ahead = working + launches * self.gap
        idle = max(0.0, launches * device.launch - ahead)
        return ahead + idle, idle


OURS = Kernels()
MEGATRON_2020 = Kernels(fused=False, forward_launches=30, backward_launches=50)
"""Kernels of Megatron-LM in 2020 and 2021, which PipeDream-2BW's code uses. Source: arXiv
1909.08053, section 3."""
PLAIN_TORCH = Kernels(fused=False, forward_launches=30, backward_launches=50)
"""Kernels of our layers on cards that Triton and csrc/cuda have no code for. Operators are plain
torch with dropout, which writes the attention scores; each gradient takes one addition more.
Megatron-LM had as many."""


def kernels_for(device: Device) -> Kernels:
    """Return the kernels that our layers run on a device."""
    return OURS if device.capability >= OLDEST_GPU else PLAIN_TORCH


class Product(NamedTuple):
    """`copies` products of m x k and k x n at once."""

    m: int
    n: int
    k: int
    copies: int = 1

    @property
    def backward(self) -> tuple[Product, Product]:
        """The products for the gradients of the first factor and of the second, the weights."""
        return Product(self.m, self.k, self.n, self.copies), Product(
            self.n, self.k, self.m, self.copies
        )


@lru_cache(maxsize=4096)
def product_time(device: Device, product: Product, result_bytes: int = HALF) -> float:
    """Return the seconds of a product in half precision.

    Args:
        device: The device.
        product: The product.
        result_bytes: Memory traffic for each number of the result.
    """
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
    """Return an estimated time of each block (embedding, layers, head) on one of `tp` devices,
    without collectives.

    Raises:
        ConfigError: tp is less than 1.
    """
    if tp < 1:
        raise config_error("parallel.tp", tp, "must be at least 1", "1")
    kinds = layer_kinds(model)
    layers = {
        kind: _layer(model, kinds.index(kind), micro_batch_size, device, tp, kernels)
        for kind in dict.fromkeys(kinds)
    }
    return (
        BlockTime(0.0, 0.0),
        *(layers[kind] for kind in kinds),
        _head(model, micro_batch_size, device, tp, kernels),
    )


def _layer(
    model: ModelConfig, layer: int, b: int, device: Device, tp: int, kernels: Kernels
) -> BlockTime:
    h = model.hidden_size
    f = model.active_ffn_size(layer)
    tokens = b * model.seq_length
    gates = 2 if model.gated else 1
    heads = model.num_heads * model.head_size
    joined = heads + 2 * model.kv_heads * model.head_size
    products = (
        Product(tokens, -(-joined // tp), h),
        Product(tokens, h, heads // tp),
        *_mlp_products(model, layer, tokens, tp),
    )
    forward, backward = _products(device, products, kernels)
    if kernels.fused:
        attention = _fused_attention(model, layer, b, device, tp)
    else:
        attention = _written_attention(model, b, device, tp)
    # norm and addition before it: two inputs, two outputs; bias gradients are sums; q, k, v are
    # concatenated again
    if kernels.fused:
        whole = 2.0 * 4 * h
        split = (gates + 1.0) * f
        whole_back = 2.0 * 4 * h + 2 * h
        split_back = (2.0 * gates + 1) * f + joined + gates * f + 2 * joined
    # two norms; twice bias, dropout (and its mask) and residual in one kernel; activation function;
    # transpose of the heads
    else:
        whole = 2 * 2 * h + 2 * (3 * h + (model.dropout > 0) * h / HALF)
        split = (gates + 1) * f + 2 * h
        whole_back = 2 * whole
        split_back = 2 * split
    forward += device.memory_time(HALF * tokens * (whole + split / tp)) + attention.forward
    backward += (
        device.memory_time(HALF * tokens * (whole_back + split_back / tp)) + attention.backward
    )
    # each expert's products are further kernels
    more = len(products) - _DENSE_PRODUCTS
    forward, forward_idle = kernels.time(forward, kernels.forward_launches + more, device)
    backward, backward_idle = kernels.time(backward, kernels.backward_launches + 2 * more, device)
    follows_pairs = kernels.fused  # other kernels write scores of all keys
    return BlockTime(
        forward,
        backward,
        forward_idle,
        backward_idle,
        attention.forward * follows_pairs,
        attention.backward * follows_pairs,
    )


def _mlp_products(model: ModelConfig, layer: int, tokens: int, tp: int) -> Iterator[Product]:
    """Yield the products of a layer's MLP, or of its experts at balanced load."""
    h = model.hidden_size
    gates = 2 if model.gated else 1
    sizes = [(tokens, model.ffn_size)]
    if model.layer_has_experts(layer):
        yield Product(tokens, model.num_experts, h)
        rows = -(-tokens * model.router_topk // model.num_experts)
        sizes = [(rows, model.expert_ffn_size)] * model.num_experts
        if model.shared_expert_ffn_hidden_size:
            sizes.append((tokens, model.shared_expert_ffn_hidden_size))
    for rows, features in sizes:
        yield Product(rows, gates * features // tp, h)
        yield Product(rows, h, features // tp)


def _products(
    device: Device, products: Iterable[Product], kernels: Kernels | None
) -> tuple[float, float]:
    """Return the seconds of forward and backward of products.

    Args:
        device: The device.
        products: The products.
        kernels: None: the second factor is not a parameter. Otherwise it is a weight, whose
            gradient is accumulated in full precision by a fused product, or in half precision by
            another kernel, as autograd does.
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


def _fused_attention(model: ModelConfig, layer: int, b: int, device: Device, tp: int) -> BlockTime:
    """Return the time of fused attention.

    Half of a causal matrix counts, and what a window leaves of it. With fewer features per head,
    exponentials weigh more. The backward has five products where the forward has two. Source: FlashAttention-2, arXiv
    2307.08691, section 3.1 and figures 5 and 6.
    """
    s = model.seq_length
    each = layer_attention_flops(model, layer)
    flops = each / tp * b * s * (0.5 if model.kind == "gpt" else 1.0)
    reached = s / (s + _SETTLED) * min(1.0, (model.head_size / 128) ** 0.5)
    rates = (
        device.peak_flops * share * reached
        for share in (device.attention_share, device.attention_back_share)
    )
    forward, backward = (n * flops / rate for n, rate in zip((1, 2.5), rates, strict=True))
    return BlockTime(forward, backward)


def _written_attention(model: ModelConfig, b: int, device: Device, tp: int) -> BlockTime:
    """Return the time of attention that materializes its scores: products of each head, with
    softmax and dropout reading and writing the full matrix between them.

    Source: arXiv 2205.05198, section 4.
    """
    s = model.seq_length
    d = model.head_size
    heads = -(-b * model.num_heads // tp)
    forward, backward = _products(device, (Product(s, s, d, heads), Product(s, d, s, heads)), None)
    scores = device.memory_time(
        heads * s * s * (HALF * 2 + (model.attention_dropout > 0) * (HALF * 2 + 1))
    )
    return BlockTime(forward + scores, backward + 2 * scores)


def _head(model: ModelConfig, b: int, device: Device, tp: int, kernels: Kernels) -> BlockTime:
    """Return the time of the output projection and cross-entropy.

    Fused, the logits are read once and replaced by their gradient. Otherwise separate fp32 kernels
    run: cast, maximum, subtract, exp, sum and divide in place; in backward, subtract the target and
    scale in place, cast back.
    """
    rows = max(1, round(LABELLED[model.kind] * b * model.seq_length))
    products = [Product(rows, -(-model.vocab_size // tp), model.hidden_size)]
    if model.kind == "bert":
        products.append(Product(rows, model.hidden_size, model.hidden_size))
    forward, backward = _products(device, products, kernels)
    whole = (
        (HALF, 2 * HALF) if kernels.fused else ((HALF + FULL) + 8 * FULL, 2 * FULL + FULL + HALF)
    )
    logits = rows * model.vocab_size / tp
    forward, forward_idle = kernels.time(
        forward + device.memory_time(whole[0] * logits), _HEAD_LAUNCHES[0], device
    )
    backward, backward_idle = kernels.time(
        backward + device.memory_time(whole[1] * logits), _HEAD_LAUNCHES[1], device
    )
    return BlockTime(forward, backward, forward_idle, backward_idle)


def remake_time(
    model: ModelConfig, layer: int, micro_batch_size: int, device: Device, tp: int = 1
) -> float:
    """Return the seconds of recomputing the outputs of the norms and the activation function of a
    layer, counted from 0: each reads its input and writes as much, or half."""
    activation = (3 if model.gated else 2) * model.active_ffn_size(layer)
    elements = micro_batch_size * model.seq_length * (4 * model.hidden_size + activation / tp)
    return device.memory_time(HALF * elements)


def work_time(ops: Sequence[Op], device: Device, kernels: Kernels = OURS) -> tuple[float, float]:
    """Return the seconds of a recorded pass of any block (prediction.work), and the part in which
    the device waits for launches.

    Each operator takes the time of its product or of its memory traffic, whichever is longer.
    """
    return kernels.time(sum(_op_time(op, device) for op in ops), len(ops), device)


def _op_time(op: Op, device: Device) -> float:
    computing = device.matmul_time(op.flops)
    if op.name in _MATRIX_PRODUCTS:
        (*copies, m, k), (*_, n) = op.shapes[-2:]
        computing = product_time(device, Product(m, n, k, prod(copies)))
    elif op.name in _CONVOLUTIONS:
        computing = sum(product_time(device, product) for product in convolution_products(op))
    elif "attention" in op.name:
        s = op.shapes[0][-2]
        share = device.attention_back_share if "backward" in op.name else device.attention_share
        computing = op.flops / (device.peak_flops * share * s / (s + _SETTLED))
    return max(computing, device.memory_time(op.num_bytes))


def convolution_products(op: Op) -> tuple[Product, ...]:
    """Return the products that a convolution is: of the pixels' windows and the weights, by groups;
    in backward those for the gradients that were asked for, the weights' first.

    Shapes: input [b, c, ..], weight [n, c / groups, ..], result [b, n, ..]; a backward begins with
    the gradient of the result. Source: Chetlur et al., cuDNN, arXiv 1410.0759.
    """
    *result, given, weight = op.shapes[: 2 + (op.name == _CONVOLUTION_BACKWARD)]
    channels = weight[0]
    window = prod(weight[1:])
    groups = max(1, given[1] // weight[1])
    if not result:
        pixels = op.flops // (2 * channels * window)
        return (Product(pixels, channels // groups, window, groups),)
    pixels = prod(result[0]) // channels
    product = Product(pixels, channels // groups, window, groups)
    of_input, of_weights = product.backward
    number = round(op.flops / (2 * pixels * channels * window))
    return (of_weights, of_input)[:number]


def activation_bytes(model: ModelConfig, micro_batch_size: int) -> int:
    """Return the bytes of the half-precision activation between two blocks, which a stage sends to
    the next."""
    return HALF * micro_batch_size * model.seq_length * model.hidden_size
