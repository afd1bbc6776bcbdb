"""Every operation on every backend that runs here: outputs and all gradients against float64, at
awkward inputs.

On the CPU these are C++ and, in Triton's interpreter (test_interpreter.py), Triton; with a GPU also
what runs there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from hybridpar import ops, random
from hybridpar.errors import ConfigError
from hybridpar.ops.attention import AttentionMask, AttentionOptions
from hybridpar.ops.backends import registry
from hybridpar.ops.dropout import NO_DROPOUT, DropoutSpec
from hybridpar.ops.norm import NormWeights
from hybridpar.ops.rotary import Frequencies
from hybridpar.ops.split_qkv import RotarySettings
from hybridpar.random import RandomKey

SCALED = Frequencies(tuple(0.9 ** (i * i) for i in range(8)), 1.3)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KEY, SITE = RandomKey.of(2**35 + 11, 7, 100), random.site("test.backends")
DROPS = DropoutSpec(0.3, KEY, SITE)
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Relative to the largest element: sums of a few hundred terms; bfloat16, float16: 2^-8, 2^-11."""


@dataclass(frozen=True)
class Case:
    """function(*tensors, backend): `shapes` of the tensors, all of them differentiable."""

    op: str
    name: str
    shapes: tuple[tuple[int, ...], ...]
    function: Callable[..., Tensor | tuple[Tensor, ...]]

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


