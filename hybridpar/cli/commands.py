"""Commands of the command line: a dataclass each, whose fields are its flags and whose `run`
returns the exit code.

A command imports its libraries when it runs, so that `--help` is quick.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from hybridpar.cli.checking import Check
from hybridpar.cli.exchange import Export, Import
from hybridpar.cli.memory import Memory
from hybridpar.cli.outputs import check_outputs, write_output
from hybridpar.cli.placing import Graph, Place
from hybridpar.cli.planning import Plan, Profile
from hybridpar.cli.proving import Conform, Replay, Verify
from hybridpar.cli.simulating import Simulate
from hybridpar.cli.values import ConfigFile, Overrides, Ranks, Threads, Within, as_utf8
from hybridpar.config import Launch
from hybridpar.cores import shared_cores
from hybridpar.errors import config_error


@dataclass(frozen=True)
class Train:
    """Train a model, or go on from the last checkpoint of the run folder."""

    path: ConfigFile
    config: Overrides
    ranks: Ranks = 0
    """Start so many ranks on this machine, and start them again if one fails ([faults]). 0:
    torchrun starts them, or there is one."""
    inject: tuple[str, ...] = ()
    """Faults to inject, once each, such as "kill rank 3 at step 20"
    (hybridpar/train/faults/inject.py)."""
    verbose: bool = False
    """Say more: how fast the machine is, how the executed schedule differs from the simulated one
    and why, what was not measured."""
    json: bool = False
    """One JSON object on stdout at the end."""

    def run(self, launch: Launch) -> int:
        if self.ranks and not launch.launched:
            if few := shared_cores(self.ranks):  # before torch is imported, which takes seconds
                print(f"hybridpar: starting {self.ranks} ranks: {few}", file=sys.stderr, flush=True)
            from hybridpar.cli.fitting import saves_most
            from hybridpar.train.faults.supervisor import supervise

            return supervise(self.config, self.ranks, launch.args, self.inject, saves_most)
        from hybridpar.train.job import train

        outcome = train(self.config, launch, self.inject, is_verbose=self.verbose)
        if self.json and launch.rank == 0:
            print(json.dumps(outcome.as_json()))
        return outcome.exit_code


@dataclass(frozen=True)
class Preprocess:
    """Turn text into a tokenised corpus (.bin, .idx, tokenizer.json) that data.corpus can name."""

    sources: Positional[tuple[str, ...]]
    """Files of text, JSON lines, JSON, CSV, parquet or Arrow, folders of them, Hugging Face
    datasets, or stdlib (the Python standard library's source)."""
    input: tuple[str, ...] = ()
    """More sources, under Megatron-LM's name of this flag."""
    text_key: str = "text"
    """The field or column that holds a document's text."""
    output: str = "data"
    """Folder for the result."""
    vocab_size: Annotated[int, Within(1, 2**24)] = 8192
    """Tokens in the vocabulary of a tokenizer that is trained on the text."""
    kind: Literal["gpt", "bert"] = "gpt"
    """Model family that the tokens are for: bert adds [CLS], [SEP] and [MASK]."""
    tokenizer: str = ""
    """A tokenizer.json; empty: one is trained on the text."""
    max_bytes: Annotated[int, Within(0, 2**60)] = 0
    """Use only so many bytes of the text; 0: all."""
    on_bad_record: Literal["error", "skip"] = "error"
    """Policy for a record that cannot be read: an error, or leave it out, and name and count those
    that were."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.data import prepare

        sources = (*self.sources, *self.input)
        if not sources:
            raise config_error(
                "sources",
                [],
                "must name at least one file, folder or data set",
                "hybridpar preprocess stdlib",
            )
        made = prepare(
            sources,
            self.output,
            self.vocab_size,
            kind=self.kind,
            tokenizer=self.tokenizer or None,
            text_key=self.text_key,
            max_bytes=self.max_bytes or None,
            on_bad_record=self.on_bad_record,
        )
        plain: dict[str, Any] = {
            "ok": True,
            "prefix": str(made.prefix),
            "tokenizer": str(made.tokenizer_path),
            "documents": made.num_documents,
            "tokens": made.num_tokens,
            "vocab_size": made.vocab_size,
            "bad_records": made.num_bad,
        }
        counts = (
            f"{made.num_documents:,} documents, {made.num_tokens:,} tokens, vocabulary "
            f"{made.vocab_size}"
        )
        counts += f", {made.num_bad:,} bad records left out" if made.num_bad else ""
        for line in made.notes():
            print(line, file=sys.stderr)
        print(json.dumps(plain) if self.json else f"{made.prefix}: {counts}")
        return 0


@dataclass(frozen=True)
class Generate:
    """Sample text from a trained GPT, in one process or split over a grid."""

    checkpoint: str
    """A run folder (its newest checkpoint), or one checkpoint in it."""
    prompt: UseAppendAction[tuple[str, ...]] = ()
    """Beginning of a text. Several make several texts, which are computed together."""
    max_tokens: int = 200
    """Most tokens of each text after its prompt."""
    temperature: float = 0.8
    """0: always the most likely token."""
    top_k: int = 40
    """Candidates for each token; 0: all."""
    top_p: float = 1.0
    """Keep the most likely candidates whose probabilities add up to this; leave the others out."""
    seed: Annotated[int, Within(-(2**63), 2**63 - 1)] = 0
    """Seed of the draws: the same one gives the same text."""
    threads: Threads = 0
    """CPU threads of a process; 0: all cores."""
    ranks: Ranks = 0
    """Start so many processes on this machine; 0: torchrun starts them, or there is one."""
    tp: Annotated[int, Within(1, 2**12), arg(name="parallel.tp")] = 1
    """Tensor parallelism: processes that share each layer."""
    pp: Annotated[int, Within(1, 2**12), arg(name="parallel.pp")] = 1
    """Pipeline parallelism: processes that hold consecutive stages."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.train.inference.generate import Sampling, check_prompts, on_grid

        sampling = Sampling(self.max_tokens, self.temperature, self.top_k, self.top_p, self.seed)
        prompts = tuple(map(as_utf8, self.prompt)) or ("",)
        check_prompts(prompts)
        starts = self.ranks if not launch.launched else 0
        if self.tp * self.pp != (processes := starts or launch.world_size):
            rule = f"tp * pp = {self.tp * self.pp} does not match the {processes} processes"
            raise config_error(
                "parallel", f"tp={self.tp} pp={self.pp}", rule, f"--ranks {self.tp * self.pp}"
            )
        if starts:
            from hybridpar.train.faults.supervisor import run_ranks

            return run_ranks(starts, launch.args)
        speaks = launch.rank == 0
        texts = [""] * len(prompts)
        live = speaks and len(prompts) == 1 and not self.json
        with on_grid(self.checkpoint, self.tp, self.pp, self.threads, launch) as generator:
            if live:
                print(prompts[0], end="", flush=True)
            for i, piece in generator.generate_all(prompts, sampling):
                texts[i] += piece
                if live:
                    print(piece, end="", flush=True)
        if speaks and self.json:
            made = [
                {"prompt": prompt, "text": text}
                for prompt, text in zip(prompts, texts, strict=True)
            ]
            print(json.dumps({"ok": True} | (made[0] if len(made) == 1 else {"texts": made})))
        elif speaks:
            print(
                ""
                if live
                else "\n\n".join(prompt + text for prompt, text in zip(prompts, texts, strict=True))
            )
        return 0


@dataclass(frozen=True)
class Watch:
    """Show a run in a browser, live: loss, speed, where time goes, the timeline, memory,
    failures."""

    folder: Positional[Annotated[Path, arg(metavar="RUN")]]
    """A run folder, such as runs/NAME."""
    html: str = ""
    """Write the page to this file, complete in itself, instead of serving it."""
    port: Annotated[int, Within(0, 2**16 - 1)] = 0
    """Port on 127.0.0.1; 0: a free one."""
    trust: bool = False
    """Import the code of a custom model that the run folder names, in order to predict the run's
    memory."""

    def run(self, launch: Launch) -> int:
        from hybridpar.watch import Board, page, serve

        board = Board(self.folder, trust=self.trust)
        if self.html:
            check_outputs([], html=self.html)
            write_output("html", self.html, page(board))
        else:
            serve(
                board,
                self.port,
                lambda address: print(f"{address}    (Ctrl-C ends it)", flush=True),
            )
        return 0


@dataclass(frozen=True)
class Doctor:
    """Say what this machine is, what was built for it, and which code each operator runs."""

    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.cli.doctor import examine, lines, problem

        found = examine()
        wrong = problem(found)
        print(json.dumps({"ok": wrong is None, **found}) if self.json else "\n".join(lines(found)))
        if wrong:
            print(f"\n{wrong}", file=sys.stderr)
        return 1 if wrong else 0


COMMANDS: dict[str, type[Any]] = {
    kind.__name__.lower(): kind
    for kind in (
        Train,
        Verify,
        Conform,
        Replay,
        Check,
        Memory,
        Profile,
        Plan,
        Simulate,
        Graph,
        Place,
        Preprocess,
        Generate,
        Export,
        Import,
        Watch,
        Doctor,
    )
}
