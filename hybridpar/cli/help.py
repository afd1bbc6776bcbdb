"""The help of a command that takes a configuration: its flags and the most common settings.

`--help-all` prints all settings by section.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import shutil
import textwrap
import typing
from typing import Any

from hybridpar.config import Config

USUAL = {
    "model.num_layers": "transformer layers",
    "model.hidden_size": "features of a token between layers",
    "model.num_heads": "attention heads",
    "model.seq_length": "tokens of a sample",
    "model.vocab_size": "tokens in the vocabulary",
    "data.corpus": "files or folders of text",
    "data.tokenizer": "a tokenizer.json; else one is trained",
    "train.num_steps": "optimizer steps of the whole run",
    "train.micro_batch_size": "samples of a micro-batch",
    "pipeline.num_microbatches": "micro-batches of a step, on each replica",
    "train.dtype": "fp32, bf16 or fp16",
    "optim.lr": "highest learning rate",
    "optim.warmup_steps": "steps until the learning rate is there",
    "optim.decay": "cosine, linear, constant or wsd",
    "parallel.tp": "tensor parallelism: ranks that share layers",
    "parallel.pp": "pipeline parallelism: stages",
    "parallel.dp": "replicas; 0: as many as ranks allow",
    "parallel.cp": "context parallelism: ranks that share samples",
    "parallel.ep": "expert parallelism: ranks sharing experts",
    "parallel.zero": "1 to 3: state that replicas split (ZeRO)",
    "pipeline.schedule": "gpipe, 1f1b, interleaved, 2bw, auto ..",
    "pipeline.recompute": "none, selective or all",
    "train.eval_interval": "steps between validations; 0: none",
    "train.save_interval": "steps between checkpoints; 0: at the end",
    "run.name": "name of the run's folder in runs/",
}
"""Settings in the short help, in order, with their descriptions."""
_WIDEST = 110
"""Largest width of the help in characters, on a terminal that is as wide."""
_METAVARS = {int: "N", float: "X", str: "TEXT", bool: ""}


def short_help(name: str, command: type[Any]) -> str:
    """Return the short help of the command `name`, whose dataclass is `command`."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    config = Config()
    own = [
        (_spelled_flag(field, hint), _described(text, field.default))
        for field, hint, text in _own_fields(command)
    ]
    own.append(("--help-all", "Print every setting, by section."))
    usual = [(f"--{key}", f"{text} [{_value(config, key)}]") for key, text in USUAL.items()]
    column = max(len(flag) for flag, _ in usual) + 4
    example = "--model.num_layers 12"
    return "\n".join(
        [
            f"usage: hybridpar {name} CONFIG.toml [flags]",
            "",
            *textwrap.wrap(" ".join((command.__doc__ or "").split()), width),
            "",
            "flags of this command [default]:",
            *_table(own, column, width),
            "",
            *textwrap.wrap(
                f"settings that most people change [default], each a flag ({example}) or a line of "
                "the "
                "file (num_layers = 12 under [model]):",
                width,
            ),
            *_table(usual, column, width),
            "",
            *textwrap.wrap(
                f"All {_number_of(config)} settings: hybridpar {name} --help-all, or "
                "docs/settings.md. "
                "Examples of files: scripts/configs. Flags of Megatron-LM, torchtitan and "
                "DeepSpeed: "
                "docs/coming_from.md.",
                width,
            ),
        ]
    )


def descriptions(kind: type[Any]) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, as one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, note in itertools.pairwise(body.body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant):
            found[field.target.id] = " ".join(str(note.value.value).split())
    return found


def _own_fields(command: type[Any]) -> list[tuple[dataclasses.Field[Any], Any, str]]:
    """Return the fields of a command that are flags, each with its annotated type and
    description."""
    hints = typing.get_type_hints(command, include_extras=True)
    texts = descriptions(command)
    return [
        (field, hints[field.name], texts[field.name])
        for field in dataclasses.fields(command)
        if field.name not in ("path", "config")
    ]


def _spelled_flag(field: dataclasses.Field[Any], hint: Any) -> str:
    """Return a flag with its metavar: '--ranks N'."""
    names = [note.name for note in getattr(hint, "__metadata__", ()) if getattr(note, "name", None)]
    while typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    several = typing.get_origin(hint) is tuple
    metavar = _METAVARS[typing.get_args(hint)[0] if several else hint]
    return f"--{(names or [field.name])[0]} {metavar}{' ..' if several else ''}".rstrip()


def _described(text: str, default: Any) -> str:
    """Return a description with its default, which is left out if it is empty."""
    return text if default in ("", (), False) else f"{text} [{default}]"


def _value(config: Config, key: str) -> str:
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name)
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value) or '""'


def _number_of(config: Config) -> int:
    return sum(
        len(dataclasses.fields(getattr(config, section.name)))
        for section in dataclasses.fields(config)
    )


def _table(rows: list[tuple[str, str]], column: int, width: int) -> list[str]:
    """Return rows of a flag and its text, which begins at `column`."""
    lines = []
    for flag, text in rows:
        first, *rest = textwrap.wrap(text, max(width - column, 20))
        lines.append(f"  {flag:<{column - 2}}{first}")
        lines += [" " * column + line for line in rest]
    return lines
