"""Builds the blocks of a model that one stage holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from hybridpar.config import AUTO, KernelsConfig, ModelConfig
from hybridpar.errors import config_error
from hybridpar.grid import Axis
from hybridpar.models.blocks import BertHead, Embedding, GPTHead, TransformerLayer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""Types by their names in train.dtype."""
HEADS: dict[str, type[GPTHead] | type[BertHead]] = {"gpt": GPTHead, "bert": BertHead}


def loss_names(model: ModelConfig) -> tuple[str, ...]:
    """The partial losses that the model's head returns, in order."""
    if model.kind == "gpt":
        return ("lm",)
    return ("mlm",) if model.sentence_head == "none" else ("mlm", model.sentence_head)


def build_blocks(
    model: ModelConfig, axis: Axis, numbers: Iterable[int], *, kernels: KernelsConfig = AUTO,
    sequence: bool = False, device: str | torch.device = "meta", dtype: torch.dtype = torch.float32,
) -> dict[int, nn.Module]:
    """The blocks with these numbers (0 the embedding, 1..num_layers the layers, num_layers + 1 the head) of `model`.

    `sequence`: between the layers' split parts, each rank holds part of every sample's rows (parallel.sequence).
    Built on the meta device unless told otherwise: nothing is allocated for blocks that live elsewhere. Where the
    embedding and the head are both here and tied, they share one parameter.

    Raises: ConfigError where heads do not fit the hidden size or the axis (see nn.HeadLayout).
    """
    blocks: dict[int, nn.Module] = {}
    for number in numbers:
        if number == 0:
            kind: type[nn.Module] = Embedding
        elif number <= model.num_layers:
            kind = TransformerLayer
        else:
            kind = HEADS[model.kind]
        blocks[number] = kind(
            model, axis, f"blocks.{number}", kernels, sequence=sequence, device=device, dtype=dtype)
    first, last = blocks.get(0), blocks.get(model.num_layers + 1)
    if model.tie_embeddings and isinstance(first, Embedding) and isinstance(last, GPTHead | BertHead):
        last.language_model.tie(first.tokens)
    return blocks


@dataclass(frozen=True)
class Recomputation:
    """The blocks that a stage runs again in its backward, each from its own input; whole: all from the stage's.

    selective: blocks that make outputs of norms and activations again, and keep the rest.
    """

    blocks: frozenset[int] = frozenset()
    whole: bool = False
    selective: frozenset[int] = frozenset()


def recomputed_blocks(text: str, model: ModelConfig, split: Sequence[range]) -> tuple[Recomputation, ...]:
    """The recomputation of each stage, by `pipeline.recompute`. split: the blocks of each stage.

    Raises: ConfigError as parse_recompute.
    """
    again = parse_recompute(text, model.num_layers, len(split))
    if again.what == "stage":
        return tuple(Recomputation(frozenset(blocks), whole=True) if stage in again.numbers else Recomputation()
                     for stage, blocks in enumerate(split))
    layers = frozenset(layer + 1 for layer in again.numbers)
    if again.what == "selective":
        return tuple(Recomputation(selective=layers.intersection(blocks)) for blocks in split)
    return tuple(Recomputation(layers.intersection(blocks)) for blocks in split)


class Again(NamedTuple):
    """The layers ('') or stages ('stage') that are recomputed, or the layers of which what is cheap ('selective')."""

    what: str
    numbers: frozenset[int]


def parse_recompute(text: str, num_layers: int, num_stages: int) -> Again:
    """Reads `pipeline.recompute`: 'none', 'all', 'selective', 'stage', or a list of layers or stages, counted from 0,
    such as '0,2-5', 'selective:0,2-5' or 'stage:0,2-3'.

    Raises: ConfigError where the text is something else or names what is not there.
    """
    counts = {"": num_layers, "selective": num_layers, "stage": num_stages}
    if text in ("none", "all"):
        return Again("", frozenset(range(num_layers if text == "all" else 0)))
    if text and text in counts:
        return Again(text, frozenset(range(counts[text])))
    what, _, numbers = text.rpartition(":")
    found = _parse_numbers(numbers, counts.get(what, 0))
    if found is not None:
        return Again(what, found)
    if what == "stage":
        rule = (f"must name stages from 0 to {num_stages - 1} (parallel.pp, times pipeline.chunks = {num_stages}), "
                "such as 'stage:0'")
        raise config_error("pipeline.recompute", text, rule, "'stage' for all of them")
    rule = (f"must be 'none', 'all', 'selective', 'stage', layers from 0 to {num_layers - 1} such as '0,2-5' or "
            "'selective:0,2-5', or stages such as 'stage:0,2-3'")
    raise config_error("pipeline.recompute", text, rule, "'all'")


def _parse_numbers(text: str, count: int) -> frozenset[int] | None:
    """Reads '0,2-5' as numbers below `count`; None where it is something else."""
    parts = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in text.split(",")]
    ranges = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part]
    if not all(parts) or not all(ranges) or max(r.stop for r in ranges) > count:
        return None
    return frozenset(number for numbers in ranges for number in numbers)
