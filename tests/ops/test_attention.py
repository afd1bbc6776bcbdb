import importlib
import math
from dataclasses import replace

import pytest
import torch

from hybridpar import native, random
from hybridpar.errors import ConfigError
from hybridpar.ops import attention, dropout, masked_attention
from hybridpar.ops.attention import AttentionCall, AttentionMask, AttentionOptions
from hybridpar.ops.dropout import KEEP_ALL, DropoutSpec
from hybridpar.random import RandomKey

KEY, SITE = RandomKey.of(5, 6, 70), random.site("test.attention")
needs_native = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


def heads(b, n, n_kv, s, d, dtype=torch.float64):
    g = torch.Generator().manual_seed(s)
    shapes = [(b, m, s, d) for m in (n, n_kv, n_kv)]
    return [
        torch.randn(x, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for x in shapes
    ]


def by_loops(q, k, v, *, causal, padding_mask=None, kv_index=None, keep=None):
    """One query at a time. `keep` [b, n, s, s] multiplies the softmax."""
    b, n, s, d = q.shape
    kv_index = kv_index or [i * k.shape[1] // n for i in range(n)]
    rows = []
    for i, h, at in torch.cartesian_prod(
        torch.arange(b), torch.arange(n), torch.arange(s)
    ).tolist():
        keys = [
            j
            for j in range(s)
            if (not causal or j <= at) and (padding_mask is None or padding_mask[i, j])
        ]
        if not keys:
            rows.append(torch.zeros(d, dtype=q.dtype))
            continue
        weights = (k[i, kv_index[h], keys] @ q[i, h, at] / math.sqrt(d)).softmax(-1)
        if keep is not None:
            weights = weights * keep[i, h, at, keys]
        rows.append(weights @ v[i, kv_index[h], keys])
    return torch.stack(rows).view(b, n, s, d)


PADDING = torch.tensor(
    [[True] * 7, [True] * 4 + [False] * 3, [False] * 3 + [True] * 4, [False] * 7]
)


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpp", marks=needs_native)])
def test_soft_caps_and_scales_against_the_formula(backend):
    q, k, v = heads(2, 4, 2, 7, 6)
    options = AttentionOptions(scale=0.7, softcap=1.5)
    out = masked_attention(q, k, v, AttentionMask(True), options, backend=backend)
    wide_k, wide_v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = 1.5 * torch.tanh(0.7 * (q @ wide_k.mT) / 1.5)
    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(later, -math.inf).softmax(-1) @ wide_v
    torch.testing.assert_close(out, expected)
    seed = torch.randn(out.shape, dtype=out.dtype)
    for got, want in zip(
        torch.autograd.grad(out, (q, k, v), seed),
        torch.autograd.grad(expected, (q, k, v), seed),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.thorough(keep=8)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(
    ("n", "n_kv", "kv_index"),
    [
        (3, 3, None),
        (4, 2, None),
        (5, 1, None),
        (5, 2, [0, 0, 0, 1, 1]),
        (2, 3, [2, 0]),
        (3, 3, [2, 1, 0]),
    ],
)
def test_against_loops_with_gradients(causal, padded, p, n, n_kv, kv_index):
    tensors = heads(4, n, n_kv, 7, 6)
    mask = PADDING if padded else None
    out = masked_attention(
        *tensors,
        AttentionMask(causal, padding_mask=mask),
        AttentionOptions(kv_index=kv_index, dropout=DropoutSpec(p, KEY, SITE)),
    )
    keep = dropout(torch.ones(4, n, 7, 7, dtype=torch.float64), DropoutSpec(p, KEY, SITE))
    expected = by_loops(*tensors, causal=causal, padding_mask=mask, kv_index=kv_index, keep=keep)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    seed = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, tensors, seed),
        torch.autograd.grad(expected, tensors, seed),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_rows_without_keys_are_zero_and_have_no_gradient(dtype, causal, p):
    q, k, v = heads(4, 2, 2, 7, 8, dtype)
    out = masked_attention(
        q,
        k,
        v,
        AttentionMask(causal, padding_mask=PADDING),
        AttentionOptions(dropout=DropoutSpec(p, KEY, SITE)),
    )
    assert out.dtype == dtype
    blind = torch.zeros(4, 7, dtype=torch.bool)
    blind[3] = True
    if causal:
        blind[2, :3] = True
    assert (out.transpose(1, 2)[blind] == 0).all()
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    assert (q.grad.transpose(1, 2)[blind] == 0).all()
    assert (k.grad.transpose(1, 2)[~PADDING] == 0).all()
    assert (v.grad.transpose(1, 2)[~PADDING] == 0).all()


@pytest.mark.thorough(keep=12)
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    ("n", "n_kv", "kv_index"), [(3, 3, None), (4, 2, None), (5, 1, None), (5, 2, [0, 0, 0, 1, 1])]
)
def test_fewer_queries_than_keys_are_the_last_ones(n, n_kv, kv_index, queries, padded, backend):
    q, k, v = heads(4, n, n_kv, 7, 6)
    options = AttentionOptions(kv_index)
    for causal in (True, False):
        mask = AttentionMask(causal, PADDING if padded else None)
        out = masked_attention(q[:, :, -queries:], k, v, mask, options, backend=backend)
        expected = masked_attention(q, k, v, mask, options, backend=backend)[:, :, -queries:]
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="dropout needs as many queries as keys"):
        masked_attention(
            q[:, :, :queries],
            k,
            v,
            AttentionMask(True),
            AttentionOptions(kv_index=kv_index, dropout=DropoutSpec(0.5, KEY)),
        )


