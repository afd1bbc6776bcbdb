#!/usr/bin/env bash
# Installs hybridpar with its test tools, then checks style and types and runs the tests.   bash scripts/test.sh [pytest options]
export EXTRAS=plot,hf,dev
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
"$PYTHON" -m ruff check .
"$PYTHON" -m mypy
OMP_NUM_THREADS=1 "$PYTHON" -m pytest -n auto --dist worksteal "$@"
