"""Finds the compiled extensions hybridpar._C and hybridpar._C_cuda. The only place that imports them; on first use."""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def missing() -> str | None:
    """Why the operators `torch.ops.hybridpar.*` cannot be used here; None when they can. Loads them on first use."""
    return _load()


def missing_cuda() -> str | None:
    """Why those operators have no CUDA versions here; None when they have. Loads them on first use."""
    return _load_cuda()


def constant_when_traced(function: Callable[..., Any]) -> None:
    """What torch.compiler.assume_constant_result does, without importing the compiler: a second at every start."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


_EXPECTED = "f28f3c9c"
"""`arguments_digest` of this checkout's extension; changes with it."""

constant_when_traced(missing)
constant_when_traced(missing_cuda)


@functools.cache
def _load() -> str | None:
    try:
        importlib.import_module("hybridpar._C")
    except ImportError as error:
        return f"the extension hybridpar._C is not built or does not load ({error})"
    if arguments_digest() != _EXPECTED:
        return "the extension hybridpar._C is of another version than this checkout; build it again"
    for name, fake in FAKES.items():
        torch.library.register_fake(f"hybridpar::{name}", fake)
    return None


def arguments_digest() -> str:
    """Stands for the operators that the extension has, and the names of their arguments."""
    operators = torch.ops.hybridpar
    found = {name: [a.name for a in getattr(operators, name).default._schema.arguments]
             for name in FAKES if hasattr(operators, name)}
    return hashlib.blake2s(repr(found).encode(), digest_size=4).hexdigest()


@functools.cache
def _load_cuda() -> str | None:
    if reason := missing():
        return reason  # the operators are defined there
    try:
        importlib.import_module("hybridpar._C_cuda")
    except ImportError as error:
        return f"the extension hybridpar._C_cuda is not built or does not load ({error})"
    return None


def _bits_fake(key0: int, key1: int, step: int, sample: int, num_samples: int, rows: int, cols: int,
               stride: int, start: int) -> Tensor:
    return torch.empty((num_samples, rows, cols), dtype=torch.int32)


def _normal_fake(key0: int, key1: int, rows: int, cols: int, stride: int, start: int, double: bool) -> Tensor:
    return torch.empty((rows, cols), dtype=torch.float64 if double else torch.float32)


def _dropout_fake(x: Tensor, *mask: Any) -> Tensor:
    return torch.empty_like(x)


def _like_first(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _stats(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[:-1].numel(), 2), dtype=_wide(x))


def _norm_fake(x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _like_first(x), _stats(x)


def _norm_backward_fake(dy: Tensor, x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _like_first(x), torch.empty_like(weight), torch.empty_like(weight)


def _add_norm_fake(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _like_first(x), _like_first(x), _stats(x)


def _add_norm_backward_fake(dy: Tensor, dsum: Tensor | None, total: Tensor, weight: Tensor, stats: Tensor,
                            with_bias: bool, centre: bool, *mask: Any) -> tuple[Tensor, ...]:
    dropped, dbias = _dropped_fake(total, with_bias, *mask)
    return _like_first(total), dropped, dbias, torch.empty_like(weight), torch.empty_like(weight)


def _dropped_fake(dsum: Tensor, with_bias: bool, *mask: Any) -> tuple[Tensor, Tensor]:
    threshold = mask[3]
    return (_like_first(dsum) if threshold else dsum.new_empty(0),
            dsum.new_empty(dsum.shape[-1] if with_bias else 0))


def _activation_backward_fake(dy: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return _like_first(x), x.new_empty(0) if bias is None else torch.empty_like(bias)


def _swiglu_fake(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _rotary_fake(x: Tensor, *args: Any) -> Tensor:
    b, n, s, d = x.shape
    return x.new_empty((b, s, n, d))


def _attention_fake(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return _rotary_fake(q), q.new_empty(q.shape[:-1], dtype=_wide(q))


def _attention_backward_fake(dout: Tensor, q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _rotary_fake(q), _rotary_fake(k), _rotary_fake(k)


def _cross_entropy_fake(logits: Tensor, column: Tensor, num_real: int, with_sum: bool) -> Tensor:
    return logits.new_empty((4 if with_sum else 3, logits.shape[0]), dtype=_wide(logits))


def _embedding_fake(ids: Tensor, weight: Tensor, start: int) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


def _sum_squares_fake(tensors: list[Tensor]) -> Tensor:
    return torch.empty(len(tensors), dtype=torch.float64, device=tensors[0].device if tensors else None)


def _best_loads_fake(covers: Tensor, class_cost: Tensor, class_nets: Tensor, net_cost: Tensor, net_size: Tensor,
                     num_ideals: int, num_accelerators: int, num_cpus: int, *args: Any) -> Tensor:
    return class_cost.new_empty((num_ideals, num_accelerators + 1, num_cpus + 1))


def _nothing(*args: Any) -> None:
    return None


# What tracing (torch.compile, meta tensors) needs to know of each operator: shape and type of what it returns.
FAKES: dict[str, Callable[..., Any]] = {
    "philox_bits": _bits_fake,
    "philox_normal": _normal_fake,
    "philox_dropout": _dropout_fake,
    "norm": _norm_fake,
    "norm_backward": _norm_backward_fake,
    "add_norm": _add_norm_fake,
    "add_norm_backward": _add_norm_backward_fake,
    "bias_dropout_add": _like_first,
    "bias_dropout_add_backward": _dropped_fake,
    "bias_gelu": _like_first,
    "bias_gelu_backward": _activation_backward_fake,
    "bias_swiglu": _swiglu_fake,
    "bias_swiglu_backward": _activation_backward_fake,
    "masked_softmax": _like_first,
    "masked_softmax_backward": _like_first,
    "rotary": _rotary_fake,
    "attention": _attention_fake,
    "attention_backward": _attention_backward_fake,
    "attention_hopper": _attention_fake,
    "cross_entropy": _cross_entropy_fake,
    "cross_entropy_backward_": _nothing,
    "embedding": _embedding_fake,
    "embedding_backward_": _nothing,
    "adam_": _nothing,
    "move_": _nothing,
    "extrapolate_": _nothing,
    "sum_squares": _sum_squares_fake,
    "placement_best_loads": _best_loads_fake,
}
