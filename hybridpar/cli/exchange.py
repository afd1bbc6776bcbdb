"""Commands that exchange models with Hugging Face and Megatron-LM; see commands.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from hybridpar.config import Launch
from hybridpar.errors import config_error
from hybridpar.reading import to_json


@dataclass(frozen=True)
class Export:
    """Write a checkpoint of any grid as a Hugging Face transformers folder: GPT-2, LLaMA, Mixtral,
    GPT-NeoX, BERT and others."""

    checkpoint: Positional[Annotated[Path, arg(metavar="RUN_OR_CHECKPOINT")]]
    """A run folder, whose newest checkpoint is used, or one checkpoint."""
    output: Positional[Annotated[Path, arg(metavar="OUTPUT")]]
    """Folder to create."""
    dtype: Literal["keep", "fp32", "bf16", "fp16", "fp64"] = "keep"
    """Precision of the weights. keep (default): train.dtype of the run."""
    max_file_gb: float = 5.0
    """Split weights into files of at most this size, in 1e9 bytes."""
    adapters: bool = False
    """Write the adapters (LoRA) alone, in the layout of PEFT. Without this flag they are merged
    into the weights."""
    verify: bool = False
    """Load both models afterwards and compare every tensor (rounded to `dtype`) and the logits.
    Needs transformers."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.checkpoint import read_held

        if not 0 < self.max_file_gb <= 1e9:
            raise config_error(
                "max_file_gb", self.max_file_gb, "must be positive, and at most 1e9", "5"
            )
        if self.adapters and self.verify:
            raise config_error(
                "verify", True, "not supported with --adapters", "--verify without --adapters"
            )
        say = partial(print, file=sys.stderr)
        return read_held(
            self.checkpoint, say, partial(self._export, say)
        )  # held during verification, too

    def _export(self, say: Callable[[str], None], checkpoint: Path) -> int:
        from hybridpar.checkpoint.huggingface import export_adapters, export_folder

        if self.adapters:
            written = export_adapters(checkpoint, self.output, dtype=self.dtype, say=say)
            what = f"{written.num_parameters:,} parameters of adapters of {checkpoint}"
            return _exchanged(
                asdict(written),
                f"{written.folder}: {what}, {written.dtype}",
                checkpoint,
                written.folder,
                verify=False,
                as_json=self.json,
            )
        made = export_folder(
            checkpoint,
            self.output,
            dtype=self.dtype,
            max_file_bytes=int(self.max_file_gb * 1e9),
            say=say,
        )
        what = (
            f"{made.num_parameters:,} parameters of {made.checkpoint} as {made.architecture}, "
            f"{made.dtype}"
        )
        return _exchanged(
            asdict(made),
            f"{made.folder}: {what}",
            made.checkpoint,
            made.folder,
            verify=self.verify,
            as_json=self.json,
        )


@dataclass(frozen=True)
class Import:
    """Create a checkpoint that trains on any grid, from a local Hugging Face folder (GPT-2, LLaMA,
    Mistral, Mixtral, GPT-NeoX, BERT and others) or a Megatron-LM GPT."""

    source: Positional[Annotated[Path, arg(metavar="FOLDER")]]
    """A folder with config.json, tokenizer.json and model.safetensors or pytorch_model.bin (or an
    index and its shards); or a Megatron-LM folder with iter_0000100/mp_rank_00/model_optim_rng.pt,
    or its folder of one iteration."""
    output: Positional[Annotated[Path, arg(metavar="OUTPUT")]]
    """Folder to create, with config.toml, tokenizer.json and a checkpoint."""
    vocab_size: int | None = None
    """Vocabulary size of a Megatron-LM model. Further rows of its embedding are padding."""
    verify: bool = False
    """Load both models afterwards and compare tensors and logits. Needs transformers, or
    megatron-core for a Megatron-LM model, which is compared by logits only."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.checkpoint.huggingface import import_folder
        from hybridpar.checkpoint.megatron import import_megatron, is_megatron

        if is_megatron(self.source):
            made = import_megatron(self.source, self.output, self.vocab_size)
        elif self.vocab_size is not None:
            raise config_error(
                "vocab_size",
                self.vocab_size,
                f"supported for Megatron-LM checkpoints only; {self.source} is not one",
                "importing without it",
            )
        else:
            made = import_folder(self.source, self.output)
        what = f"{made.num_parameters:,} parameters of a {made.model_type}, {made.dtype}"
        text = f"{made.folder}: {what}; hybridpar train {made.folder / 'config.toml'} trains it"
        return _exchanged(
            asdict(made), text, made.checkpoint, self.source, verify=self.verify, as_json=self.json
        )


@dataclass(frozen=True)
class Upcycle:
    """Create a checkpoint of a model with experts from a dense one, whose MLPs it copies."""

    checkpoint: Positional[Annotated[Path, arg(metavar="RUN_OR_CHECKPOINT")]]
    """A run folder, whose newest checkpoint is used, or one checkpoint; of a model without biases."""
    output: Positional[Annotated[Path, arg(metavar="OUTPUT")]]
    """Folder to create, with config.toml and a checkpoint."""
    num_experts: int = 8
    """Experts of a layer, copies of its MLP (model.num_experts)."""
    router_topk: int = 2
    """Experts that a token visits (model.router_topk)."""
    moe_layers: str = "1"
    """Layers that get experts: a digit per layer, repeated (model.moe_layers)."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.checkpoint.upcycle import upcycle

        made = upcycle(
            self.checkpoint,
            self.output,
            num_experts=self.num_experts,
            topk=self.router_topk,
            layers=self.moe_layers,
            say=partial(print, file=sys.stderr),
        )
        text = (
            f"{made.folder}: {made.num_parameters:,} parameters, of which a token visits "
            f"{made.num_active:,}; hybridpar train {made.folder / 'config.toml'} trains it"
        )
        return _exchanged(
            asdict(made), text, made.checkpoint, made.folder, verify=False, as_json=self.json
        )


def _exchanged(
    made: dict[str, Any], text: str, checkpoint: Path, folder: Path, *, verify: bool, as_json: bool
) -> int:
    """Report the result of an export or import, compare both models if asked to, and return the
    exit code."""
    from hybridpar.checkpoint.huggingface import compare
    from hybridpar.checkpoint.megatron import compare_megatron, is_megatron

    out = sys.stderr if as_json else sys.stdout
    plain: dict[str, Any] = {
        "ok": True,
        **{k: str(v) if isinstance(v, Path) else v for k, v in made.items()},
    }
    print(text, file=out)
    for note in made["notes"]:
        print(f"  note: {note}", file=out)
    if verify:
        bare = bool(made.get("started_anew"))
        found = (
            compare_megatron(checkpoint, folder)
            if is_megatron(folder)
            else compare(checkpoint, folder, bare=bare)
        )
        plain |= {
            "ok": found.ok,
            "tolerance": found.tolerance,
            "largest_difference": found.difference,
            "relative_difference": found.relative,
        }
        plain["different_tensors"] = list(found.different)
        print(f"  verify: {'features' if bare else 'logits'} of {found}", file=out)
    if as_json:
        print(to_json(plain))
    return 0 if plain["ok"] else 1