def on(tensor: Tensor | None, x: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.to(x.device)


def cases() -> Iterator[Case]:
    for shape in ((3, 7, 41), (2, 64), (1, 1), (5, 1030), (0, 8), (300, 33)):
        name = "x".join(map(str, shape))
        h = shape[-1:]
        yield Case(
            "layer_norm",
            name,
            (shape, h, h),
            lambda x, w, b, k: ops.layer_norm(x, w, b, 1e-3, backend=k),
        )
        yield Case(
            "rms_norm", name, (shape, h), lambda x, w, k: ops.rms_norm(x, w, 1e-3, backend=k)
        )
        yield Case("gelu", name, (shape, h), lambda x, b, k: ops.gelu(x, b, backend=k))
        yield Case("gelu", f"{name}-no-bias", (shape,), lambda x, k: ops.gelu(x, backend=k))
        pair = (*shape[:-1], 2 * shape[-1])
        wide = (2 * shape[-1],)
        yield Case("swiglu", name, (pair, wide), lambda x, b, k: ops.swiglu(x, b, backend=k))
        yield Case("swiglu", f"{name}-no-bias", (pair,), lambda x, k: ops.swiglu(x, backend=k))
        yield Case("geglu", name, (pair, wide), lambda x, b, k: ops.geglu(x, b, backend=k))
        yield Case("geglu", f"{name}-no-bias", (pair,), lambda x, k: ops.geglu(x, backend=k))
        for drop, spec in (("", NO_DROPOUT), ("-dropout", DROPS)):
            yield Case(
                "add_norm",
                f"{name}{drop}",
                (shape, h, shape, h, h),
                lambda x, c, r, w, b, k, spec=spec: ops.add_norm(
                    x, r, NormWeights(w, b, 1e-3), bias_of_x=c, dropout=spec, backend=k
                ),
            )
            yield Case(
                "add_norm",
                f"{name}{drop}-rms-no-bias",
                (shape, shape, h),
                lambda x, r, w, k, spec=spec: ops.add_norm(
                    x, r, NormWeights(w, None, 1e-3), dropout=spec, backend=k
                ),
            )
            yield Case(
                "bias_dropout_add",
                f"{name}{drop}",
                (shape, h, shape),
                lambda x, b, r, k, spec=spec: ops.bias_dropout_add(
                    x, r, b, dropout=spec, backend=k
                ),
            )
            yield Case(
                "bias_dropout_add",
                f"{name}{drop}-no-bias",
                (shape, shape),
                lambda x, r, k, spec=spec: ops.bias_dropout_add(x, r, dropout=spec, backend=k),
            )
        yield Case("dropout", name, (shape,), lambda x, k: ops.dropout(x, DROPS, backend=k))
    yield Case(
        "dropout",
        "part",
        ((2, 3, 300),),
        lambda x, k: ops.dropout(x, replace(DROPS, inner_size=500, inner_start=13), backend=k),
    )
    for b, n, s, d in ((2, 3, 5, 6), (1, 2, 130, 32), (2, 1, 1, 2), (0, 2, 3, 4)):
        shape = (b, n, s, d)
        yield Case(
            "rotary", f"{s}x{d}", (shape,), lambda x, k: ops.rotary(x, offset=500, backend=k)
        )
        each = torch.arange(b * s).view(b, s).flip(-1)
        yield Case(
            "rotary",
            f"{s}x{d}-positions",
            (shape,),
            lambda x, k, each=each: ops.rotary(x, positions=each.to(x.device), backend=k),
        )
    yield Case(
        "rotary",
        "first-features",
        ((2, 3, 5, 16),),
        lambda x, k: ops.rotary(x[..., :4], offset=500, backend=k),
    )
    given = torch.arange(10).view(2, 5).flip(-1)
    yield Case(
        "rotary",
        "scaled",
        ((2, 3, 5, 16),),
        lambda x, k: ops.rotary(x, frequencies=SCALED, positions=given.to(x.device), backend=k),
    )
    for biased in (True, False):
        yield Case(
            "split_qkv",
            f"scaled{'-no-bias' * (not biased)}",
            ((2, 5, 8 * 20), (8 * 20,)) if biased else ((2, 5, 8 * 20),),
            lambda qkv, *bias_and_backend: ops.split_qkv(
                qkv,
                (3, 1),
                bias=bias_and_backend[0] if len(bias_and_backend) == 2 else None,
                turn=RotarySettings(500.0, 16, "torch", SCALED),
                positions=given.to(qkv.device),
                backend=bias_and_backend[-1],
            ),
        )
    yield Case(
        "attention",
        "scale",
        ((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8)),
        lambda q, k, v, backend: ops.masked_attention(
            q, k, v, AttentionMask(True), AttentionOptions(scale=0.9), backend=backend
        ),
    )
    for b, n, n_kv, s, d, index, causal, window, p in (
        (2, 4, 2, 9, 8, None, True, None, 0.0),
        (1, 3, 2, 133, 20, [1, 0, 1], True, 41, 0.0),
        (2, 2, 1, 70, 32, None, True, 3, 0.3),
        (2, 2, 2, 37, 7, None, False, None, 0.0),
        (1, 2, 2, 65, 64, None, False, None, 0.2),
    ):
        real = torch.arange(b * s).view(b, s) % 4 != 1 if n_kv == 2 and b == 2 else None
        yield Case(
            "attention",
            f"soft-cap-{s}x{d}{'-causal' * causal}",
            ((b, n, s, d), (b, n_kv, s, d), (b, n_kv, s, d)),
            lambda q, k, v, backend, m=real, i=index, c=causal, w=window, p=p: ops.masked_attention(
                q,
                k,
                v,
                AttentionMask(c, padding_mask=on(m, q), window=w),
                AttentionOptions(
                    kv_index=i, dropout=DropoutSpec(p, KEY, SITE), scale=0.6, softcap=1.25
                ),
                backend=backend,
            ),
        )
    for b, s, d, groups, features in (
        (2, 5, 7, (1, 1, 1), 0),
        (1, 70, 32, (2, 2), 32),
        (2, 5, 8, (1, 3, 2), 4),
        (3, 1, 1, (2,), 0),
        (1, 33, 20, (4, 1), 20),
        (0, 2, 4, (1, 2), 4),
    ):
        rows = d * (sum(groups) + 2 * len(groups))
        turn = RotarySettings(500.0, features, "torch") if features else None
        each = torch.arange(b * s).view(b, s).flip(-1) * 1_000_003 if len(groups) == 3 else None
        for biased in (True, False):
            name = f"{s}x{d}-{len(groups)}-groups{'-rotary' * bool(features)}{'-no-bias' * (not biased)}"
            yield Case(
                "split_qkv",
                name,
                ((b, s, rows), (rows,)) if biased else ((b, s, rows),),
                lambda qkv, *bias_and_backend, g=groups, turn=turn, each=each: ops.split_qkv(
                    qkv,
                    g,
                    bias=bias_and_backend[0] if len(bias_and_backend) == 2 else None,
                    turn=turn,
                    positions=on(each, qkv),
                    backend=bias_and_backend[-1],
                ),
            )
    for b, n, n_kv, s, d, index in (
        (2, 3, 3, 5, 7, None),
        (1, 4, 2, 131, 32, None),
        (1, 2, 1, 70, 40, None),
        (2, 3, 2, 33, 5, [1, 0, 1]),
        (1, 1, 1, 260, 64, None),
        (1, 1, 1, 1, 1, None),
    ):
        real = torch.arange(b * s).view(b, s) % 4 != 1
        for causal in (False, True):
            for padded in (False, True):
                for p in (0.0, 0.3):
                    mask = real if padded else None
                    name = f"{n}-{n_kv}x{s}x{d}"
                    yield Case(
                        "attention",
                        f"{name}{'-causal' * causal}{'-padded' * padded}{'-dropout' * (p > 0)}",
                        ((b, n, s, d), (b, n_kv, s, d), (b, n_kv, s, d)),
                        lambda q, k, v, backend, c=causal, m=mask, i=index, p=p: (
                            ops.masked_attention(
                                q,
                                k,
                                v,
                                AttentionMask(c, padding_mask=on(m, q)),
                                AttentionOptions(
                                    kv_index=i, dropout=DropoutSpec(p, KEY, SITE), head_start=3
                                ),
                                backend=backend,
                            )
                        ),
                    )


CASES = list(cases())


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
        ],
    ),
]


