"""Our layers pass; every bug of the catalogue is found and named; torch's own parallel modules are examined."""

from __future__ import annotations

import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, parallel

from conformance import wrong
from hybridpar.cli import main
from hybridpar.conformance import CASES, Built, Case, Factory, conform
from hybridpar.conformance.cases import Layout, Loss
from hybridpar.conformance.ours import FACTORIES
from hybridpar.errors import ConfigError
from hybridpar.nn import split_ranges

pytestmark = pytest.mark.ranks

BUGS: dict[str, tuple[str, Factory, int, str]] = {
    "no sum over rows": ("mlp", wrong.mlp("sum"), 2, "output: ranks differ; right on none"),
    "no sum of the input's gradient": ("mlp", wrong.mlp("input"), 3,
                                       "input gradient: every rank has a part of it: a sum"),
    "no gradient of the input": ("mlp", wrong.of(lambda plain, x: plain(x.detach())), 2,
                                 "input gradient: there is none"),
    "no loss": ("loss", wrong.of(lambda plain, x, labels: 0 * plain(x, labels)), 2, "output: off by -"),
    "bias of every rank": ("mlp", wrong.mlp("bias"), 3, "output: down.bias is in it 3 times"),
    "gradient summed twice": ("mlp", wrong.mlp("twice"), 3, "gradient of up.weight: 3 times what it should be"),
    "summed at every micro-batch": ("accumulated", wrong.accumulated, 2, "gradient of up.weight: off by"),
    "norm counts copies": ("block", wrong.block("twice"), 3, "norm: what all ranks hold is counted 3 times"),
    "norm leaves one out": ("block", wrong.block("norm.weight"), 2, "norm: norm.weight is left out"),
    "padding takes part": ("loss", wrong.of(wrong.padded), 2, "output: "),
    "denominator of all logits twice": ("loss", wrong.of(wrong.gathered), 2, "output: off by 0.693147, log(2)"),
    "smoothing of a share": ("smoothed_loss", wrong.of(wrong.smoothed), 2, "output: ranks differ"),
    "norm of a rank's rows": ("sequence_norm", wrong.of(lambda plain, x: plain(x)), 3,
                              "gradient of weight: every rank has a part of it: a sum over the ranks is missing"),
    "mean of means": ("mean_loss", wrong.of(wrong.mean_of_means, finish=True, mean=True), 2, "output: off by"),
    "loss divided twice": ("mean_loss", wrong.of(lambda plain, x, y: plain(x, y) / 2, finish=True), 1,
                           "output: 0.5 times what it should be; input gradient: 0.5 times"),
    "edge of a share": ("embedding", wrong.of(wrong.edge), 2, "output: off by"),
    "ends that are not summed": ("tied", lambda plain, group: wrong.Untied(plain), 1,
                                 "gradient of embedding.weight: off by"),
    "masks of one's own": ("dropout_copies", lambda plain, group: wrong.OwnMasks(0.5), 2,
                           "mask: differs from rank to rank"),
    "masks that repeat over ranks": ("dropout_rows", lambda plain, group: plain, 2, "ranks 0 and 1 drop the same"),
    "masks that repeat": ("dropout_copies", lambda plain, group: wrong.Repeated(0.5), 1,
                          "is the same at the next step"),
    "another mask in the backward": ("dropout_copies", lambda plain, group: wrong.Recomputed(0.5), 1,
                                     "of the backward is another one"),
    "not scaled": ("dropout_copies", lambda plain, group: Built(nn.Dropout(0.4)), 1, "not scaled by 2.0"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found_and_named(name: str) -> None:
    case, factory, num_ranks, looks = BUGS[name]
    (result,) = conform({case: factory}, [num_ranks])
    assert not result.ok
    assert not result.refused, result
    assert looks in str(result)


def test_every_case_has_a_bug() -> None:
    assert {case for case, *_ in BUGS.values()} == set(CASES) == set(FACTORIES)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ours_are_equal_to_one_process(num_ranks: int) -> None:
    assert [str(result) for result in conform(FACTORIES, [num_ranks]) if not result.ok] == []


def test_modules_without_bugs_are_equal() -> None:
    """The wrong ones, put right."""
    right = {"mlp": wrong.mlp(""), "block": wrong.block(""), "sequence_norm": wrong.of(lambda m, x: m(x), finish=True)}
    assert [str(result) for result in conform(right, [3]) if not result.ok] == []


EVEN = 52
"""A vocabulary that two ranks share equally."""


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
    results = [*conform({"mlp": torch_mlp}, [3]),
               *conform({"embedding": torch_embedding, "sequence_norm": torch_norm}, [2])]
    assert all(result.ok for result in results), [*map(str, results)]


def test_a_framework_that_refuses_is_not_wrong() -> None:
    def refusing(plain: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        raise ValueError(f"21 features on {group.size()} ranks")

    (result,) = conform({"mlp": refusing}, [2])
    assert (result.ok, result.findings, result.refused) == (False, (), "ValueError: 21 features on 2 ranks")


def megatron_loss(plain: Any, group: dist.ProcessGroup) -> Built:
    """Megatron Core's own cross-entropy, over a vocabulary of equal shares."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=group.size())
    (start, stop), head = split_ranges(EVEN, group.size())[group.rank()], plain.head
    head.weight = nn.Parameter(head.weight[start:stop].detach().clone())
    head.bias = nn.Parameter(head.bias[start:stop].detach().clone())

    def forward(plain: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits, valid = head(wrong.Sum.apply(x, False, True)), labels >= 0
        with torch.compiler.set_stance("force_eager"):  # a fork may not compile
            losses = tensor_parallel.vocab_parallel_cross_entropy(logits, labels.clamp_min(0), plain.smoothing_given)
        return (losses * valid).sum() / valid.sum()

    return Built(wrong.Of(plain, forward), layout=lambda name, parameter: Layout(0))


def megatron_plain(smoothing: float) -> nn.Module:
    """Megatron's smoothing is shared by all other labels, torch's by all."""
    plain = Loss(smoothing * EVEN / (EVEN - 1), EVEN)
    plain.smoothing_given = smoothing
    return plain


def even_labels() -> tuple[torch.Tensor, ...]:
    x, labels = CASES["loss"].inputs()
    return x, labels.clamp_max(EVEN - 1)


def test_the_published_bug_of_label_smoothing_is_found_in_megatron_core() -> None:
    """7452 (1), in the version that the tests install. It computes in float32."""
    pytest.importorskip("megatron.core.tensor_parallel")
    cases = {f"{s}": Case(partial(megatron_plain, s), even_labels, "", "7452 (1)") for s in (0.0, 0.1)}
    without, smoothed = (conform({name: megatron_loss}, [1, 2], cases=cases, tolerance=1e-5) for name in cases)
    assert all(result.ok for result in [*without, smoothed[0]]), [*map(str, without), str(smoothed[0])]
    assert "output: ranks differ" in str(smoothed[1])


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "given.py").write_text("from torch import nn\nCASES = {'embedding': lambda plain, group: plain}\n"
                                       "WRONG = {'dropout_rows': lambda plain, group: plain}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["conform", "given:CASES", "--ranks", "1", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["embedding on 1: equal", "embedding on 2: equal"]
    assert main(["conform", "given:WRONG", "--ranks", "2", "--json"]) == 1
    plain = json.loads(capsys.readouterr().out)
    assert plain["results"][0]["findings"][0]["what"] == "mask"
    assert main(["conform", "given:NONE"]) == 1
    assert "must be a module and a dict of factories in it" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="'nonesuch': is no case; there are mlp, "):
        conform({"nonesuch": lambda plain, group: plain})
