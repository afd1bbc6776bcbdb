#!/usr/bin/env bash
# Everything that needs a GPU: builds against the torch that is here, runs the GPU tests and benchmarks, and writes JSON.
# Each step is a process of its own with a limit of its own, and what it has found is written at once: one that fails, or
# is cut off, loses nothing of the others. Those that were never measured come first. Tests run beside each other, what is
# timed runs alone.
#
#   bash scripts/gpu_check.sh [FOLDER [STEP | CALL ..]]
#
#   FOLDER     where the reports go (default: benchmarks/results); all but the log are named after the GPU: .._h100.json
#   STEP       of those below (--list: prints them, their limits and each call's sum); default: all
#   CALL       1, 2 or 3: the steps of that number, which leave at most eight files
#   LIMIT=510  seconds for all of them; what no longer fits is left out, and said to be
#   COMMIT=..  what the results name, where the folder is a copy whose git history does not tell
#   WHEELS=..  folder of wheels of packages that are missing here (tyro, tomli-w and what they need); default: .whl
#
# A GPU's minutes are for what needs it. So build before, for its kind, and take the extensions along: they load in any
# torch from 2.11 on and Python from 3.10 on, and `build` then takes seconds. With 15 minutes of a machine, of which its
# start takes one or two: call 1, then at once call 2 with LIMIT=200, with the steps that call 1 left out.
#
#   HYBRIDPAR_BUILD=cuda HYBRIDPAR_CUDA_ARCHS=90a python setup.py build_ext --inplace    # hybridpar/_C*.abi3.so
#   pip download --no-deps --only-binary=:all: --python-version 3.12 -d .whl tyro tomli-w rich docstring-parser typeguard
#   bash scripts/gpu_check.sh OUT 1; LIMIT=200 bash scripts/gpu_check.sh OUT bert-graphs 2
#
# Installs nothing else: torch >= 2.11 with CUDA, triton, numpy, einops and pytest must be there; what else is missing is
# said and done without. Without a GPU it rehearses: builds the CPU operators, collects the tests, and runs the benchmarks
# at a tiny size.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# name, call, seconds (&: beside the next), command; a pair of trained 1.3B is 70 GiB, which an H100 has
steps="build         1 120  build
nccl          1 170& gpu_tests 6 tests/train/test_gpu.py -k 'nccl and not graphs'
graphs        1 170& gpu_tests 3 tests/pipeline/run/test_graphs.py
grid-graphs   1 120& gpu_tests 1 tests/train/test_gpu.py -k nccl-graphs
moves         1 170& gpu_tests 4 tests/train/test_gpu.py tests/train/test_offload_auto_gpu.py tests/train/test_planned_memory.py tests/memory/test_history.py -k 'not nccl and not grid'
memcheck      1 170& NICE=10 sanitize memcheck
tests         1 170  NICE=10 gpu_tests 8 \$(others)
1.3B-dropout  1  95  single gpu_single_1.3B_dropout 1.3B 5 --dropout 0.1
345M-dropout  1  65  single gpu_single_345M_dropout 345M 5 --dropout 0.1
1.3B-16       1 110  single gpu_single_1.3B_16 1.3B 3 --microbatches 16
1.3B-fp8      1  45  single gpu_single_1.3B_fp8 1.3B 5 --fp8 --peers none
bert-graphs   1  40  single gpu_single_bert bert_large 5 --graphs
gloo          2 100& gpu_tests 8 tests/train/test_gpu.py -k 'grid and not nccl'
racecheck     2 100  sanitize racecheck
attention     2  70  operators gpu_ops_attention 3 --table --ops 'causal attention' --sizes d72 d80 d96 d64-grouped d128-grouped d64 d256
operators     2  90  operators gpu_ops 5 --table --sizes 1.3B
operators-4   3  80  operators gpu_ops_large 5 --sizes large
345M          3 110  single gpu_single 345M 9
1.3B          3 130  single gpu_single_1.3B 1.3B 7"
if [ "${1:-}" = --list ]; then
    echo "$steps"
    awk '$1 == "build" {build = $3; next}
         {if ($3 + 0 > most) most = $3 + 0} $3 !~ /&/ {sum[$2] += most; most = 0}  # beside each other: as long as the longest
         END {for (call = 1; call in sum; ++call) print "call " call ": " sum[call] " s at most; where it builds, " build " more"}' <<<"$steps"
    exit
