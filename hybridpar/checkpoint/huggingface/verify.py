"""Compare a checkpoint with a Hugging Face folder: every tensor, and the logits of transformers'
model on the same tokens, in float64.

A folder may have a lower precision than the checkpoint, such as an export in bf16 of an fp32
master. So the checkpoint's weights are first rounded to the folder's precision. Each tensor must
then be equal to the bit, and a hybridpar model with these weights gives the logits. Logits differ
only by rounding, because some of transformers' models compute angles, norms and softmax in float32
nevertheless. How much that can be, relative to the largest logit, depends on the weights; our model
in float32 shows it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridpar.checkpoint.huggingface.configuration import family_of
from hybridpar.checkpoint.huggingface.names import match, plan_of
from hybridpar.checkpoint.huggingface.source import CONFIG, WeightFiles, read_json
from hybridpar.checkpoint.load import FullWeights, MergedWeights
from hybridpar.checkpoint.stages import whole_model
from hybridpar.config import ModelConfig
from hybridpar.errors import CheckpointError, config_error
from hybridpar.runtime.stage import Stage

TOLERANCE = 1e-5
"""Share of the largest logit: float32 in their model usually leaves 1e-7, another form of gelu
5e-5."""
LARGEST_TOLERANCE = 1e-3
"""Largest tolerance, for weights that amplify rounding."""
_SAMPLES = 2
_LENGTH = 64
_SHOWN = 8


@dataclass(frozen=True)
class Comparison:
    """The largest difference of a logit, the largest logit, and the largest relative difference
    that counts as rounding.

    `different`: names of tensors that differ from the checkpoint's, rounded to the folder's
    precision.
    """

    difference: float
    largest: float
    num_tokens: int
    tolerance: float = TOLERANCE
    different: tuple[str, ...] = ()

    @property
    def relative(self) -> float:
        if not self.difference:
            return 0.0
        return self.difference / self.largest if 0 < self.largest < math.inf else math.inf

    @property
    def ok(self) -> bool:
        return self.relative <= self.tolerance and not self.different

    def __str__(self) -> str:
        text = (
            f"{self.num_tokens} tokens in float64: largest difference {self.difference:.1e}, "
            f"{self.relative:.1e} "
            f"of the largest value {self.largest:.1e} (tolerance {self.tolerance:.1e} of it)"
        )
        if not self.different:
            return text
        more = f" and {len(self.different) - _SHOWN} more" if len(self.different) > _SHOWN else ""
        return (
            f"{text}; tensors that differ from the checkpoint's: "
            f"{', '.join(self.different[:_SHOWN])}{more}"
        )


def compare(checkpoint: Path, folder: Path, *, bare: bool = False) -> Comparison:
    """Compare all tensors, and all logits (BERT: also of the sentence head) on random tokens.

    Args:
        bare: Compare a BERT's features and pooled features instead, for a folder without heads.

    Raises:
        ConfigError: transformers is not installed.
        CheckpointError: transformers misses tensors that it needs.
    """
    full = MergedWeights(checkpoint)
    model = full.manifest.config.transformer
    batch = random_batch(model)
    theirs = their_features(folder, model, batch) if bare else their_logits(folder, model, batch)
    weights, different = _rounded(full, model, folder)
    run = our_features if bare else our_logits
    real = batch["padding_mask"]
    stage = whole_model(model, weights, torch.float64)
    ours = run(model, stage, batch)
    rounding = compare_logits(run(model, stage.float(), batch), ours, real, checkpoint).relative
    tolerance = min(max(TOLERANCE, 4 * rounding), LARGEST_TOLERANCE)
    return replace(compare_logits(ours, theirs, real, folder, tolerance), different=different)


def _rounded(
    full: FullWeights, model: ModelConfig, folder: Path
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the checkpoint's weights, rounded to the precision of the folder's tensors, and the
    names of tensors that are not equal to them, to the bit. Weights that the folder lacks, such as
    heads of a bare BERT, are not changed.

    Raises:
        CheckpointError: The folder has other tensors than such a model.
    """
    files = WeightFiles(folder)
    family = family_of(read_json(folder / CONFIG), files.shapes)
    plan = plan_of(model, family)
    matched = match(files.shapes, plan, family)
    weights: dict[str, Tensor] = {}
    different = []
    for entry in plan.entries:
        name = full.find_tied(entry.ours, entry.placement.tied)
        if name is None:
            raise CheckpointError(f"{full.folder}: has no {entry.ours}")
        ours = weights[entry.ours] = full.read(name)
        if entry.ours in matched.absent:
            continue
        parts = []
        for their_name, part in zip(
            entry.theirs, entry.layout.split(ours, plan.heads), strict=True
        ):
            theirs = files.read(matched.names[their_name])
            parts.append(part.to(theirs.dtype))
            if not _same_bits(parts[-1], theirs):
                different.append(matched.names[their_name])
        weights[entry.ours] = entry.layout.join([part.to(ours.dtype) for part in parts], plan.heads)
    different += [
        copy
        for copy, original in matched.copies.items()
        if not _same_bits(files.read(copy), files.read(original))
    ]
    return weights, tuple(different)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def compare_logits(
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    real: Tensor,
    source: Path,
    tolerance: float = TOLERANCE,
) -> Comparison:
    """Compare the outputs of two models on the same tokens (words; for a BERT also sentence);
    returns the output that differs most.

    Shapes: words [b, s, v], compared where `real` [b, s] is True; sentence [b, ..].

    Raises:
        CheckpointError: Shapes differ; names `source`, where theirs came from.
    """
    found = []
    for kind, mine in ours.items():
        if mine.shape != (other := theirs[kind]).shape:
            raise CheckpointError(
                f"{source}: its logits of {kind} have shape {list(other.shape)}, ours "
                f"{list(mine.shape)}"
            )
        a, b = (x[real].double() if kind == "words" else x.double() for x in (mine, other))
        difference = float((a - b).abs().max().nan_to_num(torch.inf))
        found.append(Comparison(difference, float(b.abs().max()), int(real.sum()), tolerance))
    return max(found, key=lambda one: one.relative)


