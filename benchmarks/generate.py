"""Claim: on CPUs `hybridpar generate` takes at most the time of transformers, with its cache.

    python -m benchmarks.generate

Both sides have the same weights, which transformers made at random, and go on greedily from the
same prompts. The logits after the prompts are compared first, and in fp32 all tokens; in bf16 some
differ, where two logits are nearly equal. Our time is of all the tokens of a text, from the
prompt's ids to text; their time is of `generate(do_sample=False)`, from ids to ids. Prompts in a
batch have different lengths, which transformers pads on the left.
"""

from __future__ import annotations

import argparse
import importlib
import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from benchmarks.common import OURS, arguments, case, parse, race, report
from hybridpar.checkpoint.huggingface import import_folder
from hybridpar.data.tokenizer import END
from hybridpar.models.build import DTYPES
from hybridpar.train.inference.generate import Generator, Sampling

PEER = "transformers"
LOGITS = {"fp32": 1e-4, "bf16": 4e-2}
"""Largest difference of logits, relative to the largest."""


@dataclass(frozen=True)
class Shape:
    """A GPT-2, or with `groups` a model of `family` with so many key heads."""

    num_layers: int
    hidden: int
    num_heads: int
    vocab: int
    seq_length: int = 1024
    groups: int = 0
    family: str = "llama"


MODELS = {
    "small": Shape(4, 256, 8, 8192),
    "gpt2": Shape(12, 768, 12, 50257),
    "llama": Shape(12, 768, 12, 32000, groups=4),
    "qwen3": Shape(4, 256, 8, 8192, groups=4, family="qwen3"),
    "tiny": Shape(2, 64, 4, 512),
}


def build(shape: Shape, dtype: str, folder: Path) -> tuple[Generator, Any]:
    """A random model of transformers, imported here, whose tokenizer has a word for each id."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": shape.vocab, "bos_token_id": 0, "eos_token_id": None}
    if shape.groups:
        config = transformers.AutoConfig.for_model(
            shape.family,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.groups,
            head_dim=shape.hidden // shape.num_heads,
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
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(DTYPES[dtype])
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({END: 0} | {f"w{i}": i for i in range(1, shape.vocab)})
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    words.save(str(folder / "tokenizer.json"))
    import_folder(folder, folder / "ours")
    return Generator.load(folder / "ours", print), model


@dataclass(frozen=True)
class Task:
    """The texts that both sides write: `batch` texts of `new_tokens` behind a prompt of
    `prompt_tokens` or a few more."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    def prompts(self, vocab: int) -> list[str]:
        lengths = [self.prompt_tokens + 5 * i for i in range(self.batch)]
        return [
            " ".join(f"w{(7 * i + 3 * j) % (vocab - 1) + 1}" for j in range(length))
            for i, length in enumerate(lengths)
        ]


class Peer:
    """Transformers' side.

    Args:
        ids: Tokens of each prompt.
    """

    def __init__(self, model: Any, ids: list[list[int]], num_tokens: int):
        longest = max(map(len, ids))
        self._model = model
        self._num_tokens = num_tokens
        self._padded = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
        starts = torch.tensor([longest - len(row) for row in ids])
        self._mask = (torch.arange(longest) >= starts[:, None]).long()

    @torch.no_grad()
    def next_logits(self) -> Tensor:
        """Return the logits after the prompts. Shapes: [b, v]."""
        at = (self._mask.cumsum(-1) - 1).clamp(min=0)
        found = self._model(self._padded, attention_mask=self._mask, position_ids=at)
        logits: Tensor = found.logits[:, -1]
        return logits

    def write(self) -> Tensor:
        """Return the tokens of the texts. Shapes: [b, new tokens]."""
        made: Tensor = self._model.generate(
            self._padded,
            attention_mask=self._mask,
            max_new_tokens=self._num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return made[:, self._padded.shape[1] :]


def sides(shape: Shape, dtype: str, task: Task, folder: Path) -> dict[str, Callable[[], float]]:
    """Each makes the texts, and returns a sum of their tokens, each weighed by its place.

    Raises: AssertionError if logits differ.
    """
    generator, model = build(shape, dtype, folder)
    generator.end = -1  # no text ends before its time
    prompts = task.prompts(shape.vocab)
    ids = [generator.tokenizer.encode(prompt).tolist() for prompt in prompts]
    peer = Peer(model, ids, task.new_tokens)
    expected = peer.next_logits()
    found = generator.decoder.start(ids, 1)
    assert found is not None
    assert (found - expected).abs().max() <= LOGITS[dtype] * expected.abs().max()
    weights = torch.arange(1, task.new_tokens + 1)[:, None]

    def ours() -> float:
        made = [""] * task.batch
        sampling = Sampling(task.new_tokens, temperature=0.0)
        for i, piece in generator.generate_all(prompts, sampling):
            made[i] += piece
        numbers = torch.tensor([[int(word[1:]) for word in text.split()] for text in made])
        return float((numbers.T * weights).sum())

    def theirs() -> float:
        return float((peer.write().T * weights).sum())

    return {OURS: ours, PEER: theirs}


def measure(
    name: str, dtype: str, threads: int, task: Task, args: argparse.Namespace
) -> dict[str, Any]:
    """Race both sides on one model."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        both = sides(MODELS[name], dtype, task, Path(folder))
        result = race(both, args.rounds, tolerance=0.0 if dtype == "fp32" else math.inf)
    label = (
        f"{name} {dtype}, {threads} thread{'s' * (threads > 1)}, {task.batch} "
        f"prompt{'s' * (task.batch > 1)} of {task.prompt_tokens}"
    )
    return case(
        label,
        result,
        task.new_tokens * task.batch,
        shape=name,
        dtype=dtype,
        threads=threads,
        **asdict(task),
    )


def main() -> None:
    parser = arguments(__doc__, rounds=5, shapes=[])
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=["small", "gpt2", "llama", "qwen3"]
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="prompts at once")
    parser.add_argument("--prompts", nargs="+", type=int, default=[16, 512], help="their tokens")
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    args = parse(parser)
    keys = product(args.models, args.dtypes, args.threads, args.batches, args.prompts)
    report(
        "generate",
        (
            measure(name, dtype, threads, Task(batch, prompt, args.tokens), args)
            for name, dtype, threads, batch, prompt in keys
        ),
        args,
        shapes=MODELS,
    )


if __name__ == "__main__":
    main()
