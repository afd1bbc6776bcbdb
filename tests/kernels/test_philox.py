"""Philox in Triton: the reference's bits in the interpreter; clean code for A100 and H100, compiled without a GPU."""

import importlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = """
import torch
from hybridpar import random
from hybridpar.kernels import philox
from hybridpar.ops.dropout import dropout_torch

CASES = [  # shape, stride, start
    ((2, 3, 7), 13, 4), ((1, 1, 2500), 2500, 2**34 - 3), ((3, 2, 1), 1, 1), ((2, 2, 130), 131, 0),
    ((2, 3, 5), 5, 2**40 + 2), ((1, 2, 1026), 1026, 3), ((0, 2, 3), 3, 0),
]
for shape, stride, start in CASES:
    key = random.philox_key(2**63 + 9, 0xDEADBEEF)
    counters = (*key, 2**32 - 1, 2**31 - 1)
    bits = philox.random_bits(*counters, shape=shape, stride=stride, start=start, device="cpu")
    reference = random.bits_reference(key, *counters[2:], num_samples=shape[0], rows=shape[1], cols=shape[2],
                                      stride=stride, start=start)
    assert torch.equal(bits, reference), (shape, stride, start)
    for dtype in (torch.float32, torch.float16):  # the interpreter computes bfloat16 wrongly
        x = torch.randn(shape).to(dtype)
        mask = (*counters, round(0.7 * 2**32), 1 / 0.3, stride, start)
        assert torch.equal(philox.philox_dropout(x, *mask), dropout_torch(x, *mask)), (shape, stride, start, dtype)
print("agreed", len(CASES))
"""


def test_same_bits_as_the_reference_in_the_interpreter():
    run = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, timeout=240,
                         env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
                         cwd=Path(__file__).parents[2])
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.startswith("agreed 7")


COUNTERS = dict.fromkeys(("key0", "key1", "step", "sample"), "i32")
PLACE = {"rows": "i32", "cols": "i32", "stride": "i64", "start": "i64", "blocks": "i32"}
SIGNATURES = {
    "bits_kernel": [{"out_ptr": "*i32", **COUNTERS, **PLACE}],
    "dropout_kernel": [
        {"x_ptr": f"*{t}", "out_ptr": f"*{t}", **COUNTERS, "threshold": "i32", "scale": "fp32", **PLACE}
        for t in ("fp32", "fp16", "bf16")
    ],
}


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kernel", SIGNATURES)
def test_compiles_without_spills(kernel, capability, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    for signature in SIGNATURES[kernel]:
        for quads in (1, 256):
            used = compiled_resources(kernel, signature, quads, capability)
            assert used["STACK"] == 0, f"spills: {used}"
            assert used["LOCAL"] == 0, f"spills: {used}"
            assert used["REG"] <= 64, f"at most 64 registers keep half of an SM's threads busy: {used}"


def compiled_resources(kernel: str, signature: dict[str, str], quads: int, capability: int) -> dict[str, int]:
    """Registers and stack bytes of the machine code, as cuobjdump (it comes with triton) reads them."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module("hybridpar.kernels.philox"), kernel)
    names = function.arg_names
    types = {**signature, "QUADS": "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
    source = ASTSource(fn=function, signature={name: types[name] for name in names},
                       constexprs={(names.index("QUADS"),): quads}, attrs=aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this triton comes without cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True,
                              check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    assert used, text
    return used


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_same_mask_as_the_reference_on_the_gpu(dtype):
    from hybridpar.ops import dropout
    from hybridpar.random import RandomKey

    x = torch.randn(3, 5, 1027, device="cuda").to(dtype)
    outs = [dropout(x, 0.3, RandomKey(1, 2, 3), 4, inner_size=2000, inner_start=13, backend=name)
            for name in ("triton", "torch")]
    assert torch.equal(*outs)
