"""Samples text from a checkpoint of a GPT, on one process.

The whole window is computed again for every token; a text longer than seq_length slides through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hybridpar.checkpoint import find, load_full
from hybridpar.checkpoint.whole import whole_model
from hybridpar.config import ModelConfig
from hybridpar.data.tokenizer import END, Tokenizer, check_vocab_fits
from hybridpar.errors import CheckpointError, config_error


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. `temperature` 0: the likeliest one. `top_k` 0: all are candidates."""

    max_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("max_tokens", self.max_tokens), ("temperature", self.temperature), ("top_k", self.top_k)):
            if value < 0:
                raise config_error(name, value, "must not be negative", str(getattr(type(self), name)))


class Generator:
    """A GPT whose weights are all in this process, and its tokenizer."""

    def __init__(self, model: ModelConfig, weights: Mapping[str, Tensor], tokenizer: Tokenizer):
        self.model, self.tokenizer = model, tokenizer
        self.stage = whole_model(model, weights)

    @staticmethod
    def load(path: str | Path, say: Callable[[str], None]) -> Generator:
        """From a run folder (its newest checkpoint that is whole) or from one checkpoint in it.

        Raises: CheckpointError if there is none; ConfigError if it is not a GPT, or the tokenizer has more ids than it;
        DataError for a damaged tokenizer.
        """
        folder = find(path, say)
        config, weights = load_full(folder)
        if config.model.kind != "gpt":
            raise config_error("checkpoint", str(path), f"holds a {config.model.kind}; only a gpt generates text")
        tokenizer = folder.parent.parent / "tokenizer.json"
        if not tokenizer.is_file():
            raise CheckpointError(f"{tokenizer}: is missing; the corpus came without one, so put it there")
        loaded = Tokenizer.load(tokenizer)
        check_vocab_fits(loaded.vocab_size, config.model.vocab_size, f"the tokenizer {tokenizer}")
        return Generator(config.model, weights, loaded)

    @torch.no_grad()
    def next_logits(self, tokens: list[int]) -> Tensor:
        """Shapes: returns [v], for what follows the last seq_length of `tokens`."""
        window = torch.tensor([tokens[-self.model.seq_length:]])
        *blocks, head = self.stage.blocks.values()
        x = None
        for block in blocks:
            x = block(x, {"tokens": window}, None)
        assert x is not None
        return head.logits(x[:, -1])[0, : self.tokenizer.vocab_size]  # type: ignore[operator]

    def generate(self, prompt: str, sampling: Sampling) -> Iterator[str]:
        """Yields the continuation of `prompt` (a new document where it is empty), piece by piece, until its end.

        Raises: as `choose`.
        """
        end = self.tokenizer.special(END)
        tokens = self.tokenizer.encode_prompt(prompt) or [end]
        random = torch.Generator().manual_seed(sampling.seed)
        made: list[int] = []
        shown = 0
        for _ in range(sampling.max_tokens):
            token = choose(self.next_logits(tokens), sampling, random)
            if token == end:
                break
            tokens.append(token)
            made.append(token)
            text = self.tokenizer.decode(made)
            if not text.endswith("\ufffd"):  # otherwise in the middle of a character
                yield text[shown:]
                shown = len(text)
        if made and (rest := self.tokenizer.decode(made)[shown:]):
            yield rest


def choose(logits: Tensor, sampling: Sampling, random: torch.Generator) -> int:
    """One token. Shapes: logits [v]. Raises: CheckpointError where they are not finite."""
    if not logits.isfinite().all():
        raise CheckpointError("the model's logits are not finite: nothing can be sampled from them")
    if sampling.temperature == 0:
        return int(logits.argmax())
    if 0 < sampling.top_k < len(logits):
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return int(torch.multinomial(torch.softmax(logits.double() / sampling.temperature, 0), 1, generator=random))
