"""Every Triton kernel compiles for A100 and H100, without a GPU: no spills, shared memory that
fits; prints a table.

Those whose tiles depend on the GPU compile for the others, too: L40S (sm_89), B200 (sm_100) and RTX
5090 (sm_120)."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import kernel_specs
import pytest
from kernel_specs import Spec

triton = pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" in os.environ, reason="the interpreter replaces the compiler"
)

CAPABILITIES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that a block may have."""
REGISTERS = 64 * 1024
"""Registers of an SM, and so the most of a block."""
CACHE = (
    Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    / "hybridpar"
    / "compiled_by_tests"
)
"""Machine code, which Triton finds again by all that it is made of: source, options, compilers and
target."""
MODULES = sorted(m.name for m in pkgutil.iter_modules(kernel_specs.__path__))
KERNELS = Path(__file__).parents[2] / "kernels"


def specs_of(module: str) -> dict[str, list[Spec]]:
    return importlib.import_module(f"kernel_specs.{module}").SPECS


def test_every_kernel_has_a_spec() -> None:
    modules = {path.stem for path in KERNELS.glob("*.py")} - {"__init__"}
    assert modules == set(MODULES)
    for module in MODULES:
        code = importlib.import_module(f"hybridpar.kernels.{module}")
        launched = {name for name in vars(code) if name.endswith("_kernel")}
        assert launched == set(specs_of(module)), module
        jitted = {n for n, f in vars(code).items() if isinstance(f, triton.runtime.jit.JITFunction)}
        assert all(name.startswith("_") for name in jitted - launched), (
            f"{module}: a kernel's name ends with _kernel"
        )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Without --thorough each kernel is compiled once, for one of its GPUs, by turns."""
    if "spec" not in metafunc.fixturenames:
        return
    cases = []
    for module in MODULES:
        for kernel, specs in specs_of(module).items():
            turn = len(cases)
            for spec in specs:
                for place, capability in enumerate(spec.capabilities):
                    is_first = spec is specs[0] and place == turn % len(spec.capabilities)
                    marks = [] if is_first else [pytest.mark.thorough]
                    name = f"{module}-{kernel}-{spec}-{capability}"
                    cases.append(
                        pytest.param(module, kernel, spec, capability, id=name, marks=marks)
                    )
    metafunc.parametrize(("module", "kernel", "spec", "capability"), cases)


@pytest.mark.thorough(keep=20)
def test_compiles_without_spills(module, kernel, spec, capability, monkeypatch, record_property):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(CACHE))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    used = compiled_resources(module, kernel, spec, capability)
    for name, value in used.items():
        record_property(name, value)
    print(f"sm_{capability} {module}.{kernel} {spec}: {used}")
    assert used["STACK"] == 0, f"spills: {used}"
    assert used["LOCAL"] == 0, f"spills: {used}"
    most = REGISTERS // (32 * spec.num_warps)
    if spec.most_registers is not None and capability in (80, 90):
        most = spec.most_registers
    assert used["REG"] <= most, f"at most {most} registers: {used}"
    assert used["SHARED"] <= CAPABILITIES[capability], used


def compiled_resources(module: str, kernel: str, spec: Spec, capability: int) -> dict[str, int]:
    """Registers, stack and shared bytes of the machine code, as cuobjdump (it comes with triton)
    reads them."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(f"hybridpar.kernels.{module}"), kernel)
    names = function.arg_names
    types = {**spec.types, **dict.fromkeys(spec.constants, "constexpr")}
    assert set(types) == set(names), f"arguments {sorted(set(types) ^ set(names))}"
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if types[name].startswith("*") or name in spec.divisible
    }
    constants = {(names.index(name),): value for name, value in spec.constants.items()}
    source = ASTSource(
        fn=function, signature={n: types[n] for n in names}, constexprs=constants, attrs=aligned
    )
    binary = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": spec.num_warps, "num_stages": spec.num_stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [cuobjdump(), "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    assert used, text
    return {**used, "SHARED": binary.metadata.shared}


@cache
def cuobjdump() -> Path:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this triton comes without cuobjdump")
    return tool
