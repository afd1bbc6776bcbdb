"""Cases that tests/ops/test_backends.py does not reach; test_interpreter.py runs them with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from ops.test_backends import DROPS, Case, compute, tensors_of

from hybridpar import native, ops
from hybridpar.ops import registry


def test_triton_runs_here():
    """Otherwise the tests of all backends would pass without it."""
    reasons = {op: registry.report(op, "cpu", torch.float32).rejected.get("triton") for op in registry.ops()}
    assert {op: reason for op, reason in reasons.items() if reason} == {}


@pytest.mark.skipif(native.missing() is not None, reason="needs hybridpar._C")
def test_arguments_and_results_are_those_of_csrc():
    def signature(library, name):
        schema = getattr(library, name).default._schema
        arguments = [(a.name, str(a.type).replace("SymInt", "int"), a.is_write) for a in schema.arguments]
        return arguments, [str(r.type) for r in schema.returns]

    names = [name for name in native.operators() if hasattr(torch.ops.hybridpar_triton, name)]
    for name in names:
        assert signature(torch.ops.hybridpar_triton, name) == signature(torch.ops.hybridpar, name), name
    assert set(native.operators()) - set(names) == {
        "attention_hopper", "philox_bits", "philox_normal", "placement_best_loads"}


def wide_cases():
    for shape in ((2, 3, 264), (2, 1, 4104), (1, 16388)):  # in one kernel; dropout apart; rows by blocks
        h = shape[-1:]
        yield Case("add_norm", f"{h[0]}-dropout", (shape, h, shape, h, h),
                   lambda x, c, r, w, b, k: ops.add_norm(x, r, w, b, bias_of_x=c, backend=k, **DROPS))
    for cols in (8200, 16388):  # by blocks backward only, and both ways
        yield Case("rms_norm", f"{cols}", ((3, cols), (cols,)), lambda x, w, k: ops.rms_norm(x, w, backend=k))


@pytest.mark.parametrize("case", [*wide_cases()], ids=str)
def test_other_widths_against_float64(case):
    tensors = tensors_of(case, torch.float32)
    exact = compute(case, [t.double() for t in tensors], "torch")
    for got, want in zip(compute(case, tensors, "triton"), exact, strict=True):
        assert (got.double() - want).abs().max() <= 3e-6 * max(want.abs().max().item(), 1.0)


def test_cross_entropy_of_several_blocks():
    """The largest logit comes last, minus infinity fills a block; the sum is of large numbers close to each other."""
    logits = torch.randn(3, 9000, generator=torch.Generator().manual_seed(1)) + 500
    logits[0] += torch.linspace(0, 30, 9000)
    logits[1, :5000] = -torch.inf
    column = torch.tensor([8999, 4, 7000])
    got, want = (ops.cross_entropy(x, k).statistics(x, column, 8990, True)
                 for x, k in ((logits, "triton"), (logits.double(), "torch")))
    torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=1e-5)


@pytest.mark.parametrize("positions", [None, torch.tensor([100_003, 2**31 + 5, 0])])
def test_rotary_of_large_positions_and_strides(positions, tmp_path):
    """2^31 elements and more apart, in a file of which three pages exist."""
    apart = 2**30 + 24
    x = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2 * apart + 64, dtype=torch.float16)
    x = x.as_strided((1, 3, 3, 8), (1, apart, 16, 1))
    x.copy_(torch.randn(1, 3, 3, 8, generator=torch.Generator().manual_seed(1)))
    got, want = (ops.rotary(x.to(t), offset=1_000_000, positions=positions, backend=k)
                 for t, k in ((torch.float16, "triton"), (torch.float64, "torch")))
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-5)
    got = ops.rotary(x.float(), offset=1_000_000, positions=positions, backend="triton")
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=5e-7)


def test_compiled_without_breaks():
    """torch.compile sees the operators from outside, and their gradients."""
    def block(x, w, b, c, k):
        y, total = ops.add_norm(x, ops.rms_norm(x, w, backend=k), w, b, bias_of_x=c, backend=k, **DROPS)
        z = ops.swiglu(torch.cat((ops.gelu(y, b, backend=k), y), -1), backend=k)
        return ops.rotary(ops.bias_dropout_add(z, total, b, backend=k, **DROPS)[:, None], backend=k)

    case = Case("", "", ((2, 4, 8), (8,), (8,), (8,)), torch.compile(block, fullgraph=True, backend="aot_eager"))
    tensors = tensors_of(case, torch.float32)
    for got, want in zip(compute(case, tensors, "triton"),
                         compute(Case("", "", case.shapes, block), tensors, "torch"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["by position", "by head", "in one product"])
def test_attention_by_the_copy_engine(layout, monkeypatch):
    """The same bits as through pointers, whatever matrix the tensors are."""
    from hybridpar.kernels import attention

    b, n, s, d = 2, 2, 128, 16
    g = torch.Generator().manual_seed(1)
    if layout == "in one product":
        q, k, v = torch.randn(b, s, 3, n, d, generator=g, dtype=torch.float16).permute(2, 0, 3, 1, 4)
    else:
        shape = (b, s, n, d) if layout == "by position" else (b, n, s, d)
        q, k, v = (torch.randn(shape, generator=g, dtype=torch.float16) for _ in range(3))
        q, k, v = (x.transpose(1, 2) if layout == "by position" else x for x in (q, k, v))
    case = Case("attention", layout, (), lambda q, k, v, backend: ops.attention(q, k, v, causal=True, backend=backend))
    wanted, used, matrix = compute(case, [q, k, v], "triton"), [], attention.matrix
    monkeypatch.setattr(attention, "has_copy_engine", lambda major: True)
    monkeypatch.setattr(attention, "matrix", lambda *args: used.append(args) or matrix(*args))
    got = compute(case, [q, k, v], "triton")
    assert len(used) == 6, "two tensors in each of three kernels"
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("count", [1, 40, 300])
def test_few_ids_are_ordered_like_many(count, monkeypatch):
    from hybridpar.kernels import embedding

    ids = torch.randint(90, (count,), generator=torch.Generator().manual_seed(count))
    few = embedding._sorted(ids, 20, 50)
    monkeypatch.setattr(embedding, "_MOST_RANKED", 0)
    assert all(torch.equal(a, b) for a, b in zip(few, embedding._sorted(ids, 20, 50), strict=True))
