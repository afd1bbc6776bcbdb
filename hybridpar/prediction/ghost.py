"""Ghosts: tensors without memory. Code runs on them while the memory that they would take is
counted.

with Tracker(torch.device("cpu")) as tracker:
    x = torch.zeros(1 << 40)          # takes nothing
    y = (x * 2).sum()                 # computes nothing
    tracker.read().peak               # 8 TiB and 4 bytes

A ghost reports the tracker's device, so that code takes the same path as on that device (fused
attention, compiled dropout), while the operation itself runs on the meta device. Autograd is
torch's own: tensors that it saves for backward stay alive as usual. Scratch space inside a kernel
is not seen.

If a GPU is requested on a machine without one, ghosts report the CPU, whose fused operators keep
the same tensors as a GPU's, and bytes are counted as by a GPU's allocator.

Integer and boolean tensors are real, because code reads their values (which positions have a
label); they are counted, too. With `make_ghosts_of_integers`, only integers from outside, and
integers computed from these alone, are real.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.multiprocessing.reductions import StorageWeakRef

from hybridpar.autograd import QuietMode, backward_from
from hybridpar.prediction.meter import Usage
from hybridpar.prediction.shapes import result_of

_META = torch.device("meta")
ARITHMETIC = frozenset({"add", "sub", "mul", "div"})
_CUDA_ROUNDING = 512  # the caching allocator hands out multiples of this many bytes


class _Block:
    """The bytes of one storage, freed when the last tensor on it is freed. `key` identifies the
    storage."""

    __slots__ = ("__weakref__", "key", "num_bytes", "tracker")

    def __init__(self, tracker: Tracker, key: int, num_bytes: int):
        self.tracker = tracker
        self.key = key
        self.num_bytes = num_bytes
        tracker.current += num_bytes

    def resize(self, num_bytes: int) -> None:
        """Allocate memory again, or with 0 free it."""
        self.tracker.current -= self.num_bytes
        self.num_bytes = self.tracker.rounded(num_bytes)
        self.tracker.current += self.num_bytes

    def __del__(self) -> None:
        self.tracker.current -= self.num_bytes


class Ghost(Tensor):
    """A tensor on the tracker's device without values: shape and dtype of `meta`, memory of
    `block`."""

    meta: Tensor
    block: _Block
    __slots__ = ("block", "meta")
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[Ghost], meta: Tensor, block: _Block) -> Ghost:
        ghost = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=block.tracker.device,
        )
        ghost.meta = meta
        ghost.block = block
        return ghost

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} on a ghost outside of its tracker")

    @property
    def stands_for_cuda(self) -> bool:
        """Whether the tensor belongs to a GPU, whichever device it reports."""
        return self.block.tracker.is_cuda

    @property
    def has_values(self) -> bool:
        """False: code that would read values assumes some instead."""
        return False

    def tolist(self) -> Any:
        """Return zeros."""
        return _zeros(tuple(self.shape))


class Tracker(QuietMode):
    """A mode that makes new floating-point tensors ghosts on `device`, and counts the bytes of all
    tensors.

    Values read from a ghost are zeros, so code whose control flow depends on them is not supported.

    Args:
        results: A cache of result shapes by operator and argument shapes, which may be shared by
            trackers.
    """

    def __init__(self, device: torch.device, results: dict[Any, Any] | None = None):
        super().__init__()
        self.device = _present(device)
        self.is_cuda = device.type == "cuda"
        self._ghost_integers = False
        self.current = self.peak = 0
        self._real: list[tuple[StorageWeakRef, _Block]] = []
        self._results = (
            {} if results is None else results
        )  # layers repeat each other, and meta kernels in Python are slow

    def read(self) -> Usage:
        """Return the bytes of all tensors made since the start, and their peak since it was last
        restarted."""
        self._forget_dead()
        return Usage(self.current, self.peak)

    def make_ghosts_of_integers(self, wanted: bool) -> None:
        """Set whether new integer tensors are ghosts, too, except those from outside."""
        self._ghost_integers = wanted

    def restart_peak(self) -> None:
        """Restart the peak from the current bytes."""
        self.peak = self.read().current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        in_place = is_in_place_without_a_mode(func, args)
        found = tensors_in((args, tuple(kwargs.values())))
        ghosts = [t for t in found if isinstance(t, Ghost)]
        if ghosts:
            out = self._run_on_ghosts(func, args, kwargs, ghosts, found)
        elif (
            not found
            and _is_factory(kwargs)
            and (self._ghost_integers or _makes_floats(func, kwargs))
        ):
            out = self._wrap(func(*args, **{**kwargs, "device": _META}), [])
        else:
            out = func(*args, **kwargs)
            self._note_real(out, [] if _is_fresh(func, out) else found)
        if not in_place:
            scratch = 0 if self.is_cuda else cast_bytes(func, ghosts)
            if self.current + scratch > self.peak:
                self._forget_dead()
                self.peak = max(self.peak, self.current + scratch)
        return out

    def _run_on_ghosts(
        self, func: Any, args: Any, kwargs: Any, ghosts: list[Ghost], found: list[Tensor]
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0
        if len(found) > len(ghosts) and any(t.layout is not torch.strided for t in found):
            return _add_nothing(func, ghosts[0])
        returns = _returns_of(func)
        if returns is _Returns.NOTHING:
            return None
        if returns is _Returns.FIRST:
            return args[0]
        if returns is _Returns.OUT:
            return kwargs["out"]
        if returns is _Returns.VIEW and len(found) == 1:
            return self._view(func, args, kwargs)
        key = (
            (func, _signature(args), _signature(tuple(kwargs.items())))
            if returns is _Returns.NEW
            else None
        )
        out = None if key is None else self._results.get(key)
        if out is None:
            metas = _map(args, _to_meta)
            meta_kwargs = {name: _map(value, _to_meta) for name, value in kwargs.items()}
            if "device" in meta_kwargs:
                meta_kwargs["device"] = _META
            out = None if key is None else result_of(func, metas, kwargs, tensors_in(metas))
            if out is None:
                out = func(*metas, **meta_kwargs)
            if key is not None:
                self._results[key] = _map(
                    out, _alike
                )  # copied, because the cached one must not be changed in place
        elif isinstance(out, Tensor):
            return self._wrap(_alike(out), ())
        else:
            out = _map(out, _alike)
        sources = ghosts if key is None else ()  # storages that the result may share
        return _map(out, lambda x: self._wrap(x, sources))

    def _view(self, func: Any, args: Any, kwargs: Any) -> Ghost:
        """Return a view of the first argument, which is the only tensor."""
        ghost: Ghost = args[0]
        meta = func(ghost.meta, *args[1:], **kwargs)
        return ghost if meta is ghost.meta else Ghost(meta, ghost.block)

    def _wrap(self, out: Any, ghosts: Sequence[Ghost]) -> Any:
        """Wrap the result of an operation on meta tensors: an argument itself, a view of one, or a
        new tensor."""
        if not isinstance(out, Tensor):
            return out
        storage = out.untyped_storage()
        for ghost in ghosts:
            if ghost.meta is out:
                return ghost
            if ghost.block.key == storage._cdata:
                return Ghost(out, ghost.block)
        return Ghost(out, _Block(self, storage._cdata, self.rounded(storage.nbytes())))

    def rounded(self, num_bytes: int) -> int:
        """Return the bytes that the device's allocator takes for `num_bytes`."""
        return -(-num_bytes // _CUDA_ROUNDING) * _CUDA_ROUNDING if self.is_cuda else num_bytes

    def _note_real(self, out: Any, arguments: list[Tensor]) -> None:
        made = tensors_in(out)
        known = {t.untyped_storage()._cdata for t in arguments if t.layout is torch.strided}
        for tensor in made:
            if (
                tensor.layout is torch.strided
                and (storage := tensor.untyped_storage())._cdata not in known
            ):
                block = _Block(self, storage._cdata, self.rounded(storage.nbytes()))
                self._real.append((StorageWeakRef(storage), block))

    def _forget_dead(self) -> None:
        for storage, _ in self._real:
            if storage.expired():
                self._real = [entry for entry in self._real if not entry[0].expired()]
                break


def _present(device: torch.device) -> torch.device:
    """Return the device with an index, because autograd has a queue per device; the CPU if there is
    no such device."""
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _zeros(shape: tuple[int, ...]) -> Any:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0.0


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples and lists."""
    found: list[Tensor] = []
    _visit((value,), found)
    return found


def _visit(values: Sequence[Any], found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _visit(value, found)


def cast_bytes(func: Any, tensors: Sequence[Tensor]) -> int:
    """Return the bytes of copies that CPUs make of narrower tensors for arithmetic on two
    dtypes."""
    if _operation(func) not in ARITHMETIC:
        return 0
    tensors = [t for t in tensors if t.is_floating_point()]
    common = max((t.dtype.itemsize for t in tensors), default=0)
    return sum(t.numel() * common for t in tensors if t.dim() and t.dtype.itemsize < common)


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(
            [
                _map(item, function) if isinstance(item, (tuple, list)) else function(item)
                for item in value
            ]
        )
    return function(value)


def _to_meta(value: Any) -> Any:
    if isinstance(value, Ghost):
        return value.meta
    return value.to(_META) if isinstance(value, Tensor) else value


def _signature(value: Any) -> Any:
    """Return a key of everything that the shape and dtype of a result may depend on."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_signature(item) for item in value)
    return type(value), value


def _alike(value: Any) -> Any:
    """Return a meta tensor with new storage and the shape, strides and dtype of another one."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)


class _Returns(Enum):
    """The result of an operator."""

    NOTHING = "nothing"  # fused updates, which have no meta kernels and take no memory
    FIRST = "its first argument, which it writes"
    OUT = "its argument out, which it writes"
    VIEW = "a view of its first argument"
    NEW = "tensors that share nothing with arguments"
    OTHER = "something else"


@cache
def _returns_of(func: Any) -> _Returns:
    """Return what an operator returns. Its hash, which the cache asks for, is a Python function."""
    schema = func._schema
    if "::_fused_" in func.name() and not schema.returns:
        return _Returns.NOTHING
    if _returns_argument(func, 0, is_write=True) and torch.Tag.inplace_view not in func.tags:
        return _Returns.FIRST
    if schema.arguments[-1].name == "out" and _returns_argument(func, -1, is_write=True):
        return _Returns.OUT
    if _returns_argument(func, 0, is_write=False):
        return _Returns.VIEW
    # the schema of _unsafe_view does not say that it returns a view
    is_new = not schema.is_mutable and all(out.alias_info is None for out in schema.returns)
    if is_new and func is not torch.ops.aten._unsafe_view.default:
        return _Returns.NEW
    return _Returns.OTHER


def _returns_argument(func: Any, index: int, *, is_write: bool) -> bool:
    """Return whether an operator returns one tensor, which shares the memory of an argument."""
    if len(func._schema.returns) != 1:
        return False
    result = func._schema.returns[0]
    argument = func._schema.arguments[index]
    if any(not isinstance(one.type, torch.TensorType) for one in (result, argument)):
        return False
    infos = (result.alias_info, argument.alias_info)
    if None in infos or infos[0].before_set != infos[1].before_set:
        return False
    return bool(infos[0].is_write == is_write)


def _is_factory(kwargs: Any) -> bool:
    """Return whether an operation without tensor arguments makes a dense tensor."""
    return "device" in kwargs and kwargs.get("layout") in (None, torch.strided)


def _makes_floats(func: Any, kwargs: Any) -> bool:
    dtype = kwargs.get("dtype")
    return _operation(func) != "arange" if dtype is None else dtype.is_floating_point


@cache
def _operation(func: Any) -> str:
    """Return the name of an operation, such as 'add' for aten.add_.Tensor."""
    return func.name().removeprefix("aten::").partition(".")[0].rstrip("_")


def _is_fresh(func: Any, out: Any) -> bool:
    """Return whether this is the last step of torch.tensor, which allocates memory, and not of
    torch.from_numpy."""
    return func is torch.ops.aten.lift_fresh.default and bool(out.untyped_storage().resizable())


def is_in_place_without_a_mode(func: Any, args: Any) -> bool:
    """Return whether autograd makes this sum in place of its first argument, unless a mode is
    active.

    Such sums add two dense gradients of one tensor, or the result of index_select. Autograd makes
    them in place if no Python code is between it and the operator (neither a Function's backward
    nor a hook), and if nothing else shares the memory of the argument, which is dropped right
    after.
    """
    return (
        func in _SUMS_OF_AUTOGRAD
        and torch._C._current_graph_task_id() != -1
        and all(t.layout is torch.strided for t in tensors_in(args))
        and _is_alone(args[0])
        and _is_called_by_autograd()
    )


_SUMS_OF_AUTOGRAD = (torch.ops.aten.add.Tensor, torch.ops.aten.index_add.default)
_RUN_BACKWARD = (_engine_run_backward.__code__, backward_from.__code__)
_CALL_OPERATOR = torch._ops.OpOverload.__call__.__code__


def _is_alone(tensor: Tensor) -> bool:
    """Return whether no other tensor shares this tensor's memory, and its elements do not
    overlap."""
    if isinstance(tensor, Ghost):
        holders = sys.getrefcount(tensor.block)
        num_bytes = tensor.block.num_bytes
    else:
        storage = tensor.untyped_storage()
        holders = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
        num_bytes = storage.nbytes()
    # the tensor itself, and this check
    return holders <= 2 and tensor.numel() * tensor.element_size() <= num_bytes


def _is_called_by_autograd() -> bool:
    """Return whether the backward itself called the operator, before modes intercepted it."""
    frame = sys._getframe(2).f_back  # the frame of the mode that asks
    while frame is not None and (
        frame.f_code is _CALL_OPERATOR or frame.f_code.co_name == "__torch_dispatch__"
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code in _RUN_BACKWARD


def _add_nothing(func: Any, ghost: Ghost) -> Ghost:
    """Return a dense gradient after adding the empty sparse one of nn.matmul.weight_gradient."""
    assert _operation(func) == "add", f"{func} on a sparse tensor"
    return ghost if func is torch.ops.aten.add_.Tensor else Ghost(ghost.meta, ghost.block)
