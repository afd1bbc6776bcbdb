"""Backward passes without the overhead that torch spends on differentiating gradients again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import wraps
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import Variable, function
from torch.autograd.graph import GradientEdge, Node, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from hybridpar.errors import HybridparError


class QuietMode(TorchDispatchMode):
    """A dispatch mode that does not notify the compiler, because that would import it, which takes
    seconds.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _NoContext:
    """The context of a forward without a backward: it keeps nothing."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep nothing."""

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: there will be no gradients."""


def apply(kind: type[function.Function], *args: Any) -> Any:
    """Return kind.apply(*args), without its overhead where autograd does not record: 10 us of an
    operator's 20 when a token is generated.
    """
    if torch.is_grad_enabled():
        return kind.apply(*args)  # type: ignore[no-untyped-call]
    return kind.forward(_NoContext(), *args)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a Function's backward like torch's once_differentiable, without its overhead if
    gradients are not differentiated again.

    The overhead is 2.5 us of the 27 us of an empty forward and backward.
    """
    careful = function.once_differentiable(backward)

    @wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        return (careful if torch.is_grad_enabled() else backward)(ctx, *grads)

    return wrapper


def backward_from(edge: GradientEdge, gradient: Tensor) -> None:
    """Run torch.autograd.backward(edge, gradient) without comparing the two shapes, for which torch
    imports sympy: 0.4 s at every start.

    torch's own autograd functions call the engine like this; it has no public name.

    Raises:
        RuntimeError: From the engine, if the shapes differ.
    """
    Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
        (edge,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def recomputed(function: Callable[..., Any], x: Any, *args: Any) -> Any:
    """Return `function(x, *args)`, for which autograd, if it is recording, keeps only the
    arguments.

    Backward runs the function again, up to the last tensor that it needs, under the same autocast
    and from the same state of torch's generators. A GPU's generator is left alone while a CUDA
    graph is captured.

    This replaces torch.utils.checkpoint, which imports the compiler: 1.3 s at every start.

    Raises:
        HybridparError: In the backward, if the function saves fewer tensors the second time, or
            tensors of other shapes or types.
    """
    if not torch.is_grad_enabled():
        return function(x, *args)
    again = _Again(function, x, args)
    with saved_tensors_hooks(again.pack, again.unpack):
        out = function(x, *args)
    again.has_run()
    return out


class _Saved:
    """The place of a tensor that a function saved; `tensor` is set from its recomputation until it
    is used.
    """

    def __init__(self, tensor: Tensor):
        self.form = tuple(tensor.shape), tensor.dtype
        self.tensor: Tensor | None = None


class _Again:
    """A function with its arguments, and the places of the tensors it saves, as long as autograd
    holds them.
    """

    def __init__(self, function: Callable[..., Any], x: Any, args: tuple[Any, ...]):
        self._function = function
        self._x = x
        self._args = args
        if isinstance(x, Tensor):  # saved as an operation saves it, so that outer hooks see it
            self._x = _Keep.apply(torch.empty(0, requires_grad=True), x).grad_fn  # type: ignore[no-untyped-call]
        self._places: list[ref[_Saved]] = []
        self._autocast = _autocast()
        self._drawn = [(generator, generator.get_state()) for generator in default_generators()]

    def has_run(self) -> None:
        """Note the end of the first run: generators that it did not draw from need not be reset."""
        self._drawn = [
            (generator, before)
            for generator, before in self._drawn
            if before.numpy().tobytes() != generator.get_state().numpy().tobytes()
        ]

    def pack(self, tensor: Tensor) -> _Saved:
        place = _Saved(tensor)
        self._places.append(ref(place))
        return place

    def unpack(self, place: _Saved) -> Tensor:
        if place.tensor is None:
            self._run()
        tensor = place.tensor
        place.tensor = None
        assert tensor is not None
        return tensor

    def _run(self) -> None:
        left = iter(self._places)
        count = 0

        def keep(x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            if (place := next(left)()) is not None:
                if (form := (tuple(x.shape), x.dtype)) != place.form:
                    raise HybridparError(_not_again(place.form, form))
                place.tensor = x = x.detach()
            if count == len(self._places):
                raise _Done
            return x

        x = self._x.saved_tensors[0] if isinstance(self._x, Node) else self._x  # type: ignore[attr-defined]
        with ExitStack() as stack:
            if self._autocast != _autocast():
                for device, enabled, dtype, cached in self._autocast:
                    stack.enter_context(torch.autocast(device, dtype, enabled, cached))
            for generator, before in self._drawn:
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(before)
            with suppress(_Done), torch.enable_grad(), saved_tensors_hooks(keep, lambda x: x):
                self._function(x, *self._args)
        if count < len(self._places):
            raise HybridparError(_not_again(f"{len(self._places)} tensors", count))


def _autocast() -> list[tuple[str, bool, torch.dtype, bool]]:
    """Return the autocast state of each kind of device in use: enabled, type, and whether casts are
    cached.
    """
    return [
        (
            device,
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            torch.is_autocast_cache_enabled(),
        )
        for device in ("cpu", "cuda")[: 1 + torch.cuda.is_initialized()]
    ]


def default_generators() -> list[torch.Generator]:
    """Return the default random generators whose state can be read, without a GPU's while a CUDA
    graph is captured.
    """
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


def _not_again(first: object, then: object) -> str:
    return (
        f"a recomputed block saved {first} in its first forward and {then} when it ran "
        f"again: its forward must do the same each time; if it cannot, use pipeline.recompute = "
        f'"none"'
    )


class _Done(Exception):
    """Raised when all tensors have been recomputed."""


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, empty: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return empty.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise AssertionError("nothing follows from it")
