#!/usr/bin/env bash
# Runs everything that needs a GPU and writes JSON. Without a GPU it is a rehearsal of the same steps at tiny sizes.
#
# Take along to the GPU machine, as it has no time to build and perhaps no network:
#
#   hybridpar/_C.abi3.so hybridpar/_C_cuda.abi3.so    loads in any torch from 2.11 on and Python from 3.10 on
#       HYBRIDPAR_BUILD=cuda HYBRIDPAR_CUDA_ARCHS=90a python setup.py build_ext --inplace
#   .whl/                                             packages that GPU images lack
#       pip download --no-deps --only-binary=:all: --python-version 3.12 -d .whl tyro tomli-w docstring-parser typeguard
#
# hybridpar/_C_recorder*.so is of one version of Python and torch, and only CPUs need it: leave it behind. If _C or
# _C_cuda does not load, the check stops at once, because what it would measure is Triton under the name of CUDA.
#
#   COMMIT=$(git rev-parse HEAD) bash scripts/gpu_check.sh FOLDER 1      first: whether it works, and how fast
#   LIMIT=250 COMMIT=.. bash scripts/gpu_check.sh FOLDER fp8 2           then: what call 1 left out, and the peers
#
#   FOLDER       for log, report and results (default: build/gpu_check); eight files at most for each call
#   1, 2 or 3    the steps of a call. Call 1 takes 400 s at most
#   STEP         one step by its name
#   --list       prints the steps, their limits, and the sum of each call
#   LIMIT=540    seconds for all of them. A step that no longer fits is left out, and the report says so
#   COMMIT=..    the commit that results name, where the folder is a copy without git's history
#   WHEELS=.whl  folder of wheels to install for this check alone
#   PYTHON=..    the interpreter (default: python3)
#
# Needs torch >= 2.11, Triton, numpy, einops and pytest. Says what else is missing, and does without.
# Steps and limits are in benchmarks/gpu_check.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" -m benchmarks.gpu_check "$@"