def random_batch(model: ModelConfig) -> dict[str, Tensor]:
    """Return random tokens; BERT's last sample ends early. Shapes: [b, s] each."""
    shape = _SAMPLES, min(model.num_positions, _LENGTH)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.vocab_size, shape, generator=generator)
    real = torch.ones(shape, dtype=torch.bool)
    if model.kind == "bert":
        real[-1, shape[1] // 2 :] = False
    return {
        "tokens": tokens,
        "padding_mask": real,
        "token_types": torch.randint(2, shape, generator=generator),
    }


@torch.no_grad()
def our_logits(model: ModelConfig, stage: Stage, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return our model's logits. Shapes: words [b, s, v]; sentence [b, 2] of a BERT with such a
    head."""
    head = stage.blocks[str(model.num_layers + 1)]
    x = _last_layer(model, stage, batch)
    logits: dict[str, Tensor] = {"words": head.logits(x)}  # type: ignore[operator]
    if model.kind == "bert" and model.sentence_head != "none":
        logits["sentence"] = head.sentence_logits(x)  # type: ignore[operator]
    return logits


def _last_layer(model: ModelConfig, stage: Stage, batch: dict[str, Tensor]) -> Tensor:
    """Return the input of the head. Shapes: [b, s, h]."""
    inputs = batch if model.kind == "bert" else {"tokens": batch["tokens"]}
    x: Any = None
    for number in range(model.num_layers + 1):
        x = stage.blocks[str(number)](x, inputs, None)
    return x


@torch.no_grad()
def our_features(model: ModelConfig, stage: Stage, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return our model's features. Shapes: words [b, s, h]; sentence [b, h] of a BERT with such
    a head, before it."""
    head: Any = stage.blocks[str(model.num_layers + 1)]
    x = _last_layer(model, stage, batch)
    return {"words": x} | (
        {} if model.sentence_head == "none" else {"sentence": torch.tanh(head.pooler(x[:, 0]))}
    )


@torch.no_grad()
def their_features(folder: Path, ours: ModelConfig, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return their model's features. Shapes: as for our_features. Raises: as `compare`."""
    has_pooler = ours.sentence_head != "none"
    model = load_theirs(folder, "BertModel", add_pooling_layer=has_pooler)
    out = model(
        input_ids=batch["tokens"],
        attention_mask=batch["padding_mask"].long(),
        token_type_ids=batch["token_types"],
    )
    return {"words": out.last_hidden_state} | (
        {"sentence": out.pooler_output} if has_pooler else {}
    )


@torch.no_grad()
def their_logits(folder: Path, ours: ModelConfig, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return their model's logits. Shapes: as for our_logits. Raises: as `compare`."""
    bert = "AutoModelForMaskedLM" if ours.sentence_head == "none" else "AutoModelForPreTraining"
    # their fastest products of experts do not take float64
    options = {"experts_implementation": "eager"} if ours.num_experts else {}
    model = load_theirs(folder, bert if ours.kind == "bert" else "AutoModelForCausalLM", **options)
    if ours.kind == "gpt":
        return {"words": model(input_ids=batch["tokens"], use_cache=False).logits}
    out = model(
        input_ids=batch["tokens"],
        attention_mask=batch["padding_mask"].long(),
        token_type_ids=batch["token_types"],
    )
    if hasattr(out, "prediction_logits"):
        return {"words": out.prediction_logits, "sentence": out.seq_relationship_logits}
    return {"words": out.logits}


def load_theirs(folder: Path, loader: str, **options: Any) -> Any:
    """Return transformers' model of a folder, in float64, by one of their classes; nothing is
    downloaded.

    Raises:
        ConfigError: transformers is not installed.
        CheckpointError: It misses tensors that it needs.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise config_error(
            "verify",
            True,
            f"requires transformers, which cannot be imported ({error})",
            "pip install 'hybridpar[hf]'",
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model, info = getattr(transformers, loader).from_pretrained(
            folder,
            dtype=torch.float64,
            local_files_only=True,
            output_loading_info=True,
            attn_implementation="eager",
            use_safetensors=any(folder.glob("*.safetensors")),
            **options,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: transformers cannot load it: {error}") from None
    for what in ("missing_keys", "mismatched_keys"):
        if info[what]:
            raise CheckpointError(
                f"{folder}: {what.replace('_', ' ')} of {loader} there: "
                f"{', '.join(map(str, sorted(info[what])[:8]))}"
            )
    return model.eval()
