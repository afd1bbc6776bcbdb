"""Commands of the command line: a dataclass each, whose fields are its flags and whose `run` returns the exit code.

A command imports its libraries when it runs, so that `--help` is quick.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from hybridpar.cli.exchange import Export, Import
from hybridpar.cli.fitting import Room, fit_report
from hybridpar.cli.memory import Memory
from hybridpar.cli.outputs import check_outputs, write_output
from hybridpar.cli.placing import Graph, Place
from hybridpar.cli.planning import ConfigFile, Overrides, Plan, Profile, Simulate, cost_on_machine, resolved
from hybridpar.cli.values import Ranks, Threads, Within, parse_grid
from hybridpar.config import Config, Launch, from_mapping
from hybridpar.errors import CheckpointError, config_error


@dataclass(frozen=True)
class Train:
    """Train a model; go on from the last checkpoint where the run folder has one."""

    path: ConfigFile
    config: Overrides
    ranks: Ranks = 0
    """Start so many ranks on this machine, and start them again where one fails ([faults]); 0: torchrun starts them, or
    there is one."""
    inject: tuple[str, ...] = ()
    """Faults that are to happen, once each, such as "kill rank 3 at step 20" (hybridpar/train/faults/inject.py)."""
    json: bool = False
    """One JSON object on stdout at the end."""

    def run(self, launch: Launch) -> int:
        if self.ranks and not launch.launched:
            from hybridpar.train.faults.supervisor import supervise

            return supervise(self.config, self.ranks, launch.args, self.inject)
        from hybridpar.train.loop import train

        outcome = train(self.config, launch, self.inject)
        if self.json and launch.rank == 0:
            print(json.dumps(outcome.as_json()))
        return outcome.exit_code


@dataclass(frozen=True)
class Verify:
    """Compare a few batches on a process grid with the same ones in one process, in float64, tensor by tensor."""

    path: ConfigFile
    config: Overrides
    grid: str = ""
    """Sizes such as tp=2,pp=2,dp=2; axes left out are 1. Empty: the grid of the configuration."""
    batches: Annotated[int, Within(1, 10_000)] = 4
    nan_batches: tuple[int, ...] = ()
    """Batches (from 0) whose gradient is made NaN on one rank: all ranks must skip their updates."""
    resume_at: int = 0
    """Save after so many batches, start afresh from the checkpoint and go on; 0: never."""
    json: bool = False
    """The report as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.checkpoint.files import to_json
        from hybridpar.verify.run import TOLERANCE, Disturbance, verify

        parallel = self.config.parallel
        own = {"tp": parallel.tp, "pp": parallel.pp, "dp": max(parallel.dp, 1)}
        sizes = {"tp": 1, "pp": 1, "dp": 1} | parse_grid(self.grid) if self.grid else own
        memory = self.config.memory if sizes["pp"] == parallel.pp else self.config.memory.on_another_grid()
        resolved(replace(self.config, memory=memory,
                         parallel=replace(parallel, tp=sizes["tp"], pp=sizes["pp"], dp=sizes["dp"])))
        for name, number in (("resume_at", self.resume_at), *(("nan_batches", n) for n in self.nan_batches)):
            if not 0 <= number < self.batches:
                rule = f"must be at least 0 and below the number of batches, {self.batches}"
                raise config_error(name, number, rule, str(self.batches - 1))
        disturbance = Disturbance(frozenset(self.nan_batches), self.resume_at)
        report = verify(self.config, sizes, self.batches, disturbance)
        out = sys.stderr if self.json else sys.stdout
        for what, worst in report.worst.items():
            place = f"({worst.name}, batch {worst.batch})"
            print(f"{what:<10} worst relative error {worst.error:.1e}  {place}", file=out)
        where, first = " ".join(f"{axis}={size}" for axis, size in report.grid.items()), report.first_divergence
        found = f"{report.tensors_compared} tensors agree within {TOLERANCE:g}" if first is None else (
            f"{first.what} of {first.name} differs first, in batch {first.batch}, by {first.error:.1e} "
            f"(tolerance {TOLERANCE:g})")
        print(f"{where}: {found}", file=out)
        if self.json:
            print(to_json(report.as_json()))
        return 0 if report.ok else 1


@dataclass(frozen=True)
class Conform:
    """Compare parallel modules of any framework with one process, case by case, and name what is wrong."""

    factories: Positional[str]
    """A module and a dict of factories in it, "my_module:FACTORIES" (hybridpar/conformance says what a factory is)."""
    ranks: Annotated[tuple[int, ...], Within(1, 64)] = (1, 2, 3, 4)
    """Numbers of processes to run each case on."""
    tolerance: Annotated[float, Within(above=0, most=1)] = 1e-9
    """Largest difference, as a share of the largest element; 1e-5 for modules that compute in float32."""
    json: bool = False

    def run(self, launch: Launch) -> int:
        from hybridpar.conformance import conform

        results = conform(_factories(self.factories), self.ranks, tolerance=self.tolerance)
        wrong = [result for result in results if result.findings]
        if self.json:
            print(json.dumps({"ok": not wrong, "results": [result.as_json() for result in results]}))
        else:
            print(*results, f"{len(results)} runs, {len(wrong)} with differences", sep="\n")
        return 1 if wrong else 0


