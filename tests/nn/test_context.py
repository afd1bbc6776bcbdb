"""Context parallelism: which tokens a rank has, that their dropout is that of all rows, and what
attention sends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops.places import places
from ranks import run_ranks
from tensor_parallel import TOLERANCE, traffic, values
from torch import Tensor

from hybridpar import native, ops, random
from hybridpar.config import KernelsConfig
from hybridpar.errors import ConfigError
from hybridpar.grid import Axis, ProcessGrid
from hybridpar.nn import Dropout, ParallelAttention, RMSNorm
from hybridpar.nn.context import ALONE, Context, ContextComm, document_ranges, token_ranges
from hybridpar.nn.context_attention import HeadSplit, context_attention
from hybridpar.nn.placement import named_placements, split_sizes
from hybridpar.nn.sequence import SequencePart
from hybridpar.ops.attention import AttentionMask, AttentionOptions, SavedAttention
from hybridpar.ops.dropout import DropoutSpec
from hybridpar.ops.partial_attention import PartialAttention
from hybridpar.random import RandomKey

F64 = torch.float64
KEY = RandomKey.of(seed=3, step=1, sample=5)


def of_rank(rank: int, size: int, length: int) -> Context:
    return Context(Axis("cp", rank, tuple(range(size)), object() if size > 1 else None), length)


@given(st.integers(1, 9), st.integers(0, 300), st.integers(0, 50))
def test_every_token_has_one_rank(size: int, more: int, window: int) -> None:
    length = 2 * size + more
    found = token_ranges(length, size, (0, window))
    tokens = [t for ranges in found for start, stop in ranges for t in range(start, stop)]
    assert sorted(tokens) == list(range(length))
    for rank, ranges in enumerate(found):
        assert all(start < stop for start, stop in ranges)
        assert [*ranges] == sorted(ranges)
        assert len(ranges) <= 1 + (rank < size - 1), "neighbouring pieces are one range"
        assert abs(sum(stop - start for start, stop in ranges) - length / size) < 1


def test_ranges_by_hand() -> None:
    assert token_ranges(37, 2) == (((0, 10), (28, 37)), ((10, 28),))
    assert token_ranges(12, 3) == (((0, 2), (10, 12)), ((2, 4), (8, 10)), ((4, 8),))
    assert token_ranges(5, 1) == (((0, 5),),)
    # 1, 2, 3, 3, 3, .. keys: 16 pairs and 17
    assert token_ranges(12, 2, (3,)) == (((0, 1), (7, 12)), ((1, 7),))


@pytest.mark.parametrize("window", [0.0, 0.25, 0.6])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ranks_have_equal_work(size: int, window: float) -> None:
    """Products with weights go by tokens, attention by pairs of a query and a key. From 64 tokens a
    rank on a rank has at most 1 % more than its share of both together, or the one token more that
    some rank must have."""
    for length in range(64 * size, 68 * size):
        windows = (int(window * length), 0)
        pairs = [sum(min(t + 1, w or length) for w in windows) / 2 for t in range(length)]
        tokens_forced = math.ceil(length / size) * size / length + 1e-6  # rounding
        for hidden in (128, 256, 1024, 8192):
            per_token = 24 * hidden**2 / (4 * hidden)  # in pairs, which are 4 h operations
            work = [
                sum(per_token * (stop - start) + sum(pairs[start:stop]) for start, stop in ranges)
                for ranges in token_ranges(length, size, windows)
            ]
            assert max(work) <= max(1.01, tokens_forced) * sum(work) / size
            if length % (2 * size) == 0 and not window:
                assert max(work) == min(work)


def test_the_micro_batch_of_a_rank() -> None:
    tokens = torch.arange(2 * 13).view(2, 13)
    batch = {
        "tokens": tokens,
        "document_start": (tokens % 13 // 4 * 4).to(torch.int32),
        "num_targets": torch.tensor(7.0),
    }
    mine = of_rank(0, 2, 13).cut(batch)
    places = [0, 1, 2, 3, 10, 11, 12]
    assert mine["tokens"].tolist() == [places, [13 + t for t in places]]
    assert mine["document_start"][0].tolist() == [0, 0, 0, 0, 8, 8, 12]
    assert mine["num_targets"] is batch["num_targets"]
    assert mine["positions"].tolist() == places
    assert mine["positions"].dtype == torch.int64
    assert mine["rows"].tolist() == places
    assert mine["rows"].dtype == torch.int32
    within = {"positions": tokens % 4}
    assert of_rank(0, 2, 13).cut(batch | within)["positions"][0].tolist() == [0, 1, 2, 3, 2, 3, 0]
    assert ALONE.cut(batch) == batch


@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (3, 1), (2, 2), (2, 3), (5, 4)])
def test_dropout_is_that_of_all_rows(cp: int, tp: int) -> None:
    """Also where ranks of tp divide the tokens of a rank of cp."""
    x = torch.randn(2, 37, 6, dtype=F64, generator=torch.Generator().manual_seed(0))
    layer = Dropout(0.3, "blocks.1.dropout")
    norm = RMSNorm(6, Axis("tp"), device="cpu", dtype=F64)
    torch.nn.init.ones_(norm.weight)
    bias = torch.linspace(1, 2, 6, dtype=F64)
    dropped = layer(x, KEY)
    added = layer.add(x, bias, x, KEY)
    normed, total = norm.add(x, bias, x, layer, KEY)
    for rank in range(cp):
        context = of_rank(rank, cp, 37)
        own = torch.cat([torch.arange(*tokens) for tokens in context.own])
        sizes = split_sizes(len(own), tp)
        for i in range(tp):
            part = SequencePart(sum(sizes[:i]), sizes[i], sizes)
            at = own[part.start : part.start + part.length]
            rows = context.rows_of(part)
            assert torch.equal(layer(x[:, at], KEY, rows), dropped[:, at])
            assert torch.equal(layer.add(x[:, at], bias, x[:, at], KEY, rows), added[:, at])
            y, kept = norm.add(x[:, at], bias, x[:, at], layer, KEY, rows)
            assert torch.equal(kept, total[:, at])
            torch.testing.assert_close(y, normed[:, at], rtol=1e-13, atol=1e-13)
            assert layer(x[:, at], None, rows) is not None


B, S, HIDDEN, HEADS, KV = 3, 37, 24, 6, 2
STARTS = (torch.arange(S, dtype=torch.int32) // 11 * 11).expand(B, S).contiguous()


def attention(axis: Axis, context: Context, **options: Any) -> ParallelAttention:
    layer = ParallelAttention(
        HIDDEN,
        HEADS,
        axis,
        num_kv_heads=KV,
        rotary_base=100.0,
        context=context,
        device="cpu",
        dtype=F64,
        **options,
    )
    for name, parameter, place in named_placements(layer):
        weights = exact(values(name, *place.shape) / 4)
        if name == "out.weight":
            weights = torch.eye(HIDDEN, dtype=F64)
        parameter.data.copy_(place.take(weights, axis.rank))
    return layer


def exact(x: Tensor) -> Tensor:
    """Round to 64ths: sums of products of such numbers are exact, in any order of summation."""
    return (64 * x).round() / 64


class Sent(NamedTuple):
    """Calls over cp, and the bytes that a rank contributes to all of one kind."""

    calls: dict[str, int]
    num_bytes: dict[str, int]


def expected(context: Context, n: int, n_kv: int, *, documents: bool) -> tuple[Sent, Sent]:
    """Return what a layer sends in forward and backward by the formulas, in float64."""
    c = context.axis.size
    if c == 1:
        return Sent({}, {}), Sent({}, {})
    own = context.sizes[context.axis.rank]
    one = 8 * B * HIDDEN // HEADS  # bytes of a head of a token
    if context.comm == "all_gather":
        # in c - 1 steps it hands on all keys but those of the next rank, and sums of the gradients
        # of all but its own
        there = 2 * (S - context.sizes[(context.axis.rank + 1) % c]) * n_kv * one
        return (
            Sent({"send": c - 1, "recv": c - 1}, {"send": there}),
            Sent({"send": c - 1, "recv": c - 1}, {"send": 2 * (S - own) * n_kv * one}),
        )
    if context.comm == "ring":
        # in c - 1 steps it hands on all keys but those of the next rank, which the last one has
        there = 2 * (S - context.sizes[(context.axis.rank + 1) % c]) * n_kv * one
        back = there + 2 * S * n_kv * one
        return (
            Sent({"send": c - 1, "recv": c - 1}, {"send": there}),
            Sent({"send": 2 * c - 1, "recv": 2 * c - 1}, {"send": back}),
        )
    kept = HeadSplit.of([g * n_kv // n for g in range(n)], n_kv, c)
    rank = context.axis.rank
    heads, kv_heads = (stop - start for start, stop in (kept.queries[rank], kept.keys[rank]))
    tokens = own * (n + 2 * n_kv) * one
    results = S * heads * one
    starts = {"all_gather": 4 * B * own} if documents else {}
    return (
        Sent(
            {"all_to_all": 2} | dict.fromkeys(starts, 1), {"all_to_all": tokens + results} | starts
        ),
        Sent({"all_to_all": 2}, {"all_to_all": own * n * one + S * (heads + 2 * kv_heads) * one}),
    )


@contextmanager
def sends(axis: Axis, sent: Sent) -> Iterator[None]:
    axis.traffic.clear()
    with traffic(axis, **sent.calls):
        yield
    for name, num_bytes in sent.num_bytes.items():
        assert axis.traffic.num_bytes[name] == num_bytes


def shared_attention(cp: int, tp: int, comm: ContextComm) -> None:
    """Outputs and gradients are those of one process, with equal masks of dropout; bytes are the
    formulas'. With gathered keys or with exchanged heads the C++ operator's forward is equal to the
    bit, where products with weights do not depend on the number of rows, as here, where they are
    exact."""
    grid = ProcessGrid(cp=cp, tp=tp)
    context = Context(grid.cp, S, comm=comm)
    x_all = exact(values("x", B, S, HIDDEN))
    dy = values("dy", B, S, HIDDEN)
    batch = context.cut({"x": x_all, "dy": dy, "first_key": STARTS})
    rows = batch.get("rows")
    own = torch.arange(S) if rows is None else rows.long()
    for documents, options in (
        (False, {}),
        (True, {}),
        (False, {"attention_dropout": 0.3}),
        (True, {"attention_dropout": 0.3, "window": 7}),
        (False, {"window": 9}),
        (True, {"softcap": 2.0}),
        (False, {"kernels": KernelsConfig(attention="torch")}),
    ):
        whole = attention(Axis("tp"), ALONE, **options)
        x_ref = x_all.clone().requires_grad_()
        y_ref = whole(x_ref, key=KEY, first_key=STARTS if documents else None)
        y_ref.backward(dy)
        layer = attention(grid.tp, context, **options)
        x = batch["x"].clone().requires_grad_()
        there, back = expected(
            context, sum(layer.group_sizes), len(layer.group_sizes), documents=documents
        )
        with sends(grid.cp, there):
            y = layer(
                x,
                key=KEY,
                first_key=batch["first_key"] if documents else None,
                rows=rows,
            )
        with sends(grid.cp, back):
            y.backward(batch["dy"])
        by_rows = native.missing() is None and "kernels" not in options
        if tp == 1 and comm != "ring" and by_rows:
            assert torch.equal(y, y_ref[:, own])
        torch.testing.assert_close(y, y_ref[:, own], **TOLERANCE)
        torch.testing.assert_close(x.grad, x_ref.grad[:, own], **TOLERANCE)


@pytest.mark.thorough(keep=3)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cp", "tp", "comm"),
    [
        (3, 1, "all_gather"),
        (3, 1, "ring"),
        (2, 1, "ulysses"),
        (2, 1, "all_gather"),
        (2, 1, "ring"),
        (4, 1, "ring"),
        (2, 3, "all_gather"),
        (2, 3, "ring"),
        (1, 2, "all_gather"),
    ],
)
def test_attention_over_the_tokens_of_all_ranks(cp: int, tp: int, comm: ContextComm) -> None:
    run_ranks(shared_attention, cp * tp, cp, tp, comm)


def narrow_ring() -> None:
    """In bfloat16 a ring adds up in float32: it is as close to float64 as one process."""
    grid = ProcessGrid(cp=3)
    tensors = [values(name, 2, 4, 50, 16) for name in "qkv"]
    dy = values("dy", 2, 4, 50, 16)
    exact = [x.clone().requires_grad_() for x in tensors]
    y_ref = ops.attention(*exact, causal=True)
    y_ref.backward(dy)
    plain = [x.bfloat16().requires_grad_() for x in tensors]
    y_plain = ops.attention(*plain, causal=True)
    y_plain.backward(dy.bfloat16())
    context = Context(grid.cp, 50, comm="ring")
    own = torch.cat([torch.arange(*tokens) for tokens in context.own])
    local = [x[:, :, own].bfloat16().requires_grad_() for x in tensors]
    mask = AttentionMask(True, positions=own.to(torch.int32))
    y = context_attention(*local, mask, AttentionOptions(), context)
    assert y.dtype == torch.bfloat16
    y.backward(dy[:, :, own].bfloat16())
    for mine, whole, reference in (
        (y, y_plain, y_ref),
        *zip(*([x.grad for x in xs] for xs in (local, plain, exact)), strict=True),
    ):
        error = (mine.double() - reference[:, :, own]).abs().max()
        usual = (whole.double() - reference).abs().max()
        assert error < 2 * usual


@pytest.mark.ranks
def test_a_ring_in_half_precision() -> None:
    run_ranks(narrow_ring, 3)


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    context = dataclasses.replace(of_rank(0, 3, S), comm="ulysses")
    with pytest.raises(ConfigError, match="a key head for each of the 3 ranks"):
        attention(Axis("tp"), context)
    assert HeadSplit.of([0, 0, 1, 2, 2, 2, 3], 4, 3) == HeadSplit(
        ((0, 3), (3, 6), (6, 7)), ((0, 2), (2, 3), (3, 4))
    )


def test_tokens_need_their_rows() -> None:
    layer = attention(Axis("tp"), of_rank(0, 2, S))
    with pytest.raises(AssertionError, match="rows"):
        layer(values("x", B, 19, HIDDEN))
    with pytest.raises(AssertionError, match="causal"):
        ParallelAttention(HIDDEN, HEADS, Axis("tp"), causal=False, context=of_rank(0, 2, S))


def packed(length: int, seed: int, rows: int = 1) -> torch.Tensor:
    """Starts of random documents, some of them long."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.zeros(rows, length, dtype=torch.int32)
    for row in starts:
        at = 0
        while at < length:
            size = int(torch.randint(1, length // 2, (), generator=generator))
            size = size if seed % 2 else max(size // 20, 1)
            row[at : at + size] = at
            at += size
    return starts


@pytest.mark.parametrize("windows", [(0,), (0, 40)])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ranks_have_equal_work_on_packed_documents(size: int, windows: tuple[int, ...]) -> None:
    """At most 1 % more than a rank's share of products with weights and attention together, or the
    one token more that some rank must have."""
    for seed in range(8):
        length = 64 * size + seed
        starts = packed(length, seed, rows=1 + seed % 3)
        ranges = document_ranges(starts, size, windows)
        positions = sorted(t for of_rank in ranges for a, b in of_rank for t in range(a, b))
        assert positions == list(range(length))
        sizes = [sum(b - a for a, b in of_rank) for of_rank in ranges]
        assert sizes == list(split_sizes(length, size))
        keys = torch.arange(length) - starts + 1
        pairs = (
            sum(keys.clamp(max=w or length).sum(0) for w in windows) / len(windows) / len(starts)
        )
        forced = math.ceil(length / size) * size / length + 1e-6
        for hidden in (128, 1024):
            per_token = 24 * hidden**2 / (4 * hidden)
            work = [
                sum(per_token * (b - a) + float(pairs[a:b].sum()) for a, b in of_rank)
                for of_rank in ranges
            ]
            assert max(work) <= max(1.01, forced) * sum(work) / size


def test_one_document_is_cut_as_evenly_as_without_packing() -> None:
    ranges = document_ranges(torch.zeros(1, 24, dtype=torch.int32), 2)
    pairs = [sum(t + 1 for a, b in of_rank for t in range(a, b)) for of_rank in ranges]
    assert max(pairs) - min(pairs) <= 12


def test_a_micro_batch_of_documents_brings_its_cut() -> None:
    starts = packed(26, 1)
    batch = {"tokens": torch.arange(26)[None], "document_start": starts}
    seen = []
    for rank in range(3):
        context = dataclasses.replace(of_rank(rank, 3, 26), follows_documents=True)
        mine = context.cut(batch)
        assert "context_ranges" not in context.cut({"tokens": batch["tokens"]})
        cut = context.of(mine)
        assert cut.ranges == document_ranges(starts, 3)
        assert mine["tokens"][0].tolist() == [t for a, b in cut.own for t in range(a, b)]
        assert mine["rows"].tolist() == mine["tokens"][0].tolist()
        assert context.of({}) is context
        seen += mine["tokens"][0].tolist()
    assert sorted(seen) == list(range(26))


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(("backend", "device"), places("attention", reference=False))
def test_dropout_of_a_ring_is_the_same_in_a_kernel(
    backend: str, device: str, dtype: torch.dtype, documents: bool, softcap: float
) -> None:
    if (device, dtype) == ("cuda", F64):
        pytest.skip("no kernel takes it")
    same_as_torch(backend, dtype, 37, documents, softcap, device=device)


def same_as_torch(
    backend: str,
    dtype: torch.dtype,
    length: int,
    documents: bool,
    softcap: float,
    *,
    device: str = "cpu",
) -> None:
    """Compare a kernel's dropout of some keys with torch's on the CPU. Blocks of keys of two ranges,
    one of them a single key; 4 query heads on 2 key heads."""
    own = ((3, 9), (20, 29))
    rows = torch.cat([torch.arange(*of) for of in own]).to(torch.int32)
    first_key = (rows // 7 * 7).expand(2, -1).contiguous() if documents else None
    dropout = DropoutSpec(0.3, KEY, random.site("blocks.1.attention"))
    options = AttentionOptions(dropout=dropout, head_start=2, softcap=softcap)
    exact = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else TOLERANCE
    for keys in (own, ((0, 3), (12, 13)), ((8, 12), (13, 20))):
        size = sum(stop - start for start, stop in keys)
        found = []
        for name, place in ((backend, device), ("torch", "cpu")):
            q = values("q", 2, 4, len(rows), 8).to(place, dtype)
            dout = values("dout", 2, 4, len(rows), 8).to(place, dtype)
            k = values("k", 2, 2, size, 8).to(place, dtype)
            v = values("v", 2, 2, size, 8).to(place, dtype)
            first = None if first_key is None else first_key.to(place)
            mask = AttentionMask(True, first_key=first, positions=rows.to(place))
            partial = PartialAttention(own, length, mask, options, name)
            assert (partial._library(q, k) is None) == (name == "torch")
            start, out, lse = partial.forward(q, k, v, keys)
            full = q.new_zeros(2, len(rows), 4, 8)
            full[:, start:] = out
            of_all = lse.new_zeros(2, 4, len(rows))
            of_all[:, :, start:] = lse.masked_fill(lse == float("-inf"), 30.0)
            saved = SavedAttention(q, k, v, full, of_all)
            computed = (out, lse, *partial.backward(dout, saved, keys)[1:])
            found.append([x.cpu() for x in computed])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, **exact)
        assert found[0][0].any()
