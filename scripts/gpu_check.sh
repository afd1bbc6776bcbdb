#!/usr/bin/env bash
# Everything that needs a GPU, in one call: builds against the torch that is here, runs the GPU tests, then the GPU
# benchmarks, and writes JSON. Made for ten minutes on a machine: about six, cut off after nine.
#
#   bash scripts/gpu_check.sh [FOLDER [STEP ..]]
#
#   FOLDER     where gpu_check.json, the tests' and the benchmarks' reports go (default: benchmarks/results)
#   STEP       of: build tests ops train sanitizer; default: the first four, in this order
#   LIMIT=540  seconds for all of them; a step that is cut off leaves what it had
#   COMMIT=..  what the results name, where the folder is a copy whose git history does not tell
#
# Installs nothing: torch >= 2.11 with CUDA, triton, numpy, einops and pytest must be there; what else is missing is said and
# left out. Without a GPU it rehearses: builds the CPU operators, collects the tests, and runs the benchmarks at a tiny size.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${1:-benchmarks/results}"
shift || true
steps="${*:-build tests ops train}"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
status=0

"$python" - <<'PY' || exit 3
import importlib.util
import os
import shutil
import sys

def lacks(names):
    return [name for name in names if importlib.util.find_spec(name) is None]

missing, optional = lacks(["torch", "triton", "numpy", "einops", "pytest", "setuptools"]), lacks(
    ["hypothesis", "pytest_timeout", "xdist", "transformers", "apex"])
path = f"{os.environ.get('PATH')}:{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"
optional += [name for name in ("ninja", "nvcc") if shutil.which(name, path=path) is None]
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

step() {  # NAME SECONDS COMMAND ..: runs it for at most that long, and what is left; remembers that it failed
    local name=$1 seconds=$(($2 * slower)) left=$((limit - SECONDS)) begin=$SECONDS code=0
    shift 2
    [ "$left" -lt "$seconds" ] && seconds=$left
    if [ "$seconds" -lt 10 ]; then
        echo "== $name: no time left" && status=124 && return
    fi
    timeout -k 10 "$seconds" "$@" || code=$?
    [ "$code" -eq 5 ] && [[ "$name" == tests* ]] && code=0  # no test was selected
    [ "$code" -ne 0 ] && status=$code
    echo "== $name: $((SECONDS - begin)) s, status $code"
}

build() {
    local arch=${gpu:-90}
    HYBRIDPAR_BUILD=$1 HYBRIDPAR_CUDA_ARCHS=${arch/#90/90a} "$python" setup.py --quiet build_ext --inplace
}

tests() {  # side by side where pytest-xdist is there: most of their time is compilation
    local files=() workers=()
    mapfile -t files < <(grep -rlE 'mark\.gpu|import places' tests --include='test_*.py')
    "$python" -c 'import xdist' 2>/dev/null && workers=(-n "$(($(nproc) < 14 ? $(nproc) : 14))" --dist worksteal)
    "$python" -m pytest -m gpu -p no:cacheprovider --tb=short --junitxml="$out/gpu_tests.xml" "${workers[@]}" "${files[@]}"
}

sanitizer() {  # every operator once more, at a few small shapes, under the checkers of memory and races
    command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer"; return; }
    for tool in memcheck racecheck; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$python" -m pytest -m gpu -p no:cacheprovider tests/ops/test_backends.py \
            -k "bfloat16 and cuda and (3x7x41 or 2x64 or 5x6 or 5x7 or 4x2050) and not attention" || return
    done
}

ops() {  # those of the 1.3B go into the table that `auto` goes by, also in the step that follows
    if [ -n "$gpu" ]; then
        "$python" -m benchmarks.gpu_ops --out "$out" --sizes 1.3B --dtypes bf16 --rounds 9 --table &&
            cp hybridpar/ops/measured.json "$out/" &&
            "$python" -m benchmarks.gpu_ops --out "$out" --sizes large --dtypes bf16 --rounds 5 --name gpu_ops_large
    else
        "$python" -m benchmarks.gpu_ops --out "$(mktemp -d)" --device cpu --sizes tiny --rounds 3
    fi
}

train() {  # against the peer whose numerics are nearest
    local peer="autocast gelu_pytorch_tanh"
    if [ -n "$gpu" ]; then
        "$python" -m benchmarks.single --device cuda --shapes 345M --rounds 9 --peers "$peer" --name gpu_single --out "$out" &&
            "$python" -m benchmarks.single --device cuda --shapes 1.3B --rounds 7 --peers "$peer compiled" \
                --name gpu_single_1.3B --out "$out" &&
            "$python" -m benchmarks.single --device cuda --shapes 345M --rounds 5 --peers "$peer compiled" --dropout 0.1 \
                --name gpu_single_dropout --out "$out"
    else
        "$python" -m benchmarks.single --shapes tiny --dtypes bf16 --threads 1 --rounds 2 --compile --out "$(mktemp -d)"
    fi
}

export -f build tests sanitizer ops train
export out python gpu
for name in $steps; do
    case $name in
        build)
            step build 150 bash -c "build $mode"
            if [ "$mode" = cuda ] && [ "$status" -ne 0 ]; then step "build of the CPU operators" 90 bash -c "build cpu"; fi ;;
        tests) step tests 150 bash -c tests ;;
        ops) step ops 160 bash -c ops ;;
        train) step train 280 bash -c train ;;
        sanitizer) step sanitizer 400 bash -c sanitizer ;;
        *) echo "no step '$name': build tests ops train sanitizer" >&2; exit 2 ;;
    esac
done
"$python" - "$out" "$status" "$steps" <<'PY'
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import torch

from hybridpar.ops import registry

out, status, steps = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split()
tests = None
if "tests" in steps and (path := out / "gpu_tests.xml").exists():
    suite = ElementTree.parse(path).getroot().find("testsuite")
    tests = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
commit = os.environ.get("COMMIT") or subprocess.run(
    ["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
result = {
    "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None, "torch": torch.__version__,
    "cuda": torch.version.cuda, "python": platform.python_version(), "commit": commit, "steps": steps,
    "status": status, "tests": tests,
}
reports = [registry.report(op, "cuda" if result["gpu"] else "cpu", torch.bfloat16) for op in registry.ops()]
(out / "gpu_check.json").write_text(json.dumps(result | {"backends": [asdict(r) for r in reports]}, indent=2))
print(json.dumps(result))
PY
exit "$status"
