"""The CUDA operators' own code on the CPU: kernels, sizes of grids and blocks, checks, allocation (see emulated/).

What this cannot show is how fast they are, and what is undefined rather than wrong.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from ops import test_backends as backends
from ops.test_backends import DTYPES, KEY, SITE, Case, compute, tensors_of

from hybridpar import native, ops
from hybridpar.ops import fused, registry

ROOT = Path(__file__).parents[2]
CUDA, EMULATED = ROOT / "csrc" / "cuda", ROOT / "tests" / "csrc" / "emulated"
pytestmark = [
    pytest.mark.timeout(1200),  # the first test compiles
    pytest.mark.skipif(not CUDA.exists(), reason="runs in a checkout"),
    pytest.mark.skipif(native.missing() is not None, reason=str(native.missing())),
]
COMMON = ["-O1", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-w", f"-I{EMULATED}", f"-I{CUDA}",
          "-Dhybridpar=hybridpar_emulated"]
KERNELS = ["-fsanitize=alignment,bounds,integer-divide-by-zero", "-fsanitize-undefined-trap-on-error", "-x", "c++"]
OPERATORS = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-include", "as_cpu.h", "-isystem",
             str(Path(torch.__file__).parent / "include")]
OPS = [op for op in registry.ops() if any(row.op == op and row.name == "cuda" for row in registry.TABLE)
       and op != "attention"]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Iterator[None]:
    """torch.ops.hybridpar_emulated, with the arguments of torch.ops.hybridpar."""
    folder, compiler = tmp_path_factory.mktemp("emulated"), shlex.split(os.environ.get("CXX", "c++"))
    operators = [path for path in CUDA.glob("*.cpp") if path.name not in ("attention.cpp", "device.cpp")]
    jobs = [(*KERNELS, path) for path in CUDA.glob("*.cu") if path.name != "attention_kernels.cu"]  # Hopper's own
    jobs += [(*OPERATORS, path) for path in [*operators, EMULATED / "device.cpp"]]

    def run(arguments: list[object]) -> None:
        run = subprocess.run([*compiler, *map(str, arguments)], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-5000:]

    def compile_one(job: tuple[object, ...]) -> Path:
        target = folder / f"{Path(str(job[-1])).stem}.o"
        run([*COMMON, *job[:-1], "-c", job[-1], "-o", target])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, jobs))
    torch_libraries = Path(torch.__file__).parent / "lib"
    run(["-shared", "-o", folder / "emulated.so", *objects, f"-L{torch_libraries}", "-ltorch_cpu", "-lc10"])

    definitions = torch.library.Library("hybridpar_emulated", "DEF")
    for name in native.FAKES:
        definitions.define(str(getattr(torch.ops.hybridpar, name).default._schema).removeprefix("hybridpar::"))
    torch.ops.load_library(folder / "emulated.so")
    yield
    definitions._destroy()


@pytest.fixture(autouse=True)
def emulated(library, monkeypatch):
    """A backend of that name, the only one that tests of backends find."""
    rows = tuple(registry.Backend(op, "emulated", f"hybridpar.ops.fused:emulated.{op}") for op in OPS)
    monkeypatch.setattr(fused, "emulated", fused.Fused(torch.ops.hybridpar_emulated), raising=False)
    monkeypatch.setattr(registry, "TABLE", registry.TABLE + rows)
    monkeypatch.setattr(backends, "others", lambda op, device="cpu", dtype=None: ["emulated"])


def wide_cases() -> Iterator[tuple[Case, torch.dtype]]:
    """Rows of whole vectors, in one warp and in several, and rows beyond what registers hold, forward and backward."""
    everything = {"layer_norm", "add_norm", "bias_dropout_add", "gelu", "softmax"}
    for shape, dtype, wanted in (
        *(((70, 5, 64), dtype, everything) for dtype in DTYPES),
        ((2, 3, 1032), torch.bfloat16, everything),
        ((2, 8200), torch.float32, {"layer_norm"}), ((2, 8200), torch.bfloat16, {"add_norm"}),
        ((2, 2051), torch.float64, {"add_norm"}), ((2, 2051), torch.bfloat16, {"layer_norm", "softmax"}),
        ((1, 16400), torch.float16, {"softmax"}),
    ):
        name, h = "x".join(map(str, shape)), shape[-1:]
        real = torch.arange(h[0]).view(1, -1) % 3 != 1
        cases = (
            Case("layer_norm", name, (shape, h, h), lambda x, w, b, k: ops.layer_norm(x, w, b, 1e-3, backend=k)),
            Case("add_norm", name, (shape, h, shape, h), lambda x, c, r, w, k: ops.add_norm(
                x, r, w, None, 1e-3, centre=False, bias_of_x=c, p=0.3, key=KEY, site=SITE, backend=k)),
            Case("bias_dropout_add", name, (shape, h, shape), lambda x, b, r, k: ops.bias_dropout_add(
                x, r, b, p=0.3, key=KEY, site=SITE, backend=k)),
            Case("gelu", name, (shape, h), lambda x, b, k: ops.gelu(x, b, backend=k)),
            Case("softmax", name, ((1, 2, 3, *h),), lambda x, k, real=real: ops.softmax(
                x, scale=0.7, causal=True, padding_mask=real, backend=k)),
        )
        yield from ((case, dtype) for case in cases if case.op in wanted)
    for dtype in DTYPES:
        yield Case("swiglu", "70x512", ((70, 512), (512,)), lambda x, b, k: ops.swiglu(x, b, backend=k)), dtype
    for dtype in DTYPES[1:]:  # an angle of 10^5 has an error of 10^-11 in double, whatever is done with it
        yield Case("rotary", "far", ((2, 19, 3, 32),), lambda x, k: ops.rotary(x, offset=200_000, backend=k)), dtype


CASES = [case for case in backends.CASES if case.op in OPS]
TYPED = [*((case, dtype) for case in CASES for dtype in DTYPES), *wide_cases()]


@pytest.mark.parametrize(("case", "dtype"), TYPED, ids=[f"{case}-{dtype}" for case, dtype in TYPED])
def test_outputs_and_gradients_against_float64(case, dtype):
    backends.test_outputs_and_gradients_against_float64(case, dtype, "cpu")


@pytest.mark.parametrize("case", CASES[::7], ids=str)
def test_outputs_do_not_depend_on_what_memory_held(case):
    backends.test_outputs_do_not_depend_on_what_memory_held(case, torch.float32, "cpu")


@pytest.mark.parametrize("op", ["gelu", "swiglu", "layer_norm", "rms_norm", "softmax"])
def test_large_values_nan_and_infinity(op):
    case = next(case for case in CASES if case.op == op)
    backends.test_large_values_stay_finite(case, torch.float32, "cpu")
    for value in (torch.nan, torch.inf):
        backends.test_nan_and_infinity_are_not_hidden(op, value, torch.float32, "cpu")


@pytest.mark.parametrize("with_sum", [False, True])
@pytest.mark.parametrize(("size", "dtype"), [
    *((size, dtype) for size in backends.ROWS for dtype in DTYPES),
    *(("3x9001-8999", dtype) for dtype in DTYPES[:3])], ids=str)  # some of e^12 there, which is beyond float16
def test_cross_entropy_passes(size, with_sum, dtype):
    backends.test_cross_entropy_passes(size, with_sum, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "inner_size", "start"), [
    ((2, 3, 64), 64, 0), ((3, 5, 64), 131, 3), ((2, 7, 24), 64, 2), ((2, 7, 40), 41, 1), ((2, 7, 41), 64, 3),
    ((0, 8), 8, 0)])
def test_dropout_is_the_reference_to_the_bit(shape, inner_size, start, dtype):
    x = tensors_of(Case("", "", (shape,), lambda: ()), dtype)[0]
    got, want = (ops.dropout(x, 0.4, KEY, SITE, inner_size=inner_size, inner_start=start, backend=backend)
                 for backend in ("emulated", "torch"))
    assert torch.equal(got, want)


def test_bits_do_not_change_from_call_to_call():
    """The order of threads does: it is drawn anew each time."""
    for case in (case for case in CASES if case.op in ("add_norm", "gelu") and "300x33" in str(case)):
        tensors = tensors_of(case, torch.float32)
        first, *others = (compute(case, tensors, "emulated") for _ in range(3))
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
