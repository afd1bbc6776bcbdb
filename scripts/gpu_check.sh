#!/usr/bin/env bash
# Everything that needs a GPU, in one call: builds against the torch that is here, runs the GPU tests, then the GPU
# benchmarks, and writes JSON.
#
#   bash scripts/gpu_check.sh [FOLDER]      FOLDER: where gpu_check.json and the test report go (default: benchmarks/results)
#
# Installs nothing from the network: torch >= 2.11 with CUDA, triton, numpy, pytest and hybridpar's other dependencies must
# be there. Without a GPU it rehearses: builds, collects the tests, and runs the benchmarks on the CPU at a tiny size.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${1:-benchmarks/results}"
mkdir -p "$out"
python="${PYTHON:-python3}"
mode=cpu
if [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ] || command -v nvcc >/dev/null; then mode=cuda; fi
HYBRIDPAR_BUILD=$mode "$python" setup.py --quiet build_ext --inplace
status=0
PYTHONPATH=$PWD "$python" -m pytest -m gpu --junitxml="$out/gpu_tests.xml" -p no:cacheprovider tests || status=$?
[ "$status" -eq 5 ] && status=0  # no test was selected
# every operator once more, at a few small shapes, under the checkers of memory and races, which are too slow for more
if [ $mode = cuda ] && command -v compute-sanitizer >/dev/null && nvidia-smi >/dev/null 2>&1; then
    for tool in memcheck racecheck; do
        PYTHONPATH=$PWD PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$python" -m pytest -m gpu -p no:cacheprovider --timeout 1200 tests/ops/test_backends.py \
            -k "bfloat16 and cuda and (3x7x41 or 2x64 or 5x6 or 5x7 or 4x2050) and not attention" || status=$?
    done
fi
if "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    PYTHONPATH=$PWD "$python" -m benchmarks.gpu_ops --out "$out" || status=$?
    PYTHONPATH=$PWD "$python" -m benchmarks.single --device cuda --name gpu_single --out "$out" || status=$?
else
    PYTHONPATH=$PWD "$python" -m benchmarks.gpu_ops --out "$(mktemp -d)" --device cpu --rounds 3 || status=$?
fi
PYTHONPATH=$PWD "$python" - "$out" "$status" <<'PY'
import json
import platform
import subprocess
import sys
from xml.etree import ElementTree

import torch

out, status = sys.argv[1], int(sys.argv[2])
suite = ElementTree.parse(f"{out}/gpu_tests.xml").getroot().find("testsuite")
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip() or None
result = {
    "gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
    "commit": commit, "status": status,
    "tests": {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")},
}
with open(f"{out}/gpu_check.json", "w") as file:
    json.dump(result, file, indent=2)
print(json.dumps(result))
PY
exit "$status"
