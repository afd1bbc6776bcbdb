"""Runs the study and reports it: `python -m benchmarks.convergence run --workers 2`, then
`... report`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.convergence import results
from benchmarks.convergence.report import write_report
from benchmarks.convergence.runner import DONE, Folders, Item, items_of, run_all, state_of
from benchmarks.convergence.study import BASES, HERE, groups, variants
from hybridpar.config import load_toml


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    if args.command == "report":
        write_report(args.results, HERE / "README.md")
        return 0
    folders = Folders(args.results, args.work)
    left = [item for item in _wanted(args) if state_of(item, folders.results) != DONE]
    for item in left:
        print(f"{item.model:<5}{item.name:<34}{state_of(item, folders.results)}")
    print(f"{len(left)} runs left", flush=True)
    if args.dry_run:
        return 0
    try:
        failed = run_all(left, folders, args.workers, _say)
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    return bool(failed)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _wanted(args: argparse.Namespace) -> list[Item]:
    items: list[Item] = []
    for model in args.models:
        known = variants(model)
        chosen = [v for group in args.groups for v in groups(model)[group]]
        if args.only:
            if unknown := [name for name in args.only if name not in known]:
                raise SystemExit(
                    f"{model} has no variant {', '.join(unknown)}; it has {', '.join(known)}"
                )
            chosen = [known[name] for name in args.only]
        items += items_of(load_toml(BASES[model]), chosen, args.seeds)
    return items


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--models", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--groups", nargs="+", choices=groups("gpt"), default=list(groups("gpt")))
    parser.add_argument(
        "--only", nargs="+", metavar="VARIANT", help="these variants, whatever their group"
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, help="only these; by default all that a variant is to have"
    )
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, of one thread each")
    parser.add_argument("--dry-run", action="store_true", help="only list what is left")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/convergence"), help="folder for runs under way"
    )
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
