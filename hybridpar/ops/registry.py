"""One table of operations and the backends that can run them.

A row names its code by text, so nothing is imported before it is used; a module that cannot be imported is a backend
that cannot run. A row's check(op, device_type, dtype) (both None: in general, on this machine) returns the reason why
it cannot, or None.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hybridpar.errors import config_error
from hybridpar.native import constant_when_traced
from hybridpar.ops import measured

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to run an operation: `path` is 'module:name.name'; `check` the same, or empty where it always can."""

    op: str
    name: str
    path: str
    check: str = ""

    def unsupported(self, device_type: str | None = None, dtype: torch.dtype | None = None) -> str | None:
        """Why it cannot run on such tensors (None: in general, on this machine); None when it can."""
        try:
            if reason := self.check and _load(self.check)(self.op, device_type, dtype):
                return reason
            _load(self.path)
        except ImportError as error:
            return f"cannot be imported ({error})"
        return None


def _rows(op: str, torch: str, *, cuda: str = "fused:compiled fused:cuda_unsupported",
          apex: bool = False) -> tuple[Backend, ...]:
    passes, cuda_unsupported = cuda.split()
    return (
        Backend(op, "cpp", f"hybridpar.ops.fused:compiled.{op}", "hybridpar.ops.fused:cpp_unsupported"),
        Backend(op, "triton", f"hybridpar.ops.fused:triton.{op}", "hybridpar.ops.triton:unsupported"),
        Backend(op, "cuda", f"hybridpar.ops.{passes}.{op}", f"hybridpar.ops.{cuda_unsupported}"),
        *([Backend(op, "apex", f"hybridpar.ops.apex:{op}", "hybridpar.ops.apex:unsupported")] if apex else []),
        Backend(op, "torch", f"hybridpar.ops.{torch}"),
    )


# Per operation in the order `auto` tries them where measured.py has no times; the last is the reference and always can.
TABLE = (
    *_rows("layer_norm", "norm:layer_norm_torch", apex=True),
    *_rows("rms_norm", "norm:rms_norm_torch", apex=True),
    *_rows("add_norm", "norm:add_norm_torch", apex=True),
    *_rows("bias_dropout_add", "norm:bias_dropout_add_torch"),
    *_rows("gelu", "activation:gelu_torch"),
    *_rows("swiglu", "activation:swiglu_torch"),
    *_rows("rotary", "rotary:rotary_torch"),
    Backend("attention", "sdpa", "hybridpar.ops.attention:attention_sdpa", "hybridpar.ops.attention:sdpa_unsupported"),
    *_rows("attention", "attention:attention_torch", cuda="hopper:fused hopper:unsupported"),
    *_rows("softmax", "attention:softmax_torch"),
    *_rows("cross_entropy", "cross_entropy:CrossEntropy"),
    *_rows("dropout", "dropout:dropout_torch"),
    Backend("embedding", "cpp", "hybridpar.ops.embedding:compiled", "hybridpar.ops.fused:cpp_unsupported"),
    Backend("embedding", "triton", "hybridpar.ops.embedding:triton", "hybridpar.ops.triton:unsupported"),
    Backend("embedding", "torch", "hybridpar.ops.embedding:Passes"),
    Backend("optimizer", "cpp", "hybridpar.ops.update:compiled", "hybridpar.ops.fused:cpp_unsupported"),
    Backend("optimizer", "triton", "hybridpar.ops.update:triton", "hybridpar.ops.triton:unsupported"),
    Backend("optimizer", "apex", "hybridpar.ops.apex:FusedAdam", "hybridpar.ops.apex:unsupported"),
    Backend("optimizer", "torch", "hybridpar.ops.update:Passes"),
)


@dataclass(frozen=True, slots=True)
class Report:
    """Which backend `auto` takes for an operation on this machine, and why not the others.

    measured: it is the fastest of those measured; else the first of the table that can.
    """

    op: str
    active: str
    rejected: dict[str, str]
    measured: bool = False


def ops() -> tuple[str, ...]:
    """The operations of the table, in its order."""
    return tuple(dict.fromkeys(row.op for row in TABLE))


def backends(op: str) -> tuple[Backend, ...]:
    """The rows of one operation, the one `auto` prefers first."""
    return tuple(row for row in TABLE if row.op == op)


def resolve(op: str, choice: str, x: Tensor) -> Callable[..., Any]:
    """The function that runs `op` on tensors like `x`: the backend named, or the one that `select` takes for 'auto'.

    Raises: ConfigError if the backend does not exist or cannot run.
    """
    module, _, name = _path(op, choice, x.device.type, x.dtype).partition(":")
    return attrgetter(name)(sys.modules[module])


def select(op: str, choice: str = "auto", device_type: str | None = None, dtype: torch.dtype | None = None) -> Backend:
    """The row that runs `op` on such tensors (None: in general, on this machine).

    'auto': of those that can, the fastest where two or more were measured on such tensors, else the first.

    Raises: ConfigError if the operation or backend does not exist, or the backend cannot run.
    """
    rows = backends(op)
    if not rows:
        raise config_error("kernels", op, "is not an operation", ", ".join(ops()))
    if choice == "auto":
        return _automatic(op, device_type, dtype)[0]
    row = next((row for row in rows if row.name == choice), None)
    works = ("auto", *(row.name for row in rows if row.unsupported(device_type, dtype) is None))
    if row is None:
        names = ", ".join(row.name for row in rows)
        raise config_error(f"kernels.{op}", choice, f"is not a backend of {op}, which has {names}", works[-1])
    if reason := row.unsupported(device_type, dtype):
        raise config_error(f"kernels.{op}", choice, f"cannot run here: {reason}", " or ".join(works))
    return row


def describe(device_type: str | None = None, dtype: torch.dtype | None = None) -> list[Report]:
    """What `auto` takes for each operation on such tensors (None: in general), and why not what it passed over."""
    return [report(op, device_type, dtype) for op in ops()]


def report(op: str, device_type: str | None = None, dtype: torch.dtype | None = None) -> Report:
    """The same of one operation."""
    reasons = {row.name: row.unsupported(device_type, dtype) for row in backends(op)}
    row, by_time = _automatic(op, device_type, dtype)
    return Report(op, row.name, {name: reason for name, reason in reasons.items() if reason}, by_time)


def _automatic(op: str, device_type: str | None, dtype: torch.dtype | None) -> tuple[Backend, bool]:
    """What 'auto' takes, and whether measured times decided."""
    able = [row for row in backends(op) if row.unsupported(device_type, dtype) is None]
    times = measured.medians(op, device_type, dtype)
    timed = [row for row in able if row.name in times]
    return (min(timed, key=lambda row: times[row.name]), True) if len(timed) > 1 else (able[0], False)


def _path(op: str, choice: str, device_type: str, dtype: torch.dtype) -> str:
    """Where the code is; its module is loaded. A text, as torch.compile runs this while it traces, and needs one."""
    return _selected(op, choice, device_type, dtype).path


constant_when_traced(_path)


@functools.cache
def _selected(op: str, choice: str, device_type: str, dtype: torch.dtype) -> Backend:
    """Selects once for each kind of tensor, and says what it took."""
    row = select(op, choice, device_type, dtype)
    _log.info("%s on %s %s: %s backend", op, device_type, dtype, row.name)
    return row


@functools.cache
def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return attrgetter(name)(importlib.import_module(module))
