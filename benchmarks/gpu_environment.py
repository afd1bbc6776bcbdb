"""Describe a machine for `benchmarks.gpu_check`, and refuse it if what would be measured there is
not what is named.

    python -m benchmarks.gpu_environment FILE

Writes FILE as JSON: GPU, versions, commit, extensions, and the backend that `auto` takes for each
operator. The status is 3 if a required package is missing, if the compiled operators do not load,
or, on a GPU, if Triton's operators do not. hybridpar would run without them, by other code, and the
results would bear the wrong name.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

STOP = 3
"""Exit status: nothing should be measured here."""
ROOT = Path(__file__).parent.parent
REQUIRED = ("torch", "numpy", "einops", "pytest")
REQUIRED_ON_GPU = ("triton",)
OPTIONAL = {
    "tyro": "tests that start `hybridpar` commands, such as NCCL's through the launcher",
    "tomli_w": "tests that start `hybridpar` commands",
    "tokenizers": "tests of tokenizers",
    "safetensors": "exported weights",
    "transformers": "the peer",
    "hypothesis": "tests with drawn cases",
    "pytest_timeout": "limits of single tests",
    "xdist": "tests beside each other",
}
"""Packages that a check can do without, and what is lost."""
PROGRAMS = {"compute-sanitizer": "memcheck and racecheck"}
BUILD = "HYBRIDPAR_BUILD={mode} {archs}python setup.py build_ext --inplace"


def missing(modules: Mapping[str, str] | tuple[str, ...]) -> list[str]:
    """Return the modules that cannot be found, without importing any."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def card_of(name: str) -> str:
    """Return the short name of a GPU for file names: "h100" for "NVIDIA H100 80GB HBM3"."""
    found = re.search(r"\b[A-Za-z]*\d+[A-Za-z]*", name)
    return found[0].lower() if found else "gpu"


def commit() -> str | None:
    """Return the commit, or None where neither COMMIT nor git says it."""
    if given := os.environ.get("COMMIT"):
        return given
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None


def reasons_to_stop(
    extensions: Mapping[str, str | None], *, on_gpu: bool, has_cuda_file: bool, triton: str | None
) -> Iterator[str]:
    """Yield why nothing should be measured.

    Args:
        extensions: Why each extension cannot be used, by its name; None if it can.
        on_gpu: Whether there is a GPU.
        has_cuda_file: Whether a file of _C_cuda is in the package. A rehearsal does not need one,
            but checks it.
        triton: Why Triton's operators cannot be used on the GPU; None if they can.
    """
    if reason := extensions["hybridpar._C"]:
        yield f"{reason}. Build it: {BUILD.format(mode='cpu', archs='')}"
    elif (on_gpu or has_cuda_file) and (reason := extensions["hybridpar._C_cuda"]):
        yield f"{reason}. Build it: {BUILD.format(mode='cuda', archs='HYBRIDPAR_CUDA_ARCHS=90a ')}"
    if on_gpu and triton:
        yield f"the Triton operators cannot be used: {triton}"


def triton_problem() -> str | None:
    """Return why an operator has no Triton version on this machine's GPU; None if each of the table
    has."""
    from hybridpar.ops.backends import registry

    for op in registry.ops():
        for row in registry.backends(op):
            dtype = row.dtypes[0] if row.dtypes else None
            if row.name == "triton" and (reason := row.unsupported("cuda", dtype)):
                return f"{op}: {reason}"
    return None


def main() -> int:
    file = Path(sys.argv[1])
    for names, what in ((OPTIONAL, "package"), (PROGRAMS, "program")):
        lacking = (
            missing(names)
            if what == "package"
            else [name for name in names if shutil.which(name) is None]
        )
        for name in lacking:
            print(f"missing {what} {name}: done without {names[name]}")
    if lacking := missing(REQUIRED):
        print(f"missing packages: {', '.join(lacking)}. Install them")
        return STOP

    import torch

    from hybridpar import native
    from hybridpar.ops.backends import registry

    on_gpu = torch.cuda.is_available()
    if on_gpu and (lacking := missing(REQUIRED_ON_GPU)):
        print(f"missing packages: {', '.join(lacking)}. Install them")
        return STOP
    device = "cuda" if on_gpu else "cpu"
    extensions = {
        "hybridpar._C": native.missing(),
        "hybridpar._C_cuda": native.missing_cuda(),
        "hybridpar._C_recorder": native.missing_recorder(),
    }
    name = torch.cuda.get_device_name() if on_gpu else None
    found: dict[str, Any] = {
        "device": device,
        "gpu": name,
        "card": card_of(name) if name else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit(),
        "extensions": extensions,
        "plugins": [name for name in ("xdist", "pytest_timeout") if name not in missing(OPTIONAL)],
    }
    print(
        f"{name or 'no GPU: a rehearsal on the CPU'}; torch {found['torch']}, CUDA "
        f"{found['cuda']}, "
        f"Python {found['python']}, commit {found['commit'] or 'unknown: give COMMIT=..'}"
    )
    for extension, reason in extensions.items():
        print(f"{extension}: {reason or 'loads'}")
    write(file, found)

    has_cuda_file = any((Path(native.__file__).parent).glob("_C_cuda*.so"))
    triton = triton_problem() if on_gpu else None
    reasons = list(
        reasons_to_stop(extensions, on_gpu=on_gpu, has_cuda_file=has_cuda_file, triton=triton)
    )
    for reason in reasons:
        print(f"stop: {reason}")
    if reasons:
        return STOP

    backends = [asdict(registry.report(op, device, torch.bfloat16)) for op in registry.ops()]
    for row in backends:
        print(f"{row['op']:<18}{row['active']}")
    write(file, found | {"backends": backends})
    return 0


def write(file: Path, found: Mapping[str, Any]) -> None:
    """Write the file at once, as the step may be cut off later."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.replace(file)


if __name__ == "__main__":
    sys.exit(main())
