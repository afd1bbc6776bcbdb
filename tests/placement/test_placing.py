"""`hybridpar graph` and `place` from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planner import made
from train.runs import write_config

from hybridpar.cli import main
from hybridpar.config import load_toml
from hybridpar.placement import make_workload, read_workload
from hybridpar.planner.measuring.profile_file import write_profile

from .graphs import document

PIPER = {
    "maxMemoryPerDevice": 10e9,
    "maxDevices": 2,
    "bandwidth": 1e12,
    "mbsInBatch": 8,
    "nodes": [
        {
            "id": v,
            "name": "layer",
            "TMPCs": {
                "1": [
                    {
                        "id": "vanilla",
                        "timePerSample": 1.0,
                        "parameterSize": 8e9,
                        "memoryUsageA": 0,
                        "memoryUsageB": 8e9,
                        "syncTimeFw": {"0": 0} if v else {},
                        "syncTimeBw": {} if v else {"1": 0},
                    }
                ]
            },
        }
        for v in range(2)
    ],
    "edges": [{"sourceId": 0, "destId": 1, "communicationCost": 0}],
}


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, out, err


def put(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


@pytest.mark.thorough
def test_from_a_configuration_to_a_placement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    graph = tmp_path / "graph.json"
    out = tmp_path / "placement.json"
    code, said, err = run(
        capsys,
        "graph",
        config,
        "--training",
        "--train.dtype",
        "bf16",
        "--device",
        "v100-16gb",
        "--link",
        "nvlink2",
        "--accelerators",
        2,
        "--output",
        graph,
        "--json",
    )
    assert code == 0, err
    about = json.loads(said)
    assert about["estimated"]
    workload = read_workload(graph)
    assert (workload.num_nodes, workload.num_accelerators) == (about["nodes"], 2)
    assert workload.accelerator_time.sum() == pytest.approx(
        about["forward_ms"] + about["backward_ms"]
    )
    code, said, err = run(capsys, "place", graph, "--solver", "dp", "--output", out, "--json")
    assert code == 0, err
    found = json.loads(said)
    assert found["contiguous"]
    assert found["proven"]
    code, said, err = run(capsys, "place", graph, "--solver", "expert", "--split", out)
    assert code == 0, err
    assert f"expert: largest load {found['objective']:.6g}" in said
    assert "bf16 on v100-16gb; estimated times of blocks, in ms" in said
    assert "layers" in said


@pytest.mark.thorough
def test_a_graph_by_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    profile = tmp_path / "profile.json"
    graph = tmp_path / "graph.json"
    write_profile(made.profile(load_toml(config), layer=0.5, head=2.0, cores=2), profile)
    code, said, err = run(capsys, "graph", config, "--profile", profile, "--output", graph)
    assert code == 0, err
    assert "measured times of blocks" in said
    layers = load_toml(config).model.num_layers
    b = load_toml(config).train.micro_batch_size
    assert read_workload(graph).accelerator_time.sum() == pytest.approx(
        1e3 * b * (0.5 * layers + 2.0)
    )


def test_other_devices_than_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = put(
        tmp_path / "g.json",
        document(6, [(v, v + 1) for v in range(5)], k=6, num_cpus=0, memory=3e9),
    )
    code, said, _ = run(
        capsys,
        "place",
        graph,
        "--accelerators",
        2,
        "--cpus",
        1,
        "--memory-gb",
        0.000000002,
        "--json",
    )
    assert code == 0
    found = json.loads(said)
    assert (len(found["fpgas"]), len(found["cpus"])) == (2, 1)
    assert max(found["memory"][:2]) <= 2
    assert found["cpus"][0]["nodes"]
    code, said, _ = run(capsys, "place", graph)
    assert code == 0
    assert "6 of 6 devices used" in said


def test_pipers_instances_go_to_pipers_planner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = put(tmp_path / "p.json", PIPER)
    out = tmp_path / "stages.json"
    code, said, err = run(capsys, "place", graph, "--output", out)
    assert code == 0, err
    assert "piper: 1 s a micro-batch" in said
    assert "equi: 1 s a micro-batch" in said
    assert "runs such stages: parallel.tp=1 parallel.pp=2 parallel.dp=1" in said
    assert [stage["nodes"] for stage in json.loads(out.read_text())["stages"]] == [
        {"0": "vanilla"},
        {"1": "vanilla"},
    ]
    code, said, _ = run(capsys, "place", graph, "--memory-gb", 16, "--json", "--solver", "equi")
    assert code == 0
    assert json.loads(said)["timePerSample"] == 1
    code, said, _ = run(capsys, "place", graph, "--max-ideals", 2)
    assert code == 0
    assert "more than 2 downsets: this is the best of one order of the layers" in said
    code, said, _ = run(capsys, "place", graph, "--accelerators", 1)
    assert code == 1
    assert "piper: nothing fits 1 devices of 10 GB" in said
    uneven = json.loads(json.dumps(PIPER))
    uneven["nodes"][1]["TMPCs"]["1"][0]["timePerSample"] = 2.0
    code, said, _ = run(capsys, "place", put(tmp_path / "u.json", uneven), "--accelerators", 3)
    assert code == 0
    assert "stages differ in replicas or tensor ranks" in said


def test_errors_are_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = document(2, [(0, 1)])
    around = good | {"edges": [*good["edges"], {"sourceId": 1, "destId": 0, "cost": 0.0}]}
    files = {
        name: put(tmp_path / f"{name}.json", value)
        for name, value in {
            "good": good,
            "around": around,
            "list": [],
            "piper": PIPER,
            "half": {"maxDevices": 3},
        }.items()
    }
    (tmp_path / "text.json").write_text("{")
    make_workload(good)
    for args, message in (
        ((tmp_path / "none.json",), "cannot be read"),
        ((tmp_path / "text.json",), "is not JSON"),
        ((files["around"],), "is a cycle"),
        ((files["list"],), "hybridpar: workload = []: must be a JSON object"),
        ((files["half"],), "maxMemoryPerDevice = None"),
        ((files["good"], "--solver", "best"), "solver = 'best': must be one of"),
        ((files["good"], "--solver", "expert"), "try --split SPLIT.json"),
        (
            (files["good"], "--split", files["good"]),
            "supported with --solver expert only; try --solver expert",
        ),
        ((files["good"], "--solver", "expert", "--split", files["list"]), "hybridpar: split = []"),
        ((files["good"], "--output", tmp_path), "is a folder, not a file"),
        ((files["good"], "--output", files["good"]), "is what is read, and would be lost; try"),
        ((files["piper"], "--max-ideals", 1), "max_ideals = 1"),
        ((tmp_path,), "cannot be read (Is a directory)"),
        ((files["good"], "--accelerators", -1), "maxFPGAs = -1"),
        ((files["good"], "--cpus", -2), "maxCPUs = -2"),
        ((files["good"], "--time_limit", 0), "time_limit = 0.0"),
        ((files["piper"], "--solver", "dp"), "which only the solvers piper and equi take"),
        ((files["piper"], "--cpus", 1), "Piper, which places on accelerators only"),
    ):
        code, out, err = run(capsys, "place", *args)
        assert code == 1
        assert message in err
        assert "Traceback" not in err
        assert not out


def test_models_without_a_graph_are_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    graph = tmp_path / "graph.json"
    for args, message in (
        (("--device", "abacus"), "device = 'abacus': must be one of"),
        (("--link", "string"), "link = 'string'"),
        ((), "train.dtype = 'fp32': estimated profiles support bf16 and fp16 only"),
        (("--train.dtype", "bf16", "--accelerators", 1), "accelerators = 1"),
        (("--train.dtype", "bf16", "--accelerators", -1), "accelerators = -1"),
        (("--train.dtype", "bf16", "--parallel.tp", 2), "parallel.tp = 2"),
    ):
        code, out, err = run(capsys, "graph", config, *args, "--output", graph)
        assert code == 1
        assert message in err
        assert "Traceback" not in err
        assert not out
    assert not graph.exists()
