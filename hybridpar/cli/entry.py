"""Entry point of the command line: turn arguments into a command, and an error into one message and
an exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tyro
from tyro.conf import FlagCreatePairsOff

from hybridpar import __version__
from hybridpar.cli.arguments import (
    complaint,
    config_arguments,
    own_arguments,
    sizes_as_bytes,
    tables_of,
    unknown_flag,
    usage,
)
from hybridpar.cli.commands import COMMANDS
from hybridpar.cli.help import short_help
from hybridpar.cli.shortage import describe, is_shortage, require_room
from hybridpar.cli.values import out_of_range
from hybridpar.config import (
    Config,
    Launch,
    from_mapping,
    load_toml,
    read_run_config,
    unloaded_code,
    without_unused,
)
from hybridpar.config.megatron_flags import megatron_flag
from hybridpar.config.names import meant
from hybridpar.config.old_keys import translate_flags
from hybridpar.errors import ConfigError, HybridparError, about_file, config_error
from hybridpar.reading import runs_near
from hybridpar.train.faults import watchdog
from hybridpar.train.faults.errors import GRACE_S, LostContactError, RankError
from hybridpar.train.reporting.console import hold_descriptors, lasting_console
from hybridpar.train.stop import end_at_interrupt

HELP = {"-h", "--help"}
"""Flags that ask for the usual settings of a command."""
HELP_ALL = "--help-all"
_RENAMED = {
    "world_size": "ranks",
    "devices": "ranks",
    "nproc_per_node": "ranks",
    "nproc": "ranks",
    "nprocs": "ranks",
    "num_processes": "ranks",
    "micro_batch": "micro_batch_sizes",
    "micro_batches": "micro_batch_sizes",
    "device_gb": "memory_gb",
    "steps": "batches",
}
"""Replacements for flags that had another name before, or that torchrun has."""
SPEC = "--model.spec"
"""The flag that names the class of a custom model, which decides what other keys [model] has."""
_ELSEWHERE = {
    "run": ["train"],
    "fit": ["train"],
    "resume": ["train"],
    "tokenize": ["preprocess"],
    "prepare": ["preprocess"],
    "sample": ["generate"],
    "convert": ["import", "export"],
    "test": ["verify"],
    "eval": ["train"],
    "validate": ["check"],
    "search": ["plan"],
    "dashboard": ["watch"],
}
"""Replacements for command names that other programs use."""
_BY_SIGNAL = 128
"""Offset of exit codes of runs that a signal stopped after they had saved: 128 + signal number."""
_LASTING = (
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)
"""File errors that would happen again after a restart. Other errors of a disk or network may
pass."""
_FIRST_S = 10.0
"""Time limit in seconds for the first rank to report an error that all ranks have."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, report an error once, in one message, and return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    hold_descriptors()
    _print_anything()
    with lasting_console() if args[:1] == ["train"] else contextlib.nullcontext():
        return _run(args)


