"""A state saved by one grid and loaded by another is the same state, element by element."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint.grids import SCALER, differing, engines, fill, load_all, numbers, save_all
from hypothesis import example, given
from hypothesis import strategies as st

from hybridpar.checkpoint.folders import begin, publish
from hybridpar.checkpoint.format.manifest import TrainingState
from hybridpar.checkpoint.format.part import Part
from hybridpar.checkpoint.reshard import clip, find_pieces
from hybridpar.checkpoint.save import make_manifest
from hybridpar.checkpoint.saved import Saved
from hybridpar.config import Config, from_mapping
from hybridpar.errors import CheckpointError
from hybridpar.nn.placement import Init, Placement, Shard
from hybridpar.optim import ParameterSlot

ZEROS = Init("zeros")
SHARED = Shard(0, (((0, 4), (6, 8)), ((2, 7),), ((3, 5), (2, 3))))
MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 12,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 11,
    "seq_length": 5,
    "vocab_size": 13,
}


def make(parallel: dict[str, int], **sections: dict[str, Any]) -> Config:
    return from_mapping(
        {
            "model": MODEL | sections.pop("model", {}),
            "parallel": {"dp": 1} | parallel,
            "pipeline": {"num_microbatches": 4, **sections.pop("pipeline", {})},
            **sections,
        }
    )


# -- arithmetic


@st.composite
def placements(draw: st.DrawFn, shape: tuple[int, ...], dim: int) -> Placement:
    """Uneven, empty, overlapping and disordered splits among them; together they hold
    everything."""
    ranks = draw(st.integers(1, 4))
    if ranks == 1:
        return Placement(shape, ZEROS)
    ends = st.integers(0, shape[dim])
    spans = st.lists(st.tuples(ends, ends).map(lambda r: (min(r), max(r))), max_size=3)
    extra = [tuple(draw(spans)) for _ in range(ranks)]
    even = Shard.even(dim, shape[dim], ranks).ranges
    return Placement(
        shape, ZEROS, Shard(dim, tuple(a + b for a, b in zip(even, extra, strict=True)))
    )


@given(st.data())
def test_pieces_make_up_any_local_tensor(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    dim = data.draw(st.integers(0, len(shape) - 1))
    wanted = data.draw(placements(shape, dim))
    saved = data.draw(placements(shape, dim))
    whole = torch.arange(int(np.prod(shape))).view(shape)
    rank = data.draw(st.integers(0, len(wanted.shard.ranges) - 1 if wanted.shard else 3))
    expected = wanted.take(whole, rank).flatten()
    a = data.draw(st.integers(0, len(expected)))
    b = data.draw(st.integers(a, len(expected)))
    part = torch.full((b - a,), -1)
    for source, pieces in find_pieces(wanted, rank, saved).items():
        local = saved.take(whole, source).flatten()
        for there, here, count in clip(pieces, 1, (a, b)).tolist():
            assert (part[here : here + count] == -1).all(), "an element has one source"
            part[here : here + count] = local[there : there + count]
    assert torch.equal(part, expected[a:b])


def test_a_rank_reads_its_own_files_first() -> None:
    place = Placement((8, 3), ZEROS, SHARED)
    for rank in range(3):
        pieces = find_pieces(place, rank, place)
        assert list(pieces) == [rank]
        assert pieces[rank].tolist() == [[0, 0, 3 * SHARED.local_size(rank)]], "in one piece"


def test_rows_of_a_split_along_columns_are_pieces() -> None:
    halves, thirds = (Placement((2, 6), ZEROS, Shard.even(1, 6, n)) for n in (2, 3))
    assert {r: p.tolist() for r, p in find_pieces(thirds, 1, halves).items()} == {
        1: [[0, 1, 1], [3, 3, 1]],
        0: [[2, 0, 1], [5, 2, 1]],
    }


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        (Placement((8, 4), ZEROS), r"has shape \[8, 4\], but this model requires \[8, 3\]"),
        (Placement((8, 3), ZEROS, Shard.even(1, 3, 2)), "another dimension"),
        (
            Placement((8, 3), ZEROS, Shard(0, (((0, 2),), ((5, 8),)))),
            "2 to 4 of dimension 0 are missing",
        ),
    ],
)
def test_misfits_are_refused(saved: Placement, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        find_pieces(Placement((8, 3), ZEROS, Shard.even(0, 8, 2)), 0, saved)


# -- whole states

GRIDS = st.tuples(*[st.integers(1, 4)] * 3).filter(lambda g: g[0] * g[1] * g[2] <= 16)
MODELS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["gpt", "bert"]),
        "num_kv_heads": st.sampled_from([1, 2, 4]),
        "ffn_hidden_size": st.integers(3, 14),
        "vocab_size": st.integers(3, 21),
        "tie_embeddings": st.booleans(),
        "activation": st.sampled_from(["gelu", "swiglu"]),
        "position": st.sampled_from(["learned", "rotary"]),
        "num_layers": st.sampled_from([2, 3]),
    }
)
SPLITS = st.none() | st.randoms(use_true_random=False)  # the stages' sizes: by cost, or any
STATES = {
    "adamw": [("exp_avg", "exp_avg_sq")],
    "lamb": [("exp_avg", "exp_avg_sq")],
    "sgd": [("momentum",)],
    "muon": [("exp_avg", "exp_avg_sq"), ("momentum",)],
}
KEPT = st.sampled_from(
    [  # schedule, optimizer, staleness
        ("1f1b", "adamw", "none"),
        ("1f1b", "muon", "none"),
        ("1f1b", "adamw", "nesterov"),
        ("1f1b", "lamb", "none"),
        ("2bw", "adamw", "none"),
        ("2bw", "sgd", "none"),
        ("2bw", "muon", "extrapolation"),
        ("2bw", "lamb", "none"),
        ("2bw", "adamw", "prediction"),
        ("2bw", "adamw", "extrapolation"),
    ]
)


def sections(
    grid: tuple[int, int, int],
    zero: int,
    model: dict[str, Any],
    kept: tuple[str, str, str],
    dtype: str,
    random: Random | None = None,
) -> Config:
    tp, pp, dp = grid
    schedule, optimizer, staleness = kept
    model = model | {"hidden_size": 16 if model["position"] == "rotary" else 12}
    blocks = model.get("num_layers", MODEL["num_layers"]) + 2
    cuts = [0, *sorted(random.sample(range(1, blocks), pp - 1)), blocks] if random else [0]
    split = [b - a for a, b in pairwise(cuts)]
    return make(
        {"tp": tp, "pp": pp, "dp": dp, "zero": zero},
        model=model,
        pipeline={"schedule": schedule, "split": split},
        optim={"name": optimizer, "staleness": staleness},
        train={"dtype": dtype},
    )


def nothing_is_left_out(
    names: set[str], versions: list[int], tied: dict[str, str], kept: tuple[str, str, str]
) -> None:
    """All ranks together hold every weight of every version, and every state of the optimizer of
    every one.

    tied: what each parameter is called, and what it is one with: with ZeRO their states may be
    under either name.
    """
    _, optimizer, staleness = kept
    more = ("previous_update",) if staleness == "extrapolation" else ()
    states: dict[str, set[str]] = {one: set() for one in tied.values()}
    for name in names:
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            parameter, _, state = rest.rpartition(".")
            states[tied[parameter]].add(state)
    for name, one in tied.items():
        assert {f"weights/{version}/{name}" for version in versions} <= names
        assert states[one] in [{*states_of, *more} for states_of in STATES[optimizer]], name


GPT = {
    "kind": "gpt",
    "num_kv_heads": 2,
    "ffn_hidden_size": 11,
    "vocab_size": 13,
    "tie_embeddings": True,
    "activation": "gelu",
    "position": "learned",
}
PLAIN = ("2bw", "adamw", "none")


@pytest.mark.thorough
@given(
    GRIDS,
    GRIDS,
    st.integers(0, 1),
    st.integers(0, 1),
    MODELS,
    KEPT,
    st.sampled_from(["fp32", "bf16", "fp64"]),
    SPLITS,
    SPLITS,
)
@example((4, 4, 4), (3, 2, 4), 1, 1, GPT, PLAIN, "fp32", None, None)
@example((4, 1, 3), (1, 4, 3), 1, 1, GPT, PLAIN, "bf16", None, None)
@example((3, 4, 1), (2, 1, 4), 1, 1, GPT, ("2bw", "muon", "extrapolation"), "fp32", None, None)
@example(
    (1, 1, 1),
    (4, 3, 1),
    0,
    1,
    GPT | {"kind": "bert"},
    ("2bw", "adamw", "prediction"),
    "fp32",
    None,
    Random(1),
)
@example((4, 2, 1), (1, 1, 1), 1, 0, GPT | {"activation": "swiglu"}, PLAIN, "fp16", Random(2), None)
@example(
    (2, 2, 3),
    (1, 2, 1),
    0,
    1,
    GPT | {"vocab_size": 3},
    ("1f1b", "lamb", "none"),
    "fp32",
    None,
    None,
)
@example(
    (1, 1, 1),
    (1, 3, 4),
    0,
    1,
    GPT | {"vocab_size": 3},
    ("1f1b", "adamw", "none"),
    "fp32",
    None,
    None,
)
def test_every_tensor_and_moment_is_the_same_on_another_grid(
    before: tuple[int, int, int],
    after: tuple[int, int, int],
    zero_before: int,
    zero_after: int,
    model: dict[str, Any],
    kept: tuple[str, str, str],
    dtype: str,
    split_before: Random | None,
    split_after: Random | None,
) -> None:
    names: set[str] = set()
    tied: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        saved = save_all(
            Path(folder), sections(before, zero_before, model, kept, dtype, split_before)
        )
        for engine in load_all(saved, sections(after, zero_after, model, kept, dtype, split_after)):
            assert not differing(engine), engine.grid.describe()
            names |= engine.state.tensors().keys()
            tied |= {name: place.tied or name for name, place in engine.state.placements.items()}
            meta = engine.state_meta()
            assert (meta["batches_done"], meta["num_updates"]) == (5, 5)
            if dtype == "fp16":
                assert meta["loss_scaler"] == SCALER
            assert meta["loss_scales"] == {str(v): 2.0**v for v in meta["versions"]}
    nothing_is_left_out(names, meta["versions"], tied, kept)


def test_there_and_back_gives_equal_files(tmp_path: Path) -> None:
    first = make({"tp": 3, "pp": 2, "zero": 1})
    second = make({"pp": 3, "dp": 2})
    there = save_all(tmp_path / "first", first)
    for engine in load_all(there, second):
        assert not differing(engine)
    back = save_all(tmp_path / "back", first)
    for path in there.glob("*.safetensors"):
        assert path.read_bytes() == (back / path.name).read_bytes()


def test_only_files_with_what_a_rank_needs_are_opened(tmp_path: Path) -> None:
    folder = save_all(tmp_path, make({"tp": 2, "pp": 4}, model={"tie_embeddings": False}))
    for path in folder.glob("pp[02]-*"):
        path.unlink()
    saved = Saved(folder)
    engine = list(engines(make({"pp": 4}, model={"tie_embeddings": False})))[1]
    for name, place in engine.state.placements.items():
        assert torch.equal(
            saved.read(ParameterSlot(name, place), "weights", "5"),
            numbers(f"weights 5  {name}", place.shape).float(),
        )


# -- what a change of schedule or staleness means


def weights_are(folder: Path, config: Config, **tensors: str) -> None:
    """On all ranks: `weights/<version>` as the checkpoint's tensor of that name."""
    for engine in load_all(folder, config):
        store = engine.state.weights
        for name, place in engine.state.placements.items():
            for key, value in tensors.items():
                got = (
                    store.leaves_of(int(key[1:]))[name]
                    if key != "master"
                    else store.full_weights()[name]
                )
                whole = numbers(f"{value} {place.tied or name}", place.shape)
                assert torch.equal(got, place.take(whole, engine.grid.tp.rank).to(got.dtype)), (
                    name,
                    key,
                )


