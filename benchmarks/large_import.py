"""Claim: an import takes at most the memory of its largest tensor and 2 GB, whatever the model's
size.

    python -m benchmarks.large_import --shapes 8B 1B

Random weights in bf16 are written as transformers shards them, and imported in a fresh process.
Peak: the most resident memory that the import added, pages of mapped files included. Some of the
imported tensors must be equal to those written. A shape needs twice its size on the disk, which is
free again afterwards.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks import common
from benchmarks.checkpoint import forget_peak, resident
from hybridpar.checkpoint.huggingface import import_folder
from hybridpar.checkpoint.load import FullWeights

ALLOWED = 2 * 10**9
FILE_BYTES = 2 * 10**9
DTYPE = torch.bfloat16
COMPARED = {
    "blocks.0.tokens.weight": "model.embed_tokens.weight",
    "blocks.1.attention.out.weight": "model.layers.0.self_attn.o_proj.weight",
    "blocks.1.mlp.down.weight": "model.layers.0.mlp.down_proj.weight",
}
"""Parameters that equal a tensor of transformers, with no other layout."""


@dataclass(frozen=True)
class Shape:
    """A LLaMA."""

    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    vocab: int

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of its tensors, in the order of the layers."""
        head_dim = self.hidden // self.num_heads
        keys = self.num_kv_heads * head_dim
        layer = {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.ffn, self.hidden),
            "mlp.up_proj": (self.ffn, self.hidden),
            "mlp.down_proj": (self.hidden, self.ffn),
        }
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for number in range(self.num_layers):
            for name, shape in layer.items():
                yield f"model.layers.{number}.{name}.weight", shape
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocab, self.hidden)


SHAPES = {
    "tiny": Shape(2, 64, 128, 4, 2, 256),
    "1B": Shape(16, 2048, 8192, 32, 8, 128256),  # Llama 3.2, without its tie
    "8B": Shape(32, 4096, 14336, 32, 8, 128256),  # Llama 3.1
}


class RandomTensors:
    """Tensors that repeat a block of random numbers, each from another place on: as fast as a
    disk."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._block = torch.randn(2**22 + 1, generator=generator).to(DTYPE)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        start = sum(name.encode()) * 104729 % len(self._block)
        block = self._block.roll(start)
        count = prod(shape)
        return block.repeat(-(-count // len(block)))[:count].view(shape)


def write(shape: Shape, folder: Path) -> None:
    """Write the files of transformers."""
    numbers = RandomTensors()
    where: dict[str, str] = {}
    held: dict[str, Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(where.values())) + 1:05}.safetensors"
        save_file(held, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(held, file))
        held.clear()

    folder.mkdir()
    for name, size in shape.tensors():
        num_bytes = prod(size) * DTYPE.itemsize
        if held and sum(tensor.nbytes for tensor in held.values()) + num_bytes > FILE_BYTES:
            flush()
        held[name] = numbers.tensor(name, size)
    flush()
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(settings))


def import_measured(tiny: Path, folder: Path) -> dict[str, float]:
    """Import a folder after another one, which loads all code that an import needs."""
    import_folder(tiny, tiny / "ours")
    forget_peak()
    before = resident()
    start = time.perf_counter()
    import_folder(folder, folder / "ours")
    seconds = time.perf_counter() - start
    return {"peak_bytes": resident("VmHWM") - before, "seconds": seconds}


def compare(shape: Shape, folder: Path) -> None:
    """Raises: AssertionError if imported tensors differ from those written."""
    full = FullWeights(folder / "ours" / "checkpoints" / "step_00000000")
    numbers = RandomTensors()
    shapes = dict(shape.tensors())
    for ours, theirs in COMPARED.items():
        assert torch.equal(full.read(ours), numbers.tensor(theirs, shapes[theirs])), ours


def measure(name: str, args: Any) -> dict[str, Any]:
    """Raises: AssertionError if an import takes more than the claim allows, or is wrong."""
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        folder = Path(root) / name
        write(SHAPES["tiny"], Path(root) / "small")
        write(shape, folder)
        found = common.run_ranks(import_measured, 1, Path(root) / "small", folder)
        compare(shape, folder)
    sizes = [prod(size) * DTYPE.itemsize for _, size in shape.tensors()]
    beyond = found["peak_bytes"] - max(sizes)
    assert beyond <= ALLOWED, f"{beyond / 1e9:.2f} GB beyond the largest tensor"
    return {
        "case": name,
        "settings": {"shape": name},
        "bytes": sum(sizes),
        "largest_tensor_bytes": max(sizes),
        **found,
        "gb_beyond_largest": round(beyond / 1e9, 3),
    }


def show(entry: dict[str, Any]) -> None:
    print(
        f"{entry['case']:<6} {entry['bytes'] / 1e9:6.2f} GB in {entry['seconds']:6.1f} s   "
        f"peak {entry['peak_bytes'] / 1e9:5.2f} GB: the largest tensor and "
        f"{entry['gb_beyond_largest']:5.2f} GB",
        flush=True,
    )


def main() -> None:
    parser = common.arguments(__doc__, rounds=1, shapes=["1B", "8B"], choices=SHAPES)
    parser.add_argument(
        "--folder", default=None, help="where files are written; the system's temporary folder"
    )
    args = common.parse(parser)
    common.report(
        "large_import",
        (measure(name, args) for name in args.shapes),
        args,
        show=show,
        meaning=(
            "peak_bytes: resident memory that the import added at most, mapped files included; "
            "gb_beyond_largest: without the bytes of the largest tensor"
        ),
        shapes=SHAPES,
    )


if __name__ == "__main__":
    main()
