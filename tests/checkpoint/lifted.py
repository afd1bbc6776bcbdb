"""Transformers without its float32: what it casts to float32 for norms, angles and softmax is
float64 inside `lifted`, so a model in float64 computes in float64 throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hybridpar.checkpoint.huggingface.verify import load_theirs


@torch.no_grad()
def exact_logits(
    folder: Path, tokens: Tensor, wrap: Callable[[Any], Any] = lambda model: model
) -> Tensor:
    """Logits of the model in a folder, in float64 throughout. Shapes: [b, s] -> [b, s, v].

    wrap: adds to the model that is loaded.
    """
    has_experts = "num_experts_per_tok" in (folder / "config.json").read_text()
    options = {"experts_implementation": "eager"} if has_experts else {}
    model = wrap(load_theirs(folder, "AutoModelForCausalLM", **options)).double().eval()
    with lifted():
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                module.__init__(module.config)  # its frequencies again
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


@contextmanager
def lifted() -> Iterator[None]:
    """Let the names of float32 in Python code mean float64."""
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(Tensor, "float", Tensor.double),
    ):
        yield
