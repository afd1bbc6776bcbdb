"""Dropout of torch in custom blocks, drawn by the key of the micro-batch.

    nn.Dropout(0.1) named layer.drop in block 3      mask of "blocks.3.layer.drop"; its second call
                                                     in a forward, "blocks.3.layer.drop.1"
    functional.dropout(x, 0.1)                       mask of "blocks.3.dropout",
                                                     "blocks.3.dropout.1", ..

torch's global generator would give another mask on another grid. This mask depends on the seed, the
step, the sample and the element, and not on the grid, the size of micro-batches, or whether a block
is recomputed. The first dimension of x must be the samples of the micro-batch, or begin with them,
such as (samples x positions).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hybridpar import ops
from hybridpar.config import KernelsConfig, ModelSpec, spec_error
from hybridpar.models.watched import refused_draw
from hybridpar.ops.dropout import DropoutSpec
from hybridpar.random import RandomKey, site

Drop = Callable[[Tensor, float, bool], Tensor]
CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Modules that drop whole channels of a sample."""
KEYED = (nn.Dropout, *CHANNELS)
"""Modules that a custom block may have."""
_FUNCTIONS = {
    functional.dropout: False,
    torch.dropout: False,
    functional.dropout1d: True,
    functional.dropout2d: True,
    functional.dropout3d: True,
    torch.feature_dropout: True,
}
"""torch's functions, and whether they drop whole channels."""
_site = lru_cache(maxsize=4096)(site)


class DropoutCalls(TorchFunctionMode):
    """A mode in which torch's dropout functions call `drop(x, p, by_channel)`.

    Attention with dropout is refused by a ConfigError that names `where`. `num_calls` counts the
    calls.
    """

    def __init__(self, drop: Drop, model: ModelSpec, where: str):
        super().__init__()
        self._drop = drop
        self._model = model
        self._where = where
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        by_channel = _FUNCTIONS.get(func)
        if by_channel is not None:
            return self._call(by_channel, *args, **kwargs)
        if (
            func is functional.scaled_dot_product_attention
            and (args[4:5] or (kwargs.get("dropout_p", 0.0),))[0] > 0
        ):
            raise refused_draw(
                self._model, self._where, " (scaled_dot_product_attention)", in_attention=True
            )
        return func(*args, **kwargs)

    def _call(
        self,
        by_channel: bool,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        *,
        train: bool = True,
    ) -> Tensor:
        if not (training and train):
            return input
        self.num_calls += 1
        return _in_place_of(input, self._drop(input, p, by_channel), inplace=inplace)


def _is_in_checkpoint() -> bool:
    """Whether a caller is torch.utils.checkpoint.

    It runs a function in the forward pass, and a second time in the backward pass.
    """
    if "torch.utils.checkpoint" not in sys.modules:
        return False
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def _in_place_of(x: Tensor, dropped: Tensor, *, inplace: bool) -> Tensor:
    return x.copy_(dropped) if inplace and dropped is not x else dropped


class KeyedDropouts:
    """Hooks around the forward of a custom block that make its dropout draw by the block's key.

    Modules of KEYED get another `forward`. Calls of torch's functions are found in a mode, which
    costs
    each function of torch about a microsecond, so blocks whose first forward in training has no
    such
    call run without it.
    """

    def __init__(self, block: nn.Module, model: ModelSpec, number: int, kernels: KernelsConfig):
        self._model = model
        self._name = f"blocks.{number}"
        self._backend = kernels.dropout
        self._key: RandomKey | None = None
        self._num_samples = 1
        self._calls: Counter[str] = Counter()
        where = f"block {number} ({block._get_name()}) of {model.kind}"
        self._mode: DropoutCalls | None = DropoutCalls(partial(self._drop, "dropout"), model, where)
        self._is_active = False
        for name, module in block.named_modules():
            if type(module) in KEYED:  # one made of these calls torch's functions
                module.forward = partial(self._forward, module, name)  # type: ignore[method-assign]
        block.register_forward_pre_hook(self._enter)
        block.register_forward_hook(self._leave, always_call=True)

    def _enter(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        self._key = args[2] if len(args) > 2 else None
        self._calls.clear()
        if self._key is None:
            return
        self._num_samples = next((len(one) for one in args[1].values() if one.dim()), 1)
        if self._mode is not None:
            self._mode.__enter__()
            self._is_active = True

    def _leave(self, block: nn.Module, args: Any, out: Any) -> None:
        self._key = None
        if self._is_active and self._mode is not None:
            self._is_active = False
            self._mode.__exit__(None, None, None)
            if self._mode.num_calls == 0:
                self._mode = None

    def _forward(self, module: Any, name: str, input: Tensor) -> Tensor:
        if not module.training:
            return input
        dropped = self._drop(name, input, module.p, isinstance(module, CHANNELS))
        return _in_place_of(input, dropped, inplace=module.inplace)

    def _drop(self, name: str, x: Tensor, p: float, by_channel: bool) -> Tensor:
        if p == 0 or x.numel() == 0:
            return x
        if self._key is None or _is_in_checkpoint():
            raise spec_error(
                self._model,
                f"not supported: torch.utils.checkpoint runs the forward of {self._name} "
                f"({name}) again without the micro-batch's random key, so dropout would draw "
                f"another mask",
                'pipeline.recompute = "all" instead of torch.utils.checkpoint, which repeats '
                "the masks",
            )
        count = self._calls[name]
        self._calls[name] += 1
        if x.dim() == 0 or len(x) % self._num_samples:
            shape = tuple(x.shape)
            rule = (
                f"dropout in {self._name} ({name}) gets a tensor of shape {shape}; the first "
                f"dimension must be the {self._num_samples} samples of the micro-batch, else "
                f"the mask would depend on the micro-batch size"
            )
            raise spec_error(
                self._model,
                rule,
                "applying dropout to a tensor [samples, ..], before it is transposed",
            )
        full_name = f"{self._name}.{name}.{count}" if count else f"{self._name}.{name}"
        whole = x.new_ones(x.shape[:2]) if by_channel else x
        spec = DropoutSpec(p, self._key, _site(full_name))
        dropped = ops.dropout(whole.reshape(self._num_samples, -1), spec, backend=self._backend)
        if by_channel:
            return x * dropped.reshape(*x.shape[:2], *[1] * (x.dim() - 2))
        return dropped.reshape(x.shape)