def _print_anything() -> None:
    """Make stdout escape characters that its encoding lacks, as stderr does."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and (out.encoding.lower(), out.errors) != (
        "utf-8",
        "surrogateescape",
    ):
        out.reconfigure(errors="backslashreplace")


def _run(args: list[str]) -> int:
    launch = Launch(0, 0, 1, 1)
    try:
        launch = Launch.from_environment(args)
        trains = args[:1] == ["train"]
        flight = watchdog.begin(launch, watchdog.START_S if trains else 0.0)
        if launch.elastic:
            end_at_interrupt()
        speaks = (
            launch.local_rank == 0 and not launch.supervisor
        )  # `parse` has read the same arguments
        command = parse(args, speaks)
        require_room()
        if trains:
            flight.limit(command.config.faults.start_timeout_s)
        code = int(command.run(launch))
        if launch.agent and code >= _BY_SIGNAL:
            _end_job(launch, f"was stopped by {signal.Signals(code - _BY_SIGNAL).name}")
        return code
    except HybridparError as error:
        return _report(error, launch, as_json="--json" in args)
    except SystemExit as end:
        if launch.agent and end.code:
            _end_job(launch, "has refused its command line")
        raise
    except BrokenPipeError:  # the reader of the output has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _report_unexpected(error, launch, args)


def _report_unexpected(error: Exception, launch: Launch, args: Sequence[str]) -> int:
    """Report a file that cannot be used, or a lack of memory.

    Raises:
        Exception: The error itself, if it is a defect of hybridpar.
    """
    many = launch.world_size > 1
    as_json = "--json" in args
    if isinstance(error, OSError) and (message := about_file(error)):
        who = f"rank {launch.rank}: " if many else ""
        final = isinstance(error, _LASTING)
        return _report(RankError(f"{who}{message}"), launch, as_json=as_json, final=final)
    if is_shortage(error):
        return _report(
            RankError(describe(error, f"rank {launch.rank}" if many else args[0])),
            launch,
            as_json=as_json,
        )
    raise error


def parse(args: Sequence[str], speaks: bool = True) -> Any:
    """Return the command as its dataclass.

    Exits with 0 after --help and --version, and with 2 if the command line is wrong.

    Args:
        args: The words of the command line.
        speaks: Whether this process prints messages; one process of a job does.

    Raises:
        ConfigError: As `load_toml`.
    """
    if not args or args[0] in ("-h", "--help"):
        print(_help(), file=sys.stdout if args else sys.stderr)
        raise SystemExit(0 if args else 2)
    if args[0] == "--version":
        print(__version__)
        raise SystemExit(0)
    name = args[0]
    rest = list(args[1:])
    if name not in COMMANDS:
        _refuse_command(name, speaks)
    command = COMMANDS[name]
    default = tyro.MISSING_NONPROP
    config = Config()
    if "config" in command.__dataclass_fields__:
        if HELP & set(rest):
            print(short_help(name, command) if speaks else "", end="\n" * speaks)
            raise SystemExit(0)
        if HELP_ALL in rest:
            default = command(path=Path("CONFIG.toml"), config=Config())
        elif not rest or rest[0].startswith("-"):
            if "run" not in own_flags(command) or not (run := _value("--run", rest)):
                _refuse_without_file(name, rest, speaks)
            if not Path(run).is_dir():
                raise config_error(
                    "run", run, "does not exist", runs_near(Path(run)) or "runs/NAME"
                )
            path = Path(run, "config.toml")
            config = read_run_config(path, trust="--trust" in rest)
            if (error := unloaded_code(config)) is not None:
                raise error
            rest.insert(0, str(path))
            default = command(path=path, config=config)
        else:
            config = load_toml(rest[0], _value(SPEC, rest))
            rest = _without(SPEC, rest)
            config, rest = _with_valid_sets(name, config, rest, speaks)
            default = command(path=Path(rest[0]), config=config)
        rest = translate_flags(rest)
    rest = ["--help" if word == HELP_ALL else word for word in rest]
    _check_flags(name, rest, speaks, config)
    if "config" in command.__dataclass_fields__:
        rest = sizes_as_bytes(config_arguments(config), _with_values(rest, config))
    rest = sizes_as_bytes(own_arguments(command), rest)
    if not HELP & set(rest):
        _check_words(
            name, rest, speaks, config if "config" in command.__dataclass_fields__ else None
        )
    made = _parsed(name, _booleans_as_python(rest, config), default, speaks)
    if problems := out_of_range(made):
        raise ConfigError(*problems)
    return _without_unused(made, speaks) if "config" in command.__dataclass_fields__ else made


def _parsed(name: str, words: list[str], default: Any, speaks: bool) -> Any:
    """Return the command that tyro parses from the words, or print its help. Exits with 2 if the
    words are wrong."""
    helps = bool(HELP & set(words))
    try:
        return tyro.cli(
            COMMANDS[name],
            prog=f"hybridpar {name}",
            args=words,
            default=default,
            use_underscores=True,
            console_outputs=speaks and helps,
            config=(FlagCreatePairsOff,),
        )
    except SystemExit as end:
        if end.code and not helps:
            _refuse(
                f"hybridpar {name}: cannot read {shlex.join(words)}; try hybridpar {name} --help",
                speaks,
            )
        raise


def _without_unused(command: Any, speaks: bool) -> Any:
    """Return the command without the settings that its schedule ignores, and report these."""
    config, lines = without_unused(command.config)
    for line in lines if speaks else ():
        print(f"hybridpar: {line}", file=sys.stderr)
    return dataclasses.replace(command, config=config)


def _with_values(words: Sequence[str], config: Config) -> list[str]:
    """Return the words with `true` after each boolean setting that is given without a value."""
    booleans = {argument.name for argument in config_arguments(config) if argument.kind is bool}
    found = []
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        found.append(word)
        is_boolean = word.startswith("--") and f"--{word[2:].replace('-', '_')}" in booleans
        if is_boolean and following.startswith("--"):
            found.append("true")
    return found


def _booleans_as_python(args: Sequence[str], config: Config) -> list[str]:
    """Write the value of `--section.key true`, in any case, as True, the only spelling that tyro
    accepts."""
    kinds = {argument.name[2:]: argument.kind for argument in config_arguments(config)}
    flag = ""
    words = []
    for arg in args:
        head, equals, value = arg.partition("=")
        if head.startswith("--"):
            flag = head[2:].replace("-", "_")
        else:
            head = ""
            equals = ""
            value = arg
        if kinds.get(flag) is bool and value.lower() in ("true", "false"):
            value = value.capitalize()
        words.append(head + equals + value)
    return words


def _check_flags(name: str, args: Iterable[str], speaks: bool, config: Config) -> None:
    known = flags_of(COMMANDS[name], config)
    for flag in (arg.partition("=")[0] for arg in args if arg.startswith("--") and arg not in HELP):
        word = flag[2:].replace("-", "_")
        if word not in known:
            if word in tables_of(config):
                _refuse(
                    f"hybridpar {name}: {flag} is a list of tables, which the configuration's file "
                    "has: "
                    f"[[{word}]]. Flags change its entries, such as {flag}.0.lr",
                    speaks,
                )
            if renamed := _new_name(word, name, known):
                _refuse(f"hybridpar {name}: {flag} {renamed}", speaks)
            same_key = [
                k
                for k in sorted(known)
                if "." in k and k.rpartition(".")[2] == word.rpartition(".")[2]
            ]
            if not same_key and "parallel.tp" in known and (answer := megatron_flag(word)):
                _refuse(f"hybridpar {name}: {flag} {answer}", speaks)
            _refuse(f"hybridpar {name}: {unknown_flag(flag, known)}", speaks)


def _new_name(word: str, command: str, known: Collection[str]) -> str:
    """Return the replacement for a flag of another name, as the end of a sentence, or ""."""
    now = _RENAMED.get(word, word)
    if now in known:
        return f"is named --{now}"
    if now == "ranks" and "parallel.tp" in known:
        return (
            f"not a flag of {command}: the number of processes follows from --parallel.tp, "
            f"--parallel.cp, --parallel.pp and --parallel.dp"
        )
    return ""


def _check_words(name: str, words: Sequence[str], speaks: bool, config: Config | None) -> None:
    """Refuse a command line that tyro could not parse.

    Args:
        config: The command's configuration, read from its file.
    """
    known = [*own_arguments(COMMANDS[name]), *(() if config is None else config_arguments(config))]
    if problem := complaint(known, words):
        example = f"; try hybridpar {name} {usage(known)}" if problem.endswith(" missing") else ""
        _refuse(f"hybridpar {name}: {problem}{example}", speaks)


def flags_of(command: type[Any], config: Config) -> set[str]:
    """Return the names of a command's flags without dashes: the command's own, and `section.key` of
    the configuration."""
    of_config = config_arguments(config) if "config" in command.__dataclass_fields__ else ()
    return own_flags(command) | {argument.name[2:] for argument in of_config}


def own_flags(command: type[Any]) -> set[str]:
    """Return the names of a command's flags that are not keys of the configuration."""
    return {
        argument.name[2:] for argument in own_arguments(command) if argument.name.startswith("--")
    }


