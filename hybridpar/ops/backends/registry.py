"""The table of operations and of the code that can run them.

An operation is added in five places:

    ops/<x>.py                the function with its checks, its torch reference `<op>_torch`, the
                              differentiable `<op>_fused` over a library's passes, and what those
                              return (PASSES); ops/__init__.py exports the function
    TABLE, here               its row
    config.KernelsConfig      its field, if layers let the user choose
    csrc/cpu/, kernels/       its passes, in either or both: a file of its own that nothing else
                              lists
    tests                     cases in ops/test_backends.py, launches of its kernels in
                              kernel_specs/

Rows name code by text, so nothing is imported before it is used; code that cannot be imported
cannot run.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hybridpar.errors import config_error
from hybridpar.native import constant_when_traced
from hybridpar.ops.backends import measured

_log = logging.getLogger(__name__)
_DEVICES = {"cpu": "the CPU", "cuda": "a GPU"}
SCALED = ("scaled frequencies",)
"""Features of operations that not all of their backends have."""
_HALF = torch.bfloat16, torch.float16
_NARROW = torch.float32, *_HALF
_ALL = torch.float64, *_NARROW


@dataclass(frozen=True, slots=True)
class Backend:
    """Code that runs an operation.

    Attributes:
        path: 'module:name.name' of the code; after a space, the path of the library of passes that
            it takes first, if any.
        device, dtypes: The tensors that it takes; empty: any.
        check: Path of a function of (op, device_type, dtype) that returns why the code cannot run
            here; empty: it can.
        fallback: It runs if no row before it can; `auto` does not take it for its measured time.
        lacks: Features of the operation that it does not have.
    """

    op: str
    name: str
    path: str
    device: str = ""
    dtypes: tuple[torch.dtype, ...] = ()
    check: str = ""
    fallback: bool = False
    lacks: tuple[str, ...] = ()

    def unsupported(
        self,
        device_type: str | None = None,
        dtype: torch.dtype | None = None,
        needs: tuple[str, ...] = (),
    ) -> str | None:
        """Return why it cannot run on such tensors, with the features in `needs`; None if it can.
        Without tensors: on this machine at all."""
        for feature in needs:
            if feature in self.lacks:
                return f"has no {feature}"
        if self.device and device_type not in (None, self.device):
            return f"runs on {_DEVICES[self.device]}, not on {device_type}"
        if self.dtypes and dtype not in (None, *self.dtypes):
            return f"has no {dtype} version"
        if self.device == "cuda" and not torch.cuda.is_available():
            return "no GPU here"
        try:
            if reason := self.check and _load(self.check)(self.op, device_type, dtype):
                return reason
            for path in self.path.split():
                _load(path)
        except ImportError as error:
            if (error.name or "").startswith("hybridpar.ops"):
                raise  # a wrong path in the table, not a library that this machine lacks
            return f"cannot be imported ({error})"
        return None


@dataclass(frozen=True, slots=True)
class _Library:
    """A library of passes, which is a backend of every operation that has a fused form over it.

    Attributes:
        backend: The backend's name.
        path: Path of the library.
        device, dtypes, check, fallback, lacks: See Backend.
    """

    backend: str
    path: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    check: str
    fallback: bool = False
    lacks: tuple[str, ...] = ()


_CPP = _Library(
    "cpp", "torch:ops.hybridpar", "cpu", _ALL, "hybridpar.ops.backends.libraries:cpp_missing"
)
_TRITON = _Library(
    "triton",
    "torch:ops.hybridpar_triton",
    "",
    _NARROW,
    "hybridpar.ops.backends.libraries:triton_missing",
)
# Kernels in CUDA C++, which are as fast as Triton's, within 2 %, and run where Triton cannot.
_CUDA = _Library(
    "cuda",
    "torch:ops.hybridpar",
    "cuda",
    _ALL,
    "hybridpar.ops.backends.libraries:cuda_missing",
    fallback=True,
)


def _rows(
    op: str,
    module: str,
    code: str = "",
    *,
    libraries: Sequence[_Library] = (_CPP, _TRITON),
    others: Sequence[Backend] = (),
) -> Iterator[Backend]:
    """Yield the rows of an operation of ops/<module>.py.

    Args:
        op: Name of the operation.
        module: Module that defines it.
        code: Its fused form, if that is more than a library, and its reference.
        libraries: Libraries that have its passes.
        others: Further rows, after the libraries' rows.
    """
    *fused, reference = (
        f"hybridpar.ops.{module}:{name}" for name in (code or f"{op}_fused {op}_torch").split()
    )
    for library in libraries:
        yield Backend(
            op,
            library.backend,
            " ".join([*fused, library.path]),
            library.device,
            library.dtypes,
            library.check,
            library.fallback,
            library.lacks,
        )
    yield from others
    yield Backend(op, "torch", reference)


# Attention for Hopper in CUDA C++, where it is faster than Triton's.
_HOPPER = Backend(
    "attention",
    "cuda",
    "hybridpar.ops.backends.hopper:attention",
    "cuda",
    _HALF,
    "hybridpar.ops.backends.hopper:missing",
)


def _apex(op: str, code: str = "", dtypes: tuple[torch.dtype, ...] = _NARROW) -> Backend:
    """Return the row of an operation that apex has, by default under its own name."""
    path = f"hybridpar.ops.backends.apex:{code or op}"
    return Backend(op, "apex", path, "cuda", dtypes, "hybridpar.ops.backends.apex:missing")


# Per operation in the order `auto` tries them where measured.py has no times; the last is the
# reference and always can.
TABLE = (
    *_rows("layer_norm", "norm", others=(_apex("layer_norm"),)),
    *_rows("rms_norm", "norm", others=(_apex("rms_norm"),)),
    *_rows("add_norm", "norm", others=(_apex("add_norm"),)),
    *_rows("bias_dropout_add", "norm"),
    *_rows("gelu", "activation"),
    *_rows("swiglu", "activation"),
    *_rows("geglu", "activation"),
    *_rows("rotary", "rotary", libraries=(_CPP, _TRITON, replace(_CUDA, lacks=SCALED))),
    *_rows("split_qkv", "split_qkv", libraries=(_TRITON,)),
    Backend(
        "attention",
        "sdpa",
        "hybridpar.ops.attention:attention_sdpa",
        "cuda",
        _HALF,
        _TRITON.check,
    ),
    *_rows("attention", "attention", others=(_HOPPER,)),
    *_rows("next_token_attention", "generation", libraries=(replace(_CPP, dtypes=_ALL[:3]),)),
    *_rows("few_rows_linear", "generation", libraries=(replace(_CPP, dtypes=_ALL[:3]),)),
    *_rows("cross_entropy", "cross_entropy", "Compiled Passes", libraries=(_CPP, _TRITON, _CUDA)),
    *_rows("dropout", "dropout"),
    *_rows(
        "embedding",
        "embedding",
        "Compiled Passes",
        libraries=(_CPP, replace(_TRITON, dtypes=_ALL)),
    ),
    *_rows("quantize", "quantize", "Passes"),
    *_rows("largest", "largest", "Passes"),
    *_rows(
        "quantize_fp8",
        "fp8",
        "Passes",
        libraries=(replace(_TRITON, dtypes=_NARROW[:2], check="hybridpar.ops.fp8:missing"),),
    ),
    *_rows(
        "optimizer",
        "update",
        "Compiled Passes",
        libraries=(_CPP, replace(_TRITON, dtypes=(torch.float64, torch.float32))),
        others=(_apex("optimizer", "FusedAdam", (torch.float32,)),),  # tensors of one type
    ),
    *_rows(
        "sparse",
        "sparse",
        "Compiled Passes",
        libraries=(replace(_CPP, dtypes=_ALL[:2]), replace(_TRITON, dtypes=_ALL[1:2])),
    ),
)


@dataclass(frozen=True, slots=True)
class Report:
    """The backend that `auto` takes for an operation on this machine, and why not the others.

    Attributes:
        measured: Whether it is the fastest of the measured ones; otherwise it is the first that can
            run.
        source: Where the times come from, or why there are none.
    """

    op: str
    active: str
    rejected: dict[str, str]
    measured: bool = False
    source: str = ""


def ops() -> tuple[str, ...]:
    """Return the operations of the table, in its order."""
    return tuple(dict.fromkeys(row.op for row in TABLE))


def backends(op: str) -> tuple[Backend, ...]:
    """Return the rows of one operation, the one `auto` prefers first."""
    return tuple(row for row in TABLE if row.op == op)


def resolve(op: str, choice: str, x: Tensor, shape: str = "", needs: tuple[str, ...] = ()) -> Any:
    """Return the code, or passes, that run `op` on tensors like `x`.

    Args:
        backend: Name of the backend; 'auto': see `select`.
        shape: Class of the shape, if the fastest backend depends on it.
        needs: Features of the operation that not all backends have.

    Raises:
        ConfigError: The backend does not exist or cannot run.
    """
    code, *library = [
        _loaded(path) for path in _path(op, choice, x.device.type, x.dtype, shape, needs).split()
    ]
    return functools.partial(code, *library) if library else code


def select(
    op: str,
    choice: str = "auto",
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
    shape: str = "",
    needs: tuple[str, ...] = (),
) -> Backend:
    """Return the row that runs `op` on such tensors (None: on this machine at all), of a class
    of shapes.

    'auto' takes the fastest of the backends that can run, if two or more were measured on such
    tensors,
    else the first. Times of fallbacks do not count.

    Raises:
        ConfigError: The operation or backend does not exist, or the backend cannot run.
    """
    rows = backends(op)
    if not rows:
        raise config_error("kernels", op, "unknown operation", ", ".join(ops()))
    if choice == "auto":
        return _automatic(op, device_type, dtype, shape, needs)[0]
    row = next((row for row in rows if row.name == choice), None)
    able = (row.name for row in rows if row.unsupported(device_type, dtype, needs) is None)
    works = ("auto", *able)
    if row is None:
        names = ", ".join(row.name for row in rows)
        near = get_close_matches(choice, works, 1)
        rule = f"unknown backend of {op}. Backends: {names}"
        raise config_error(f"kernels.{op}", choice, rule, near[0] if near else "auto")
    if reason := row.unsupported(device_type, dtype, needs):
        raise config_error(
            f"kernels.{op}", choice, f"cannot run here: {reason}", " or ".join(works)
        )
    return row


def report(
    op: str, device_type: str | None = None, dtype: torch.dtype | None = None, shape: str = ""
) -> Report:
    """Return the backend that `auto` takes for an operation on such tensors (None: on this
    machine at all).

    The report says why it takes that one, and why others cannot run.

    Args:
        shape: Class of the tensors' shapes.
    """
    reasons = {row.name: row.unsupported(device_type, dtype) for row in backends(op)}
    row, by_time = _automatic(op, device_type, dtype, shape)
    times = measured.find(op, device_type, dtype, shape)
    source = (
        times.source
        if by_time or not times.medians
        else "one backend alone of those that can run was measured"
    )
    return Report(
        op, row.name, {name: reason for name, reason in reasons.items() if reason}, by_time, source
    )


def _automatic(
    op: str,
    device_type: str | None,
    dtype: torch.dtype | None,
    shape: str = "",
    needs: tuple[str, ...] = (),
) -> tuple[Backend, bool]:
    """Return the row that 'auto' takes, and whether measured times decided."""
    able = [row for row in backends(op) if row.unsupported(device_type, dtype, needs) is None]
    times = measured.medians(op, device_type, dtype, shape)
    timed = [row for row in able if row.name in times and not row.fallback]
    return (
        (min(timed, key=lambda row: times[row.name]), True) if len(timed) > 1 else (able[0], False)
    )


def _path(
    op: str,
    choice: str,
    device_type: str,
    dtype: torch.dtype,
    shape: str,
    needs: tuple[str, ...],
) -> str:
    """Return the path of the selected row, whose modules are loaded.

    It is a text, as torch.compile runs this while it traces.
    """
    return _selected(op, choice, device_type, dtype, shape, needs).path


constant_when_traced(_path)


@functools.cache
def _selected(
    op: str,
    choice: str,
    device_type: str,
    dtype: torch.dtype,
    shape: str,
    needs: tuple[str, ...],
) -> Backend:
    """Select once for each kind of tensor, and log the choice."""
    row = select(op, choice, device_type, dtype, shape, needs)
    _log.info("%s on %s %s: %s backend", f"{op} {shape}".rstrip(), device_type, dtype, row.name)
    return row


@functools.cache
def _load(path: str) -> Any:
    """Import the code at `path`. Raises: ImportError."""
    importlib.import_module(path.partition(":")[0])
    return _loaded(path)


def _loaded(path: str) -> Any:
    """Return the code at `path`, whose module is loaded."""
    module, _, name = path.partition(":")
    return attrgetter(name)(sys.modules[module])
