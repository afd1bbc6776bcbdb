"""Our layers pass; every bug of the catalogue is found and named; torch's own parallel modules are
examined."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, parallel

from conformance import wrong
from hybridpar.cli import main
from hybridpar.conformance import CASES, Built, Factory, conform
from hybridpar.conformance.ours import FACTORIES
from hybridpar.errors import ConfigError

pytestmark = pytest.mark.ranks

BUGS: dict[str, tuple[str, Factory, int, str]] = {
    "no sum over rows": ("mlp", wrong.mlp("sum"), 2, "output: ranks differ; right on none"),
    "no sum of the input's gradient": (
        "mlp",
        wrong.mlp("input"),
        3,
        "input gradient: every rank has a partial sum: an all-reduce",
    ),
    "no gradient of the input": (
        "mlp",
        wrong.of(lambda plain, x: plain(x.detach())),
        2,
        "input gradient: there is none",
    ),
    "no loss": (
        "loss",
        wrong.of(lambda plain, x, labels: 0 * plain(x, labels)),
        2,
        "output: off by -",
    ),
    "bias of every rank": ("mlp", wrong.mlp("bias"), 3, "output: down.bias is included 3 times"),
    "gradient summed twice": (
        "mlp",
        wrong.mlp("twice"),
        3,
        "gradient of up.weight: 3 times what it should be",
    ),
    "summed at every micro-batch": (
        "accumulated",
        wrong.accumulated,
        2,
        "gradient of up.weight: off by",
    ),
    "norm counts copies": (
        "block",
        wrong.block("twice"),
        3,
        "norm: what all ranks hold is counted 3 times",
    ),
    "norm leaves one out": (
        "block",
        wrong.block("norm.weight"),
        2,
        "norm: norm.weight is left out",
    ),
    "padding takes part": ("loss", wrong.of(wrong.padded), 2, "output: "),
    "denominator of all logits twice": (
        "loss",
        wrong.of(wrong.gathered),
        2,
        "output: off by 0.693147, log(2)",
    ),
    "smoothing of a share": ("smoothed_loss", wrong.of(wrong.smoothed), 2, "output: ranks differ"),
    "norm of a rank's rows": (
        "sequence_norm",
        wrong.of(lambda plain, x: plain(x)),
        3,
        "gradient of weight: every rank has a partial sum: an all-reduce over the ranks is missing",
    ),
    "mean of means": (
        "mean_loss",
        wrong.of(wrong.mean_of_means, finish=True, mean=True),
        2,
        "output: off by",
    ),
    "loss divided twice": (
        "mean_loss",
        wrong.of(lambda plain, x, y: plain(x, y) / 2, finish=True),
        1,
        "output: 0.5 times what it should be; input gradient: 0.5 times",
    ),
    "edge of a share": ("embedding", wrong.of(wrong.edge), 2, "output: off by"),
    "ends that are not summed": (
        "tied",
        lambda plain, group: wrong.Untied(plain),
        1,
        "gradient of embedding.weight: off by",
    ),
    "a scale of a rank's heads": ("attention", wrong.heads("scale"), 2, "output: off by"),
    "no mask": ("attention", wrong.heads("mask"), 2, "output: off by"),
    "the key of another group": (
        "grouped_attention",
        wrong.heads("key", grouped=True),
        1,
        "output: off by",
    ),
    "keys that two ranks hold": (
        "grouped_attention",
        wrong.heads("shared", grouped=True),
        4,
        "gradient of qkv.weight: ranks that hold the same rows have a part of it each: a sum",
    ),
    "a mask that begins anew": (
        "sequence_attention",
        wrong.rows_attention("mask"),
        3,
        "output: off by",
    ),
    "gradients of own keys alone": (
        "sequence_attention",
        wrong.rows_attention("backward"),
        3,
        "input gradient: off by",
    ),
    "weights of own rows alone": (
        "sequence_attention",
        wrong.rows_attention("weights"),
        2,
        "gradient of qkv.weight: every rank has a partial sum: an all-reduce over the ranks is",
    ),
    "documents that see each other": (
        "packed_attention",
        wrong.rows_attention("packed"),
        2,
        "output: off by",
    ),
    "dropped tokens": ("experts", wrong.experts("capacity"), 2, "output: off by"),
    "probabilities left out": ("experts", wrong.experts("weights"), 2, "output: off by"),
    "experts' gradients once a rank": (
        "experts",
        wrong.experts("twice"),
        3,
        "gradient of up: 3 times what it should be",
    ),
    "a router of own rows": (
        "experts",
        wrong.experts("router"),
        2,
        "gradient of router.weight: every rank has a partial sum",
    ),
    "balance of own rows": ("expert_losses", wrong.experts("own rows"), 2, "output: ranks differ"),
    "balance without gradient": (
        "expert_losses",
        wrong.experts("no gradient"),
        2,
        "gradient of router.weight: off by",
    ),
    "balance once a rank": (
        "expert_losses",
        wrong.experts("each"),
        3,
        "gradient of router.weight: off by",
    ),
    "masks of one's own": (
        "dropout_copies",
        lambda plain, group: wrong.OwnMasks(0.5),
        2,
        "mask: differs from rank to rank",
    ),
    "masks that repeat over ranks": (
        "dropout_rows",
        lambda plain, group: plain,
        2,
        "ranks 0 and 1 drop the same",
    ),
    "masks that repeat": (
        "dropout_copies",
        lambda plain, group: wrong.Repeated(0.5),
        1,
        "is the same at the next step",
    ),
    "another mask in the backward": (
        "dropout_copies",
        lambda plain, group: wrong.Recomputed(0.5),
        1,
        "in the backward differs",
    ),
    "not scaled": (
        "dropout_copies",
        lambda plain, group: Built(nn.Dropout(0.4)),
        1,
        "not scaled by 2.0",
    ),
}


@pytest.mark.thorough(keep=12)
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found_and_named(name: str) -> None:
    case, factory, num_ranks, looks = BUGS[name]
    (result,) = conform({case: factory}, [num_ranks])
    assert not result.ok
    assert not result.refused, result
    assert looks in str(result)


def test_every_case_has_a_bug() -> None:
    assert {case for case, *_ in BUGS.values()} == set(CASES)
    assert set(CASES) - set(FACTORIES) == {"packed_attention", "experts", "expert_losses"}, (
        "of which there is no layer"
    )


@pytest.mark.thorough
def test_ours_are_equal_to_one_process() -> None:
    assert [str(result) for result in conform(FACTORIES, [3]) if not result.ok] == []


def test_modules_without_bugs_are_equal() -> None:
    """The wrong ones, put right."""
    right = {
        "mlp": wrong.mlp(""),
        "block": wrong.block(""),
        "sequence_norm": wrong.of(lambda m, x: m(x), finish=True),
        "attention": wrong.heads(""),
        "grouped_attention": wrong.heads("", grouped=True),
        "sequence_attention": wrong.rows_attention(""),
        "packed_attention": wrong.rows_attention(""),
        "experts": wrong.experts(""),
        "expert_losses": wrong.experts(""),
    }
    assert [str(result) for result in conform(right, [4]) if not result.ok] == []


def torch_mlp(plain: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    return parallel.parallelize_module(plain, DeviceMesh.from_group(group, "cpu"), plan)  # type: ignore[arg-type]


def torch_embedding(plain: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    style = parallel.RowwiseParallel(input_layouts=Replicate())
    return parallel.parallelize_module(plain, DeviceMesh.from_group(group, "cpu"), style)


def torch_norm(plain: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    style = parallel.SequenceParallel(sequence_dim=0)
    return parallel.parallelize_module(plain, DeviceMesh.from_group(group, "cpu"), style)


def test_torchs_own_modules_are_equal() -> None:
    """In equal shares; it refuses others, as of 21 features on two ranks."""
    importlib.import_module("torch._dynamo")  # else every rank does
    results = [
        *conform({"mlp": torch_mlp}, [3]),
        *conform({"embedding": torch_embedding, "sequence_norm": torch_norm}, [2]),
    ]
    assert all(result.ok for result in results), [*map(str, results)]


def test_a_framework_that_refuses_is_not_wrong() -> None:
    def refusing(plain: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        raise ValueError(f"21 features on {group.size()} ranks")

    (result,) = conform({"mlp": refusing}, [2])
    assert (result.ok, result.findings, result.refused) == (
        False,
        (),
        "ValueError: 21 features on 2 ranks",
    )


@pytest.mark.thorough
def test_the_published_bug_of_label_smoothing_is_found_in_megatron_core() -> None:
    """7452 (1), in the version that the tests install. It computes in float32. In a process of its
    own: forks of one that has compiled may wait for ever in Megatron."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    tests = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-m", "conformance.megatron_loss"],
        cwd=tests,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tests.parent)},
    )
    assert run.returncode == 0, run.stderr
    *equal, wrong_one = run.stdout.splitlines()
    assert equal == ["0.0 on 1: equal", "0.0 on 2: equal", "0.1 on 1: equal"]
    assert "output: ranks differ" in wrong_one


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "given.py").write_text(
        "from torch import nn\nCASES = {'embedding': lambda plain, group: plain}\n"
        "WRONG = {'dropout_rows': lambda plain, group: plain}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["conform", "given:CASES", "--ranks", "1", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "embedding on 1: equal",
        "embedding on 2: equal",
    ]
    assert main(["conform", "given:WRONG", "--ranks", "2", "--json"]) == 1
    plain = json.loads(capsys.readouterr().out)
    assert plain["results"][0]["findings"][0]["what"] == "mask"
    assert main(["conform", "given:NONE"]) == 1
    assert "must be a module and the name of a dict in it" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"'nonesuch': unknown case\. Cases: mlp, "):
        conform({"nonesuch": lambda plain, group: plain})
