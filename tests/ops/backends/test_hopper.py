"""Attention in CUDA C++ for Hopper, which takes the plain cases and leaves the others to Triton."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridpar import native, ops
from hybridpar.ops.attention import AttentionCall, AttentionMask
from hybridpar.ops.backends import hopper, registry
from hybridpar.ops.dropout import DropoutMask

(ROW,) = (row for row in registry.backends("attention") if row.name == "cuda")
REASON = ROW.unsupported("cuda", torch.bfloat16)
needs_hopper = pytest.mark.skipif(REASON is not None, reason=str(REASON))
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
"""Norm of the error over that of the result: both round the probabilities and the result."""


def packed(b: int, heads: tuple[int, int], s: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v as a model has them, heads within positions, in one buffer."""
    n, n_kv = heads
    g = torch.Generator("cuda").manual_seed(s + d)
    x = torch.randn(b, s, n + 2 * n_kv, d, device="cuda", generator=g).to(dtype)
    return [t.transpose(1, 2) for t in x.split([n, n_kv, n_kv], 2)]


def forward(
    q: Tensor, k: Tensor, v: Tensor, kv_head: list[int], causal: bool
) -> tuple[Tensor, Tensor]:
    """The memory that its results go to holds NaNs before."""
    b, n, s, d = q.shape
    poison = (
        q.new_full((b, s, n, d), float("nan")),
        q.new_full((b, n, s), float("nan"), dtype=torch.float32),
    )
    del poison
    return torch.ops.hybridpar.attention_hopper(q, k, v, kv_head, d**-0.5, causal)


def check(q: Tensor, k: Tensor, v: Tensor, kv_head: list[int], causal: bool) -> None:
    out, lse = forward(q, k, v, kv_head, causal)
    for sample in range(q.shape[0]):
        for head, kv in enumerate(kv_head):
            scores = q[sample, head].double() @ k[sample, kv].double().T * q.shape[-1] ** -0.5
            if causal:
                scores = scores.masked_fill(
                    torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf")
                )
            exact = scores.softmax(-1) @ v[sample, kv].double()
            assert (out[sample, :, head] - exact).norm() <= TOLERANCE[q.dtype] * exact.norm(), (
                sample,
                head,
            )
            torch.testing.assert_close(
                lse[sample, head].double(), scores.logsumexp(-1), rtol=0, atol=1e-4
            )
    again = forward(q, k, v, kv_head, causal)
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("d", hopper.HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s", [1, 2, 63, 64, 65, 127, 128, 129, 200, 1000, 2048])
def test_against_float64(dtype, d, causal, s):
    check(*packed(2, (5, 3), s, d, dtype), [2, 0, 1, 1, 2], causal)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("d", hopper.HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_more_work_than_the_gpu_has_multiprocessors(d, causal):
    check(*packed(3, (40, 8), 650, d, torch.bfloat16), [i // 5 for i in range(40)], causal)


@pytest.mark.gpu
@needs_hopper
def test_keys_beyond_what_the_cache_holds_are_taken_in_groups_of_heads():
    check(*packed(1, (6, 6), 16384 + 70, 128, torch.bfloat16), list(range(6)), True)


@pytest.mark.gpu
@needs_hopper
def test_any_strides():
    dense = [t.contiguous() for t in packed(2, (2, 2), 150, 64, torch.bfloat16)]
    want = forward(*dense, [0, 1], True)[0]
    shifted = [
        torch.empty(t.numel() + 1, device="cuda", dtype=t.dtype)[1:].view_as(t).copy_(t)
        for t in dense
    ]
    gaps = [torch.stack((t, t), -1)[..., 0] for t in dense]
    odd = [torch.nn.functional.pad(t, (0, 3))[..., :64] for t in dense]
    for tensors in (shifted, gaps, odd):
        assert torch.equal(forward(*tensors, [0, 1], True)[0], want)
    q, k, v = dense
    one = [t[:, :1].expand(-1, 2, -1, -1) for t in (k, v)]
    assert torch.equal(forward(q, *one, [0, 1], True)[0], forward(q, k, v, [0, 0], True)[0])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_against_triton(causal, padded):
    tensors = packed(2, (4, 2), 300, 64, torch.bfloat16)
    mask = torch.arange(600, device="cuda").view(2, 300) % 5 != 3 if padded else None
    results = []
    for backend in ("cuda", "triton"):
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = ops.masked_attention(
            *leaves, AttentionMask(causal, padding_mask=mask), backend=backend
        )
        results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out) + tensors[0])])
    for got, want in zip(*results, strict=True):
        assert (got - want).double().norm() <= 1e-2 * want.double().norm()