def others(op: str, device: str = "cpu", dtype: torch.dtype | None = None) -> list[str]:
    """The backends of `op`, besides the reference, that run on such tensors; without any there is
    nothing to test."""
    names = [
        row.name
        for row in registry.backends(op)
        if row.name != "torch" and not row.unsupported(device, dtype)
    ]
    if not names:
        pytest.skip(f"only the reference of {op} runs here")
    return names


def compute(case: Case, tensors: list[Tensor], backend: str) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = case.function(*leaves, backend)
    outs = list(out) if isinstance(out, tuple) else [out]
    seeds = [
        torch.randn(o.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64).to(o)
        for i, o in enumerate(outs)
    ]
    return [*outs, *torch.autograd.grad(outs, leaves, seeds)]


def tensors_of(
    case: Case, dtype: torch.dtype, scale: float = 1.0, device: str = "cpu"
) -> list[Tensor]:
    g = torch.Generator().manual_seed(sum(map(sum, case.shapes)))
    return [
        (scale * torch.randn(shape, generator=g, dtype=torch.float64)).to(device, dtype)
        for shape in case.shapes
    ]


@pytest.mark.thorough(keep=213)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_against_float64(case, dtype, device):
    tensors = tensors_of(case, dtype, device=device)
    exact = compute(case, [t.double() for t in tensors], "torch")
    for backend in others(case.op, device, dtype):
        for got, want in zip(compute(case, tensors, backend), exact, strict=True):
            assert (got.dtype, got.shape) == (dtype, want.shape)
            if want.numel():
                largest = max(want.abs().max().item(), 1.0)
                assert (got.double() - want).abs().max() <= TOLERANCE[dtype] * largest, backend


@pytest.mark.parametrize(
    "case", [c for c in CASES if "130" in str(c) or "7x41" in str(c) or "5x7" in str(c)], ids=str
)
@pytest.mark.parametrize("device", DEVICES)
def test_strides_do_not_matter(case, device):
    for backend in others(case.op, device, torch.float32):
        tensors = tensors_of(case, torch.float32, device=device)
        gaps = [
            torch.stack((t, torch.full_like(t, torch.nan)), 0 if t.dim() < 2 else -1)
            for t in tensors
        ]
        strided = [g[0] if t.dim() < 2 else g[..., 0] for t, g in zip(tensors, gaps, strict=True)]
        for got, want in zip(
            compute(case, strided, backend), compute(case, tensors, backend), strict=True
        ):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.thorough(keep=107)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=str
)  # of which some loops have their own
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_number_of_threads_gives_the_same_bits(case, dtype):
    before = torch.get_num_threads()
    for backend in others(case.op):
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(compute(case, tensors_of(case, dtype), backend))
        torch.set_num_threads(before)
        assert all(
            torch.equal(a, b)
            for other in results[1:]
            for a, b in zip(results[0], other, strict=True)
        ), backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # 1e4 is beyond float16
@pytest.mark.parametrize(
    "case",
    [
        c
        for c in CASES
        if c.op in ("gelu", "swiglu", "geglu", "attention", "layer_norm")
        and ("7x41" in str(c) or "5x7" in str(c))
    ],
    ids=str,
)
@pytest.mark.parametrize("device", DEVICES)
def test_large_values_stay_finite(case, dtype, device):
    tensors = tensors_of(case, dtype, 100.0, device)
    exact = compute(case, [t.double() for t in tensors], "torch")
    for backend in others(case.op, device, dtype):
        got = compute(case, tensors, backend)
        assert all(tensor.isfinite().all() for tensor in got)
        # scores of 1e4 have an absolute error of 1e-3 in float32 before the exponential
        assert (got[0].double() - exact[0]).abs().max() <= 3 * TOLERANCE[torch.bfloat16] * exact[
            0
        ].abs().max()


