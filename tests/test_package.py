"""An installation's contents, and how setup.py behaves if something is missing."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridpar import native

ROOT = Path(__file__).parents[1]
needs_source = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="runs in a checkout")


def python(code, *, cwd, **env):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


def build(**env):
    """Asks setup.py for its name, which makes it decide what to build; returns exit status and
    stderr."""
    run = subprocess.run(
        [sys.executable, "setup.py", "--name"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=200,
        env={**os.environ, **env},
    )
    return run.returncode, run.stderr


def test_kernels_are_part_of_the_package(tmp_path):
    code = "import hybridpar.kernels as k, sys; print(k.__name__, 'kernels' in sys.modules)"
    for cwd in (tmp_path, ROOT):
        run = python(code, cwd=cwd, PYTHONPATH=str(ROOT))
        assert run.stdout.split() == ["hybridpar.kernels", "False"], run.stderr


def test_importing_loads_no_extension(tmp_path):
    code = (
        "import hybridpar.ops, hybridpar.random, sys; print([m for m in sys.modules if m == "
        "'hybridpar._C'])"
    )
    run = python(code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert run.stdout.strip() == "[]", run.stderr


def test_training_and_planning_need_no_source_system(tmp_path):
    code = """
import sys
sys.modules["scipy"] = sys.modules["networkx"] = None
import hybridpar.cli, hybridpar.train.job, hybridpar.checkpoint.huggingface, hybridpar.checkpoint.megatron
import hybridpar.planner.measuring.local_profile, hybridpar.planner.searching.search
rooms = ("hybridpar.placement", "hybridpar.memory_behaviour")
print([name for name, module in sys.modules.items() if name.startswith(rooms) or (
    module is not None and name.split(".")[0] in ("scipy", "networkx"))])
"""
    run = python(code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.parametrize("command", ["place", "graph"])
def test_a_command_without_its_extra_says_what_to_install(tmp_path, command):
    code = f"""