TWO = {"schedule": "2bw"}
ONE = {"schedule": "1f1b"}


def test_one_version_becomes_two_equal_ones(tmp_path: Path) -> None:
    folder = save_all(tmp_path, make({"tp": 2}, pipeline=ONE))
    after = make({"pp": 2}, pipeline=TWO)
    weights_are(folder, after, v4="weights 5 ", v5="weights 5 ")
    for engine in load_all(folder, after):
        assert engine.state_meta()["versions"] == [4, 5]
        assert engine.state_meta()["loss_scales"] == {"4": 32.0, "5": 32.0}
        assert not differing(engine, ignore=("weights/4",))


def test_newest_of_two_versions_becomes_one(tmp_path: Path) -> None:
    folder = save_all(tmp_path, make({"pp": 2}, pipeline=TWO))
    for engine in load_all(folder, make({"tp": 3}, pipeline=ONE)):
        assert not differing(engine)
        assert engine.state_meta()["versions"] == [5]


def test_pipedream_hands_on_its_newest_version(tmp_path: Path) -> None:
    """Its stages keep different numbers of versions."""
    pipedream = {"schedule": "pipedream", "num_microbatches": 1}
    folder = save_all(tmp_path, make({"pp": 3}, pipeline=pipedream))
    assert Saved(folder).manifest.state.versions == (5,)
    weights_are(folder, make({"pp": 2}, pipeline=TWO), v4="weights 5 ", v5="weights 5 ")
    weights_are(folder, make({"pp": 2, "tp": 2}, pipeline=pipedream), v5="weights 5 ")