def _factories(name: str) -> dict[str, Any]:
    """What "module:name" names; modules of this folder come first. Raises: ConfigError."""
    module, _, attribute = name.partition(":")
    sys.path[:0] = [str(Path.cwd())] * (str(Path.cwd()) not in sys.path)
    try:
        found = getattr(importlib.import_module(module), attribute, None) if module else None
    except ImportError as error:
        raise config_error("factories", name, f"cannot be imported ({error})", "my_module:FACTORIES") from error
    if not isinstance(found, dict):
        raise config_error("factories", name, "must be a module and a dict of factories in it", "my_module:FACTORIES")
    return found


@dataclass(frozen=True)
class Replay:
    """Run one step of a run again on one CPU process, and say where its numbers stop being finite."""

    path: Positional[Annotated[Path, arg(metavar="BUNDLE.json | RUN")]]
    """A replay bundle from a run's folder anomalies/; or a run folder, and a --step."""
    step: Annotated[int, Within(0, 2**40)] = 0
    """The step to run again, as numbered in the metrics of the run folder."""
    threads: Threads = 0
    """CPU threads; 0: all cores."""
    json: bool = False
    """The report as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.checkpoint.files import to_json
        from hybridpar.train.launch import set_threads
        from hybridpar.verify.replay import replay

        if self.step and not self.path.exists():
            raise config_error("path", str(self.path), "does not exist", "a run folder, such as runs/NAME")
        if self.path.is_dir() != (self.step > 0):
            raise config_error("step", self.step, "says which step of a run folder; a bundle has its own",
                               "hybridpar replay runs/NAME --step 100")
        set_threads(self.threads, launch)
        report = replay(self.path, self.step, lambda text: print(text, file=sys.stderr))
        print(to_json(report.as_json()) if self.json else "\n".join(report.lines()))
        return 0 if report.agrees else 1


@dataclass(frozen=True)
class Check:
    """Report everything wrong with a configuration at once, for any number of processes, without starting any."""

    path: ConfigFile
    config: Overrides
    world_size: Annotated[int, Within(0, 2**20)] = 0
    """Processes of the pretended job; 0: as many as the grid has."""
    profile: str = ""
    """What `hybridpar profile` has measured: also says what links need and give, the time of a step, and what each
    remedy costs of it."""
    cluster: str = ""
    """A cluster.toml: the same of those machines, with estimated times (or those of the profile)."""
    device_gb: Annotated[float, Within(0, 1e9)] = 0.0
    """Memory of a device, or of a process on CPUs, in GB; 0: as the profile or cluster has it, else as this machine."""
    largest: bool = False
    """Also say how many layers of this width would fit, as it is and with each setting that saves memory."""
    json: bool = False

    def run(self, launch: Launch) -> int:
        config = resolved(self.config, self.world_size)
        room = Room.of(config, launch, self.profile, self.cluster, self.device_gb)
        on_machine = self.profile or self.cluster
        cost = cost_on_machine(config, self.profile, self.cluster, launch) if on_machine else None
        absent = _absent(config)
        from torch.nn import ModuleList

        from hybridpar.grid import Axis, lines_of, sizes_of
        from hybridpar.memory import predict, table
        from hybridpar.memory.knobs import knobs, savings
        from hybridpar.memory.predict import default_device
        from hybridpar.memory.report import short_form
        from hybridpar.models.build import build_blocks
        from hybridpar.models.cost import stage_split, training_flops_per_token
        from hybridpar.pipeline.plan.sizes import Sizes
        from hybridpar.planner.links_report import link_lines, link_needs, step_line
        from hybridpar.train.folder import measured
        from hybridpar.train.forecast import forecasts
        from hybridpar.train.host_forecast import forecast_host
        from hybridpar.train.offload_forecast import forecast_offload
        from hybridpar.train.planned_memory import forecast_planned
        from hybridpar.train.site_traffic import site_traffic

        config, device = from_mapping(measured(config), config), default_device(config)
        offload = forecast_offload(config) if device.type == "cpu" else None
        if offload is not None and config.memory.offload_activations == "auto":
            config = from_mapping({"memory": {"offload_activations": offload.away}}, config)
        memory = predict(config, device=device)
        stages = stage_split(config.model, config.parallel.pp, config.pipeline.split, config.pipeline.num_chunks,
                             config.pipeline.placement)
        model = ModuleList(build_blocks(config.model, Axis("tp"), range(config.model.num_blocks)).values())
        several = {"sites": config.parallel.sites} if config.parallel.sites > 1 else {}
        grid, parameters = config.parallel, sum(p.numel() for p in model.parameters())
        plain = {
            "ok": True, "grid": {"tp": grid.tp, "pp": grid.pp, "dp": grid.dp, **several},
            "stages": [[b.start, b.stop] for b in stages], "parameters": parameters,
            "batch_samples": config.global_batch_size, "batch_tokens": config.batch_tokens,
            "training_flops_per_token": training_flops_per_token(config.model),
            "device": device.type, "peak_memory": [stage.as_json() for stage in memory], "absent": absent,
        }
        tiers, host, sites = forecasts(config), forecast_host(config), site_traffic(config)
        name, fullest = Sizes.of(config).rank_name, max(range(len(memory)), key=lambda rank: memory[rank].total)
        arena = forecast_planned(config, lines_of(sizes_of(grid))["pp"][0][fullest])
        fit, fit_lines = fit_report(config, memory, room, name, largest=self.largest)
        if self.json:
            plain |= {"tiers": [one.as_json() for one in tiers]} | fit | {
                key: found.as_json() for key, found in (
                    ("host", host), ("offload", offload), ("planned", arena), ("sites", sites)) if found}
            if cost is not None:
                plain |= {"step_ms": 1e3 * cost.step_time, "links": [need.as_json() for need in link_needs(cost)]}
            print(json.dumps(plain))
            return 0
        likeliest = knobs(config, fullest, memory[fullest])[:1]
        saving = next(iter(savings(config, fullest, memory[fullest], likeliest, device)), None)
        blocks = ", ".join(f"{b.start}-{b.stop - 1}" for b in stages)
        if (chunks := config.pipeline.num_chunks) > 1:
            blocks += (f"; rank r holds r and {2 * grid.pp - 1} - r" if config.pipeline.placement == "v" else
                       f"; each rank holds {chunks}, which are {grid.pp} apart")
        at_sites = f" at {grid.sites} sites" if several else ""
        print(f"{self.path}: fine on tp={grid.tp} pp={grid.pp} dp={grid.dp}{at_sites}, {grid.num_ranks} processes\n"
              f"  {parameters:,} parameters; blocks of the stages: {blocks} (0 the embedding, the last one the head)\n"
              f"  a batch: {config.global_batch_size} samples, {config.batch_tokens:,} tokens\n"
              f"\npredicted peak memory of a process of each {name} with train.device = {device.type}, in MiB\n"
              f"{table(memory, name)}\n" + "\n".join(short_form(memory, name, saving)))
        for number, tier in enumerate(tiers):
            print(f"{name} {number}: {tier}")
        for found in (host, offload, arena, sites):
            if found is not None:
                print(f"\n{found}")
        if fit_lines:
            print("\n" + "\n".join(fit_lines))
        if cost is not None:
            print("", step_line(cost), *link_lines(cost), sep="\n")
        for text in absent:
            print(f"\nnot on this machine, or of no use: {text}")
        return 0


def _absent(config: Config) -> list[str]:
    """Files that the configuration names and this machine does not have; the one that is to train may."""
    from hybridpar.checkpoint import find_start
    from hybridpar.data import absent_sources

    found = absent_sources(config.data)
    if config.train.start_from:
        try:
            find_start(config.train.start_from, config.model)
        except CheckpointError as error:
            found.append(f"train.start_from = {error}")
    return found


@dataclass(frozen=True)
class Preprocess:
    """Turn text into a tokenised corpus (.bin, .idx, tokenizer.json) that data.corpus can name."""

    sources: Positional[tuple[str, ...]]
    """Files of text, JSON lines, JSON, CSV, parquet or Arrow, folders of them, Hugging Face datasets, or stdlib (the
    Python standard library's source)."""
    input: tuple[str, ...] = ()
    """More sources, by Megatron-LM's name of this flag."""
    text_key: str = "text"
    """The field or column that holds a document's text."""
    output: str = "data"
    """Folder for the result."""
    vocab_size: Annotated[int, Within(1, 2**24)] = 8192
    kind: Literal["gpt", "bert"] = "gpt"
    tokenizer: str = ""
    """A tokenizer.json; empty: one is trained on the text."""
    max_bytes: Annotated[int, Within(0, 2**60)] = 0
    """Use only so much of the text; 0: all."""
    json: bool = False

    def run(self, launch: Launch) -> int:
        from hybridpar.data import prepare

        sources = (*self.sources, *self.input)
        if not sources:
            raise config_error("sources", [], "name no text", "hybridpar preprocess stdlib")
        made = prepare(sources, self.output, self.vocab_size, kind=self.kind, tokenizer=self.tokenizer or None,
                       text_key=self.text_key, max_bytes=self.max_bytes or None)
        plain: dict[str, Any] = {
            "ok": True, "prefix": str(made.prefix), "tokenizer": str(made.tokenizer_path),
            "documents": made.num_documents, "tokens": made.num_tokens, "vocab_size": made.vocab_size}
        counts = f"{made.num_documents:,} documents, {made.num_tokens:,} tokens, vocabulary {made.vocab_size}"
        print(json.dumps(plain) if self.json else f"{made.prefix}: {counts}")
        return 0


@dataclass(frozen=True)
class Generate:
    """Sample text from a trained GPT, on one process or on a grid that holds a part of it on each."""

    checkpoint: str
    """A run folder (its newest checkpoint), or one checkpoint in it."""
    prompt: UseAppendAction[tuple[str, ...]] = ()
    """Beginning of the text; given several times, there are several texts, which are computed together."""
    max_tokens: int = 200
    temperature: float = 0.8
    """0: always the likeliest token."""
    top_k: int = 40
    """Candidates for each token; 0: all."""
    top_p: float = 1.0
    """Probability of the likeliest candidates together; the others are left out."""
    seed: Annotated[int, Within(-(2**63), 2**63 - 1)] = 0
    threads: Threads = 0
    """CPU threads of a process; 0: all cores."""
    ranks: Ranks = 0
    """Start so many processes on this machine; 0: torchrun starts them, or there is one."""
    tp: Annotated[int, Within(1, 2**12), arg(name="parallel.tp")] = 1
    pp: Annotated[int, Within(1, 2**12), arg(name="parallel.pp")] = 1
    json: bool = False

    def run(self, launch: Launch) -> int:
        from hybridpar.train.generate import Sampling, on_grid

        sampling = Sampling(self.max_tokens, self.temperature, self.top_k, self.top_p, self.seed)
        starts = self.ranks if not launch.launched else 0
        if self.tp * self.pp != (processes := starts or launch.world_size):
            rule = f"tp * pp is {self.tp * self.pp}, and there are {processes} processes"
            raise config_error("parallel", f"tp={self.tp} pp={self.pp}", rule, f"--ranks {self.tp * self.pp}")
        if starts:
            from hybridpar.train.faults.supervisor import run_ranks

            return run_ranks(starts, launch.args)
        prompts, speaks = self.prompt or ("",), launch.rank == 0
        texts, live = [""] * len(prompts), speaks and len(prompts) == 1 and not self.json
        with on_grid(self.checkpoint, self.tp, self.pp, self.threads, launch) as generator:
            if live:
                print(prompts[0], end="", flush=True)
            for i, piece in generator.generate_all(prompts, sampling):
                texts[i] += piece
                if live:
                    print(piece, end="", flush=True)
        if speaks and self.json:
            made = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
            print(json.dumps({"ok": True} | (made[0] if len(made) == 1 else {"texts": made})))
        elif speaks:
            print("" if live else "\n\n".join(prompt + text for prompt, text in zip(prompts, texts, strict=True)))
        return 0


@dataclass(frozen=True)
class Watch:
    """Show a run in a browser, live: loss, speed, where time goes, the timeline, memory, failures."""

    folder: Positional[Annotated[Path, arg(metavar="RUN")]]
    """A run folder, such as runs/NAME."""
    html: str = ""
    """Write the page to this file, which needs no other, in the stead of serving it."""
    port: Annotated[int, Within(0, 2**16 - 1)] = 0
    """Port on 127.0.0.1; 0: a free one."""

    def run(self, launch: Launch) -> int:
        from hybridpar.watch import Board, page, serve

        board = Board(self.folder)
        if self.html:
            check_outputs([], html=self.html)
            write_output("html", self.html, page(board))
        else:
            serve(board, self.port, lambda address: print(f"{address}    (Ctrl-C ends it)", flush=True))
        return 0


@dataclass(frozen=True)
class Doctor:
    """Say what this machine is, what was built for it, and which code each operator runs."""

    json: bool = False

    def run(self, launch: Launch) -> int:
        from hybridpar.cli.doctor import examine, lines, problem

        found = examine()
        wrong = problem(found)
        print(json.dumps({"ok": wrong is None, **found}) if self.json else "\n".join(lines(found)))
        if wrong:
            print(f"\n{wrong}", file=sys.stderr)
        return 1 if wrong else 0


COMMANDS: dict[str, type[Any]] = {
    kind.__name__.lower(): kind for kind in (
        Train, Verify, Conform, Replay, Check, Memory, Profile, Plan, Simulate, Graph, Place, Preprocess, Generate,
        Export, Import, Watch, Doctor)
}