def _without(flag: str, args: Sequence[str]) -> list[str]:
    """Return the arguments without a flag and its value."""
    place = next(
        (i for i, arg in enumerate(args) if arg == flag or arg.startswith(f"{flag}=")), len(args)
    )
    return [*args[:place], *args[place + (2 if args[place : place + 1] == [flag] else 1) :]]


def _value(flag: str, args: Sequence[str]) -> str:
    """Return the value of a flag, or "" if it is not given."""
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        if arg == flag or arg.startswith(f"{flag}="):
            return following if arg == flag else arg.partition("=")[2]
    return ""


def _with_valid_sets(
    command: str, config: Config, args: Sequence[str], speaks: bool
) -> tuple[Config, list[str]]:
    """Return the configuration with the data sets of `--data.valid_sets.NAME SOURCE ..`, and the
    remaining arguments."""
    sets: dict[str, list[str]] = {}
    others: list[str] = []
    words = others
    for arg in args:
        flag, equals, value = arg.partition("=")
        if flag in ("--data.valid_sets", "--data.valid-sets"):
            _refuse(
                f"hybridpar {command}: {flag} needs the name of a set; try {flag}.other SOURCE",
                speaks,
            )
        if arg.startswith("--"):
            section, _, name = flag.replace("-", "_").partition("data.valid_sets.")
            words = sets.setdefault(flag[-len(name) :], []) if section == "__" and name else others
        if words is others:
            others.append(arg)
        elif not arg.startswith("--") or equals:
            words.append(value if arg.startswith("--") else arg)
    if not sets:
        return config, others
    return from_mapping(
        {"data": {"valid_sets": {**config.data.valid_sets, **sets}}}, config
    ), others


