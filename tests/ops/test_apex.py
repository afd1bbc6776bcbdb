"""apex as a backend, by stand-ins: it is not on this machine, or broken, or another package of that name."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from hybridpar import ops
from hybridpar.errors import ConfigError
from hybridpar.ops import apex, registry

EXTENSION, PACKAGE = "fused_layer_norm_cuda", "apex.normalization.fused_layer_norm"


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing that was found by another test is remembered; there seems to be a GPU."""
    caches = (apex._functions, registry._selected)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in (EXTENSION, "apex", "apex.normalization", PACKAGE):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    yield
    for cache in caches:
        cache.cache_clear()


def reason() -> str | None:
    return apex.unsupported("layer_norm", "cuda", torch.bfloat16)


def stand_in(name: str, **content: object) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(content)
    return module


def test_absent():
    assert "fused_layer_norm_cuda" in reason()
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


def test_present(monkeypatch):
    def layer(x, weight, bias, shape, eps):
        assert shape == weight.shape
        return F.layer_norm(x, shape, weight, bias, eps)

    def rms(x, weight, shape, eps):
        return F.rms_norm(x, shape, weight, eps)

    monkeypatch.setitem(sys.modules, EXTENSION, stand_in(EXTENSION))
    monkeypatch.setitem(sys.modules, PACKAGE, stand_in(
        PACKAGE, fused_layer_norm_affine=layer, fused_rms_norm_affine=rms))
    assert reason() is None
    assert "no torch.float64 version" in apex.unsupported("layer_norm", "cuda", torch.float64)
    assert "GPU" in apex.unsupported("layer_norm", "cpu", torch.float32)
    x, weight, bias = torch.randn(3, 5), torch.randn(5), torch.randn(5)
    assert torch.equal(apex.layer_norm(x, weight, bias, 1e-5), ops.layer_norm(x, weight, bias, backend="torch"))
    assert torch.equal(apex.rms_norm(x, weight, 1e-6), ops.rms_norm(x, weight, backend="torch"))