import sys
sys.modules["scipy"] = None
from hybridpar.cli import main
sys.exit(main(["{command}", "{ROOT / "scripts/configs/gpt_tiny.toml"}"]))
"""
    run = python(code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert run.returncode != 0
    assert (
        run.stderr.strip()
        .splitlines()[-1]
        .endswith(f"command = '{command}': requires scipy; try pip install 'hybridpar[placement]'")
    ), run.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("hybridpar._C") is None, reason="the extension is not built"
)
def test_the_checkout_knows_the_arguments_of_its_extension():
    importlib.import_module("hybridpar._C")
    assert native.arguments_digest() == native._EXPECTED, (
        "build it again; if it is new, put the left into native.py"
    )


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_extension_has_every_operator_on_the_cpu():
    for name in set(native.operators()) - {"attention_hopper"}:
        keys = ("CPU", "CompositeExplicitAutograd")
        assert any(
            torch._C._dispatch_has_kernel_for_dispatch_key(f"hybridpar::{name}", key)
            for key in keys
        ), name


def test_a_missing_or_old_extension_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "hybridpar._C", None)
    assert "not built" in native._load.__wrapped__()
    monkeypatch.setitem(sys.modules, "hybridpar._C", sys)
    monkeypatch.setattr(native, "operators", list)
    assert "build it again" in native._load.__wrapped__()


def test_a_recorder_that_cannot_be_used_is_a_reason(monkeypatch):
    def start():
        raise RuntimeError("another fallback is there\nat some place")

    monkeypatch.setitem(sys.modules, "hybridpar._C_recorder", None)
    assert "not built" in native._load_recorder.__wrapped__()
    module = SimpleNamespace(torch_version="2.0.0", start=start, Observer=object)
    monkeypatch.setitem(sys.modules, "hybridpar._C_recorder", module)
    assert "was built for torch 2.0.0, and this is 2" in native._load_recorder.__wrapped__()
    module.torch_version = torch.__version__.partition("+")[0]
    assert "build it again" in native._load_recorder.__wrapped__()
    module.Observer = SimpleNamespace(name_tensors=None)
    assert native._load_recorder.__wrapped__().endswith(
        "cannot be used with this torch (another fallback is there)"
    )


@needs_source
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"HYBRIDPAR_BUILD": "gpu"}, "must be one of auto, cpu, cuda, none"),
        ({"HYBRIDPAR_BUILD": "cuda", "CUDA_HOME": "/nowhere"}, "no nvcc (looked in /nowhere/bin"),
        (
            {"HYBRIDPAR_BUILD": "cuda", "HYBRIDPAR_CUDA_ARCHS": "9.0"},
            "must be compute capabilities of 8.0 or more",
        ),
        ({"HYBRIDPAR_BUILD": "cpu", "CXX": "/nowhere/c++"}, "no C++ compiler"),
    ],
)
def test_modes_that_cannot_be_met_fail_and_say_why(env, message):
    status, stderr = build(**env)
    assert status != 0, env
    assert message in stderr, (env, stderr)


@pytest.mark.thorough
@needs_source
def test_half_a_cuda_toolkit_fails_and_says_what_is_missing(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    status, stderr = build(HYBRIDPAR_BUILD="cuda", CUDA_HOME=str(tmp_path))
    assert status != 0
    assert f"the CUDA toolkit {tmp_path} lacks libcudart_static.a or cuda_runtime.h" in stderr


@pytest.mark.thorough
@needs_source
def test_auto_goes_on_without_nvcc_and_says_so(tmp_path):
    """A torch that has CUDA; its name is enough here."""
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch.version.cuda = '13.0'\n")
    status, stderr = build(HYBRIDPAR_BUILD="auto", PYTHONPATH=str(tmp_path), CUDA_HOME="/nowhere")
    assert status == 0, stderr
    assert "building without the compiled operators (hybridpar._C_cuda): no nvcc" in stderr


@pytest.mark.thorough
@needs_source
def test_auto_goes_on_without_a_compiler_and_says_so():
    status, stderr = build(HYBRIDPAR_BUILD="auto", CXX="/nowhere/c++")
    assert status == 0, stderr
    assert "building without the compiled operators (hybridpar._C): no C++ compiler" in stderr


@needs_source
def test_auto_goes_on_without_torch_and_says_so(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('hidden by the test')\n")
    status, stderr = build(HYBRIDPAR_BUILD="auto", PYTHONPATH=str(tmp_path))
    assert status == 0, stderr
    assert "torch cannot be imported at build time" in stderr


ONE_FAILS = """
import runpy, setuptools, sys
def setup(*, ext_modules, package_dir, real=setuptools.setup, **arguments):
    names = {"hybridpar._C": "csrc/module.c", "hybridpar._C_recorder": "csrc/nowhere.c"}
    if arguments["cmdclass"]["build_ext"].__name__ == "Tolerant":
        names["hybridpar._C_cuda"] = "csrc/nowhere.c"
    extensions = [setuptools.Extension(name, [source], optional="recorder" in name) for name, source in names.items()]
    real(ext_modules=extensions, package_dir={"hybridpar": target}, **arguments)
target = sys.argv.pop()
setuptools.setup = setup
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.mark.thorough
@needs_source
@pytest.mark.skipif(native.missing() is not None, reason="needs a compiler")
def test_a_build_leaves_out_failing_optional_parts(tmp_path):
    arguments = ("build_ext", "--inplace", "-b", tmp_path / "b", "-t", tmp_path / "t", tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", ONE_FAILS, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HYBRIDPAR_BUILD": "auto"},
    )
    assert run.returncode == 0, run.stderr
    for name in ("_C_recorder", "_C_cuda"):
        assert f"(hybridpar.{name}): the compilation failed" in run.stderr
        assert not list(tmp_path.glob(f"{name}.*"))
    assert len(list(tmp_path.glob("_C.*so"))) == 1


@needs_source
def test_none_builds_nothing_without_a_word():
    status, stderr = build(HYBRIDPAR_BUILD="none")
    assert status == 0
    assert "compiled operators" not in stderr
