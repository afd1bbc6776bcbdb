"""What test_interpreter.py runs with TRITON_INTERPRET=1 besides tests/ops/test_backends.py: what that does not reach."""

from __future__ import annotations

import pytest
import torch
from ops.test_backends import DROPS, Case, compute, tensors_of

from hybridpar import ops
from hybridpar.ops import registry


def test_triton_runs_here():
    """Otherwise the tests of all backends pass without it."""
    for op in registry.ops():
        if op != "attention":
            assert registry.select(op, "triton", "cpu", torch.float32).unsupported("cpu", torch.float32) is None


def norms():
    for shape in ((2, 2, 4104), (2, 8200), (2, 16500)):  # sums apart, rows by blocks backward, and forward
        h = shape[-1:]
        yield Case("layer_norm", f"{h[0]}", (shape, h, h), lambda x, w, b, k: ops.layer_norm(x, w, b, backend=k))
        yield Case("rms_norm", f"{h[0]}", (shape, h), lambda x, w, k: ops.rms_norm(x, w, backend=k))
    for shape in ((2, 3, 264), (2, 2, 4104), (2, 8200), (2, 16500)):  # rows of a sample; as above
        h = shape[-1:]
        yield Case("add_norm", f"{h[0]}-dropout", (shape, h, shape, h, h),
                   lambda x, c, r, w, b, k: ops.add_norm(x, r, w, b, bias_of_x=c, backend=k, **DROPS))
        yield Case("add_norm", f"{h[0]}-rms", (shape, shape, h),
                   lambda x, r, w, k: ops.add_norm(x, r, w, centre=False, backend=k))


@pytest.mark.parametrize("case", [*norms()], ids=str)
def test_other_widths_against_float64(case):
    tensors = tensors_of(case, torch.float32)
    exact = compute(case, [t.double() for t in tensors], "torch")
    for got, want in zip(compute(case, tensors, "triton"), exact, strict=True):
        assert (got.double() - want).abs().max() <= 3e-6 * max(want.abs().max().item(), 1.0)