def _help() -> str:
    lines = [
        f"  {name:<11} {(command.__doc__ or '').rstrip()}" for name, command in COMMANDS.items()
    ]
    return "\n".join(
        [
            "hybridpar: train GPT, BERT and your own models on any grid of processes",
            "",
            *lines,
            "",
            "hybridpar COMMAND --help tells more, --help-all everything. Flags are --section.key "
            "value, over what "
            "CONFIG.toml says.",
        ]
    )


def _refuse(text: str, speaks: bool) -> NoReturn:
    """Report an error of the command line and exit with 2."""
    if speaks:
        print(text, file=sys.stderr)
    raise SystemExit(2)


def _refuse_command(name: str, speaks: bool) -> NoReturn:
    """Report an unknown command and the command that was probably meant, and exit with 2."""
    near = meant(name, COMMANDS) or list(_ELSEWHERE.get(name.lower(), ()))
    if name.endswith(".toml"):
        _refuse(
            f"hybridpar: the first word must be a command; did you mean hybridpar train {name}?",
            speaks,
        )
    works = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(COMMANDS)}"
    _refuse(f"hybridpar: {name} is not a command; {works}", speaks)


def _refuse_without_file(name: str, words: Sequence[str], speaks: bool) -> NoReturn:
    """Report a command line that does not begin with its configuration file, and exit with 2."""
    files = [word for word in words if word.endswith(".toml") and not word.startswith("-")]
    here = sorted(path.name for path in Path().glob("*.toml") if path.name != "pyproject.toml")
    rest = [word for word in words if word not in files[:1] and word != "-"]
    file = (files or here or ["CONFIG.toml"])[0]
    again = shlex.join(["hybridpar", name, file, *rest])
    _refuse(
        f"hybridpar {name}: the first argument must be a configuration file; try {again}", speaks
    )


def _end_job(launch: Launch, text: str, late: str = "") -> None:
    """End a job on all hosts, so that torchrun does not start it again.

    Args:
        text: The reason, for the other hosts.
        late: Message to print if the first rank of this host does not end the job in time.
    """
    from hybridpar.train.launching.launch import leave, stop_agent

    leave(launch, text)
    if late:
        print(late, file=sys.stderr, flush=True)
    stop_agent(launch)


def _report(error: HybridparError, launch: Launch, *, as_json: bool, final: bool = False) -> int:
    """Print an error once per host: on the host's first rank if all ranks have the error, else on
    the rank that has it.

    Args:
        final: Whether to end the job, because the error would occur again after a restart.
    """
    alone = isinstance(error, RankError)
    problems = error.problems if isinstance(error, ConfigError) else ()

    heading = f"{len(problems)} problems:\n" if len(problems) > 1 else ""
    line = f"hybridpar: {heading}{error}"
    speaks = alone or launch.local_rank == 0
    if speaks:
        print(line, file=sys.stderr, flush=True)
    if as_json and launch.rank == 0:
        plain = {
            "ok": False,
            "error": str(error),
            "problems": [dataclasses.asdict(p) for p in problems],
        }
        print(json.dumps(plain, default=str), flush=True)
    if launch.agent and (final or not error.may_pass):
        _end_job(launch, f"has refused: {error}", "" if speaks else line)
    if launch.supervisor and not speaks and launch.args[0] != "train":
        # once one rank exits, torchrun's agent kills all ranks, including the rank that reports the
        # error
        time.sleep(_FIRST_S)
    if alone and launch.world_size > 1:
        if isinstance(error, LostContactError):
            time.sleep(GRACE_S)
        # a normal exit would destroy communicators, which wait for ranks that have exited
        os._exit(1)
    return 1
