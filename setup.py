"""Builds the compiled parts _C, _C_recorder and _C_cuda where the machine can. The rest is in
pyproject.toml.

HYBRIDPAR_BUILD   auto   (default) the CPU operators if torch and a C++ compiler are at hand, and the CUDA operators if
                         torch has CUDA and nvcc is at hand too; otherwise the package installs
                         without them, says why, and runs on Triton and plain torch
                  cpu    the CPU operators, or fail
                  cuda   the CPU and CUDA operators, or fail; torch need not have CUDA
                  none   no compiled part
HYBRIDPAR_CUDA_ARCHS     the GPUs that the CUDA operators are compiled for (default "80;90a": A100,
                         H100 and H200). Any newer GPU, such as a B200 (100) or an RTX 5090 (120),
                         compiles what is for an older one when it loads the operators for the first
                         time. Attention is for 90a alone
CUDA_HOME                the CUDA toolkit, where nvcc is not on the PATH or in /usr/local/cuda
CXX                      the C++ compiler

torch must be importable at build time: pip install --no-build-isolation. The operators keep to
torch's stable ABI (2.10) and Python's limited API (3.10), so one wheel serves every later version
of both. The CUDA runtime is linked in. The recorder of memory events comes with the CPU operators.
It needs more of torch than is stable, so it serves the torch and the Python that it was built for;
with others, Python records.
"""

import os
import re
import shutil
import sys
import warnings
from glob import glob

from setuptools import find_packages, setup

MODES = ("auto", "cpu", "cuda", "none")
PACKAGE_DIR = {"hybridpar": "hybridpar", "hybridpar.kernels": "kernels"}
PLAIN = ["-O3", "-g0", "-Wall"]
COMPILE = [
    *PLAIN,
    "-std=c++17",
    "-fopenmp-simd",  # what makes `#pragma omp simd` count; threads come from torch
    "-fno-math-errno",
    "-fno-trapping-math",  # let loops vectorise; change no result
    # normal numbers promise equal bits on every machine, so no fused multiply-add may creep in
    "-ffp-contract=off",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
]

# What comes from static libraries stays inside. Some compilers link libstdc++ so; where its symbols
# meet those of another version, which torch has loaded, an error ends the process (seen: 13.3
# inside, 14.2 beside it).
LINK = ["-s", "-Wl,--exclude-libs,ALL"]


class CannotBuild(Exception):
    """The machine lacks something that a compiled part needs."""


def tools():
    """torch.utils.cpp_extension. Raises: CannotBuild without it, or without a compiler."""
    if sys.platform != "linux":
        raise CannotBuild(f"the compiled parts are written for Linux, not {sys.platform}")
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        raise CannotBuild(
            f"torch cannot be imported at build time ({error}); add --no-build-isolation"
        ) from error
    command = os.environ.get("CXX", "c++").split()
    if not command or not shutil.which(command[0]):
        raise CannotBuild(f"no C++ compiler ({' '.join(command)!r} is not a program; set CXX)")
    return cpp_extension


