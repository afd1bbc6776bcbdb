"""Claim: on CPUs a token costs `hybridpar generate` at most 1.3 times what it costs transformers,
with its cache.

    python -m benchmarks.generate

Both sides have the same weights, which transformers made at random, in fp32, and go on greedily
from the same prompt: the tokens are compared first. Ours is the time of all the tokens of a text,
from the prompt's ids to text; theirs that of `generate(do_sample=False)`, to ids. Prompts in a
batch have different lengths, padded on the left over there.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import tokenizers
import torch

from benchmarks.common import OURS, arguments, case, parse, race, report
from hybridpar.checkpoint.huggingface import import_folder
from hybridpar.data.tokenizer import END
from hybridpar.train.inference.generate import Generator, Sampling

PEER = "transformers"


@dataclass(frozen=True)
class Shape:
    """A GPT-2, or with `groups` a LLaMA with so many key heads."""

    num_layers: int
    hidden: int
    num_heads: int
    vocab: int
    seq_length: int = 1024
    groups: int = 0


MODELS = {
    "small": Shape(4, 256, 8, 8192),
    "gpt2": Shape(12, 768, 12, 50257),
    "llama": Shape(12, 768, 12, 32000, groups=4),
    "tiny": Shape(2, 64, 4, 512),
}


def build(shape: Shape, folder: Path) -> tuple[Generator, Any]:
    """A random model of transformers, imported here, whose tokenizer has a word for each id."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": shape.vocab, "bos_token_id": 0, "eos_token_id": None}
    if shape.groups:
        config = transformers.LlamaConfig(
            hidden_size=shape.hidden,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.groups,
            intermediate_size=8 * shape.hidden // 3,
            max_position_embeddings=shape.seq_length,
            **sizes,
        )
    else:
        config = transformers.GPT2Config(
            n_embd=shape.hidden,
            n_layer=shape.num_layers,
            n_head=shape.num_heads,
            n_positions=shape.seq_length,
            **sizes,
        )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({END: 0} | {f"w{i}": i for i in range(1, shape.vocab)})
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    words.save(str(folder / "tokenizer.json"))
    import_folder(folder, folder / "ours")
    return Generator.load(folder / "ours", print), model


def sides(
    shape: Shape, folder: Path, num_tokens: int, batch: int
) -> dict[str, Callable[[], float]]:
    """Each makes the texts, and returns a sum of their tokens, each weighed by its place."""
    generator, model = build(shape, folder)
    generator.end = -1  # no text ends before its time
    prompts = [" ".join(f"w{7 * i + 3 * j + 1}" for j in range(16 + 5 * i)) for i in range(batch)]
    ids = [generator.tokenizer.encode(prompt).tolist() for prompt in prompts]
    longest = max(map(len, ids))
    left = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
    real = (
        torch.arange(longest) >= longest - torch.tensor([len(row) for row in ids])[:, None]
    ).long()
    weights = torch.arange(1, num_tokens + 1)[:, None]

    def ours() -> float:
        made = [""] * batch
        for i, piece in generator.generate_all(prompts, Sampling(num_tokens, temperature=0.0)):
            made[i] += piece
        numbers = torch.tensor([[int(word[1:]) for word in text.split()] for text in made])
        return float((numbers.T * weights).sum())

    def theirs() -> float:
        made = model.generate(
            left, attention_mask=real, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
        return float((made[:, longest:].T * weights).sum())

    return {OURS: ours, PEER: theirs}


def measure(name: str, threads: int, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Races both sides on one model. The tokens must be the same ones."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        both = sides(MODELS[name], Path(folder), args.tokens, batch)
        result = race(both, args.rounds, tolerance=0.0)
    label = f"{name}, {threads} thread{'s' * (threads > 1)}, {batch} prompt{'s' * (batch > 1)}"
    return case(
        label,
        result,
        args.tokens * batch,
        shape=name,
        threads=threads,
        batch=batch,
        new_tokens=args.tokens,
    )


def main() -> None:
    parser = arguments(__doc__, rounds=5, shapes=[])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["small", "gpt2", "llama"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4], help="prompts at once")
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    args = parse(parser)
    report(
        "generate",
        (measure(*key, args) for key in product(args.models, args.threads, args.batches)),
        args,
        shapes=MODELS,
    )


if __name__ == "__main__":
    main()
