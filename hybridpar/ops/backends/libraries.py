"""The libraries of passes that fused operations are made of, and why one cannot be used here.

    torch.ops.hybridpar          C++ (csrc/cpu); some passes in CUDA C++, too (csrc/cuda)
    torch.ops.hybridpar_triton   Triton (kernels/), with the same names, arguments and results

In Triton's interpreter (TRITON_INTERPRET=1) its passes take tensors on the CPU, for tests: hours
for a second of the compiled ones. torch.compile sees a pass from outside, by a function of its
arguments that returns empty tensors of the shapes and types that the pass returns: PASSES of the
operation's module.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hybridpar import native
from hybridpar.config import triton_is_interpreted
from hybridpar.ops.backends import registry

_log = logging.getLogger(__name__)
OLDEST_GPU = (8, 0)
"""Compute capability that csrc/cuda is compiled for at least (setup.py)."""
Shapes = Mapping[str, Callable[..., Any]]
"""Type of PASSES: passes by name, each with a function that returns empty tensors like theirs."""


def like(x: Tensor, *_: Any) -> Tensor:
    """Return an empty tensor like a pass's first argument, without gaps."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def heads_inside(x: Tensor, *_: Any) -> Tensor:
    """Return the result [b, s, n, d] of a pass whose first argument is [b, n, s, d]."""
    b, n, s, d = x.shape
    return x.new_empty((b, s, n, d))


def nothing(*_: Any) -> None:
    """Return the result of a pass that writes to its arguments."""


def wide_type(x: Tensor) -> torch.dtype:
    """Return the type that passes compute in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def without_gaps(x: Tensor) -> Tensor:
    """Return x, or a copy if there are gaps in its last dimension."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def cpp_missing(op: str, *_: Any) -> str | None:
    """Return why the C++ passes of `op` cannot be used; None if they can."""
    return _known(native.missing(), "hybridpar", op)


def cuda_missing(op: str, *_: Any) -> str | None:
    """Return why the CUDA C++ passes of `op`, one of which has its name, cannot be used; None if
    they can."""
    reason = _known(native.missing_cuda(), "hybridpar", op)
    if reason is None and not has_cuda(op):
        reason = f"has no version of {op}"
    if (
        reason is None
        and torch.cuda.is_available()
        and (found := torch.cuda.get_device_capability()) < OLDEST_GPU
    ):
        reason = "needs a GPU of compute capability 8.0 or more, not {}.{}".format(*found)
    return reason


