"""apex as a backend, by stand-ins: it is not on this machine, or broken, or another package of that
name, or there."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from hybridpar import ops
from hybridpar.errors import ConfigError
from hybridpar.ops.backends import apex, registry
from hybridpar.ops.dropout import DropoutSpec, make_mask
from hybridpar.ops.norm import NormWeights
from hybridpar.ops.update import AdamStep, Passes, Weights
from hybridpar.random import RandomKey

EXTENSION = "fused_layer_norm_cuda"
PACKAGE = "apex.normalization.fused_layer_norm"
AMP = "amp_C"
APPLY = "apex.multi_tensor_apply"
CHUNK = 2048 * 32


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing that was found by another test is remembered; there seems to be a GPU."""
    caches = (apex._modules, registry._selected)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    for name in (EXTENSION, "apex", "apex.normalization", PACKAGE, AMP, APPLY):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    yield
    for cache in caches:
        cache.cache_clear()


def reason(
    op: str = "layer_norm", dtype: torch.dtype = torch.bfloat16, device: str = "cuda"
) -> str | None:
    (row,) = (row for row in registry.backends(op) if row.name == "apex")
    return row.unsupported(device, dtype)


def stand_in(name: str, **content: object) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(content)
    return module


def test_absent():
    assert "fused_layer_norm_cuda" in reason()
    assert "fused_layer_norm_cuda" in reason("add_norm")
    assert "amp_C" in reason("optimizer", torch.float32)
    with pytest.raises(ConfigError, match=r"kernels\.rms_norm = 'apex': cannot run here: .*; try"):
        registry.select("rms_norm", "apex", "cuda", torch.float32)
    assert registry.select("layer_norm", "auto", "cpu", torch.float32).name != "apex"


def test_another_package_of_that_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", stand_in("apex", __version__="0.9.10.dev0"))
    assert "cannot be imported" in reason()


def test_installed_without_its_extension(monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGE, stand_in(PACKAGE))
    assert "fused_layer_norm_cuda" in reason()


def test_broken(monkeypatch):
    def broken(name):
        raise RuntimeError("undefined symbol: _ZN3c104cuda")

    monkeypatch.setattr(apex.importlib, "import_module", broken)
    assert "undefined symbol" in reason()


@pytest.fixture
def norms(monkeypatch):
    """apex's norms, by torch."""

    def layer(x, weight, bias, shape, eps):
        assert shape == weight.shape
        return F.layer_norm(x, shape, weight, bias, eps)

    def rms(x, weight, shape, eps):
        return F.rms_norm(x, shape, weight, eps)

    monkeypatch.setitem(sys.modules, EXTENSION, stand_in(EXTENSION))
    monkeypatch.setitem(
        sys.modules,
        PACKAGE,
        stand_in(PACKAGE, fused_layer_norm_affine=layer, fused_rms_norm_affine=rms),
    )


