"""From the arguments to a command, and from an error to one message and an exit code."""

from __future__ import annotations

import dataclasses
import difflib
import errno
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tyro
from tyro.conf import FlagCreatePairsOff

from hybridpar import __version__
from hybridpar.cli.arguments import Signature, flag_of, make_command, read_arguments
from hybridpar.cli.commands import COMMANDS
from hybridpar.config import Config, Launch
from hybridpar.errors import ConfigError, HybridparError
from hybridpar.train.errors import LostContactError, RankError

_GRACE_S = 2.0
"""How long a rank that lost contact outlives the one that died, so that the launcher sees and names that one first."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""What a system says of a disk when it does not say of which file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; what is wrong is said once, in one message. Returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    launch = Launch.from_environment(args)
    try:
        return parse(args, launch.rank == 0).run(launch)
    except HybridparError as error:
        return _report(error, launch, as_json="--json" in args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None and error.errno not in _FULL:
            raise
        who = f"rank {launch.rank}: " if launch.world_size > 1 else ""
        message = f"{who}{error.filename or 'a disk'}: {error.strerror}"
        return _report(RankError(message), launch, as_json="--json" in args)


def parse(args: Sequence[str], speaks: bool = True) -> Any:
    """The command as its dataclass; only one process of a job `speaks`.

    Exits with 0 after --help and --version, with 2 if the command line is wrong. Raises: ConfigError (load_toml).
    """
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help(), file=sys.stdout if args else sys.stderr)
        raise SystemExit(0 if args else 2)
    if args[0] in ("--version", "version"):
        print(__version__)
        raise SystemExit(0)
    name, rest = args[0], list(args[1:])
    if name not in COMMANDS:
        _refuse(f"hybridpar: {name} is not a command", name, COMMANDS, speaks)
    signature = Signature.of(COMMANDS[name])
    _check_flags(name, rest, signature.kinds, speaks)
    if {"-h", "--help"} & set(rest):
        _help_of(name, signature, speaks)
    try:
        arguments = read_arguments(signature, rest)
    except HybridparError as error:
        _refuse(f"hybridpar {name}: {_headed(error)}", "", (), speaks)
    return make_command(signature, arguments)


def _check_flags(name: str, args: Iterable[str], known: Iterable[str], speaks: bool) -> None:
    for word in filter(None, map(flag_of, args)):
        if word not in known and word != "help":
            same_key = [k for k in known if "." in k and k.rpartition(".")[2] == word.rpartition(".")[2]]
            _refuse(f"hybridpar {name}: unknown flag --{word}", word, same_key or known, speaks, "--")


def _help_of(name: str, signature: Signature, speaks: bool) -> NoReturn:
    """Says what a command takes, and exits."""
    default: Any = tyro.MISSING_NONPROP
    if signature.takes_config:
        default = signature.command(path=Path("CONFIG.toml"), config=Config())
    tyro.cli(signature.command, prog=f"hybridpar {name}", args=["--help"], default=default, use_underscores=True,
             console_outputs=speaks, config=(FlagCreatePairsOff,))
    raise AssertionError("tyro exits after its help")


def _help() -> str:
    lines = [f"  {name:<11} {command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join([
        "hybridpar: train GPT and BERT with tensor, pipeline and data parallelism", "", *lines, "",
        "hybridpar COMMAND --help tells more. Flags are --section.key value, over what CONFIG.toml says."])


def _refuse(text: str, word: str, known: Iterable[str], speaks: bool, dashes: str = "") -> NoReturn:
    """Says what is wrong with the command line, and the nearest thing that exists; exits with 2."""
    near = difflib.get_close_matches(word.lower(), list(known), 1, cutoff=0.4)
    if speaks:
        print(f"{text}; did you mean {dashes}{near[0]}?" if near else text, file=sys.stderr)
    raise SystemExit(2)


def _headed(error: HybridparError) -> str:
    """The message, and how many problems it names where there are several."""
    count = len(error.problems) if isinstance(error, ConfigError) else 1
    return f"{count} problems:\n{error}" if count > 1 else str(error)


def _report(error: HybridparError, launch: Launch, *, as_json: bool) -> int:
    """Prints an error once: by rank 0 where all ranks have it, by the one rank that it is of, which then ends."""
    alone = isinstance(error, RankError)
    problems = error.problems if isinstance(error, ConfigError) else ()
    if alone or launch.rank == 0:
        print(f"hybridpar: {_headed(error)}", file=sys.stderr, flush=True)
    if as_json and launch.rank == 0:
        plain = {"ok": False, "error": str(error), "problems": [dataclasses.asdict(p) for p in problems]}
        print(json.dumps(plain, default=str), flush=True)
    if alone and launch.world_size > 1:
        if isinstance(error, LostContactError):
            time.sleep(_GRACE_S)
        os._exit(1)  # communicators would wait for ranks that are gone
    return 1
