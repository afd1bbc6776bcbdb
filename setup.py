"""Builds the compiled part, hybridpar._C, where the machine can. Everything else is in pyproject.toml.

HYBRIDPAR_BUILD   auto   (default) the CPU operators if torch and a C++ compiler are at hand; otherwise the package
                         installs without them, says why, and runs on plain torch
                  cpu    the CPU operators, or fail
                  cuda   the CPU and CUDA operators, or fail
                  none   no compiled part

torch must be importable at build time: pip install --no-build-isolation. The extension keeps to torch's stable ABI
(2.10) and Python's limited API (3.10), so one wheel serves every later version of both.
"""

import os
import shutil
import sys
import warnings
from glob import glob

from setuptools import find_packages, setup

MODES = ("auto", "cpu", "cuda", "none")
PACKAGE_DIR = {"hybridpar": "hybridpar", "hybridpar.kernels": "kernels"}
COMPILE = [
    "-O3", "-g0", "-std=c++17", "-Wall",
    "-fopenmp-simd",  # what makes `#pragma omp simd` count; threads come from torch
    "-fno-math-errno", "-fno-trapping-math",  # let loops vectorise; change no result
    "-ffp-contract=off",  # normal numbers promise equal bits on every machine, so no fused multiply-add may creep in
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
]


class CannotBuild(Exception):
    """The machine lacks something that the compiled part needs."""


def require_compiler():
    """Raises: CannotBuild if there is no C++ compiler."""
    command = os.environ.get("CXX", "c++").split()
    if not command or not shutil.which(command[0]):
        raise CannotBuild(f"no C++ compiler ({' '.join(command)!r} is not a program; set CXX)")


def cpu_extension():
    """The extension and the command that builds it.

    Raises: CannotBuild without torch or a compiler.
    """
    if sys.platform != "linux":
        raise CannotBuild(f"the compiled part is written for Linux, not {sys.platform}")
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        raise CannotBuild(f"torch cannot be imported at build time ({error}); add --no-build-isolation") from error
    require_compiler()
    extension = cpp_extension.CppExtension(
        "hybridpar._C", ["csrc/module.c", *sorted(glob("csrc/cpu/*.cpp"))], depends=sorted(glob("csrc/cpu/*.h")),
        extra_compile_args={"cxx": COMPILE}, extra_link_args=["-s"], py_limited_api=True,
    )
    return extension, cpp_extension.BuildExtension


def tolerant(build):
    """In auto mode a failed compilation must not fail the installation."""

    class Tolerant(build):
        def run(self):
            try:
                super().run()
            except Exception as error:
                skip(f"the compilation failed ({type(error).__name__}: {error})")
                self.extensions = self.distribution.ext_modules = []

    return Tolerant


def skip(reason):
    warnings.warn(f"hybridpar: building without the compiled operators: {reason}", stacklevel=2)


def compiled(mode):
    """The arguments of `setup` for the compiled part.

    Raises: SystemExit where a mode other than auto cannot be met.
    """
    if mode not in MODES:
        raise SystemExit(f"HYBRIDPAR_BUILD={mode}: must be one of {', '.join(MODES)}")
    if mode == "cuda" and not glob("csrc/cuda/*.cu"):
        raise SystemExit("HYBRIDPAR_BUILD=cuda: this version has no CUDA operators (csrc/cuda is empty); use cpu")
    if mode == "none":
        return {}
    try:
        extension, build = cpu_extension()
    except CannotBuild as reason:
        if mode != "auto":
            raise SystemExit(f"HYBRIDPAR_BUILD={mode}: {reason}") from None
        skip(reason)
        return {}
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": tolerant(build) if mode == "auto" else build},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(
    packages=[*find_packages(include=["hybridpar", "hybridpar.*"]), "hybridpar.kernels"],
    package_dir=PACKAGE_DIR,
    **compiled(os.environ.get("HYBRIDPAR_BUILD", "auto")),
)
