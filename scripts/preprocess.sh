#!/usr/bin/env bash
# Text to token ids: trains a byte-level BPE tokenizer and writes Megatron .bin/.idx.   bash scripts/preprocess.sh --help
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
"$PYTHON" -m hybridpar preprocess "$@"
