#!/usr/bin/env bash
# Installs hybridpar with its test tools, then checks style and types and runs the tests.   bash scripts/test.sh [pytest options]
#   --thorough     everything, for hours; else what finds each kind of fault, in 8 minutes on two cores
#   --slice 3/12   the third of twelve shares of what only --thorough runs
export EXTRAS=plot,hf,dev
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
# tests start hundreds of processes, which read bytecode instead of compiling hybridpar again; the tests' own is written
# on one core while the other one checks types
export PYTHONDONTWRITEBYTECODE=
"$PYTHON" -m pytest --collect-only -qq "$@" >/dev/null &
"$PYTHON" -m ruff format --check .
"$PYTHON" -m ruff check .
"$PYTHON" -m mypy
wait
# three workers on two cores: ranks wait for each other, and supervisors for ranks
OMP_NUM_THREADS=1 "$PYTHON" -m pytest -n $((3 * $(nproc) / 2)) --dist worksteal "$@"