fi
out="${1:-benchmarks/results}"
shift || true
names="$(awk '{print $1}' <<<"$steps")"
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
read -r gpu card < <("$python" -c 'import torch; found = torch.cuda.is_available()
print("%d%d" % torch.cuda.get_device_capability() if found else "", torch.cuda.get_device_name().split()[1].lower() if found else "")')
# where there is no GPU there is no hurry
[ -n "$gpu" ] && mode=cuda slower=1 || mode=cpu slower=10
limit=$((${LIMIT:-510} * slower))
if [ -n "$gpu" ] && [ ! -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ] && ! command -v nvcc >/dev/null; then
    echo "no nvcc: without the CUDA C++ operators"
    mode=cpu
fi

build() {
    if [ "$mode" = cuda ] && "$python" -c 'import sys; from hybridpar import native; sys.exit(native.missing() or native.missing_cuda())'; then
        echo "what came along loads"
        return
    fi
    HYBRIDPAR_BUILD=$mode HYBRIDPAR_CUDA_ARCHS=${gpu/#90/90a} "$python" setup.py --quiet build_ext --inplace && return
    [ "$mode" = cuda ] && HYBRIDPAR_BUILD=cpu "$python" setup.py --quiet build_ext --inplace
    return 1  # also where the CPU's operators alone are there
}

gpu_tests() {  # WORKERS [PYTEST OPTION ..] FILE ..: side by side where pytest-xdist is there: most of their time is compilation
    local most=$1 workers=() code=0
    shift
    "$python" -c 'import pytest_timeout' 2>/dev/null && workers=(--timeout 150)  # one that hangs is one that fails
    "$python" -c 'import xdist' 2>/dev/null && workers+=(-n "$(($(nproc) < most ? $(nproc) : most))" --dist worksteal)
    nice -n "${NICE:-0}" "$python" -m pytest -vv -m gpu -p no:cacheprovider --tb=short --continue-on-collection-errors \
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
            --peers "autocast gelu_pytorch_tanh compiled" --name "${name}_$card" --out "$out" "$@"
    else
        "$python" -m benchmarks.single "$@" --shapes tiny --dtypes bf16 --threads 1 --rounds 2 --compile --out "$(mktemp -d)"
    fi
}

operators() {  # NAME ROUNDS [OPTION ..]
    local name=$1 rounds=$2
    shift 2
    if [ -n "$gpu" ]; then
        "$python" -m benchmarks.gpu_ops --out "$out" --dtypes bf16 --rounds "$rounds" --name "${name}_$card" "$@"
    else
        "$python" -m benchmarks.gpu_ops --out "$(mktemp -d)" --device cpu --sizes tiny --rounds 3
    fi
}

sanitize() {  # TOOL: every operator once more, at a few small shapes, those that were never looked at first
    local which="test_sparse and 4081 and triton or (test_largest or test_quantize) and same_bytes and float32"
    which+=" or test_embedding and bfloat16 and float32 and triton and (odd or few) or 4x2050 and bfloat16"
    which+=" or against_float64 and bfloat16 and not no-bias"
    which+=" and (3x7x41 or 5x6 or 5x7 and causal-padded-dropout or 300x33-dropout)"
    command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer"; return; }
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 9 \
        nice -n "${NICE:-0}" "$python" -m pytest -vv -m gpu -p no:cacheprovider -k "cuda and not held and ($which)" \
        tests/ops/test_{sparse,largest,quantize,embedding,backends}.py
}

export -f build gpu_tests others single operators sanitize
export out python gpu card mode
: >"$out/gpu_check.log"
table="$(cksum <hybridpar/ops/measured.json)"
found="$(mktemp)"
report() {  # [say]: from the steps so far; prints them, too
    "$python" - "$out" "$found" "$@" <<'PY'
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
    tests = {key: len(re.findall(rf"^{re.escape(name)}: (?:\[gw.*\b{key} tests/|tests/.* {key} +[\[(])", log, re.M))
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
if "say" in sys.argv:
    print(*re.findall(r"^\S+: (?:.*\b(?:FAILED|ERROR) tests/.*|FAILED .*)$", log, re.M), *steps, sep="\n")
PY
}
run() {  # NAME SECONDS COMMAND: a step; each line of the log begins with its name
    local begin=$SECONDS code
    timeout -k 10 "$2" bash -c "$3" 2>&1 | sed -u "s/^/$1: /" | tee -a "$out/gpu_check.log"
    code=${PIPESTATUS[0]}
    echo "$1 $((SECONDS - begin)) $code" >>"$found"
}
chosen="" name=gpu_check
for one in ${*:-$names}; do
    of_call="$(awk -v call="$one" '$2 == call {print $1}' <<<"$steps")"
    [ -n "$of_call" ] && name="gpu_check_$one"
    chosen="$chosen ${of_call:-$one}"
done
export report="$out/$name${card:+_$card}.json"
if [ "$mode" = cuda ] && ! grep -qw build <<<"$chosen"; then chosen="build $chosen"; fi
for name in $chosen; do
    if ! grep -qxF -- "$name" <<<"$names"; then echo "no step '$name': $(tr '\n' ' ' <<<"$names")" >&2; exit 2; fi
done
for name in $chosen; do
    read -r _ _ seconds command < <(awk -v name="$name" '$1 == name' <<<"$steps")
    allowed=$((${seconds%&} * slower)) left=$((limit - SECONDS))
    [ "$left" -lt "$allowed" ] && allowed=$left
    if [ "$allowed" -lt 10 ]; then
        echo "$name 0 124" >>"$found"
    elif [ -n "$gpu" ] && [ "$seconds" != "${seconds%&}" ]; then
        run "$name" "$allowed" "$command" &
        continue
    else
        run "$name" "$allowed" "$command"
    fi
    wait
    report
done
wait
report say
awk '$3 != 0 {bad = 1} END {exit bad}' "$found"
status=$?
[ "$(cksum <hybridpar/ops/measured.json)" = "$table" ] || cp hybridpar/ops/measured.json "$out/"
exit "$status"