def test_the_first_step_has_one_version(tmp_path: Path) -> None:
    folder = save_all(tmp_path, make({}, pipeline=ONE), step=0)
    for engine in load_all(folder, make({"pp": 2}, pipeline=TWO)):
        assert engine.state_meta()["versions"] == [0]


def test_a_run_that_does_not_predict_takes_the_master(tmp_path: Path) -> None:
    folder = save_all(
        tmp_path, make({"tp": 2, "zero": 1}, pipeline=TWO, optim={"staleness": "prediction"})
    )
    weights_are(folder, make({"pp": 2}, pipeline=TWO), v4="master  ", v5="master  ")
    weights_are(folder, make({"dp": 2, "zero": 1}, pipeline=ONE), v5="master  ")


def test_a_run_that_begins_to_predict_has_predicted_nothing_yet(tmp_path: Path) -> None:
    folder = save_all(tmp_path, make({"tp": 2, "zero": 1}, pipeline=ONE))
    predicting = make({"pp": 2}, pipeline=TWO, optim={"staleness": "prediction"})
    weights_are(folder, predicting, v4="weights 5 ", v5="weights 5 ", master="weights 5 ")


def test_a_state_that_the_old_run_had_not_begins_as_zero(tmp_path: Path) -> None:
    folder = save_all(tmp_path, make({"pp": 2, "zero": 1}, pipeline=TWO))
    for engine in load_all(
        folder, make({"tp": 2}, pipeline=TWO, optim={"staleness": "extrapolation"})
    ):
        assert all(name.endswith(".previous_update") for name in differing(engine))
        assert all(
            not t.any() for n, t in engine.state.tensors().items() if n.endswith(".previous_update")
        )


def test_a_state_that_the_old_run_must_have_had_is_missed(tmp_path: Path) -> None:
    """Were it taken as zero, damage would pass for a new optimizer."""
    config = make({})
    (engine,) = engines(config)
    fill(engine, 5)
    whole = engine.state.optimizer.state_tensors()
    engine.state.optimizer.state_tensors = lambda: {  # type: ignore[method-assign]
        name: t for name, t in whole.items() if name != "blocks.1.mlp.up.weight.exp_avg_sq"
    }
    aside = begin(tmp_path, 5)
    written = [Part.of(engine).write(aside)]
    folder = publish(
        aside, make_manifest(config, "", TrainingState.of(engine.state_meta()), written)
    )
    with pytest.raises(
        CheckpointError, match=r"has no optimizer exp_avg_sq of blocks\.1\.mlp\.up\.weight"
    ):
        list(load_all(folder, make({"tp": 2})))
