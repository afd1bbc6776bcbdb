"""An import takes the memory of its largest tensor, whatever the size of the model."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridpar.checkpoint import read_manifest
from hybridpar.checkpoint.huggingface import import_folder
from hybridpar.checkpoint.load import FullWeights

WIDTH = 1024
FFN = 2048
VOCAB = 8192
LARGEST = 4 * VOCAB * WIDTH
LAYER = {
    "input_layernorm": (WIDTH,),
    "mlp.down_proj": (WIDTH, FFN),
    "mlp.gate_proj": (FFN, WIDTH),
    "mlp.up_proj": (FFN, WIDTH),
    "post_attention_layernorm": (WIDTH,),
    **{f"self_attn.{part}_proj": (WIDTH, WIDTH) for part in "qkvo"},
}


def write(folder: Path, num_layers: int, *, pickled: bool = False) -> int:
    """Write a LLaMA of random weights in fp32, a file for each layer; return its bytes."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    suffix = "bin" if pickled else "safetensors"
    where = {}
    total = 0

    def put(number: int, shapes: dict[str, tuple[int, ...]]) -> None:
        nonlocal total
        file = f"model-{number}.{suffix}"
        tensors = {
            f"{name}.weight": torch.randn(shape, generator=generator)
            for name, shape in shapes.items()
        }
        if pickled:
            torch.save(tensors, folder / file)
        else:
            save_file(tensors, folder / file)
        where.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())

    ends = {"model.embed_tokens": (VOCAB, WIDTH), "lm_head": (VOCAB, WIDTH)}
    put(0, {**ends, "model.norm": (WIDTH,)})
    for layer in range(num_layers):
        put(layer + 1, {f"model.layers.{layer}.{name}": shape for name, shape in LAYER.items()})
    index = "pytorch_model.bin.index.json" if pickled else "model.safetensors.index.json"
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    settings = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "vocab_size": VOCAB,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return total


def peak_of(small: Path, large: Path, sent: multiprocessing.connection.Connection) -> None:
    """Send the bytes that the import of the large model took at most, besides the small one's."""

    def resident(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

    import_folder(small, small / "ours")  # loads what any import needs
    Path("/proc/self/clear_refs").write_text("5")  # the peak is reset
    before = resident("VmRSS")
    import_folder(large, large / "ours")
    sent.send(resident("VmHWM") - before)


@pytest.mark.thorough
@pytest.mark.parametrize("pickled", [False, True])
def test_an_import_takes_the_memory_of_its_largest_tensor(
    tmp_path: Path, pickled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, whose resident memory counts the pages of mapped files, too. A
    second copy of the largest tensor would be too much.

    By default glibc keeps some freed memory, up to several tensors' here, and how much varies. With
    a fixed threshold it returns tensors to the system as soon as they are freed.
    """
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")
    write(tmp_path / "small", 1, pickled=pickled)
    total = write(tmp_path / "large", 12, pickled=pickled)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    fresh = multiprocessing.get_context("spawn")
    process = fresh.Process(target=peak_of, args=(tmp_path / "small", tmp_path / "large", sender))
    process.start()
    process.join()
    peak = receiver.recv()
    assert process.exitcode == 0
    assert total > 13 * LARGEST
    assert peak < 1.75 * LARGEST, (peak / LARGEST, total / LARGEST)
    saved = tmp_path / "large" / "ours" / "checkpoints" / "step_00000000"
    assert read_manifest(saved).config.transformer.num_layers == 12
    found = FullWeights(saved).read("blocks.12.mlp.down.weight")
    assert found.std() == pytest.approx(1.0, abs=0.01)
