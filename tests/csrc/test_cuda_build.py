"""Without a GPU: the CUDA operators compile for A100, H100 and RTX 5090, without spills, and load
in a torch without CUDA. Newer GPUs than those of the default list, such as a B200, get code that
they can compile.

Prints what registers and shared memory each kernel takes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from hybridpar import native

ROOT = Path(__file__).parents[2]
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
pytestmark = [
    pytest.mark.timeout(1200),  # compiles for a minute, on a core of its own
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="runs in a checkout"),
    pytest.mark.skipif(NVCC is None, reason="needs nvcc"),
    pytest.mark.skipif(native.missing() is not None, reason=str(native.missing())),
]
ARCHITECTURES = ("80", "90a", "120")
"""The default of setup.py, and a GPU of the generation behind it. Each takes 15 s, so without
--thorough one is compiled."""
OPERATORS = {"attention_hopper", "cross_entropy", "cross_entropy_backward_", "rotary"}
"""Operators with a version in CUDA C++: where it is faster than Triton's."""

ONLY_CUDA = """
import runpy, setuptools, sys
def setup(*, ext_modules, real=setuptools.setup, **arguments):
    real(ext_modules=[e for e in ext_modules if e.name == "hybridpar._C_cuda"], **arguments)
setuptools.setup = setup
runpy.run_path("setup.py", run_name="__main__")
"""

LOAD = """
import json, sys
import torch, hybridpar
from hybridpar import native
from hybridpar.ops.backends import libraries
hybridpar.__path__.insert(0, sys.argv[1])
print(json.dumps({
    "missing": native.missing_cuda(),
    "operators": [name for name in native.operators() if libraries.has_cuda(name)],
    "reasons": [libraries.cuda_missing(op) for op in ("rotary", "cross_entropy", "embedding")],
}))
"""


@pytest.fixture(
    scope="module",
    params=[("90a",), pytest.param(ARCHITECTURES, marks=pytest.mark.thorough)],
    ids=str,
)
def architectures(request) -> tuple[str, ...]:
    return request.param


@pytest.fixture(scope="module")
def built(architectures, built_once) -> tuple[Path, str]:
    """The folder of the extension that setup.py built, and the compilers' output."""
    name = "-".join(["cuda", *architectures])
    folder = built_once(name, partial(build, architectures))
    return folder / "lib" / "hybridpar", (folder / "log").read_text()


def build(architectures: tuple[str, ...], folder: Path) -> None:
    env = {
        **os.environ,
        "HYBRIDPAR_BUILD": "cuda",
        "HYBRIDPAR_CUDA_ARCHS": ";".join(architectures),
        "NVCC_APPEND_FLAGS": "-Xptxas=-v,-warn-spills,--warning-as-error",
    }
    command = [
        sys.executable,
        "-c",
        ONLY_CUDA,
        "build_ext",
        "-b",
        folder / "lib",
        "-t",
        folder / "objects",
    ]
    run = subprocess.run(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert run.returncode == 0, run.stdout[-5000:]
    (folder / "log").write_text(run.stdout)


def test_compiles_without_spills(built, architectures, record_property):
    found = re.findall(
        r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes "
        r"spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)",
        built[1],
        re.DOTALL,
    )
    names = demangled([name for name, *_ in found])
    assert {architecture for _, architecture, *_ in found} == set(architectures)
    for source in [*(ROOT / "csrc").rglob("*.cu"), *(ROOT / "csrc").rglob("*.cuh")]:
        text = source.read_text()
        kernels = re.findall(r"__global__ .*?(\w+_kernel)\(", text)
        assert len(kernels) == text.count("__global__"), (
            f"{source}: a kernel's name ends with _kernel, in its line"
        )
        for kernel in kernels:
            found_in = sum(kernel in name for name in names)
            assert found_in >= 4 * len(architectures), (
                f"{kernel}: for 4 types, or uses, and each architecture"
            )
    for name, (_, architecture, stack, stores, loads, registers, rest) in sorted(
        zip(names, found, strict=True)
    ):
        shared = re.search(r"(\d+) bytes smem", rest)
        used = {"registers": int(registers), "shared": int(shared[1]) if shared else 0}
        record_property(f"sm_{architecture} {name}", used)
        print(f"sm_{architecture} {name}: {used}")
        assert (stack, stores, loads) == ("0", "0", "0"), f"sm_{architecture} {name} spills"


@pytest.mark.parametrize("newer", ["100", "120"])
def test_newer_gpus_compile_what_the_default_has(built, architectures, newer, tmp_path):
    """Compile PTX like a driver that loads the extension, for which a build has PTX of the GPUs
    that it is for."""
    tools = Path(os.path.realpath(NVCC)).parent, triton_tools()
    cuobjdump, ptxas = (
        next((folder / name for folder in tools if (folder / name).exists()), None)
        for name in ("cuobjdump", "ptxas")
    )
    if cuobjdump is None or ptxas is None:
        pytest.skip("needs cuobjdump, which comes with CUDA and with triton, and ptxas")
    (library,) = built[0].glob("_C_cuda*.so")
    subprocess.run(
        [cuobjdump, "-xptx", "all", library], cwd=tmp_path, check=True, capture_output=True
    )
    texts = {path: path.read_text() for path in tmp_path.glob("*.ptx")}
    by_target = {
        target: [path for path, text in texts.items() if f".target sm_{target}\n" in text]
        for target in {"80", "90"} & {name[:2] for name in architectures}
    }
    assert all(by_target.values()), f"PTX of {by_target}"
    kernels = set()
    for path in by_target["90"]:
        run = subprocess.run(
            [ptxas, f"-arch=sm_{newer}", "-warn-spills", "-v", path, "-o", tmp_path / "code"],
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        assert "spilled" not in run.stderr.lower(), run.stderr
        kernels |= set(re.findall(r"Compiling entry function '(\w+)'", run.stderr))
    assert {
        name
        for name in ("rotary_kernel", "cross_entropy_kernel", "cross_entropy_backward_kernel")
        if not any(name in kernel for kernel in kernels)
    } == set()


def triton_tools() -> Path:
    found = importlib.util.find_spec("triton")
    return (
        Path(found.origin).parent / "backends" / "nvidia" / "bin"
        if found and found.origin
        else Path("nowhere")
    )


def demangled(names: list[str]) -> list[str]:
    """'kernel<type, number>', if c++filt is here."""
    if not shutil.which("c++filt"):
        return names
    text = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout
    return [
        re.sub(r"hybridpar::|\(anonymous namespace\)::|^void |\(.*\)$", "", line)
        for line in text.splitlines()
    ]


def test_loads_where_torch_has_no_cuda(built):
    run = subprocess.run(
        [sys.executable, "-c", LOAD, built[0]],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["missing"] is None
    assert set(answer["operators"]) == OPERATORS
    assert answer["reasons"] == [None, None, "has no version of embedding"]