def has_cuda(name: str) -> bool:
    """Whether the loaded extensions have a CUDA version of torch.ops.hybridpar.<name>."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"hybridpar::{name}", "CUDA")


def triton_missing(op: str, device_type: str | None, dtype: torch.dtype | None) -> str | None:
    """Return why the Triton passes of `op` cannot take such tensors; None if they can."""
    interpreted = triton_is_interpreted()
    if device_type not in (None, "cpu" if interpreted else "cuda"):
        return (
            "its interpreter runs on the CPU"
            if interpreted
            else f"runs on a GPU, not on {device_type}"
        )
    if interpreted and dtype == torch.bfloat16:
        return "its interpreter computes bfloat16 wrongly"
    if not interpreted and not torch.cuda.is_available():
        return "no GPU here"
    found = triton_library()
    examine_triton(warn=True)
    return _known(found.reason(passes_of(op)), "hybridpar_triton", op)


@dataclass
class TritonLibrary:
    """The Triton operators of this process.

    Attributes:
        failure: Why none of them can be used. Empty: some or all can.
        broken: By module of kernels/, why it cannot be imported or registered.
        missing: By operator, the broken module that would have defined it.
        is_told: Whether the user was told what is missing.
    """

    failure: str = ""
    broken: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    is_told: bool = False
    _library: torch.library.Library | None = None
    """Operators live as long as their library."""

    def reason(self, passes: Iterable[str]) -> str | None:
        """Return why not all of these operators can be used; None if they can."""
        if self.failure:
            return self.failure
        module = next((self.missing[name] for name in passes if name in self.missing), None)
        return None if module is None else self.describe(module)

    def describe(self, module: str) -> str:
        """Return why a module is broken."""
        return f"kernels/{module}.py cannot be imported ({self.broken[module]})"

    def problems(self) -> list[str]:
        """Return all that is wrong, a sentence each. Empty: every operator can be used."""
        return [self.failure] if self.failure else [self.describe(module) for module in self.broken]


def examine_triton(*, warn: bool) -> None:
    """Warn of Triton's problems on this machine's GPU, once in a process. `warn` False: say
    nothing, now or later."""
    found = triton_library()
    if found.is_told:
        return
    found.is_told = True  # before the warning, which asks of each operation what runs it
    if warn and not triton_is_interpreted() and (text := warning_of(found)):
        _log.warning(text)


@functools.cache
def triton_library() -> TritonLibrary:
    """Import and register all Triton operators, and see whether a kernel can be launched. Takes a
    second once."""
    return load_triton(
        "hybridpar.kernels", "hybridpar_triton", None if triton_is_interpreted() else _launch_probe
    )


def load_triton(package: str, library: str, probe: Callable[[], None] | None) -> TritonLibrary:
    """Register what the modules of a package list as OPERATORS: name -> arguments that it writes.

    A module that fails takes no other module's operators with it, unless that one imports it.

    Args:
        package: Name of the package of kernels.
        library: Namespace of the operators in torch.ops.
        probe: Launches a kernel. Triton compiles its launcher with the machine's C compiler at the
            first launch only, so imports do not show that one is missing. None: nothing is
                launched.
    """
    found = TritonLibrary()
    if probe is not None:
        try:
            probe()
        except Exception as error:  # ours, Triton's, a compiler's or the driver's
            found.failure = f"Triton cannot launch a kernel ({_in_one_line(error)})"
            if isinstance(error, ImportError):
                found.failure = f"Triton cannot be imported ({error})"
            return found
    found._library = torch.library.Library(library, "DEF")
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        name = f"{package}.{module.name}"
        try:
            _register(found._library, importlib.import_module(name))
        except (
            Exception
        ) as error:  # a name that this Triton does not have, an argument that it does not take
            found.broken[module.name] = _in_one_line(error)
            found.missing |= dict.fromkeys(_listed_operators(name), module.name)
    return found


def _register(library: torch.library.Library, kernels: ModuleType) -> None:
    for name, written in getattr(kernels, "OPERATORS", {}).items():
        function = getattr(kernels, name)
        library.define(name + torch.library.infer_schema(function, mutates_args=written))
        library.impl(name, function, "CompositeExplicitAutograd")


def _launch_probe() -> None:
    importlib.import_module("hybridpar.kernels.probe").probe()


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _listed_operators(module: str) -> list[str]:
    """Return the names in OPERATORS of a module that cannot be imported, from its text.

    The text may be no Python.
    """
    package, _, name = module.rpartition(".")
    for folder in importlib.import_module(package).__path__:
        if (path := Path(folder, f"{name}.py")).is_file():
            listed = re.search(
                r"^OPERATORS\b[^{]*(\{.*?\})", path.read_text(errors="replace"), re.M | re.S
            )
            return re.findall(r'"(\w+)"\s*:', listed[1]) if listed else []
    return []


def warning_of(found: TritonLibrary) -> str:
    """Return Triton's problems, the operations that lose by them, and a remedy. Empty: there is no
    problem."""
    problems = found.problems()
    if not problems:
        return ""
    slower = []
    for op in registry.ops():
        if found.reason(passes_of(op)) and any(
            row.name == "triton" for row in registry.backends(op)
        ):
            slower.append(f"{op} ({registry.report(op, 'cuda', torch.bfloat16).active})")
    cost = (
        f" These operations run without Triton, which is slower: {', '.join(slower)}."
        if slower
        else ""
    )
    return f"{'; '.join(problems)}.{cost} {remedy(problems[0])}."


_TESTED = "3.6", "3.9"
"""The oldest and newest Triton that the kernels were tested with."""
_REMEDIES = (
    ("No module named 'triton'", f'Install Triton: pip install "triton>={_TESTED[0]}"'),
    (
        "C compiler",
        "Install a C compiler, which Triton needs at run time, such as gcc, or name one in CC",
    ),
    (
        "returned non-zero exit status",
        "The C compiler that Triton calls at run time fails. See its message above; it "
        "needs Python's headers (python3-dev)",
    ),
)


def remedy(problem: str) -> str:
    """Return what a user can do about a problem with Triton."""
    for sign, text in _REMEDIES:
        if sign in problem:
            return text
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        version = "of an unknown version"
    return (
        f"This is Triton {version}; the kernels are tested with {' to '.join(_TESTED)}. Install "
        "one of these"
    )


@functools.cache
def passes_of(op: str) -> tuple[str, ...]:
    """Return the names of the passes that an operation uses.

    In a module with several operations these are the passes that begin with its name, or, if there
    are none, with no other operation's name. Otherwise they are all passes of the module.
    """
    module = _module_of(op)
    names = tuple(importlib.import_module(module).PASSES)
    others = tuple(other for other in registry.ops() if other != op and _module_of(other) == module)
    own = tuple(name for name in names if name.startswith(op))
    if others and own:
        return own
    return tuple(name for name in names if not name.startswith(others))


def _module_of(op: str) -> str:
    return registry.backends(op)[-1].path.partition(":")[0]


def _known(reason: str | None, library: str, op: str) -> str | None:
    """Return the reason; without one, let torch.compile and meta tensors know the passes of op's
    module."""
    if reason is None:
        _register_shapes(library, _module_of(op))
    return reason


@functools.cache
def _register_shapes(library: str, module: str) -> None:
    passes = getattr(torch.ops, library)
    for name, shapes in importlib.import_module(module).PASSES.items():
        if hasattr(passes, name):
            torch.library.register_fake(f"{library}::{name}", shapes)
