"""Attention split by heads equals attention on whole tensors, for even and uneven heads and shared
key-value heads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from einops import rearrange, repeat
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from tensor_parallel import TOLERANCE, check_gradients, fill, leaf, traffic, values
from torch import Tensor

from hybridpar.errors import ConfigError
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.nn import HeadLayout, ParallelAttention, named_placements, reduce_shared_gradients
from hybridpar.nn.attention import QKNorm
from hybridpar.ops.backends import libraries, registry
from hybridpar.ops.split_qkv import split_heads
from hybridpar.random import RandomKey

HEAD_DIM = 4
KEY = RandomKey.of(seed=3, step=1, sample=5)


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    causal: bool = True
    rotary_base: float | None = None
    padding: bool = False
    bias: bool = True
    batch: int = 2
    rotary_fraction: float = 1.0
    window: int | None = None
    head_dim: int = HEAD_DIM
    qk_norm: QKNorm | None = None
    softcap: float = 0.0
    scale: float | None = None
    qkv_bias: bool | None = None


CASES = [
    Case(4, 4),
    Case(5, 5, rotary_base=100.0),
    Case(5, 5, causal=False, padding=True, bias=False),
    Case(4, 2, rotary_base=100.0),
    Case(4, 1),
    Case(6, 3, causal=False, padding=True),
    Case(6, 2, padding=True),
    Case(9, 3),
    Case(5, 1),
    Case(4, 2, batch=0),
    Case(5, 5, rotary_base=100.0, rotary_fraction=0.5),
    Case(4, 2, rotary_base=100.0, rotary_fraction=0.5, batch=0),
    Case(5, 5, window=2),
    Case(4, 2, padding=True, window=3),
    Case(5, 1, rotary_base=100.0, head_dim=6, bias=False, qkv_bias=True, scale=0.3),
    Case(6, 3, rotary_base=100.0, qk_norm=QKNorm("head", 1e-2), softcap=0.5),
    Case(6, 2, rotary_base=100.0, qk_norm=QKNorm("full", 1e-2)),
    Case(9, 3, qk_norm=QKNorm("full", 1e-2, zero_centered=True), padding=True, softcap=2.0),
    Case(4, 1, qk_norm=QKNorm("head", 1e-2, zero_centered=True), head_dim=3, causal=False),
    Case(4, 2, qk_norm=QKNorm("full"), batch=0),
]


def make(case: Case, axis: Axis, dropout: float = 0.0) -> ParallelAttention:
    return ParallelAttention(
        case.heads * HEAD_DIM,
        case.heads,
        axis,
        num_kv_heads=case.kv_heads,
        causal=case.causal,
        window=case.window,
        bias=case.bias,
        rotary_base=case.rotary_base,
        rotary_fraction=case.rotary_fraction,
        head_dim=case.head_dim,
        qk_norm=case.qk_norm,
        softcap=case.softcap,
        scale=case.scale,
        qkv_bias=case.qkv_bias,
        attention_dropout=dropout,
        name="blocks.0.attention",
        dtype=torch.float64,
    )


def reference(x: Tensor, mask: Tensor | None, whole: dict[str, Tensor], case: Case) -> Tensor:
    """Attention by its formula, head by head in the order of the global weight."""
    m = case.heads // case.kv_heads
    qkv = x @ whole["qkv.weight"].T + whole.get("qkv.bias", 0.0)
    qkv = rearrange(qkv, "b s (g slot d) -> b g slot s d", g=case.kv_heads, d=case.head_dim)
    q = rearrange(qkv[:, :, :m], "b g m s d -> b (g m) s d")
    k = qkv[:, :, m]
    v = qkv[:, :, m + 1]
    if case.qk_norm is not None:
        q, k = (
            normed(t, whole[f"{name}_norm.weight"], case.qk_norm)
            for name, t in (("q", q), ("k", k))
        )
    k, v = (repeat(t, "b g s d -> b (g m) s d", m=m) for t in (k, v))
    if case.rotary_base is not None:
        r = int(case.head_dim * case.rotary_fraction)
        q, k = (
            torch.cat((rotate(t[..., :r], case.rotary_base), t[..., r:]), dim=-1) for t in (q, k)
        )
    s = x.shape[1]
    visible = (
        torch.ones(s, s, dtype=torch.bool).tril()
        if case.causal
        else torch.ones(s, s, dtype=torch.bool)
    )
    if case.window is not None:
        visible = visible.triu(1 - case.window)
    if mask is not None:
        visible = visible & mask[:, None, None, :]
    scores = q @ k.transpose(-1, -2) * (case.scale or case.head_dim**-0.5)
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    y = rearrange(scores.softmax(-1) @ v, "b n s d -> b s (n d)")
    return y @ whole["out.weight"].T + whole.get("out.bias", 0.0)


def normed(x: Tensor, weight: Tensor, norm: QKNorm) -> Tensor:
    """RMSNorm over each head, or over all features of a position. Shapes: x [b, n, s, d]."""
    joined = x if norm.kind == "head" else rearrange(x, "b n s d -> b 1 s (n d)")
    scale = weight + 1 if norm.zero_centered else weight
    y = joined / (joined.square().mean(-1, keepdim=True) + norm.eps).sqrt() * scale
    return y if norm.kind == "head" else rearrange(y, "b 1 s (n d) -> b n s d", n=x.shape[1])


def rotate(x: Tensor, base: float) -> Tensor:
    """Pairs (i, i + d/2) as complex numbers, turned by position * base^(-2i/d)."""
    d = x.shape[-1]
    s = x.shape[-2]
    angle = torch.arange(s, dtype=x.dtype)[:, None] * base ** (
        -torch.arange(0, d, 2, dtype=x.dtype) / d
    )
    turned = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat((turned.real, turned.imag), dim=-1)


def check(case: Case, axis: Axis) -> None:
    h = case.heads * HEAD_DIM
    layer = make(case, axis)
    whole = fill(layer, axis)
    x = leaf("x", case.batch, 5, h)
    x_ref = leaf("x", case.batch, 5, h)
    mask = torch.arange(5) < torch.tensor([[3], [5]]) if case.padding else None
    calls = 2 if case.qk_norm and case.qk_norm.kind == "full" else 1
    with traffic(axis, all_reduce=calls):
        y = layer(x, mask)
    y_ref = reference(x_ref, mask, whole, case)
    torch.testing.assert_close(y, y_ref, **TOLERANCE)
    with traffic(axis, all_reduce=calls):
        y.backward(values("dy", *y.shape))
    y_ref.backward(values("dy", *y.shape))
    torch.testing.assert_close(x.grad, x_ref.grad, **TOLERANCE)
    check_gradients(layer, whole, axis)

    # dropout: the same heads get the same masks whoever computes them
    split = make(case, axis, dropout=0.3)
    alone = make(case, Axis("tp"), dropout=0.3)
    fill(split, axis), fill(alone, Axis("tp"))
    dropped = split(x, mask, KEY)
    torch.testing.assert_close(dropped, alone(x, mask, KEY), **TOLERANCE)
    if case.batch:
        assert not torch.allclose(dropped, y)


def shared_rows_take_one_collective(axis: Axis) -> None:
    layer = torch.nn.ModuleList([make(Case(4, 2), axis), make(Case(4, 1), axis)])
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    shared = [
        placement for _, _, placement in named_placements(layer) if len(placement.shared_index())
    ]
    assert len(shared) == (
        4 if axis.size > 2 else 2
    )  # two kv heads over two ranks: each has one to itself
    with traffic(axis, all_reduce=1):
        reduce_shared_gradients(
            [(p.grad, placement) for _, p, placement in named_placements(layer)], axis
        )
    for _, p, placement in named_placements(layer):
        if placement.shard is not None:
            holders = placement.shard.holders(placement.shape[placement.shard.dim])
            expected = holders[placement.shard.index(axis.rank)].double()
            rows = p.grad.movedim(placement.shard.dim, 0).reshape(len(expected), -1)
            assert torch.equal(rows, expected[:, None].expand_as(rows))
    whole_groups = make(Case(4, 4), axis)
    with traffic(axis):
        reduce_shared_gradients(
            [(p, placement) for _, p, placement in named_placements(whole_groups)], axis
        )


def run_cases(tp: int) -> None:
    axis = ProcessGrid(tp=tp).tp
    for case in CASES:
        if case.heads >= tp:
            try:
                check(case, axis)
            except Exception as error:
                raise AssertionError(f"{case} at tp {tp}: {error}") from error
    if tp > 1:
        shared_rows_take_one_collective(axis)


def test_attention_on_one_process() -> None:
    run_cases(1)


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_attention_split(tp: int) -> None:
    run_ranks(run_cases, tp, tp)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.data())
def test_layout(kv_heads: int, q_per_group: int, head_dim: int, data: st.DataObject) -> None:
    """Ranks together hold every row; each query head is on one rank, beside its group's key and
    value."""
    heads = kv_heads * q_per_group
    tp = data.draw(st.integers(1, heads))
    layout = HeadLayout(heads * head_dim, heads, kv_heads, tp)
    shard = layout.qkv_shard()
    rows = (heads + 2 * kv_heads) * head_dim
    holders = rearrange(shard.holders(rows), "(g slot d) -> g slot d", g=kv_heads, d=head_dim)
    assert (holders[:, :q_per_group] == 1).all()
    assert (holders[:, q_per_group:] >= 1).all()
    assert torch.equal(holders[:, -1], holders[:, -2])
    for rank in range(tp):
        groups = layout.group_heads(rank)
        assert (
            sum(b - a for a, b in groups.values()) == layout.heads[rank][1] - layout.heads[rank][0]
        )
        slots = [
            g * (q_per_group + 2) + slot
            for g, (a, b) in groups.items()
            for slot in (*(i - g * q_per_group for i in range(a, b)), q_per_group, q_per_group + 1)
        ]
        expected = [slot * head_dim + i for slot in slots for i in range(head_dim)]
        assert shard.index(rank).tolist() == expected


def test_whole_uniform_groups_are_views() -> None:
    layer = make(Case(4, 4), Axis("tp"))
    qkv = torch.randn(2, 5, 3 * 16)
    heads = split_heads(qkv, layer.group_sizes)
    assert all(t.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr() for t in heads)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_heads": 3}, "num_heads = 3: must divide the hidden size 16; try 1, 2, 4, 8, 16"),
        (
            {"num_heads": 4, "num_kv_heads": 3},
            "num_kv_heads = 3: must divide num_heads 4; try 1, 2, 4",
        ),
        ({"num_heads": 4, "num_kv_heads": 0}, "num_kv_heads = 0"),
        (
            {"num_heads": 16, "rotary_base": 1e4},
            "rotary_fraction = 1.0: rotary embeddings need an even number of features; of a "
            "head's 1 (hidden_size / num_heads) this takes 1; try a larger hidden_size",
        ),
        *[
            (
                {"num_heads": 4, "rotary_base": 1e4, "rotary_fraction": fraction},
                f"rotary_fraction = {fraction}: ",
            )
            for fraction in (-0.5, 0.0, 0.3, 1.5, float("nan"), float("inf"))
        ],
    ],
)
def test_counts_that_do_not_fit(kwargs: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelAttention(16, axis=Axis("tp"), **kwargs)
    assert message in str(caught.value)


def test_more_ranks_than_heads() -> None:
    with pytest.raises(ConfigError, match=r"parallel.tp = 5: .* num_heads = 4: .*; try 4"):
        HeadLayout(16, 4, 4, 5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_on_a_gpu_with_and_without_triton(
    triton: bool, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding, rotary positions, shared keys, dropout: the same output and gradients as on the
    CPU."""
    if not triton:
        monkeypatch.setattr(libraries, "_register_triton", lambda: "cannot be imported (a test)")
    case = Case(6, 3, rotary_base=100.0, padding=True, rotary_fraction=0.5)
    registry._selected.cache_clear()
    try:
        assert (
            registry.select("attention", "auto", "cuda", torch.bfloat16).name == "torch"
        ) is not triton
        results = []
        for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32)):
            layer = make(case, Axis("tp"), dropout)
            fill(layer, Axis("tp"))
            layer.to(device, dtype)
            x = values("x", 2, 5, 24).to(device, dtype).requires_grad_()
            mask = torch.arange(5, device=device) < torch.tensor([[3], [5]], device=device)
            y = layer(x, mask, KEY)
            y.backward(values("dy", *y.shape).to(y))
            results.append([y, x.grad, *(p.grad for p in layer.parameters())])
        for on_cpu, on_gpu in zip(*results, strict=True):
            torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-3, atol=1e-3)
    finally:
        registry._selected.cache_clear()
