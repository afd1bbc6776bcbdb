"""Builds the blocks of a model that one stage holds."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn

from hybridpar.config import KernelsConfig, ModelConfig
from hybridpar.errors import config_error
from hybridpar.grid import Axis
from hybridpar.models.blocks import BertHead, Embedding, GPTHead, TransformerLayer

AUTO = KernelsConfig()
HEADS: dict[str, type[GPTHead] | type[BertHead]] = {"gpt": GPTHead, "bert": BertHead}


def loss_names(model: ModelConfig) -> tuple[str, ...]:
    """The partial losses that the model's head returns, in order."""
    if model.kind == "gpt":
        return ("lm",)
    return ("mlm",) if model.sentence_head == "none" else ("mlm", model.sentence_head)


def build_blocks(
    model: ModelConfig, axis: Axis, numbers: Iterable[int], *, kernels: KernelsConfig = AUTO,
    device: str | torch.device = "meta", dtype: torch.dtype = torch.float32,
) -> dict[int, nn.Module]:
    """The blocks with these numbers (0 the embedding, 1..num_layers the layers, num_layers + 1 the head) of `model`.

    Built on the meta device unless told otherwise: nothing is allocated for blocks that live elsewhere. Where the
    embedding and the head are both here and tied, they share one parameter.
    """
    blocks: dict[int, nn.Module] = {}
    for number in numbers:
        if number == 0:
            kind: type[nn.Module] = Embedding
        elif number <= model.num_layers:
            kind = TransformerLayer
        else:
            kind = HEADS[model.kind]
        blocks[number] = kind(model, axis, f"blocks.{number}", kernels, device=device, dtype=dtype)
    first, last = blocks.get(0), blocks.get(model.num_layers + 1)
    if model.tie_embeddings and isinstance(first, Embedding) and isinstance(last, GPTHead | BertHead):
        last.language_model.tie(first.tokens)
    return blocks


def parse_layers(text: str, num_layers: int) -> frozenset[int]:
    """Block numbers from 'none', 'all', or a list of layers (counted from 0) and ranges such as '0,2-5'.

    Raises: ConfigError where the text is something else or names a layer that the model has not.
    """
    if text == "none":
        return frozenset()
    if text == "all":
        return frozenset(range(1, num_layers + 1))
    parts = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in text.split(",")]
    ranges = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part]
    layers = {layer for layers in ranges for layer in layers}
    if not all(parts) or not all(ranges) or max(layers) >= num_layers:
        rule = f"must be 'none', 'all' or layers from 0 to {num_layers - 1} such as '0,2-5'"
        raise config_error("pipeline.recompute", text, rule, "'all'")
    return frozenset(layer + 1 for layer in layers)