@pytest.mark.gpu
@needs_hopper
def test_refuses_what_it_cannot_take():
    q = torch.zeros(1, 2, 8, 64, device="cuda", dtype=torch.bfloat16)
    cases = [
        ((q.float(), q.float(), q.float(), [0, 1], 1.0, True), "needs bfloat16 or float16"),
        ((q[..., :32], q[..., :32], q[..., :32], [0, 1], 1.0, True), "d 64 or 128, got d 32"),
        ((q, q, q[:, :1], [0, 1], 1.0, True), "k and v"),
        ((q, q, q, [0], 1.0, True), "an entry for each"),
        ((q, q, q, [0, 2], 1.0, True), "a head that is not there"),
        ((q, q, q, [0, 1], 0.0, True), "positive"),
    ]
    for arguments, message in cases:
        with pytest.raises(RuntimeError, match=message):
            torch.ops.hybridpar.attention_hopper(*arguments)


def test_says_where_it_cannot_run():
    assert ROW.unsupported("cpu", torch.bfloat16) == "runs on a GPU, not on cpu"
    assert ROW.unsupported("cuda", torch.float32) == "has no torch.float32 version"


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
@pytest.mark.parametrize(
    ("d", "padded", "threshold", "taken"),
    [
        (64, False, 0, "hopper"),
        (128, False, 0, "hopper"),
        (80, False, 0, "triton"),
        (64, True, 0, "triton"),
        (64, False, 9, "triton"),
    ],
)
def test_takes_plain_cases_and_leaves_the_others(monkeypatch, d, padded, threshold, taken):
    class Called:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, operator: str) -> object:
            return lambda *arguments: (self.name, operator, arguments)

    monkeypatch.setattr(torch.ops, "hybridpar", Called("hopper"))
    monkeypatch.setattr(torch.ops, "hybridpar_triton", Called("triton"))
    q = torch.zeros(1, 2, 3, d, dtype=torch.bfloat16)
    real = torch.ones(1, 3, dtype=torch.bool) if padded else None
    drops = DropoutMask(1, 2, None, threshold, 1.5, stride=3, start=5)
    call = AttentionCall(AttentionMask(True, real), [0, 1], drops)
    library, _, arguments = hopper.HopperPasses().forward(q, q, q, call)
    assert library == taken
    of_triton = (real, None, None, [0, 1], d**-0.5, 0.0, True, 0, 1, 2, None, threshold, 1.5, 5)
    assert arguments[3:] == (([0, 1], d**-0.5, True) if taken == "hopper" else of_triton)
    if taken == "hopper":
        first = torch.zeros(1, 3, dtype=torch.int32)
        limits = ({"window": 2}, {"first_key": first}, {"positions": first[0]})
        calls = [replace(call, mask=AttentionMask(True, **limit)) for limit in limits]
        for limited in (*calls, replace(call, softcap=30.0)):
            library, _, arguments = hopper.HopperPasses().forward(q, q, q, limited)
            assert library == "triton"


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_shapes_while_tracing():
    registry.select("attention", "cpp")
    q = torch.empty(2, 4, 7, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 2, 7, 64, dtype=torch.bfloat16, device="meta")
    out, lse = torch.ops.hybridpar.attention_hopper(q, k, k, [0, 0, 1, 1], 0.5, True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (
        (2, 7, 4, 64),
        torch.bfloat16,
        (2, 4, 7),
        torch.float32,
    )