@pytest.mark.parametrize("op", ["gelu", "swiglu", "layer_norm", "rms_norm", "attention"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_nan_and_infinity_are_not_hidden(op, value, dtype, device):
    case = next(c for c in CASES if c.op == op)
    for backend in others(op, device, dtype):
        tensors = tensors_of(case, dtype, device=device)
        tensors[0].view(-1)[3] = value
        got = compute(case, tensors, backend)[0]
        if op == "attention":  # torch's fused kernel hides a NaN in q
            assert not got.isfinite().all()
        else:  # on the CPU: torch's rms_norm on a GPU makes NaN of a whole row with an infinity
            expected = compute(case, [t.cpu() for t in tensors], "torch")[0]
            assert torch.equal(got.isfinite().cpu(), expected.isfinite())


@pytest.mark.thorough(keep=107)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_do_not_depend_on_what_memory_held(case, dtype, device):
    """Fresh memory is filled with NaN: no operator reads what it has not written."""
    malloc_fills(0x100)  # with bytes of 0xff: what operators take from the allocator themselves
    try:
        assert torch.empty(5000).isnan().all()
        torch.use_deterministic_algorithms(
            True, warn_only=True
        )  # which fills what they get from torch.empty
        assert torch.empty(3, device=device).isnan().all()
        for backend in others(case.op, device, dtype):
            for tensor in compute(case, tensors_of(case, dtype, device=device), backend):
                assert tensor.isfinite().all(), backend
    finally:
        torch.use_deterministic_algorithms(False)
        malloc_fills(0)


def malloc_fills(pattern: int) -> None:
    """Has glibc fill what it gives out with the inverse of the lowest byte of `pattern`; 0: no
    longer."""
    assert ctypes.CDLL(None).mallopt(-6, pattern)  # M_PERTURB


ROWS = ["2x3-7", "1x0-5", "4x2050-2050", "3x40-33"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_sum", [False, True])
@pytest.mark.parametrize("size", ROWS)
@pytest.mark.parametrize("device", DEVICES)
def test_cross_entropy_passes(size, with_sum, dtype, device):
    shape, _, real = size.partition("-")
    rows, cols = map(int, shape.split("x"))
    real = min(int(real), cols)
    logits = tensors_of(Case("", "", ((rows, cols),), lambda: ()), dtype, 3.0, device)[0]
    column = torch.arange(rows, device=device) * 2 - 1  # on another rank, here, beyond
    numbers = torch.rand(4, rows, dtype=torch.float64, device=device)
    reference = ops.cross_entropy(logits.double(), "torch")
    exact = reference.statistics(logits.double(), column, real, with_sum)
    gradient = torch.empty_like(logits.double())
    reference.gradient_(gradient, logits.double(), column, numbers, real)
    for backend in others("cross_entropy", device, dtype):
        passes = ops.cross_entropy(logits, backend)
        got = passes.statistics(logits, column, real, with_sum)
        own = logits.clone()
        other = torch.empty_like(logits)
        torch.testing.assert_close(got.double(), exact, rtol=3e-6, atol=1e-5)
        passes.gradient_(own, own, column, numbers.to(got.dtype), real)
        passes.gradient_(other, logits, column, numbers.to(got.dtype), real)
        assert torch.equal(own, other)
        torch.testing.assert_close(
            own.double(), gradient, rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=1e-6
        )
        assert (own[:, real:] == 0).all()


OTHER_ARGUMENTS = {
    "quantize": {"bits": 8},
    "few_rows_linear": {"weight": torch.ones(4, 1), "bias": None},
    "next_token_attention": {"keys": None, "values": None, "positions": None, "how": None},
}
"""Arguments of operations that CASES does not have, besides the first."""


def test_every_op_takes_a_backend():
    for op in registry.ops():
        case = next((c for c in CASES if c.op == op), None)
        function = partial(getattr(ops, op), **OTHER_ARGUMENTS.get(op, {}))
        with pytest.raises(ConfigError, match="unknown backend of"):
            function(torch.ones(1, 1), backend="abacus") if case is None else compute(
                case, tensors_of(case, torch.float32), "abacus"
            )
