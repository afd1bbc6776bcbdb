#!/usr/bin/env bash
# Samples text from a run.   bash scripts/generate.sh --checkpoint runs/gpt_tiny --prompt 'def main('
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
"$PYTHON" -m hybridpar generate "$@"
