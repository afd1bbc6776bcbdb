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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import FlagConversionOff, FlagCreatePairsOff, Positional, arg

from hybridpar import __version__
from hybridpar.config import Config, Launch, load_toml
from hybridpar.errors import ConfigError, HybridparError, config_error

_GRACE_S = 2.0
"""How long a rank that lost contact outlives the one that died, so that the launcher sees and names that one first."""

ConfigFile = Positional[Annotated[Path, arg(metavar="CONFIG.toml")]]
Overrides = Annotated[Config, arg(name=""), FlagConversionOff]
"""Every `--section.key`, over what the file says."""


@dataclass(frozen=True)
class Train:
    """Train a model; go on from the last checkpoint where the run folder has one."""

    path: ConfigFile
    config: Overrides
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

    path: ConfigFile
    config: Overrides
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

    path: ConfigFile
    config: Overrides
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

    path: ConfigFile
    config: Overrides
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; what is wrong is said once, in one message. Returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    launch = Launch.from_environment()
    try:
        return _parse(args, launch.rank == 0).run(launch)
    except HybridparError as error:
        return _report(error, launch, as_json="--json" in args)
    except KeyboardInterrupt:
        return 130


def _parse(args: list[str], speaks: bool) -> Any:
    """The command as its dataclass. Exits: with 0 after --help or --version, with 2 if the command line is wrong."""
    if not args or args[0] in ("-h", "--help"):
        print(_help(), file=sys.stdout if args else sys.stderr)
        raise SystemExit(0 if args else 2)
    if args[0] == "--version":
        print(__version__)
        raise SystemExit(0)
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        _refuse(f"{name} is not a command", name, COMMANDS, speaks)
    command = COMMANDS[name]
    known = flags_of(command)
    helps = bool({"-h", "--help"} & set(rest))
    for flag in (a.partition("=")[0] for a in rest if a.startswith("--") and a != "--help"):
        if flag[2:].replace("-", "_") not in known:
            _refuse(f"hybridpar {name}: unknown flag {flag}", flag[2:].replace("-", "_"), known, speaks, "--")
    default: Any = tyro.MISSING
    if command.__dataclass_fields__.keys() >= {"path", "config"}:
        if not helps and (not rest or rest[0].startswith("-")):
            _refuse(f"hybridpar {name}: the first argument must be a configuration file", "", (), speaks)
        default = command(path=Path("CONFIG.toml") if helps else Path(rest[0]), config=Config() if helps else load_toml(rest[0]))
    return tyro.cli(
        command, prog=f"hybridpar {name}", args=rest, default=default, use_underscores=True, console_outputs=speaks,
        config=(FlagCreatePairsOff,))


def flags_of(command: type[Any]) -> set[str]:
    """The names of a command's flags, without dashes: its own and `section.key`."""
    names = {f.name for f in dataclasses.fields(command)} - {"path", "config", "sources"}
    if "config" in command.__dataclass_fields__:
        names |= {f"{s.name}.{k.name}" for s in dataclasses.fields(Config) for k in dataclasses.fields(s.default_factory)}  # type: ignore[arg-type]
    return names


def _help() -> str:
    lines = [f"  {name:<11} {command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join([
        "hybridpar: train GPT and BERT with tensor, pipeline and data parallelism", "", *lines, "",
        "hybridpar COMMAND --help tells more. Flags are --section.key value, over what CONFIG.toml says."])


def _refuse(text: str, word: str, known: Any, speaks: bool, dashes: str = "") -> None:
    """Says what is wrong with the command line, and the nearest thing that exists; exits with 2."""
    near = difflib.get_close_matches(word, list(known), 1, cutoff=0.5) or [
        k for k in known if word and k.rpartition(".")[2] == word.rpartition(".")[2]]
    hint = f"; did you mean {dashes}{near[0]}?" if near else f"; there are {', '.join(known)}" if known and not dashes else ""
    if speaks:
        print(f"{text}{hint}", file=sys.stderr)
    raise SystemExit(2)


def _report(error: HybridparError, launch: Launch, *, as_json: bool) -> int:
    """Prints an error once: by rank 0 where all ranks have it, by the one rank that it is of, which then ends."""
    alone = any(base.__name__ == "RankError" for base in type(error).__mro__)
    if alone or launch.rank == 0:
        several = isinstance(error, ConfigError) and len(error.problems) > 1
        print(f"hybridpar: {f'{len(error.problems)} problems:' + chr(10) if several else ''}{error}", file=sys.stderr, flush=True)
    if as_json and launch.rank == 0:
        problems = [
            {"field": p.field, "value": p.value, "rule": p.rule, "suggestion": p.suggestion} for p in error.problems
        ] if isinstance(error, ConfigError) else []
        print(json.dumps({"ok": False, "error": str(error), "problems": problems}, default=str), flush=True)
    if alone and launch.world_size > 1:
        if type(error).__name__ == "LostContactError":
            time.sleep(_GRACE_S)
        os._exit(1)  # communicators would wait for ranks that are gone
    return 1


def _check_or_raise(config: Config, world_size: int = 0) -> Config:
    """The configuration with its grid filled in (world_size 0: as many processes as it has). Raises: ConfigError."""
    from hybridpar.validate import resolve

    parallel = config.parallel
    return resolve(config, world_size or max(1, parallel.tp * parallel.pp * max(parallel.dp, 1)))


def parse_grid(text: str) -> dict[str, int]:
    """'tp=2,pp=2,dp=2' as numbers by axis. Raises: ConfigError."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in ("tp", "pp", "dp") or not size.isdigit() or int(size) < 1 or axis in sizes:
            raise config_error("grid", text, "must be sizes of tp, pp and dp", "tp=2,pp=2,dp=2")
        sizes[axis] = int(size)
    return sizes


def count_parameters(config: Config) -> int:
    """Parameters of the whole model, tied ones once; nothing is allocated."""
    from hybridpar.grid import Axis
    from hybridpar.models.build import build_blocks
    from hybridpar.pipeline.run.stage import Stage

    stage = Stage(build_blocks(config.model, Axis("tp"), range(config.model.num_blocks)))
    return sum(p.numel() for p in stage.parameters())


if __name__ == "__main__":
    sys.exit(main())
