#!/usr/bin/env bash
# Everything that needs a GPU: builds against the torch that is here, runs the GPU tests and benchmarks, and writes JSON.
# Each step is a process of its own with a limit of its own, and what it has found is written at once: one that fails, or
# is cut off, loses nothing of the others. Those that were never measured come first.
#
#   bash scripts/gpu_check.sh [FOLDER [STEP | CALL ..]]
#
#   FOLDER     where gpu_check.json, gpu_check.log and the benchmarks' reports go (default: benchmarks/results)
#   STEP       of those below (list: prints them); default: all. `build` goes first where a GPU has no build yet
#   CALL       1, 2 or 3: the steps of that number, which leave at most eight files; their report is gpu_check_CALL.json
#   LIMIT=540  seconds for all of them; what no longer fits is left out, and said to be
#   COMMIT=..  what the results name, where the folder is a copy whose git history does not tell
#   WHEELS=..  folder of wheels of packages that are missing here (tyro, tomli-w and what they need); default: .whl
#
# Installs nothing else: torch >= 2.11 with CUDA, triton, numpy, einops and pytest must be there; what else is missing is
# said and done without. Without a GPU it rehearses: builds the CPU operators, collects the tests, and runs the benchmarks
# at a tiny size.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${1:-benchmarks/results}"
shift || true
# name, call, seconds, command; in the order of what was measured least
steps="build         1 150 build
nccl          1 170 env WORKERS=4 bash -c 'gpu_tests tests/train/test_gpu.py -k \"nccl and not graphs\"'
graphs        1 100 gpu_tests tests/pipeline/run/test_graphs.py
moves         1 150 gpu_tests tests/train/test_gpu.py tests/train/test_planned_memory.py tests/memory/test_history.py -k 'not nccl and not grid'
345M-dropout  2 110 single gpu_single_345M_dropout 345M 5 --dropout 0.1
1.3B-dropout  2 130 single gpu_single_1.3B_dropout 1.3B 5 --dropout 0.1
1.3B-fp8      2 110 single gpu_single_1.3B_fp8 1.3B 3 --fp8
bert-graphs   2  60 single gpu_single_bert bert_large 7 --graphs
1.3B-16       2 150 single gpu_single_1.3B_16 1.3B 3 --microbatches 16
grid-graphs   1 100 gpu_tests tests/train/test_gpu.py -k nccl-graphs
gloo          1 150 gpu_tests tests/train/test_gpu.py -k 'grid and not nccl'
tests         2 170 gpu_tests \$(others)
345M          3 110 single gpu_single 345M 9
1.3B          3 130 single gpu_single_1.3B 1.3B 7
operators     3  90 operators gpu_ops 1.3B 9 --table
attention     3  90 operators gpu_ops_attention d72 5 --table --ops 'causal attention' --sizes d64 d72 d80 d96 d256 d64-grouped d128-grouped
operators-4   3  80 operators gpu_ops_large large 5
memcheck      3 200 sanitize memcheck
racecheck     3 200 sanitize racecheck"
names="$(awk '{print $1}' <<<"$steps")"
if [ "${1:-}" = list ]; then echo "$steps"; exit; fi
mkdir -p "$out"
out="$(cd "$out" && pwd)"
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
wheels="${WHEELS:-.whl}"
if [ -d "$wheels" ]; then
    site="$(mktemp -d)"
    "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$wheels"/*.whl && PYTHONPATH="$PYTHONPATH:$site"
fi
"$python" - <<'PY' || exit 3
import importlib.util
import os
import shutil
import sys

def lacks(names):
    return [name for name in names if importlib.util.find_spec(name) is None]

missing, optional = lacks(["torch", "triton", "numpy", "einops", "pytest", "setuptools"]), lacks(
    ["tyro", "tomli_w", "rich", "tokenizers", "safetensors", "hypothesis", "pytest_timeout", "xdist", "transformers", "apex"])
path = f"{os.environ.get('PATH')}:{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"
optional += [name for name in ("ninja", "nvcc", "compute-sanitizer") if shutil.which(name, path=path) is None]
if missing:
    sys.exit(f"missing, and needed: {', '.join(missing)}")
print(f"missing, and done without: {', '.join(optional) or 'nothing'}")
PY
gpu="$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability() if torch.cuda.is_available() else "")')"
# where there is no GPU there is no hurry
[ -n "$gpu" ] && mode=cuda slower=1 || mode=cpu slower=10
limit=$((${LIMIT:-540} * slower))
if [ -n "$gpu" ] && [ ! -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ] && ! command -v nvcc >/dev/null; then
    echo "no nvcc: without the CUDA C++ operators"
    mode=cpu
fi

build() {
    HYBRIDPAR_BUILD=$mode HYBRIDPAR_CUDA_ARCHS=${gpu/#90/90a} "$python" setup.py --quiet build_ext --inplace && return
    [ "$mode" = cuda ] && HYBRIDPAR_BUILD=cpu "$python" setup.py --quiet build_ext --inplace
    return 1  # also where the CPU's operators alone are there
}

gpu_tests() {  # [PYTEST OPTION ..] FILE ..: side by side where pytest-xdist is there: most of their time is compilation
    local workers=() code=0
    "$python" -c 'import pytest_timeout' 2>/dev/null && workers=(--timeout 120)  # one that hangs is one that fails
    "$python" -c 'import xdist' 2>/dev/null && workers+=(-n "${WORKERS:-$(($(nproc) < 14 ? $(nproc) : 14))}" --dist worksteal)
    "$python" -m pytest -vv -m gpu -p no:cacheprovider --tb=short --continue-on-collection-errors \
        "${workers[@]}" "$@" || code=$?
    [ "$code" -eq 5 ] && code=0  # none was selected
    return "$code"
}

others() {  # the files with GPU tests, but for those that have a step of their own
    grep -rlE 'mark\.gpu|import places' tests --include='test_*.py' | grep -vE 'train/test_|run/test_graphs|tests/memory'
}

single() {  # NAME SHAPE ROUNDS [OPTION ..]: training steps, beside the peer whose numerics are nearest
    local name=$1 shape=$2 rounds=$3
    shift 3
    if [ -n "$gpu" ]; then
        "$python" -m benchmarks.single --device cuda --shapes "$shape" --rounds "$rounds" \
            --peers "autocast gelu_pytorch_tanh compiled" --name "$name" --out "$out" "$@"
    else
        "$python" -m benchmarks.single "$@" --shapes tiny --dtypes bf16 --threads 1 --rounds 2 --compile --out "$(mktemp -d)"
    fi
}

operators() {  # NAME SIZE ROUNDS [OPTION ..]
    local name=$1 size=$2 rounds=$3
    shift 3
    if [ -n "$gpu" ]; then
        "$python" -m benchmarks.gpu_ops --out "$out" --sizes "$size" --dtypes bf16 --rounds "$rounds" --name "$name" "$@"
    else
        "$python" -m benchmarks.gpu_ops --out "$(mktemp -d)" --device cpu --sizes tiny --rounds 3
    fi
}

sanitize() {  # TOOL: every operator once more, at a few small shapes, and training with dropout
    command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer"; return; }
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 9 \
        "$python" -m pytest -m gpu -p no:cacheprovider tests/ops/test_backends.py \
        -k "bfloat16 and cuda and (3x7x41 or 2x64 or 5x6 or 5x7 or 4x2050) and not attention or dropout"
}

export -f build gpu_tests others single operators sanitize
export out python gpu mode
status=0
: >"$out/gpu_check.log"
found="$(mktemp)"
report() {  # from the steps so far
    "$python" - "$out" "$found" <<'PY'
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from hybridpar.ops import registry

out, found = Path(sys.argv[1]), Path(sys.argv[2])
log = (out / "gpu_check.log").read_text(errors="replace")
steps = []
for line in found.read_text().splitlines():
    name, seconds, status = line.split()
    said = log.split(f"\n== begin {name}\n")[-1].split(f"\n== end {name}\n")[0]
    tests = {key: len(re.findall(rf"^(?:\[gw.*\b{key} tests/|tests/.* {key} +[\[(])", said, re.M))
             for key in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    tests = {"tests": tests} if any(tests.values()) else {}
    steps.append({"step": name, "seconds": int(seconds), "status": int(status)} | tests)
device = "cuda" if torch.cuda.is_available() else "cpu"
commit = os.environ.get("COMMIT") or subprocess.run(
    ["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
result = {
    "gpu": torch.cuda.get_device_name() if device == "cuda" else None, "torch": torch.__version__,
    "cuda": torch.version.cuda, "python": platform.python_version(), "commit": commit, "steps": steps,
    "status": max((abs(step["status"]) for step in steps), default=0),
    "backends": [asdict(registry.report(op, device, torch.bfloat16)) for op in registry.ops()],
}
Path(os.environ["report"]).write_text(json.dumps(result, indent=2) + "\n")
PY
}
chosen="" name=gpu_check
for one in ${*:-$names}; do
    of_call="$(awk -v call="$one" '$2 == call {print $1}' <<<"$steps")"
    [ -n "$of_call" ] && name="gpu_check_$one"
    chosen="$chosen ${of_call:-$one}"
done
export report="$out/$name.json"
if [ "$mode" = cuda ] && ! grep -qw build <<<"$chosen" && ! compgen -G "hybridpar/_C_cuda*.so" >/dev/null; then
    chosen="build $chosen"
fi
for name in $chosen; do
    line="$(awk -v name="$name" '$1 == name' <<<"$steps")"
    if [ -z "$line" ]; then echo "no step '$name': $(tr '\n' ' ' <<<"$names")" >&2; exit 2; fi
    read -r _ _ seconds command <<<"$line"
    seconds=$((seconds * slower)) left=$((limit - SECONDS)) begin=$SECONDS code=0
    [ "$left" -lt "$seconds" ] && seconds=$left
    printf '\n== begin %s\n' "$name" | tee -a "$out/gpu_check.log"
    if [ "$seconds" -lt 10 ]; then
        code=124
    else
        timeout -k 10 "$seconds" bash -c "$command" 2>&1 | tee -a "$out/gpu_check.log"
        code=${PIPESTATUS[0]}
    fi
    printf '\n== end %s\n' "$name" >>"$out/gpu_check.log"
    echo "== $name: $((SECONDS - begin)) s, status $code"
    echo "$name $((SECONDS - begin)) $code" >>"$found"
    [ "$code" -ne 0 ] && status=$code
    report
done
[ -f hybridpar/ops/measured.json ] && cp hybridpar/ops/measured.json "$out/"
exit "$status"
