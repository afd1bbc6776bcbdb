"""The Triton kernels in Triton's interpreter: the tests of all backends, and of what those cannot
reach.

The former would pass with C++ alone; test_triton_runs_here, among the latter, would not. bfloat16
is wrong there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[2]
# numpy has no threads; the last: hundreds of programs
HERE = "not cuda and not threads and not (dropout and 300x33)"
# of attention: all branches of its kernels, but those without one of them
EACH = "causal-padded-dropout"
RUNS = {  # each starts a Python, so they are few
    "backends": (
        "tests/ops/test_backends.py",
        [
            f"{HERE} and not attention and not memory_held and (torch.float32 or torch.float16 and "
            "not 300x33)",
            f"{HERE} and attention and torch.float32 and not memory_held and (x5x7 and not large "
            f"or soft-cap "
            f"or {EACH} or x70x40 and "
            "not dropout and not padded)",
            f"{HERE} and (strides and (not attention or {EACH}) or memory_held and torch.float32 "
            "and (5x1030 or 2x64 or "
            f"x5x7 and {EACH}))",
        ],
    ),
    "others": (
        "tests/ops/test_update.py tests/ops/test_embedding.py tests/ops/test_quantize.py "
        "tests/ops/test_largest.py tests/ops/test_sparse.py tests/ops/test_fp8.py "
        "tests/kernels/interpreted.py",
        [
            "test_update and triton and not cuda and not bfloat16 and (torch.float16-False-nadamw "
            "or "
            "float64-None-True-first or float16-True or directions or extrapolation or square or "
            "autograd)",
            "test_update and triton and not cuda and any_address and 3-triton",
            "test_embedding and rows_and and triton and not cuda and not float16 and not (many and "
            "float64)",
            "not cuda and not threads and not float64 and not bfloat16- and not 200003 and "
            "(test_quantize or "
            "test_sparse and triton and not float32-float32 or test_largest and "
            "(False-torch.float32 or True-torch.float16 "
            "or finite or equal_ones and float32 or more_than))",
            "test_fp8 and triton",
            "interpreted",
        ],
    ),
}


@pytest.mark.thorough(keep=1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.thorough)])
def test_in_the_interpreter(name, every):
    """every: one case of so many runs."""
    tests, choices = RUNS[name]
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *tests.split(),
            "-k",
            " or ".join(f"({c})" for c in choices),
            "-p",
            "no:cacheprovider",
            "-p",
            "triton_interpreter",
            "--thorough",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "EVERY": str(every),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "tests"),
        },
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    summary = run.stdout.splitlines()[-1]
    assert " passed" in summary, summary
    print(summary)
