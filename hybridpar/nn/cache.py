"""Keys and values of the tokens that an attention layer has seen, so that it computes new ones
alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor


class KeyValueCache:
    """Keys and values of one attention layer, for up to `capacity` positions of several texts.

    Letters: b texts, g local groups (key and value heads), s new positions, d head dim.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._stop: int | None = None
        self.kept: tuple[Tensor, Tensor] | None = None
        """Keys and values, [b, g, capacity, d] each. None: nothing is kept yet."""

    def advance(self, stop: int) -> None:
        """Say where the next new positions end, which is known outside of the layers. Otherwise each
        layer asks the device for it.
        """
        assert stop <= self.capacity, (stop, self.capacity)
        self._stop = stop

    def extend(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new positions; return the keys and values up to the last
        position.

        A text with fewer positions than another has zeros behind its own, or values computed for
        padding.
        Shapes: k, v [b, g, s, d]; positions [s] (consecutive, of every text) or [b, s] -> both [b,
        g, last + 1, d].
        """
        if self.kept is None:
            b, g, _, d = k.shape
            # not empty: what is masked still must be finite
            self.kept = k.new_zeros(b, g, self.capacity, d), v.new_zeros(b, g, self.capacity, d)
        keys, values = self.kept
        stop = int(positions.max()) + 1 if self._stop is None else self._stop
        self._stop = None
        s = k.shape[2]
        if positions.dim() == 1:
            keys.narrow(2, stop - s, s).copy_(k)
            values.narrow(2, stop - s, s).copy_(v)
        else:
            texts = torch.arange(len(keys), device=keys.device)[:, None]
            keys[texts, :, positions] = rearrange(k, "b g s d -> b s g d")
            values[texts, :, positions] = rearrange(v, "b g s d -> b s g d")
        return keys.narrow(2, 0, stop), values.narrow(2, 0, stop)

    def replace(self, texts: Sequence[int], other: KeyValueCache) -> None:
        """Replace some of these texts by the texts of another cache."""
        assert self.kept is not None
        assert other.kept is not None
        for kept, fresh in zip(self.kept, other.kept, strict=True):
            kept[list(texts)] = fresh

    def keep(self, texts: Sequence[int]) -> None:
        """Forget all other texts."""
        assert self.kept is not None
        keys, values = self.kept
        self.kept = keys[list(texts)], values[list(texts)]