def test_one_query_takes_grouped_keys_as_they_are(monkeypatch):
    """None is copied for each query head."""
    q, k, v = heads(2, 6, 2, 7, 8)
    seen = []
    kernel = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, *a, **o: (seen.append((k.data_ptr(), k.shape)), kernel(q, k, v, *a, **o))[
            1
        ],
    )
    attention(q[:, :, -1:], k, v, causal=True)
    assert seen == [(k.data_ptr(), k.shape)]


def test_padding_does_not_leak():
    q, k, v = (t.detach() for t in heads(4, 2, 2, 7, 8))
    out = masked_attention(q, k, v, AttentionMask(False, padding_mask=PADDING))
    noise = torch.where(PADDING[:, None, :, None], 0.0, 100.0)
    assert torch.equal(
        masked_attention(q, k + noise, v - noise, AttentionMask(False, padding_mask=PADDING)), out
    )


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_ranks_and_micro_batches_compute_parts_of_the_whole(p):
    q, k, v = (t.detach() for t in heads(4, 5, 5, 7, 6))
    whole = masked_attention(
        q, k, v, AttentionMask(True), AttentionOptions(dropout=DropoutSpec(p, KEY, SITE))
    )
    for a, b in ((0, 1), (1, 4)):
        for start, stop in ((0, 2), (2, 5)):
            part = masked_attention(
                *(t[a:b, start:stop] for t in (q, k, v)),
                AttentionMask(True),
                AttentionOptions(
                    dropout=DropoutSpec(p, RandomKey.of(5, 6, 70 + a), SITE), head_start=start
                ),
            )
            torch.testing.assert_close(part, whole[a:b, start:stop], rtol=1e-13, atol=1e-13)


def test_evaluation_has_no_dropout():
    q, k, v = heads(2, 2, 2, 5, 4)
    plain = attention(q, k, v, causal=True)
    assert torch.equal(
        masked_attention(
            q, k, v, AttentionMask(True), AttentionOptions(dropout=DropoutSpec(0.5, None, SITE))
        ),
        plain,
    )
    assert not torch.equal(
        masked_attention(
            q, k, v, AttentionMask(True), AttentionOptions(dropout=DropoutSpec(0.5, KEY, SITE))
        ),
        plain,
    )


def test_a_rank_without_heads():
    q, k, v = heads(2, 0, 0, 5, 4)
    assert masked_attention(
        q, k, v, AttentionMask(True), AttentionOptions(dropout=DropoutSpec(0.5, KEY))
    ).shape == (2, 0, 5, 4)


@pytest.mark.thorough
def test_compiles():
    compiled = torch.compile(masked_attention, fullgraph=True, backend="aot_eager")
    tensors = heads(4, 4, 2, 7, 6)
    for settings in (
        (AttentionMask(causal=True),),
        (
            AttentionMask(causal=False, padding_mask=PADDING),
            AttentionOptions(dropout=DropoutSpec(0.5, KEY)),
        ),
    ):
        want = masked_attention(*tensors, *settings)
        torch.testing.assert_close(compiled(*tensors, *settings), want)


