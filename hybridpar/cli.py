"""The command line: hybridpar train | verify | check | simulate | preprocess | generate.

    hybridpar train CONFIG.toml --parallel.tp 2 --train.num_steps 100       alone, or under torchrun
    python -m hybridpar train ...                                          the same

A TOML file comes over the defaults and flags over the file. Exit codes: 0 fine; 1 it failed, or verify found a
difference; 2 the command line is wrong; 130 and 143 stopped by Ctrl-C or SIGTERM, after saving.
`--json` prints one JSON object on stdout; everything else that a command says goes to stderr then.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro
from tyro.conf import Positional, arg

from hybridpar import __version__
from hybridpar.config import Config, Launch, load_toml
from hybridpar.errors import ConfigError, HybridparError, config_error

_GRACE_S = 2.0
"""How long a rank that lost contact outlives the one that died, so that the launcher sees and names that one first."""

Path_ = Annotated[Path, arg(metavar="CONFIG.toml")]


@dataclass(frozen=True)
class Train:
    """Train a model; go on from the last checkpoint where the run folder has one."""

    path: Positional[Path_]
    config: Annotated[Config, arg(name="")]
    json: bool = False
    """One JSON object on stdout at the end."""

    def run(self, launch: Launch) -> int:
        from hybridpar.train.loop import train

        outcome = train(self.config, launch)
        if self.json and launch.rank == 0:
            print(json.dumps(outcome.as_json()))
        return outcome.exit_code


@dataclass(frozen=True)
class Verify:
    """Compare a few batches on a process grid with the same ones in one process, in float64, tensor by tensor."""

    path: Positional[Path_]
    config: Annotated[Config, arg(name="")]
    grid: str = ""
    """Such as tp=2,pp=2,dp=2; axes left out are 1. Empty: the grid of the configuration."""
    batches: int = 4
    json: bool = False
    """The report as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.verify.run import verify

        parallel = self.config.parallel
        sizes = parse_grid(self.grid) if self.grid else {"tp": parallel.tp, "pp": parallel.pp, "dp": max(parallel.dp, 1)}
        _check_or_raise(dataclasses.replace(self.config, parallel=dataclasses.replace(parallel, **{
            axis: sizes.get(axis, 1) for axis in ("tp", "pp", "dp")})))
        report = verify(self.config, sizes, self.batches)
        plain = report.as_json()
        out = sys.stderr if self.json else sys.stdout
        for what, worst in plain["worst"].items():
            print(f"{what:<10} worst relative error {worst['relative_error']:.1e}  ({worst['tensor']}, batch {worst['batch']})",
                  file=out)
        where = " ".join(f"{axis}={size}" for axis, size in plain["grid"].items())
        first = plain["first_divergence"]
        print(f"{where}: {plain['tensors_compared']} tensors agree within {plain['tolerance']:g}" if report.ok else
              f"{where}: {first['what']} of {first['tensor']} diverges first, in batch {first['batch']}", file=out)
        if self.json:
            print(json.dumps(plain))
        return 0 if report.ok else 1


@dataclass(frozen=True)
class Check:
    """Report everything wrong with a configuration at once, for any number of processes, without starting any."""

    path: Positional[Path_]
    config: Annotated[Config, arg(name="")]
    world_size: int = 0
    """Processes of the pretended job; 0: as many as the grid has."""
    json: bool = False

    def run(self, launch: Launch) -> int:
        config = _check_or_raise(self.config, self.world_size)
        from hybridpar.models.cost import stage_split, training_flops_per_token

        stages = stage_split(config.model, config.parallel.pp, config.pipeline.split)
        plain = {
            "ok": True, "grid": dataclasses.asdict(config.parallel), "stages": [[b.start, b.stop] for b in stages],
            "parameters": count_parameters(config), "batch_samples": config.global_batch_size,
            "batch_tokens": config.batch_tokens, "training_flops_per_token": training_flops_per_token(config.model),
        }
        if self.json:
            print(json.dumps(plain))
            return 0
        grid = config.parallel
        print(f"{self.path}: fine on tp={grid.tp} pp={grid.pp} dp={grid.dp}, {grid.tp * grid.pp * grid.dp} processes\n"
              f"  {plain['parameters']:,} parameters; blocks of each stage: "
              f"{', '.join(f'{b.start}-{b.stop - 1}' for b in stages)} (0 the embedding, {config.model.num_layers + 1} the head)\n"
              f"  a batch: {config.global_batch_size} samples, {config.batch_tokens:,} tokens")
        return 0


