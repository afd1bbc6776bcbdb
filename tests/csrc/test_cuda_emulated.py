"""The CUDA operators' own code on the CPU: kernels, sizes of grids and blocks, checks, allocation
(see emulated/).

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
from ops.test_backends import DTYPES, Case, tensors_of

from hybridpar import native, ops
from hybridpar.ops.backends import registry

ROOT = Path(__file__).parents[2]
CUDA = ROOT / "csrc" / "cuda"
EMULATED = ROOT / "tests" / "csrc" / "emulated"
pytestmark = [
    pytest.mark.timeout(1200),  # the first test compiles
    pytest.mark.skipif(not CUDA.exists(), reason="runs in a checkout"),
    pytest.mark.skipif(native.missing() is not None, reason=str(native.missing())),
]
COMMON = [
    "-O1",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-w",
    f"-I{EMULATED}",
    f"-I{CUDA}",
    "-Dhybridpar=hybridpar_emulated",
]
KERNELS = [
    "-fsanitize=alignment,bounds,integer-divide-by-zero",
    "-fsanitize-undefined-trap-on-error",
    "-x",
    "c++",
]
OPERATORS = [
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
    "-include",
    "as_cpu.h",
    "-isystem",
    str(Path(torch.__file__).parent / "include"),
]
ROWS = [row for row in registry.TABLE if row.name == "cuda" and row.op != "attention"]
OPS = [row.op for row in ROWS]


@pytest.fixture(scope="module")
def library(built_once) -> Iterator[None]:
    """torch.ops.hybridpar_emulated, with the arguments of torch.ops.hybridpar."""
    folder = built_once("emulated", build)
    definitions = torch.library.Library("hybridpar_emulated", "DEF")
    for name in native.operators():
        definitions.define(
            str(getattr(torch.ops.hybridpar, name).default._schema).removeprefix("hybridpar::")
        )
    torch.ops.load_library(folder / "emulated.so")
    yield
    definitions._destroy()


def build(folder: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    operators = [
        path for path in CUDA.glob("*.cpp") if path.name not in ("attention.cpp", "device.cpp")
    ]
    jobs = [
        (*KERNELS, path) for path in CUDA.glob("*.cu") if path.name != "attention_kernels.cu"
    ]  # Hopper's own
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
    run(
        [
            "-shared",
            "-o",
            folder / "emulated.so",
            *objects,
            f"-L{torch_libraries}",
            "-ltorch_cpu",
            "-lc10",
        ]
    )


@pytest.fixture(autouse=True)
def emulated(library, monkeypatch):
    """A backend of that name, the only one that tests of backends find."""
    rows = tuple(registry.Backend(row.op, "emulated", row.path + "_emulated") for row in ROWS)
    monkeypatch.setattr(registry, "TABLE", registry.TABLE + rows)
    monkeypatch.setattr(backends, "others", lambda op, device="cpu", dtype=None: ["emulated"])


WITHOUT_SCALED = {row.op for row in ROWS if set(registry.SCALED) <= set(row.lacks)}
CASES = [
    case
    for case in backends.CASES
    if case.op in OPS and not (case.op in WITHOUT_SCALED and case.name.startswith("scaled"))
]
FAR = Case(
    "rotary", "far", ((2, 19, 3, 32),), lambda x, k: ops.rotary(x, offset=200_000, backend=k)
)
TYPED = [
    *((case, dtype) for case in CASES for dtype in DTYPES),
    *((FAR, dtype) for dtype in DTYPES[1:]),
]  # in double an angle of 10^5 has an error of 10^-11, whatever is done


@pytest.mark.thorough(keep=13)
@pytest.mark.parametrize(("case", "dtype"), TYPED, ids=[f"{case}-{dtype}" for case, dtype in TYPED])
def test_outputs_and_gradients_against_float64(case, dtype):
    backends.test_outputs_and_gradients_against_float64(case, dtype, "cpu")


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_outputs_do_not_depend_on_what_memory_held(case):
    backends.test_outputs_do_not_depend_on_what_memory_held(case, torch.float32, "cpu")


@pytest.mark.parametrize("with_sum", [False, True])
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *((size, dtype) for size in backends.ROWS for dtype in DTYPES),
        *(("3x9001-8999", dtype) for dtype in DTYPES[:3]),
    ],
    ids=str,
)  # some of e^12 there, which is beyond float16
def test_cross_entropy_passes(size, with_sum, dtype):
    backends.test_cross_entropy_passes(size, with_sum, dtype, "cpu")


def test_bits_do_not_change_from_call_to_call():
    """The order of threads does: it is drawn anew each time."""
    logits = tensors_of(Case("", "", ((3, 2050),), lambda: ()), torch.float32)[0]
    passes, column = ops.cross_entropy(logits, "emulated"), torch.arange(3)
    first, *others = (passes.statistics(logits, column, 2050, True) for _ in range(3))
    assert all(torch.equal(first, other) for other in others)