def test_bad_input():
    q, k, v = (torch.ones(2, n, 3, 4) for n in (4, 2, 2))
    with pytest.raises(ValueError, match=r"expected q \[b, n, s, d\]"):
        attention(q[0], k[0], v[0], causal=True)
    with pytest.raises(ValueError, match=r"expected q \[b, n, s, d\]"):
        attention(q, k, v[:, :1], causal=True)
    with pytest.raises(ValueError, match="q and k must have the same samples"):
        attention(q, k[:, :, :2], v[:, :, :2], causal=True)
    with pytest.raises(ValueError, match="q and k must have the same samples"):
        attention(q, k[..., :3], v[..., :3], causal=True)
    with pytest.raises(ValueError, match="unless kv_index is given"):
        attention(q[:, :3], k, v, causal=True)
    with pytest.raises(ValueError, match="kv_index must have 4 entries from 0 to 1"):
        masked_attention(q, k, v, AttentionMask(True), AttentionOptions(kv_index=[0, 1, 2, 0]))
    with pytest.raises(ValueError, match="padding_mask must be bool"):
        masked_attention(q, k, v, AttentionMask(True, padding_mask=torch.ones(2, 3)))
    with pytest.raises(ValueError, match="padding_mask must be bool"):
        masked_attention(
            q, k, v, AttentionMask(True, padding_mask=torch.ones(2, 4, dtype=torch.bool))
        )
    with pytest.raises(ConfigError, match="less than 1"):
        masked_attention(
            q, k, v, AttentionMask(True), AttentionOptions(dropout=DropoutSpec(1.0, KEY))
        )
    with pytest.raises(ConfigError, match="less than 1"):
        masked_attention(
            q, k, v, AttentionMask(True), AttentionOptions(dropout=DropoutSpec(-1.0, KEY))
        )


@pytest.mark.parametrize(
    ("n", "n_kv", "d", "changes", "taken"),
    [
        (4, 4, 16, {}, True),
        (4, 2, 16, {}, True),
        (4, 4, 12, {}, False),
        (4, 2, 16, {"kv_index": [0, 0, 0, 1]}, False),
        (4, 4, 16, {"mask": AttentionMask(True, PADDING)}, False),
        (4, 4, 16, {"dropout": KEEP_ALL._replace(threshold=1)}, False),
    ],
)
def test_torchs_fused_kernel_takes_plain_cases_and_leaves_the_others(
    monkeypatch, n, n_kv, d, changes, taken
):
    module = importlib.import_module("hybridpar.ops.attention")
    left = []
    monkeypatch.setattr(
        module, "resolve", lambda op, backend, q: lambda *args: left.append(backend)
    )
    call = AttentionCall(AttentionMask(True), [i * n_kv // n for i in range(n)])
    call = replace(call, **changes)
    tensors = heads(4, n, n_kv, 7, d)
    out = module.attention_sdpa(*tensors, call)
    assert left == [] if taken else left == ["triton"]
    if taken:
        torch.testing.assert_close(out, by_loops(*tensors, causal=True), rtol=1e-12, atol=1e-12)
    torch.use_deterministic_algorithms(True)
    try:
        module.attention_sdpa(*tensors, call)
    finally:
        torch.use_deterministic_algorithms(False)
    assert left[-1] == "triton"


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpp", marks=needs_native)])
def test_compiles_once_for_all_steps(backend):
    graphs = []

    def count(module, _inputs):
        graphs.append(module)
        return module.forward

    def function(q, k, v, padding, key):
        return masked_attention(
            q,
            k,
            v,
            AttentionMask(True, padding_mask=padding),
            AttentionOptions(dropout=DropoutSpec(0.3, key, SITE)),
            backend=backend,
        )

    compiled = torch.compile(function, fullgraph=True, backend=count)
    for step in range(2):
        tensors = heads(2, 4, 2, 7, 8)
        key = RandomKey.of(1, step, 8 * step)
        outs = [f(*tensors, PADDING[:2], key).sin() for f in (compiled, function)]
        assert torch.equal(*outs)
        for got, expected in zip(
            *(torch.autograd.grad(y.sum(), tensors) for y in outs), strict=True
        ):
            assert torch.equal(got, expected)
    assert len(graphs) == 1