def toolkit():
    """The CUDA toolkit and its folder of libraries. Raises: CannotBuild if there is none, or a part
    is missing."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = os.path.realpath(shutil.which("nvcc") or "")
    places = [named] if named else ["/usr/local/cuda", os.path.dirname(os.path.dirname(found))]
    home = next((place for place in places if place and os.path.exists(f"{place}/bin/nvcc")), None)
    if home is None:
        where = (
            f"{named}/bin, where CUDA_HOME or CUDA_PATH points"
            if named
            else "/usr/local/cuda/bin and on the PATH"
        )
        raise CannotBuild(
            f"no nvcc (looked in {where}); set CUDA_HOME to the folder of the CUDA toolkit"
        )
    libraries = next(
        (
            f"{home}/{lib}"
            for lib in ("lib64", "lib", "targets/x86_64-linux/lib")
            if os.path.exists(f"{home}/{lib}/libcudart_static.a")
        ),
        None,
    )
    if libraries is None or not os.path.exists(f"{home}/include/cuda_runtime.h"):
        raise CannotBuild(
            f"the CUDA toolkit {home} lacks libcudart_static.a or cuda_runtime.h; install the "
            "development files of the CUDA runtime, or set CUDA_HOME to a toolkit with them"
        )
    return home, libraries


def architectures():
    """The GPUs to compile for. Raises: CannotBuild if they are not written as expected."""
    text = os.environ.get("HYBRIDPAR_CUDA_ARCHS", "80;90a")
    names = text.split(";")
    if not all(re.fullmatch(r"([89]\d|1\d\d)[af]?", name) for name in names):
        raise CannotBuild(
            f"HYBRIDPAR_CUDA_ARCHS={text!r}: must be compute capabilities of 8.0 or more, such as "
            "80;90a"
        )
    return names


def targets(names):
    """nvcc's arguments: machine code for each, and what newer GPUs can compile (PTX), which has no
    letter.

    Of each, as a GPU between two of them needs that of the older one.
    """
    numbers = sorted({int(name.rstrip("af")) for name in names})
    return [
        *(f"-gencode=arch=compute_{name},code=sm_{name}" for name in names),
        *(f"-gencode=arch=compute_{number},code=compute_{number}" for number in numbers),
    ]


def cpu_extension(cpp_extension):
    return cpp_extension.CppExtension(
        "hybridpar._C",
        ["csrc/module.c", *sorted(glob("csrc/cpu/*.cpp") + glob("csrc/placement/*.cpp"))],
        depends=sorted(glob("csrc/cpu/*.h")),
        extra_compile_args={"cxx": COMPILE},
        extra_link_args=LINK,
        py_limited_api=True,
    )


def recorder_extension(cpp_extension):
    return cpp_extension.CppExtension(
        "hybridpar._C_recorder",
        sorted(glob("csrc/recorder/*.cpp")),
        depends=sorted(glob("csrc/recorder/*.h")),
        extra_compile_args={"cxx": [*PLAIN, "-fvisibility=hidden"]},
        extra_link_args=LINK,
        optional=True,
    )


def cuda_extension(cpp_extension):
    """Raises: CannotBuild without a CUDA toolkit, or GPUs to compile for."""
    names = architectures()
    hopper = ["-DHYBRIDPAR_HOPPER"] if "90a" in names else []
    home, libraries = toolkit()
    cpp_extension.CUDA_HOME = home  # None in a torch without CUDA, for which this compiles too
    return cpp_extension.CppExtension(
        "hybridpar._C_cuda",
        [
            "csrc/cuda/module.c",
            *sorted(glob("csrc/cuda/*.cpp")),
            *sorted(glob("csrc/cuda/*.cu")),
        ],
        depends=sorted(glob("csrc/cuda/*.h") + glob("csrc/cuda/*.cuh")),
        include_dirs=[f"{home}/include"],
        extra_compile_args={
            "cxx": [*COMPILE, *hopper, "-fvisibility=hidden"],
            "nvcc": ["-O3", "-std=c++17", "-Xcompiler=-fvisibility=hidden", *targets(names)],
        },
        extra_link_args=[
            f"-L{libraries}",
            "-l:libcudart_static.a",
            "-lrt",
            "-lpthread",
            "-ldl",
            *LINK,
        ],
        py_limited_api=True,
    )


def sparing(build):
    """An optional extension that cannot be built is left out."""

    class Sparing(build):
        def build_extension(self, ext):
            try:
                super().build_extension(ext)
            except Exception as error:
                if not ext.optional:
                    raise
                skip(ext.name, f"the compilation failed ({type(error).__name__}: {error})")

    return Sparing


def tolerant(build):
    """In auto mode a failed compilation must not fail the installation: what was asked for last is
    left out first."""

    class Tolerant(build):
        def run(self):
            # which a run that fails leaves changed
            inplace = self.inplace
            compiler = self.compiler
            while self.extensions:
                self.inplace = inplace
                self.compiler = compiler
                try:
                    return super().run()
                except Exception as error:
                    skip(
                        self.extensions[-1].name,
                        f"the compilation failed ({type(error).__name__}: {error})",
                    )
                    self.extensions = self.distribution.ext_modules = self.extensions[:-1]

    return Tolerant


def skip(what, reason):
    part = "recorder" if what.endswith("_recorder") else "operators"
    warnings.warn(
        f"hybridpar: building without the compiled {part} ({what}): {reason}", stacklevel=2
    )


def compiled(mode):
    """The arguments of `setup` for the compiled parts.

    Raises: SystemExit where a mode other than auto cannot be met.
    """
    if mode not in MODES:
        raise SystemExit(f"HYBRIDPAR_BUILD={mode}: must be one of {', '.join(MODES)}")
    if mode == "none":
        return {}
    extensions = []
    try:
        cpp_extension = tools()
        extensions += [cpu_extension(cpp_extension), recorder_extension(cpp_extension)]
        if mode == "cuda" or (mode == "auto" and cpp_extension.torch.version.cuda):
            extensions.append(cuda_extension(cpp_extension))
    except CannotBuild as reason:
        if mode != "auto":
            raise SystemExit(f"HYBRIDPAR_BUILD={mode}: {reason}") from None
        skip("hybridpar._C_cuda" if extensions else "hybridpar._C", reason)
    if not extensions:
        return {}
    build = sparing(cpp_extension.BuildExtension)
    return {
        "ext_modules": extensions,
        "cmdclass": {"build_ext": tolerant(build) if mode == "auto" else build},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(
    packages=[*find_packages(include=["hybridpar", "hybridpar.*"]), "hybridpar.kernels"],
    package_dir=PACKAGE_DIR,
    **compiled(os.environ.get("HYBRIDPAR_BUILD", "auto")),
)