@dataclass(frozen=True)
class Simulate:
    """Draw the pipeline schedule of a configuration, and say how long stages would be idle."""

    path: Positional[Path_]
    config: Annotated[Config, arg(name="")]
    svg: str = ""
    """Also write a picture to this file."""
    batches: int = 2
    """Batches to draw."""
    json: bool = False

    def run(self, launch: Launch) -> int:
        from hybridpar.pipeline.plan.draw import draw, draw_svg
        from hybridpar.train.preview import preview

        config = _check_or_raise(self.config)
        if self.batches < 1:
            raise config_error("batches", self.batches, "must be positive", "2")
        pipeline = config.pipeline
        shown = preview(config, self.batches)
        title = f"{pipeline.schedule}, {config.parallel.pp} stages, {pipeline.num_microbatches} micro-batches a batch"
        if self.svg:
            Path(self.svg).write_text(draw_svg(shown.timeline, title=title), encoding="utf-8")
        out = sys.stderr if self.json else sys.stdout
        print(f"{title}\n\n{draw(shown.timeline)}\n", file=out)
        print(f"steady state: {shown.step_time:.2f} forwards of the costliest stage from one batch to the next", file=out)
        for rank, (idle, live, versions) in enumerate(
                zip(shown.bubble, shown.peak_activations, shown.peak_versions, strict=True)):
            print(f"  stage {rank}: idle {100 * idle:4.1f} %, at most {live} micro-batches in flight, {versions} weight versions",
                  file=out)
        if self.json:
            print(json.dumps({
                "ok": True, "schedule": pipeline.schedule, "stages": config.parallel.pp,
                "num_microbatches": pipeline.num_microbatches, "step_time": shown.step_time, "bubble": shown.bubble,
                "peak_activations": shown.peak_activations, "peak_versions": shown.peak_versions,
                "makespan": shown.timeline.makespan, "svg": self.svg or None}))
        return 0


@dataclass(frozen=True)
class Preprocess:
    """Turn text into a tokenised corpus (.bin, .idx, tokenizer.json) that data.corpus can name."""

    sources: Positional[tuple[str, ...]]
    """Text files, folders, .jsonl files, or stdlib (the Python standard library's source)."""
    output: str = "data"
    """Folder for the result."""
    vocab_size: int = 8192
    kind: Literal["gpt", "bert"] = "gpt"
    tokenizer: str = ""
    """A tokenizer.json; empty: one is trained on the text."""
    max_bytes: int = 0
    """Use only so much of the text; 0: all."""
    json: bool = False

    def run(self, launch: Launch) -> int:
        from hybridpar.data import prepare

        made = prepare(self.sources, self.output, self.vocab_size, kind=self.kind, tokenizer=self.tokenizer or None,
                       max_bytes=self.max_bytes or None)
        plain = {"ok": True, "prefix": str(made.prefix), "tokenizer": str(made.tokenizer_path), "documents": made.num_documents,
                 "tokens": made.num_tokens, "vocab_size": made.vocab_size}
        print(json.dumps(plain) if self.json else
              f"{made.prefix}: {made.num_documents:,} documents, {made.num_tokens:,} tokens, vocabulary {made.vocab_size}")
        return 0


@dataclass(frozen=True)
class Generate:
    """Sample text from a trained GPT."""

    checkpoint: str
    """A run folder (its newest checkpoint), or one checkpoint in it."""
    prompt: str = ""
    max_tokens: int = 200
    temperature: float = 0.8
    """0: always the likeliest token."""
    top_k: int = 40
    """Candidates for each token; 0: all."""
    seed: int = 0
    threads: int = 0
    """CPU threads; 0: all cores."""
    json: bool = False

    def run(self, launch: Launch) -> int:
        from hybridpar.train.generate import Generator, Sampling
        from hybridpar.train.launch import set_threads

        set_threads(self.threads, launch)
        sampling = Sampling(self.max_tokens, self.temperature, self.top_k, self.seed)
        pieces = Generator.load(self.checkpoint, lambda text: print(text, file=sys.stderr)).generate(self.prompt, sampling)
        if self.json:
            print(json.dumps({"ok": True, "prompt": self.prompt, "text": "".join(pieces)}))
            return 0
        print(self.prompt, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
        return 0


COMMANDS: dict[str, type[Any]] = {
    "train": Train, "verify": Verify, "check": Check, "simulate": Simulate, "preprocess": Preprocess, "generate": Generate,
}
