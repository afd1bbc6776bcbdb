"""The readers of configurations, and of what runs and plans leave behind."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import torch

from hybridpar.config import Config, load_toml, to_toml
from hybridpar.data.synthetic import SyntheticLoader
from hybridpar.errors import ConfigError
from hybridpar.grid import ProcessGrid
from hybridpar.job import JobPlan
from hybridpar.memory_behaviour.trace_file import read_trace
from hybridpar.placement import make_workload, read_document, read_split
from hybridpar.placement.piper import is_instance, make_instance
from hybridpar.planner.machines.cluster import read_cluster
from hybridpar.planner.measuring.profile_file import read_profile, write_profile
from hybridpar.train.bundle import Bundle, read_bundle
from hybridpar.train.continued import settings_of
from hybridpar.train.engine import Engine
from hybridpar.train.folder import find_run, measured
from hybridpar.train.reporting import trace
from hybridpar.train.reporting.costs_file import read_costs, run_costs, write_costs
from hybridpar.train.reporting.run_metrics import read_metrics
from hybridpar.validate import problems
from hybridpar.watch import Board, page

from .mutate import mutate_json, mutate_lines, mutate_toml
from .samples import (
    CHANGES,
    CLUSTER,
    INSTANCE,
    MEMORY,
    METRICS,
    PROFILE,
    RUN,
    SPLIT,
    TINY,
    WORKLOAD,
)
from .target import Target, folder_with


def make_configs(folder: Path) -> list[Path]:
    root = Path(__file__).parent.parent.parent / "scripts" / "configs"
    texts = [(root / name).read_text() for name in ("gpt_tiny.toml", "bert_large.toml")] + [
        to_toml(TINY)
    ]
    return [folder_with(folder / str(i), config__toml=text) for i, text in enumerate(texts)]


def read_config(folder: Path) -> None:
    config = load_toml(folder / "config.toml")
    problems(config, 8)
    to_toml(config)


def read_run(folder: Path) -> None:
    """State that a run reads when it resumes."""
    read_metrics(folder / "metrics.jsonl")
    here = replace(TINY, run=replace(TINY.run, dir=str(folder.parent), name=folder.name))
    measured(replace(here, pipeline=replace(here.pipeline, early_switch="auto")))
    find_run(here)

    with contextlib.suppress(ConfigError):
        settings_of(folder, 7, 4)


def make_runs(folder: Path) -> list[Path]:
    return [
        folder_with(
            folder / "run",
            config__toml=RUN,
            metrics__jsonl=METRICS,
            changes__jsonl=CHANGES,
            peaks__json=json.dumps({"a machine": 1e11}),
        )
    ]


def make_boards(folder: Path) -> list[Path]:
    return [
        folder_with(
            folder / "board", metrics__jsonl=METRICS, failures__jsonl=CHANGES, notes__jsonl=METRICS
        )
    ]


def make_bundles(folder: Path) -> list[Path]:
    bundle = Bundle(
        _grid(),
        7,
        {"lm": 2.5},
        float("nan"),
        "corpus",
        4,
        5,
        (6,),
        "non_finite",
        "the loss is nan",
        "skip",
        1e-3,
        1.0,
        "0123",
        ((5, 5), (5, 5)),
        (1.5, float("inf")),
        range(12, 12 + _grid().global_batch_size),
    )
    return [folder_with(folder / "anomalies", step_00000007__json=bundle.to_json())]


def _grid() -> Config:
    return replace(TINY, parallel=replace(TINY.parallel, pp=2, dp=2))


def make_costs(folder: Path) -> list[Path]:
    engine = Engine(JobPlan(TINY), ProcessGrid(), torch.device("cpu"))
    recorder = trace.Recorder(engine.executor, 0, 8)
    engine.train(
        SyntheticLoader(TINY.model, 1, 2), 8, lambda result: recorder.after_step(result.step)
    )
    recorder.close()
    costs = run_costs(JobPlan(TINY), trace.gather(recorder, engine.grid))
    assert costs is not None
    write_costs(costs, folder_with(folder / "costs") / "costs.json")
    return [folder / "costs"]


def make_profiles(folder: Path) -> list[Path]:
    (folder / "p").mkdir()
    write_profile(PROFILE, folder / "p" / "profile.json")
    return [folder / "p"]


def make_graphs(folder: Path) -> list[Path]:
    return [
        folder_with(folder / "w", graph__json=json.dumps(WORKLOAD), split__json=json.dumps(SPLIT)),
        folder_with(folder / "i", graph__json=json.dumps(INSTANCE), split__json="{}"),
    ]


def read_graph(folder: Path) -> None:
    document = read_document(folder / "graph.json")
    if is_instance(document):
        make_instance(document)
        return
    workload = make_workload(document)
    if workload.blocks is not None:
        workload.in_blocks()
    read_split(workload, folder / "split.json")


def make_clusters(folder: Path) -> list[Path]:
    return [folder_with(folder / str(i), cluster__toml=text) for i, text in enumerate(CLUSTER)]


def read_memory(folder: Path) -> None:
    _, spans = read_trace(folder / "memory.jsonl")
    for _ in spans:
        pass


TARGETS = (
    Target("configuration", make_configs, read_config, {".toml": mutate_toml}, share=0.5),
    Target(
        "run folder",
        make_runs,
        read_run,
        {".toml": mutate_toml, ".jsonl": mutate_lines, ".json": mutate_json},
        share=0.3,
    ),
    Target(
        "dashboard",
        make_boards,
        lambda folder: page(Board(folder)),
        {".jsonl": mutate_lines},
        share=0.5,
    ),
    Target(
        "replay bundle",
        make_bundles,
        lambda folder: read_bundle(folder / "step_00000007.json"),
        {".json": mutate_json},
    ),
    Target(
        "costs",
        make_costs,
        lambda folder: read_costs(folder / "costs.json"),
        {".json": mutate_json},
    ),
    Target(
        "profile",
        make_profiles,
        lambda folder: read_profile(folder / "profile.json"),
        {".json": mutate_json},
    ),
    Target(
        "graph", make_graphs, read_graph, {"graph.json": mutate_json, "split.json": mutate_json}
    ),
    Target(
        "cluster",
        make_clusters,
        lambda folder: read_cluster(folder / "cluster.toml"),
        {".toml": mutate_toml},
    ),
    Target(
        "memory trace",
        lambda folder: [folder_with(folder / "m", memory__jsonl=MEMORY)],
        read_memory,
        {".jsonl": mutate_lines},
    ),
)
