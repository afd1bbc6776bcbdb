"""Commands of the command line. Each is a dataclass whose fields are its flags and whose `run`
method returns the exit code.

Libraries are imported in `run`, so that `--help` is quick.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from hybridpar.cli.checking import Check
from hybridpar.cli.exchange import Export, Import, Upcycle
from hybridpar.cli.memory import Memory
from hybridpar.cli.outputs import check_outputs, write_output
from hybridpar.cli.placing import Graph, Place
from hybridpar.cli.planning import Plan, Profile
from hybridpar.cli.proving import Conform, Replay, Verify
from hybridpar.cli.simulating import Simulate
from hybridpar.cli.values import ConfigFile, Overrides, Ranks, Threads, Within, as_utf8
from hybridpar.config import Launch, Size, TrainConfig
from hybridpar.cores import shared_cores
from hybridpar.errors import config_error


@dataclass(frozen=True)
class Train:
    """Train a model, or resume from the last checkpoint of the run folder."""

    path: ConfigFile
    config: Overrides
    ranks: Ranks = 0
    """Number of ranks to start on this machine, and to restart if one fails ([faults]). 0
    (default): run as one process, or as the rank that torchrun started."""
    inject: tuple[str, ...] = ()
    """Faults to inject, once each, such as "kill rank 3 at step 20"
    (hybridpar/train/faults/inject.py)."""
    verbose: bool = False
    """Report more: the speed of the machine, why the executed schedule differs from the simulated
    one, and which numbers were not measured."""
    json: bool = False
    """Print one JSON object on stdout at the end."""

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
    """Convert text to a tokenized corpus (.bin, .idx, tokenizer.json) for data.corpus."""

    sources: Positional[tuple[str, ...]]
    """Files of text, JSON lines, JSON, CSV, Parquet or Arrow, folders of such files, Hugging Face
    datasets, or stdlib (the Python standard library's source)."""
    input: tuple[str, ...] = ()
    """More sources; Megatron-LM's name for this flag."""
    text_key: str = "text"
    """The field or column that holds a document's text."""
    format: Literal["text", "chat"] = "text"
    """Kind of the records. chat: conversations in JSON lines, JSON, parquet or Arrow, with
    "messages" or with "prompt" and "answer"; --tokenizer must be set."""
    chat_template: str = ""
    """chat: path of a chat template (jinja). Empty (default): the tokenizer's own."""
    output: str = "data"
    """Folder for the result."""
    vocab_size: Annotated[int, Within(1, 2**24)] = 8192
    """Vocabulary size of the tokenizer that is trained on the text."""
    kind: Literal["gpt", "bert"] = "gpt"
    """Model family that will read the tokens. bert adds [CLS], [SEP] and [MASK]."""
    tokenizer: str = ""
    """Path of a tokenizer.json. Empty (default): train a tokenizer on the text."""
    max_bytes: Annotated[int, Size(0, 2**60)] = 0
    """Largest size of the text to use, such as 200MB. 0 (default): all."""
    on_bad_record: Literal["error", "skip"] = "error"
    """Action for a record that cannot be read: stop with an error, or skip it and report the
    skipped records."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.data import ChatTemplate, CorpusOptions, Tokenizer, prepare

        sources = (*self.sources, *self.input)
        if not sources:
            raise config_error(
                "sources",
                [],
                "must name at least one file, folder or data set",
                "hybridpar preprocess stdlib",
            )
        chat = None
        if self.format == "chat" and self.tokenizer:
            chat = ChatTemplate.of(Tokenizer.load(self.tokenizer), self.chat_template)
        elif self.format == "chat":
            raise config_error(
                "tokenizer", "", 'must be set with format = "chat"', "--tokenizer tokenizer.json"
            )
        made = prepare(
            sources,
            self.output,
            self.vocab_size,
            tokenizer=self.tokenizer or None,
            options=CorpusOptions(
                self.kind, self.text_key, self.max_bytes or None, self.on_bad_record, chat
            ),
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
    """A run folder, whose newest checkpoint is used, or one checkpoint."""
    prompt: UseAppendAction[tuple[str, ...]] = ()
    """Beginning of a text. May be given several times; the texts are generated as one batch."""
    chat: bool = False
    """Each prompt is a message of a user, which the chat template of the run's tokenizer writes."""
    max_tokens: int = 200
    """Largest number of tokens to generate for each prompt."""
    temperature: float = 0.8
    """Sampling temperature. 0: always take the most likely token."""
    top_k: int = 40
    """Number of most likely tokens to sample from. 0: all."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities add up to this
    value."""
    repetition_penalty: float = 1.0
    """Makes tokens that the text has already less likely: divides their positive logits, and
    multiplies negative ones. 1: no penalty."""
    stop: UseAppendAction[tuple[str, ...]] = ()
    """Text at which a continuation ends, and which is not printed. May be given several times."""
    seed: Annotated[int, Within(-(2**63), 2**63 - 1)] = 0
    """Seed of the sampling. Equal seeds give equal texts."""
    threads: Threads = 0
    """CPU threads of each process. 0 (default): all cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs if every process on a machine can have its own, else CPUs."""
    ranks: Ranks = 0
    """Number of processes to start on this machine. 0 (default): run as one process, or as the rank
    that torchrun started."""
    tp: Annotated[int, Within(1, 2**12), arg(name="parallel.tp")] = 1
    """Tensor-parallel size: processes that share each layer."""
    pp: Annotated[int, Within(1, 2**12), arg(name="parallel.pp")] = 1
    """Pipeline-parallel size: processes that hold consecutive stages."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.train.inference.generate import Sampling, check_prompts, on_grid

        sampling = Sampling(
            self.max_tokens,
            self.temperature,
            self.top_k,
            self.top_p,
            self.seed,
            self.repetition_penalty,
            self.stop,
        )
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
        settings = TrainConfig(threads=self.threads, device=self.device)
        with on_grid(self.checkpoint, self.tp, self.pp, settings, launch) as generator:
            if live:
                print("" if self.chat else prompts[0], end="", flush=True)
            for i, piece in generator.generate_all(prompts, sampling, chat=self.chat):
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
                else "\n\n".join(
                    text if self.chat else prompt + text
                    for prompt, text in zip(prompts, texts, strict=True)
                )
            )
        return 0


@dataclass(frozen=True)
class Watch:
    """Show a run live in a browser: loss, speed, time breakdown, timeline, memory, failures."""

    folder: Positional[Annotated[Path, arg(metavar="RUN")]]
    """A run folder, such as runs/NAME."""
    html: str = ""
    """Write a self-contained HTML page to this file instead of serving it."""
    port: Annotated[int, Within(0, 2**16 - 1)] = 0
    """Port on 127.0.0.1. 0 (default): any free port."""
    trust: bool = False
    """Import the code of a custom model from the folder that the run recorded, in order to predict
    the run's memory."""

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
    """Report this machine's hardware, the extensions built for it, and the backend of each
    operator."""

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
        Upcycle,
        Watch,
        Doctor,
    )
}
