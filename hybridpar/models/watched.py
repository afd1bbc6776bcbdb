"""Checks in the forward of a custom block: its mode, its buffers, and torch's generator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from hybridpar.autograd import QuietMode, default_generators
from hybridpar.config import ModelSpec, spec_error
from hybridpar.errors import ConfigError

_DRAWS = torch.Tag.nondeterministic_seeded


class RefuseDraws(QuietMode):
    """A mode in which an operator that draws from torch's global generator raises ConfigError.

    Operators with a generator of their own are allowed, and so are attention and RReLU if they draw
    nothing.

    Args:
        where: Names the block in the error.
    """

    def __init__(self, model: ModelSpec, where: str):
        super().__init__()
        self._model = model
        self._where = where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _DRAWS in func.tags and _draws(func, args, kwargs):
            raise refused_draw(self._model, self._where, f" ({func.overloadpacket})")
        return func(*args, **kwargs)


def refused_draw(
    model: ModelSpec, where: str, what: str = "", *, in_attention: bool = False
) -> ConfigError:
    """Return the error for a draw from torch's global generator.

    Args:
        what: The operator, in brackets.
    """
    rule = (
        f"{where} draws from torch's global generator{what}, so results would depend on the "
        f"grid and could not be resumed"
    )
    if in_attention:
        works = (
            "dropout_p=0.0, or nn.Dropout applied to the attention weights: drop((q @ k.mT * "
            "d**-0.5).softmax(-1)) @ "
            "v"
        )
    elif model.max_tp > 1 or model.context_parallel:
        works = "hybridpar.Dropout(p, build.name), called with the key"
    else:
        works = "nn.Dropout, which hybridpar seeds by micro-batch"
    return spec_error(model, rule, works)


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of an operator draws from the global generator."""
    given = {argument.name: argument.default_value for argument in func._schema.arguments}
    given.update(zip(given, args, strict=False))
    given.update(kwargs)
    if given.get("generator") is not None:
        return False
    return given.get("dropout_p", 1.0) != 0.0 and given.get("training", True) is not False


class BlockWatch:
    """Hooks around the forward of one custom block.

    A block called with a key is in training mode, and without one in evaluation mode. Modules that
    the constructor has put into evaluation mode stay there.

    Draws from torch's global generator and changes of persistent buffers are refused: neither would
    be
    the same on another grid. Both are looked for in every forward, by the generator's state (some 5
    us)
    and counters of changes. The first forward in each mode names the operator that draws, and
    compares
    buffers by value, as changes of `buffer.data` are not counted. A buffer may be filled if it was
    None,
    or be replaced by one that begins with the same values, as caches are; a buffer that is not
    persistent is a cache by declaration.
    """

    def __init__(self, block: nn.Module, model: ModelSpec, number: int):
        self._model = model
        self._where = f"block {number} ({block._get_name()}) of {model.kind}"
        self._always_in_eval = [module for module in block.modules() if not module.training]
        self._buffers = [
            (f"{prefix}.{name}" if prefix else name, module, name)
            for prefix, module in block.named_modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self._before: list[tuple[Tensor | None, int]] = []
        self._values: list[Tensor | None] = []
        self._generators: list[tuple[torch.Generator, bytes]] = []
        self._modes_seen: set[bool] = set()
        self._refuse_draws: RefuseDraws | None = None
        block.register_forward_pre_hook(self._enter)
        block.register_forward_hook(self._leave, always_call=True)
        block.register_forward_hook(self._compare)

    def _enter(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        is_training = len(args) > 2 and args[2] is not None
        if block.training != is_training:
            block.train(is_training)
            for module in self._always_in_eval:
                module.eval()
        self._before = [_state_of(module._buffers.get(name)) for _, module, name in self._buffers]
        self._generators = [(generator, _state(generator)) for generator in default_generators()]
        if is_training not in self._modes_seen:
            self._modes_seen.add(is_training)
            if not is_in_torch_dispatch_mode():  # tensors of a prediction have no values
                self._values = [
                    None if buffer is None else buffer.detach().clone()
                    for buffer, _ in self._before
                ]
            self._refuse_draws = RefuseDraws(self._model, self._where)
            self._refuse_draws.__enter__()

    def _leave(self, block: nn.Module, args: Any, out: Any) -> None:
        if self._refuse_draws is not None:
            self._refuse_draws.__exit__(None, None, None)
            self._refuse_draws = None

    def _compare(self, block: nn.Module, args: Any, out: Any) -> None:
        """Require that this forward changed no persistent buffer and drew nothing. Raises:
        ConfigError."""
        if any(_state(generator) != before for generator, before in self._generators):
            raise refused_draw(self._model, self._where)
        for number, (full, module, name) in enumerate(self._buffers):
            if not self._has_changed(number, module._buffers.get(name)):
                continue
            rule = (
                f"{self._where} changes its buffer {full!r} in its forward, which is not "
                f"supported: the values would depend on the grid, and checkpoints do not save "
                f"buffers"
            )
            works = (
                f"computing the values from the input at each call or, if it is only a cache, "
                f"register_buffer({name!r}, .., persistent=False)"
            )
            raise spec_error(self._model, rule, works)
        self._before = []
        self._values = []

    def _has_changed(self, number: int, now: Tensor | None) -> bool:
        before, version = self._before[number]
        if now is not before:
            return before is not None and not _begins_with(now, before, version)
        if now is None:
            return False
        value = self._values[number] if self._values else None
        is_equal = value is None or torch.equal(value.nan_to_num(), now.nan_to_num())
        return now._version != version or not is_equal


def _state(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _state_of(buffer: Tensor | None) -> tuple[Tensor | None, int]:
    return buffer, 0 if buffer is None else buffer._version


def _begins_with(now: Tensor | None, before: Tensor, version: int) -> bool:
    """Whether a buffer was replaced by one that begins with the same values."""
    if now is None or now is before or before._version != version:
        return False
    if type(now) is not Tensor or now.is_meta:
        return True  # without values; the first forward that computes tells
    if now.dtype != before.dtype or now.dim() != before.dim():
        return False
    start = now[tuple(map(slice, before.shape))]
    return torch.equal(start.to(before.device), before)
