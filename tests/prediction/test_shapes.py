"""Rules for results of operators say what torch's meta kernels say, and save their imports."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridpar.prediction.shapes import result_of

META = torch.device("meta")
aten = torch.ops.aten


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    found = [x for arg in args for x in (arg if isinstance(arg, list) else [arg])]
    return [x for x in found if isinstance(x, Tensor)]


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mm.default, (_meta(3, 4), _meta(5, 4).t())),
        (aten.bmm.default, (_meta(2, 3, 4), _meta(2, 4, 5))),
        (aten.addmm.default, (_meta(5), _meta(3, 4), _meta(5, 4).t())),
        (aten.add.Tensor, (_meta(2, 3, 4), _meta(3, 4))),
        (aten.sub.Tensor, (_meta(2, 1, 4), _meta(3, 1))),
        (aten.mul.Tensor, (_meta(2, 3), 2.5)),
        (aten.mul.Tensor, (_meta(2, 3), _meta(2, 3, dtype=torch.int64))),
        (aten.div.Tensor, (_meta(1, 3).expand(2, 3), _meta(2, 3))),
        (aten.div.Tensor, (_meta(2, 6)[:, :3], _meta())),
        (aten.exp.default, (_meta(2, 3),)),
        (aten.zeros_like.default, (_meta(2, 3, dtype=torch.float32),)),
        (aten.sum.dim_IntList, (_meta(2, 3, 4), [0], True)),
        (aten.sum.dim_IntList, (_meta(2, 3, 4), [-1, 0])),
        (aten.sum.dim_IntList, (_meta(2, 3, 4), [])),
        (aten.cat.default, ([_meta(2, 3), _meta(5, 3)],)),
        (aten.cat.default, ([_meta(2, 3), _meta(2, 1)], -1)),
        (aten.stack.default, ([_meta(2, 3), _meta(2, 3)], -1)),
        (aten.embedding.default, (_meta(9, 3), _meta(2, 4, dtype=torch.int64))),
        (aten.index.Tensor, (_meta(9, 3), [torch.tensor([1, 0], device=META)])),
        (aten.slice_backward.default, (_meta(2, 1), [2, 4], 1, 0, 1, 1)),
    ],
)
def test_a_rule_says_what_the_meta_kernel_says(func: Any, args: tuple[Any, ...]) -> None:
    found = result_of(func, args, {}, _tensors(args))
    expected = func(*args)
    assert found is not None
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert (found.dtype, found.device) == (expected.dtype, META)


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (aten.relu.default, (_meta(2),), {}),
        (aten.add.Tensor, (_meta(2), _meta(2, dtype=torch.float32)), {}),
        (aten.add.Tensor, (_meta(2, 3).t(), _meta(3, 2)), {}),
        (aten.div.Tensor, (_meta(2, dtype=torch.int64), 2), {}),
        (aten.sum.dim_IntList, (_meta(2), [0]), {"dtype": torch.float32}),
        (aten.cat.default, ([_meta(0), _meta(2, 3)],), {}),
        (aten.index.Tensor, (_meta(2, 3), [None, _meta(2, dtype=torch.int64)]), {}),
    ],
    ids=["no rule", "dtypes", "order", "integers", "another dtype", "empty", "later dimension"],
)
def test_other_results_are_left_to_torch(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert result_of(func, args, kwargs, _tensors(args)) is None


def test_a_prediction_imports_no_compiler() -> None:
    code = """
import sys
from hybridpar.config import Config, ModelConfig, ParallelConfig
from hybridpar.job import JobPlan
from hybridpar.prediction import predict
small = ModelConfig(num_layers=2, hidden_size=32, num_heads=2, seq_length=16, vocab_size=64)
predict(JobPlan(Config(model=small, parallel=ParallelConfig(dp=1))))
sys.exit(", ".join({"sympy", "torch._dynamo"} & {*sys.modules}) or 0)"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
