"""Import the compiled extensions on first use: operators (_C, _C_cuda), and the recorder of memory
events (_C_recorder).

No other module imports them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable
from typing import Any

import torch


def missing() -> str | None:
    """Return why the operators `torch.ops.hybridpar.*` cannot be used here; None if they can. Loads
    them on first use.
    """
    return _load()


def missing_cuda() -> str | None:
    """Return why the operators have no CUDA versions here; None if they have. Loads them on first
    use.
    """
    return _load_cuda()


def missing_recorder() -> str | None:
    """Return why `recorder` cannot be used here; None if it can. Loads it on first use."""
    return _load_recorder()


def recorder() -> Any:
    """Return the module hybridpar._C_recorder."""
    return importlib.import_module(_RECORDER)


def constant_when_traced(function: Callable[..., Any]) -> None:
    """Apply torch.compiler.assume_constant_result without importing the compiler, which takes a
    second at every start.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


_EXPECTED = "bafcdd90"
"""`arguments_digest` of the extension that this checkout's sources build."""

constant_when_traced(missing)


@functools.cache
def _load() -> str | None:
    try:
        importlib.import_module("hybridpar._C")
    except ImportError as error:
        return f"the extension hybridpar._C is not built or does not load ({error})"
    if arguments_digest() != _EXPECTED:
        return (
            "the extension hybridpar._C was built for another version of hybridpar; build it again"
        )
    return None


def arguments_digest() -> str:
    """Return a hash of the operators that the extension has, and of the names of their
    arguments.
    """
    found = {
        name: [
            argument.name
            for argument in getattr(torch.ops.hybridpar, name).default._schema.arguments
        ]
        for name in operators()
    }
    return hashlib.blake2s(repr(found).encode(), digest_size=4).hexdigest()


def operators() -> list[str]:
    """Return the names of torch.ops.hybridpar.*, once the extension is loaded."""
    names = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    ours = sorted(name for namespace, _, name in names if namespace == "hybridpar")
    return [name for name in ours if hasattr(torch.ops.hybridpar, name)]


@functools.cache
def _load_cuda() -> str | None:
    if reason := missing():
        return reason  # the operators are defined there
    try:
        importlib.import_module("hybridpar._C_cuda")
    except ImportError as error:
        return f"the extension hybridpar._C_cuda is not built or does not load ({error})"
    return None


_RECORDER = "hybridpar._C_recorder"


@functools.cache
def _load_recorder() -> str | None:
    try:
        module = importlib.import_module(_RECORDER)
    except ImportError as error:
        return f"the extension {_RECORDER} is not built or does not load ({error})"
    if module.torch_version != (found := torch.__version__.partition("+")[0]):
        return (
            f"the extension {_RECORDER} was built for torch {module.torch_version}, and this is "
            f"{found}"
        )
    if not hasattr(module.Observer, "name_tensors"):
        return (
            f"the extension {_RECORDER} was built for another version of hybridpar; build it again"
        )
    try:
        module.start()
    except RuntimeError as error:
        return (
            f"the extension {_RECORDER} cannot be used with this torch "
            f"({str(error).splitlines()[0]})"
        )
    return None
