"""Report this machine's hardware, the extensions that were built for it, which backend each
operator runs, and why."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hybridpar import __version__, native
from hybridpar.cores import available_cores
from hybridpar.cpu import cpu_fields, cpu_name
from hybridpar.ops.attention import attention_class
from hybridpar.ops.backends import libraries, registry

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = {"attention": attention_class(128, grouped=False)}
"""Shape class to report for operations whose fastest backend depends on the shape."""
PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "apex")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
"""CPU instruction sets that decide the speed of matrix products."""


def examine() -> dict[str, Any]:
    """Collect everything that `hybridpar doctor` reports, as plain data."""
    has_cuda = torch.cuda.is_available()
    devices = ["cpu", *["cuda"] * has_cuda]
    gpus = [_gpu(i) for i in range(torch.cuda.device_count())] if has_cuda else []
    return {
        "versions": {
            "hybridpar": __version__,
            "python": platform.python_version(),
            **_versions(),
            "cuda of torch": torch.version.cuda,
        },
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            **_cpu(),
            "memory_gib": _memory_gib(),
            "gpus": gpus,
            "c++": shutil.which("c++"),
            "nvcc": shutil.which("nvcc"),
        },
        "built": {
            "hybridpar._C": native.missing() or "yes",
            "hybridpar._C_cuda": native.missing_cuda() or "yes",
            "hybridpar._C_recorder": native.missing_recorder() or "yes",
        },
        "triton": _triton() if "cuda" in devices else None,
        "operators": {
            device: {op: _choices(op, device) for op in registry.ops()} for device in devices
        },
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _cpu() -> dict[str, Any]:
    fields = cpu_fields()
    known = (fields.get("flags") or fields.get("Features", "")).split()
    return {
        "cpu": cpu_name(),
        "cores": available_cores(),
        "instructions": [name for name in CPU_FLAGS if name in known],
    }


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
    }


def _triton() -> dict[str, Any]:
    """Launch a Triton kernel on this machine's GPU; return all problems, and a warning for the
    user."""
    libraries.examine_triton(warn=False)  # `problem` reports the warning
    found = libraries.triton_library()
    return {"problems": found.problems(), "warning": libraries.warning_of(found)}


def _choices(op: str, device: str) -> dict[str, Any]:
    """Return the backends that `auto` selects for an operation on a device.

    The result has the backend for each dtype, the dtypes for which measured times decided, the
    source of these times, and the reasons why other backends cannot run.
    """
    reports = {
        str(dtype).removeprefix("torch."): registry.report(op, device, dtype, SHAPES.get(op, ""))
        for dtype in DTYPES
    }
    return {
        **{name: report.active for name, report in reports.items()},
        "measured": [name for name, report in reports.items() if report.measured],
        "source": {name: report.source for name, report in reports.items()},
        "cannot": next(iter(reports.values())).rejected,
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Format the data of `examine` as lines for the user."""
    versions = found["versions"]
    machine = found["machine"]
    yield ", ".join(f"{name} {version or '(none)'}" for name, version in versions.items())
    yield (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; "
        f"{machine['system']}; "
        f"{' '.join(machine['instructions']) or 'no vector instructions that we know'}"
    )
    for gpu in machine["gpus"]:
        yield (
            f"{gpu['name']}, {gpu['memory_gib']} GiB, capability {gpu['capability']}, "
            f"{gpu['multiprocessors']} multiprocessors"
        )
    yield f"C++ compiler: {machine['c++'] or 'none'}; nvcc: {machine['nvcc'] or 'none'}"
    yield ""
    for name, state in found["built"].items():
        yield f"{name}: {state}"
    if found["triton"] is not None:
        for problem in found["triton"]["problems"] or [
            "compiles and launches kernels, and all of ours are there"
        ]:
            yield f"triton on the GPU: {problem}"
    for device, operators in found["operators"].items():
        yield ""
        yield from _table(device, operators)


def _table(device: str, operators: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    dtypes = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    yield f"{'operators on ' + device:<20}" + "".join(f"{dtype:<10}" for dtype in dtypes)
    for op, choice in operators.items():
        yield f"  {op:<18}" + "".join(
            f"{choice[dtype] + '*' * (dtype in choice['measured']):<10}" for dtype in dtypes
        )
    yield "  * the fastest by measured times; without these, the first that can run"
    sources: dict[str, list[str]] = {}
    for op, choice in operators.items():
        for dtype in choice["measured"]:
            sources.setdefault(choice["source"][dtype], []).append(op)
    if device == "cuda":
        for op, choice in operators.items():
            if "bfloat16" not in choice["measured"]:
                sources.setdefault(choice["source"]["bfloat16"], []).append(op)
    for source, ops in sources.items():
        yield (
            f"  {'*' if source.startswith('measured') else '-'} {source}: "
            f"{', '.join(dict.fromkeys(ops))}"
        )
    grouped: dict[tuple[str, str], list[str]] = {}
    for op, choice in operators.items():
        for name, reason in choice["cannot"].items():
            grouped.setdefault((name, reason), []).append(op)
    for (name, reason), ops in grouped.items():
        all_of_it = len(ops) == sum(
            name in {row.name for row in registry.backends(op)} for op in operators
        )
        yield f"not {name} for {'any' if all_of_it and len(ops) > 2 else ', '.join(ops)}: {reason}"


def problem(found: Mapping[str, Any]) -> str | None:
    """Return a message about missing components of the installation, or None if it is complete."""
    if found["built"]["hybridpar._C"] != "yes" and sys.platform == "linux":
        return (
            "the C++ operators are missing, so plain torch runs instead; installing with "
            "HYBRIDPAR_BUILD=cpu shows why they were not built"
        )
    if found["triton"] is not None and found["triton"]["warning"]:
        return f"there is a GPU, but Triton's kernels cannot all run: {found['triton']['warning']}"
    return None
