"""Code compiled for AVX512-BF16 stays where only such CPUs come: functions that several files
define (templates, inline ones), of which the linker keeps one for all, must have none of its
instructions."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for path in (ROOT / "csrc" / "cpu").glob("*.cpp")
    if '#include "vectors.h"' in path.read_text()
)
INSTRUCTIONS = re.compile(r"%zmm|%k[0-7]|%[xy]mm(?:1[6-9]|[23]\d)\b")
pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions are those of x86"),
    pytest.mark.skipif(
        not (FILES and shutil.which("g++") and shutil.which("objdump")),
        reason="needs g++ and objdump",
    ),
]


def shared_functions(source: Path, folder: Path) -> dict[str, str]:
    """The code of the functions that the linker may take for another file's, by their names."""
    target = folder / f"{source.stem}.o"
    folders = [
        f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])
    ]
    # -O1: what -O3 would inline is there to be seen
    subprocess.run(
        [
            "g++",
            "-c",
            "-O1",
            "-std=c++17",
            "-fopenmp-simd",
            "-DTORCH_TARGET_VERSION=0x020a000000000000",
            *folders,
            str(source),
            "-o",
            str(target),
        ],
        check=True,
    )
    names = subprocess.run(["nm", str(target)], check=True, capture_output=True, text=True).stdout
    shared = {line.split()[-1] for line in names.splitlines() if re.search(r" [WVuT] ", line)}
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(target)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = re.findall(r"^[0-9a-f]+ <([^>]+)>:\n((?:.+\n)*)", listing, re.MULTILINE)
    return {name: code for name, code in found if name in shared}


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", FILES, ids=lambda path: path.stem)
def test_only_namespace_vectors_has_them(source, tmp_path):
    functions = shared_functions(source, tmp_path)
    with_them = [name for name, code in functions.items() if INSTRUCTIONS.search(code)]
    assert [name for name in with_them if not name.startswith("_ZN9hybridpar7vectors")] == []
    assert functions
