"""Claim: hybridpar's CPU operators, forward and backward, take half of PyTorch's time or less,
torch.compile included.

    python -m benchmarks.ops

One thread, the rows of a GPT 345M block (hidden 1024, 1,024 tokens, vocabulary 50,304) and of the
tiny configuration (hidden 256, 512 tokens, vocabulary 4,096). PyTorch's side is the operation as
one writes it: F.rms_norm, x + bias and F.gelu, F.cross_entropy; `compile` the same function under
torch.compile. A round runs each side for about 20 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import OURS, Step, arguments, case, parse, race, report
from hybridpar import ops
from hybridpar.grid import Axis
from hybridpar.nn import vocab_parallel_cross_entropy
from hybridpar.ops.norm import NormWeights
from hybridpar.ops.split_qkv import RotarySettings
from hybridpar.ops.update import AdamStep, Weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
"""Largest relative difference of the compared number, a sum of absolute values: rounding differs by
side."""
ROUND_S = 0.02


@dataclass(frozen=True)
class Size:
    """Sizes of a micro-batch of a model, as its operators see it."""

    samples: int
    seq_length: int
    hidden: int
    num_heads: int
    vocab: int
    num_kv_heads: int = 0
    """0: as many as there are heads."""

    @property
    def tokens(self) -> int:
        return self.samples * self.seq_length


SIZES = {"345M": Size(1, 1024, 1024, 16, 50304), "tiny": Size(4, 128, 256, 8, 4096)}
Function = Callable[..., Tensor | tuple[Tensor, ...]]


def rotary_eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate with tables made before, as models do."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rotary_tables(s: int, d: int, like: Tensor) -> tuple[Tensor, Tensor]:
    angle = torch.outer(
        torch.arange(s).double(), 10000.0 ** (torch.arange(d // 2).double() / (-d / 2))
    )
    return angle.cos().to(like), angle.sin().to(like)


def swiglu_eager(x: Tensor, bias: Tensor) -> Tensor:
    gate, up = (x + bias).chunk(2, -1)
    return F.silu(gate) * up


@dataclass(frozen=True)
class Operation:
    """`ours(backend)` and PyTorch's function of `tensors`, by all of which they are differentiated.

    `traffic`: elements that forward and backward have to read and write. `flops`: multiplications
    and additions of the two, where those bound it.
    """

    tensors: list[Tensor]
    ours: Callable[[str], Function]
    eager: Function
    traffic: float
    flops: float = 0.0


def operations(size: Size, dtype: torch.dtype, device: str = "cpu") -> dict[str, Operation]:
    """Return the operations to time, by the names that the table prints."""
    t = size.tokens
    h = size.hidden
    n = size.num_heads
    v = size.vocab
    s = size.seq_length
    d = h // n
    scores = size.samples * n * s * s
    features = 4 * h

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device).requires_grad_()

    def heads(n: int = n) -> Tensor:
        return (
            torch.randn(size.samples, s, n, d, dtype=dtype, device=device)
            .transpose(1, 2)
            .requires_grad_()
        )

    labels = torch.randint(v, (t,), device=device)
    tables = rotary_tables(s, d, torch.empty(0, dtype=dtype, device=device))
    of_gpus = {
        "qkv split": qkv_split(leaf(size.samples, s, 3 * h), leaf(3 * h), n)
    }  # CPUs have the reference alone
    return (of_gpus if device != "cpu" else {}) | {
        "rms_norm": Operation(
            [leaf(t, h), leaf(h)],
            lambda k: lambda x, w: ops.rms_norm(x, w, backend=k),
            lambda x, w: F.rms_norm(x, (h,), w, 1e-6),
            5 * t * h,
        ),
        "layer_norm": Operation(
            [leaf(t, h), leaf(h), leaf(h)],
            lambda k: lambda x, w, b: ops.layer_norm(x, w, b, backend=k),
            lambda x, w, b: F.layer_norm(x, (h,), w, b, 1e-5),
            5 * t * h,
        ),
        "bias + add + rms_norm": Operation(
            [leaf(t, h), leaf(h), leaf(t, h), leaf(h)],
            lambda k: (
                lambda x, c, r, w: ops.add_norm(
                    x, r, NormWeights(w, eps=1e-6), bias_of_x=c, backend=k
                )
            ),
            lambda x, c, r, w: (F.rms_norm(total := x + c + r, (h,), w, 1e-6), total),
            8 * t * h,
        ),
        "bias + gelu": Operation(
            [leaf(t, features), leaf(features)],
            lambda k: lambda x, b: ops.gelu(x, b, backend=k),
            lambda x, b: F.gelu(x + b, approximate="tanh"),
            5 * t * features,
        ),
        "bias + swiglu": Operation(
            [leaf(t, features), leaf(features)],
            lambda k: lambda x, b: ops.swiglu(x, b, backend=k),
            swiglu_eager,
            4 * t * features,
        ),
        "rotary": Operation(
            [heads()],
            lambda k: lambda x: ops.rotary(x, backend=k),
            lambda x: rotary_eager(x, *tables),
            4 * t * h,
        ),
        "causal attention": Operation(
            [heads(), *(heads(size.num_kv_heads or n) for _ in "kv")],
            lambda k: lambda q, k_, v_: ops.attention(q, k_, v_, causal=True, backend=k),
            lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=size.num_kv_heads > 0
            ),
            11 * t * h,
            7 * scores * d,
        ),
        "cross-entropy": Operation(
            [leaf(t, v)],
            lambda k: (
                lambda x: vocab_parallel_cross_entropy(x, labels, Axis("tp"), backend=k).sum()
            ),
            lambda x: F.cross_entropy(x, labels, reduction="sum"),
            3 * t * v,
        ),
    }


def qkv_split(qkv: Tensor, bias: Tensor, num_heads: int) -> Operation:
    """The split of a product into heads, which are turned, and the gradients of the product and its
    bias."""
    groups = (1,) * num_heads
    turn = RotarySettings(10000.0, qkv.shape[-1] // (3 * num_heads))

    def ours(backend: str) -> Function:
        return lambda x, b: ops.split_qkv(x, groups, bias=b, turn=turn, backend=backend)

    return Operation([qkv, bias], ours, ours("torch"), 10 / 3 * qkv.numel())


def gradients_for(function: Function, tensors: list[Tensor]) -> list[Tensor]:
    """Return the gradients that the backward pass begins with, the same for all sides: one for each output."""
    with torch.no_grad():
        outputs = as_tuple(function(*tensors))
    return [
        torch.linspace(-1, 1, y.numel(), device=y.device).to(y.dtype).view(y.shape) for y in outputs
    ]


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def compute(function: Function, tensors: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """Forward and backward: the outputs and the gradients of all tensors."""
    outputs = as_tuple(function(*tensors))
    return [*outputs, *torch.autograd.grad(outputs, tensors, gradients)]


def step(function: Function, tensors: list[Tensor], gradients: list[Tensor]) -> Step:
    def run() -> float:
        compute(function, tensors, gradients)
        return 0.0

    return run


def measure(
    size_name: str, dtype_name: str, rounds: int, only: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """`only`: the names of operations to measure; none: all."""
    for name, operation in operations(SIZES[size_name], DTYPES[dtype_name]).items():
        if only and name not in only:
            continue
        torch._dynamo.reset()
        tensors = operation.tensors
        eager = operation.eager
        functions = {OURS: operation.ours("auto"), "eager": eager, "compile": torch.compile(eager)}
        gradients = gradients_for(eager, tensors)
        steps = {side: step(function, tensors, gradients) for side, function in functions.items()}
        values = {
            side: sum(
                t.detach().double().abs().sum().item()
                for t in compute(function, tensors, gradients)
            )
            for side, function in functions.items()
        }
        for value in values.values():
            assert abs(value - values[OURS]) <= TOLERANCE[dtype_name] * values[OURS], (
                f"{name}: {values}"
            )
        start = time.perf_counter()
        steps[OURS]()
        repeat = max(1, round(ROUND_S / (time.perf_counter() - start)))
        result = race(steps, rounds, tolerance=0.0, repeat=repeat)
        yield case(
            f"{size_name} {dtype_name} {name}",
            result,
            SIZES[size_name].tokens,
            shape=size_name,
            dtype=dtype_name,
            op=name,
        )


def measure_update(
    size_name: str, rounds: int, only: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """The passes that follow the backward, over the parameters of a layer and an embedding, in
    float32.

    Ours reads one version of the weights and writes another, PyTorch's writes over the only one.
    """
    size = SIZES[size_name]
    h = size.hidden
    shapes = [
        (size.vocab, h),
        *[(h,)] * 6,
        (3 * h,),
        (4 * h,),
        (3 * h, h),
        (h, h),
        (4 * h, h),
        (h, 4 * h),
    ]
    old, gradients, new, means, squares = (
        [torch.randn(shape) * 1e-3 for shape in shapes] for _ in range(5)
    )
    squares = [x.square() for x in squares]
    passes, step_of_adam = ops.optimizer(old[0]), AdamStep(0.5, 0.9, 0.999, 1e-8, 10)
    weights = Weights(old, new)
    decays = [0.01] * len(old)
    numel = sum(x.numel() for x in old)

    def peer(**kind: bool) -> torch.optim.AdamW:
        leaves = [x.clone().requires_grad_() for x in old]
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient.clone()
        return torch.optim.AdamW(leaves, lr=1e-5, **kind)

    def clip(optimizer: torch.optim.AdamW) -> float:
        return float(
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e9, foreach=True)
        )

    def adam() -> float:
        passes.adam(weights, gradients, (means, squares), decays, 1e-5, step_of_adam)
        return 0.0

    def norm() -> float:
        return float(passes.sum_squares(gradients).sum().sqrt())

    def total_norm() -> float:
        return float(torch.nn.utils.get_total_norm(gradients, foreach=True))

    def stepping(optimizer: torch.optim.AdamW) -> Step:
        return lambda: optimizer.step() or 0.0

    fused, foreach = peer(fused=True), peer(foreach=True)
    races: dict[str, dict[str, Step]] = {
        "AdamW": {OURS: adam, "fused": stepping(fused), "foreach": stepping(foreach)},
        "gradient norm": {
            OURS: norm,
            "clip_grad_norm_": lambda: clip(fused),
            "get_total_norm": total_norm,
        },
    }
    for name, sides in races.items():
        if only and name not in only:
            continue
        result = race(
            sides, rounds, tolerance=1e-2
        )  # torch sums a large tensor's squares in float32
        yield case(
            f"{size_name} fp32 {name}", result, numel, shape=size_name, dtype="fp32", op=name
        )


def main() -> None:
    parser = arguments(__doc__, rounds=11, shapes=[])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument(
        "--ops", nargs="+", default=[], help="operators by their names in the table; by default all"
    )
    args = parse(parser)
    torch.set_num_threads(1)
    updates = args.sizes if "fp32" in args.dtypes else ()
    report(
        "ops",
        chain(
            *(measure(*key, args.rounds, args.ops) for key in product(args.sizes, args.dtypes)),
            *(measure_update(size, args.rounds, args.ops) for size in updates),
        ),
        args,
        shapes=SIZES,
    )


if __name__ == "__main__":
    main()
