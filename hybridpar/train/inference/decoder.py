"""Compute next tokens of several texts, on this rank's stage of a GPT on a grid of tp and pp.

    start      prompts, padded at their ends to one length, are computed together; keys and values
               are kept
    go_on      one more token of each text is computed
    forget     texts that have ended are dropped

A text fills the model's window of seq_length positions. When it would exceed the window, the last
half of the window becomes its beginning and is recomputed. So a token costs the same however long
the text is, and sees at least the last seq_length // 2 tokens. Texts do not affect each other,
except for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridpar.comm.p2p import irecv, isend
from hybridpar.config import ModelConfig
from hybridpar.grid import ProcessGrid
from hybridpar.nn import KeyValueCache
from hybridpar.runtime.stage import Stage


class Decoder:
    """This rank's stage, with keys and values of the current texts.

    Collectives: every computing method, on all ranks of the grid, with the same texts.
    """

    def __init__(self, stage: Stage, model: ModelConfig, grid: ProcessGrid):
        self.stage = stage
        self.model = model
        self.grid = grid
        self._texts: list[list[int]] = []
        self._lengths: list[int] = []
        """Number of positions of each text whose keys and values are cached."""
        self._capacity = 0
        self._layers = range(1, model.num_layers + 1)
        self._caches: dict[str, KeyValueCache] = {}
        weight = next(iter(stage.parameters()))
        self.device = weight.device
        self._dtype = weight.dtype

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> Tensor | None:
        """Start with new texts, to each of which up to `room` tokens will be added.

        Shapes: returns logits [b, v] on the last stage's ranks, else None.
        """
        window = self.model.seq_length
        self._texts = [list(prompt[-window:]) for prompt in prompts]
        self._lengths = [len(text) for text in self._texts]
        self._capacity = min(window, max(self._lengths) + room)
        self._caches, logits = self._compute(self._texts)
        return logits

    def go_on(self, tokens: Sequence[int]) -> Tensor | None:
        """Add a token to each text. Shapes: as for `start`."""
        window = self.model.seq_length
        half = self.model.seq_length // 2
        full = [i for i, length in enumerate(self._lengths) if length == window]
        for i in full:
            self._texts[i] = self._texts[i][window - half :]
            self._lengths[i] = half
        if full and half:
            for number, fresh in self._compute([self._texts[i] for i in full])[0].items():
                self._caches[number].replace(full, fresh)
        for text, token in zip(self._texts, tokens, strict=True):
            text.append(token)
        at = torch.tensor(self._lengths)
        self._lengths = [length + 1 for length in self._lengths]
        batch = {"tokens": torch.tensor(tokens)[:, None], "positions": at[:1]}
        if len(set(self._lengths)) > 1:
            batch["positions"] = at[:, None]
            batch["padding_mask"] = torch.arange(max(self._lengths)) <= at[:, None]
        for cache in self._caches.values():
            cache.advance(max(self._lengths))
        return self._logits(self._forward(batch, self._caches))

    def forget(self, ended: Sequence[int]) -> None:
        """Drop these texts; the others move up."""
        stay = [i for i in range(len(self._texts)) if i not in ended]
        self._texts = [self._texts[i] for i in stay]
        self._lengths = [self._lengths[i] for i in stay]
        for cache in self._caches.values():
            cache.keep(stay)

    def _compute(
        self, texts: Sequence[Sequence[int]]
    ) -> tuple[dict[str, KeyValueCache], Tensor | None]:
        """Return caches of these texts, and the logits of the tokens that follow them."""
        longest = max(map(len, texts))
        caches = {
            number: KeyValueCache(self._capacity)
            for number in self.stage.blocks
            if int(number) in self._layers
        }
        padded = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
        for cache in caches.values():
            cache.advance(longest)
        x = self._forward({"tokens": padded, "positions": torch.arange(longest)}, caches)
        if x is not None:
            last = torch.tensor([len(text) - 1 for text in texts], device=self.device)
            x = x[torch.arange(len(x), device=self.device), last][:, None]
        return caches, self._logits(x)

    @torch.no_grad()
    def _forward(
        self, batch: dict[str, Tensor], caches: Mapping[str, KeyValueCache]
    ) -> Tensor | None:
        """Compute the layers' output for new tokens; None if it went to the next stage.

        Shapes: returns [b, s, h].
        """
        pp = self.grid.pp
        batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
        x = None
        if not pp.is_first:
            shape = (*batch["tokens"].shape, self.model.hidden_size)
            x = torch.empty(shape, dtype=self._dtype, device=self.device)
            irecv(x, pp.rank - 1, pp).wait()
        for number, block in self.stage.blocks.items():
            if number in caches:
                x = block(x, batch, None, caches[number])
            elif number == "0":
                x = block(x, batch, None)
        if pp.is_last:
            return x
        assert x is not None
        isend(x, pp.rank + 1, pp).wait()
        return None

    @torch.no_grad()
    def _logits(self, x: Tensor | None) -> Tensor | None:
        """Return the logits after one position of each text. Shapes: x [b, 1, h] -> [b, v]."""
        if x is None:
            return None
        head = self.stage.blocks[str(self.model.num_layers + 1)]
        logits: Tensor = head.logits(x)  # type: ignore[operator]
        return logits[:, 0]
