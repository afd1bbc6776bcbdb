"""subspace: a token's coordinates along fixed random directions. Settings: messages_kept,
messages_values."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridpar import random
from hybridpar.config import Config
from hybridpar.state.compression.codec import KeptShare, kept_share
from hybridpar.state.compression.low_rank import basis


@dataclass(frozen=True)
class Subspace(KeptShare):
    """Sends the r = share * cols coordinates of each row along fixed directions, x U; U^T maps them
    back.

    U [cols, r] is orthonormal, drawn once for all links of a run, and never sent. Both ways use it,
    so gradients are those of a layer y = x U U^T, and both sides of a link train to work in these r
    directions. (Subspace Networks, NeurIPS 2025, without their rule that weights stay in the
    subspace.)
    """

    is_in_model = True

    _bases: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def row_bytes(self, cols: int) -> int:
        return self.values(cols)

    def encode(self, x: Tensor) -> Tensor:
        return (x @ self._basis(x)).to(self._type).view(torch.uint8)

    def decode_(self, x: Tensor, message: Tensor) -> None:
        torch.mm(message.view(self._type).to(x.dtype), self._basis(x).t(), out=x)

    @property
    def _type(self) -> torch.dtype:
        return torch.bfloat16 if self.rounded else self.dtype

    def _basis(self, x: Tensor) -> Tensor:
        if x.device not in self._bases:
            cols = x.shape[1]
            rank = self.kept(x.shape[1])
            drawn = random.normal(
                0,
                random.site(f"subspace {cols} {rank}"),
                rows=cols,
                cols=rank,
                stride=rank,
                start=0,
                dtype=torch.float64,
            )
            self._bases[x.device] = basis(drawn).to(x.device, self.dtype)
        return self._bases[x.device]


def make_codec(config: Config) -> Subspace:
    """Create the codec of messages."""
    return Subspace(*kept_share(config))


MESSAGES = make_codec