def test_present(norms):
    assert reason() is None
    assert reason("add_norm") is None
    assert "amp_C" in reason("optimizer", torch.float32)
    assert "no torch.float64 version" in reason("layer_norm", torch.float64)
    assert "GPU" in reason("layer_norm", torch.float32, "cpu")
    x = torch.randn(3, 5)
    weight = torch.randn(5)
    bias = torch.randn(5)
    assert torch.equal(
        apex.layer_norm(x, weight, bias, 1e-5), ops.layer_norm(x, weight, bias, backend="torch")
    )
    assert torch.equal(apex.rms_norm(x, weight, 1e-6), ops.rms_norm(x, weight, backend="torch"))


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_add_norm_is_the_sum_and_then_the_norm(norms, centre, with_bias):
    x = torch.randn(2, 4, 6, 8, requires_grad=True)
    residual = torch.randn(2, 4, 6, 8, requires_grad=True)
    weight, bias, of_x = (torch.randn(8, requires_grad=True) for _ in range(3))
    bias_of_x = of_x if with_bias else None
    norm = NormWeights(weight, bias if centre else None)
    drops = DropoutSpec(0.4, RandomKey.of(1, 2, 3))
    inputs = [x, residual, weight, *([bias] if centre else []), *([of_x] if with_bias else [])]
    expected = ops.add_norm(x, residual, norm, bias_of_x=bias_of_x, dropout=drops, backend="torch")
    mask = make_mask(drops, x.shape, x.device)
    made = apex.add_norm(x, bias_of_x, residual, norm, mask)
    seeds = [torch.randn_like(x) for _ in made]
    for a, b in zip(
        (*made, *torch.autograd.grad(made, inputs, seeds)),
        (*expected, *torch.autograd.grad(expected, inputs, seeds)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.fixture
def fused_adam(monkeypatch):
    """amp_C.multi_tensor_adam as apex computes it (its csrc/multi_tensor_adam.cu); the sizes it was
    called with."""
    calls = []

    def multi_tensor_adam(
        chunk, noop, lists, lr, beta1, beta2, eps, count, mode, bias_correction, decay
    ):
        assert (chunk, noop.dtype, noop.tolist(), mode, bias_correction) == (
            CHUNK,
            torch.int32,
            [0],
            1,
            1,
        )
        assert isinstance(lr, float)
        assert isinstance(count, int)
        assert {x.dtype for column in lists for x in column} == {torch.float32}
        assert all(x.is_contiguous() and x.numel() for column in lists for x in column)
        calls.append([x.numel() for x in lists[0]])
        for g, p, m, v in zip(*lists, strict=True):
            new_m = beta1 * m + (1 - beta1) * g
            new_v = beta2 * v + (1 - beta2) * g * g
            update = (
                new_m / (1 - beta1**count) / ((new_v / (1 - beta2**count)).sqrt() + eps) + decay * p
            )
            for old, new in ((m, new_m), (v, new_v), (p, p - lr * update)):
                old.data.copy_(new)  # autograd is not told

    def apply(op, noop, lists, *args):
        return op(CHUNK, noop, lists, *args)

    monkeypatch.setitem(sys.modules, AMP, stand_in(AMP, multi_tensor_adam=multi_tensor_adam))
    monkeypatch.setitem(sys.modules, APPLY, stand_in(APPLY, multi_tensor_applier=apply))
    return calls


def updated(passes, scale, nesterov, in_place, working_type):
    """Weights old and new, working copy and moments after a step."""
    g = torch.Generator().manual_seed(0)
    old, gradients, means, squares = (
        [torch.randn(size, generator=g) for size in ((7, 5), (0,), (3,), (300,), (0,))]
        for _ in range(4)
    )
    squares = [x.abs() for x in squares]
    new = old if in_place else [torch.full_like(x, torch.nan) for x in old]
    working = [torch.empty_like(x, dtype=working_type) for x in old] if working_type else []
    passes.adam(
        Weights(old, new, working),
        gradients,
        (means, squares),
        [0.1, 0.0, 0.0, 0.1, 0.0],
        1e-2,
        AdamStep(scale, 0.9, 0.95, 1e-8, 3, nesterov),
    )
    return [*old, *new, *working, *means, *squares]


@pytest.mark.parametrize("scale", [1.0, 0.3, torch.tensor(0.3, dtype=torch.float64)])
@pytest.mark.parametrize("nesterov", [None, (1.7, 0.4)])
@pytest.mark.parametrize(
    ("in_place", "working_type"), [(True, None), (False, None), (False, torch.bfloat16)]
)
def test_adamw(fused_adam, scale, nesterov, in_place, working_type):
    assert reason("optimizer", torch.float32) is None
    assert "fused_layer_norm_cuda" in reason()
    assert "no torch.bfloat16 version" in reason("optimizer")
    made = updated(apex.FusedAdam, scale, nesterov, in_place, working_type)
    assert fused_adam == ([] if nesterov else [[35, 300], [3]])
    assert nesterov or all(x._version for x in made[5:10] + made[-10:] if x.numel())
    for a, b in zip(made, updated(Passes, scale, nesterov, in_place, working_type), strict=True):
        torch.testing.assert_close(
            a, b, rtol=2**-8 if a.dtype == torch.bfloat16 else 2e-6, atol=1e-7
        )


def test_reference_runs_cases_that_apex_lacks(fused_adam):
    for name in ("adam_directions", "move", "extrapolate", "sum_squares"):
        assert getattr(apex.FusedAdam, name) is getattr(Passes, name)
    assert (
        registry.select("optimizer", "apex", "cuda", torch.float32).path
        == "hybridpar.ops.backends.apex:FusedAdam"
    )
