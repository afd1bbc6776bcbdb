"""A pytest plugin for Triton's interpreter, which makes it three times as fast: its language is
patched once a launch, not at every call of a device function; types of blocks, of which there are
few, are made once; a reduction by a function of the kernels' calls it with halves of blocks, not
with single numbers. EVERY in the environment: one test of so many runs."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from triton import language
from triton.language import core
from triton.runtime import interpreter


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep what EVERY says of the tests that -k has selected."""
    items[:] = [
        item
        for i, item in enumerate(items)
        if i % int(os.environ.get("EVERY", "1")) == 0 or item.name == "test_triton_runs_here"
    ]


def call(self: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    languages = {*map(self.fn.__globals__.get, ("tl", "core"))} & {language, language.core}
    if any(language.core.is_builtin(each.load) for each in languages):
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


make_block_type = core.block_type.__init__
np_dtype_of = interpreter._get_np_dtype
attributes: dict[Any, dict[str, Any]] = {}


def of_tensors(shape: Any) -> dict[str, Any]:
    """Attributes that all tensors of a shape have in common."""
    sizes = [core.constexpr(size) for size in shape]
    numel = 1
    for size in sizes:
        numel *= size.value
    return {"shape": core.tuple(sizes), "numel": core.constexpr(numel)}


OF_SCALARS = of_tensors(())


def init_block_type(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
    sizes = shape.values if isinstance(shape, core.tuple) else shape
    key = element_ty.name, *(size if type(size) is int else size.value for size in sizes)
    if key not in attributes:
        make_block_type(self, element_ty, shape)
        attributes[key] = {
            **vars(self),
            "of_tensors": of_tensors(self.shape),
            "numbers": np_dtype_of(element_ty),
        }
    vars(self).update(attributes[key])


def init_tensor(self: core.tensor, handle: Any, of_type: core.dtype) -> None:
    vars(self).update(
        vars(of_type)["of_tensors"] if of_type.is_block() else OF_SCALARS,
        handle=handle,
        type=of_type,
        dtype=of_type.scalar,
    )


def reduce(self: interpreter.ReduceOps, tensors: tuple[core.tensor, ...]) -> list[core.tensor]:
    """Along an axis of a power of two."""
    types = [x.dtype for x in tensors]
    parts = [x.handle.data for x in tensors]
    while parts[0].shape[self.axis] > 1:
        halves = zip(*(np.split(part, 2, self.axis) for part in parts), strict=True)
        made = self.combine_fn.fn(
            *(self.to_tensor(*one) for half in halves for one in zip(half, types, strict=True))
        )
        parts = [x.handle.data for x in made]
    return [
        self.to_tensor(part if self.keep_dims else part.squeeze(self.axis), dtype)
        for part, dtype in zip(parts, types, strict=True)
    ]


interpreter.InterpretedFunction.__call__ = call  # type: ignore[method-assign]
core.block_type.__init__ = init_block_type  # type: ignore[method-assign]
core.tensor.__init__ = init_tensor  # type: ignore[method-assign]
interpreter.ReduceOps.generic_reduce = reduce
interpreter._get_np_dtype = lambda of_type: vars(of_type).get("numbers") or np_dtype_of(of_type)
