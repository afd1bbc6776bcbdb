"""`hybridpar profile` and `plan` from the command line, and a run that came from a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planner import made
from train.runs import write_config

from hybridpar.cli import main
from hybridpar.config import Launch, from_mapping, load_toml
from hybridpar.data import IndexedWriter
from hybridpar.planner.measuring import local_profile, measure_machine
from hybridpar.planner.measuring.profile import settings_of
from hybridpar.planner.measuring.profile_file import read_profile, write_profile

CLUSTER = (
    'servers = 2\ndevices_per_server = 4\ndevice = "a100-80gb"\ninner = "nvlink3"\nouter = '
    '"infiniband-hdr"\n'
)


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.ranks
def test_from_a_profile_to_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    profile = tmp_path / "profile.json"
    plan = tmp_path / "plan.toml"
    code, _, err = run(capsys, "profile", config, "--quick", "--ranks", 2, "--output", profile)
    assert code == 0, err
    measured = read_profile(profile)
    assert measured.tp_degrees == [1, 2]
    assert measured.settings == settings_of(load_toml(config))
    layer = measured.block("layer", 1, load_toml(config).train.micro_batch_size)
    assert min(layer.forward, layer.backward) > 0
    assert measured.block("layer", 2, 1).forward_messages
    assert measured.links["local"].reduce[2](1e6) > 0
    code, out, err = run(
        capsys, "plan", config, "--profile", profile, "--ranks", 1, "--output", plan
    )
    assert code == 0, err
    assert "tp=1 pp=1 dp=1" in out
    code, _, err = run(capsys, "train", plan, "--train.num_steps", 6)
    assert code == 0, err
    assert " planned)" in err


def test_check_says_before_a_run_that_a_link_is_too_slow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    cluster = tmp_path / "cluster.toml"
    slow = "{ gbit_per_s = 0.1, back_gbit_per_s = 0.001, latency_us = 5000, share = 1.0 }"
    cluster.write_text(
        CLUSTER.replace('"infiniband-hdr"', slow).replace("server = 4", "server = 1")
    )
    flags = ("check", config, "--train.dtype", "bf16", "--parallel.pp", 2, "--cluster", cluster)
    code, out, err = run(capsys, *flags, "--json")
    assert code == 0, err
    found = json.loads(out)
    stages = found["links"][0]
    assert stages["gives"] == pytest.approx(1e6 / 8, rel=1e-3)  # a byte counts as latency
    assert stages["factor"] > 1.9
    base = load_toml(config)
    sent = (
        2 * base.train.micro_batch_size * base.model.seq_length * base.model.hidden_size * 8 / 1e6
    )
    assert found["step_ms"] > 1e3 * base.pipeline.num_microbatches * sent, (
        "the slower way alone takes so long"
    )
    code, out, err = run(capsys, *flags)
    assert code == 0, err
    assert "predicted time of a step" in out
    assert "stages 0 - 1: " in out
    assert "1 Mbit/s available: link-bound by " in out


def test_a_plan_for_a_cluster_and_its_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    cluster = tmp_path / "cluster.toml"
    plan = tmp_path / "plan.toml"
    cluster.write_text(CLUSTER)
    bf16 = ("--train.dtype", "bf16", "--cluster", cluster)
    code, out, err = run(
        capsys,
        "plan",
        config,
        *bf16,
        "--batch_size",
        16,
        "--grid",
        "pp=2",
        "--output",
        plan,
        "--json",
        "--svg",
        tmp_path / "plan.svg",
    )
    assert code == 0, err
    found = json.loads(out)
    assert {row["pp"] for row in found["ranked"]} == {2}
    assert any(line.startswith("links: ") for line in found["assumptions"])
    assert (
        "each of the 2 servers, R = 0 to 1: torchrun --nnodes 2 --node-rank R --nproc-per-node 4 "
        in err
    )
    assert "  stages 0 - 1: " in err, "what its links need and give"
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    code, out, err = run(
        capsys, "simulate", plan, "--cluster", cluster, "--json", "--perfetto", tmp_path / "t.json"
    )
    assert code == 0, err
    assert json.loads(out)["ranks"] == 8
    assert json.loads(out)["step_time"] == pytest.approx(
        load_toml(plan).plan.step_ms / 1e3, rel=1e-3
    )
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_packed_documents_cost_what_they_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token file says how long its documents are; of text it is a setting."""
    config = write_config(tmp_path)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    with IndexedWriter(tmp_path / "tokens", "int32") as writer:
        for _ in range(100):
            writer.add(np.ones(4, np.int32))
            writer.end_sequence()
            writer.end_document()
    flags = (config, "--cluster", cluster, "--train.dtype", "bf16", "--data.packing", "stream")
    tokens = ("--data.corpus", tmp_path / "tokens")
    times = []
    for more in ((), ("--data.document_length", 4), tokens):
        code, out, err = run(capsys, "simulate", *flags, *more, "--json")
        assert code == 0, err
        times.append(json.loads(out)["step_time"])
    assert times[1] == times[2] < times[0]
    flops = []
    for more in ((), tokens):
        code, out, err = run(capsys, "check", *flags, *more, "--json")
        assert code == 0, err
        flops.append(json.loads(out)["training_flops_per_token"])
    model = load_toml(config).model
    forward = 2 * model.num_layers * model.hidden_size * model.seq_length
    left = round(forward * 5 / (model.seq_length + 1))
    assert flops[0] - flops[1] == 3 * (forward - left)
    plan = ("plan", *flags, *tokens, "--ranks", 2, "--output", tmp_path / "plan.toml", "--json")
    code, out, err = run(capsys, *plan)
    assert code == 0, err
    assert json.loads(out)["assumptions"][0] == "documents of 4 tokens (data.document_length)"
    assert load_toml(tmp_path / "plan.toml").data.document_length == 4


def test_measured_times_that_cannot_be_kept_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, config = made.profile(made.config()), write_config(tmp_path)
    monkeypatch.setattr(local_profile, "measure_machine", lambda *args, **options: measured)
    found = local_profile.cached_profile(
        from_mapping({"data": {"cache": str(config / "x")}}), Launch(0, 0, 1, 1)
    )
    assert found is measured
    assert (
        "cannot be written (Not a directory), so these times are not kept"
        in capsys.readouterr().err
    )


@pytest.mark.thorough
def test_a_plan_of_a_busy_machine_is_not_trusted_to_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    profile = tmp_path / "profile.json"
    plan = tmp_path / "plan.toml"
    quiet = made.profile(load_toml(config), cores=2)
    for efficiency, said in ((0.6, True), (0.97, False)):
        write_profile(
            replace(quiet, hardware=replace(quiet.hardware, efficiency=efficiency)), profile
        )
        for brief in ((), ("--brief",)):
            code, out, err = run(
                capsys, "plan", config, "--profile", profile, "--ranks", 1, "--output", plan, *brief
            )
            assert code == 0, err
            assert (
                "other programs took 40 % of the cores while this machine was measured" in err
            ) == said
            assert f"measured with {100 * efficiency:.0f}% of the cores" in (err if brief else out)
        assert load_toml(plan).plan.cores_taken == pytest.approx(1 - efficiency)
        code, _, err = run(
            capsys, "train", plan, "--run.name", said, "--train.num_steps", 6, "--verbose"
        )
        assert code == 0, err
        share = 40 if said else 3
        (line,) = [line for line in err.splitlines() if "plan: a step takes" in line]
        assert line.endswith(
            f"%); other programs took {share} % of the cores while it was measured"
        )


def test_errors_are_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    profile = tmp_path / "profile.json"
    write_profile(made.profile(made.config()), profile)
    for args, message in (
        (("--profile", profile), "does not match the profile, which was made with"),
        (("--profile", tmp_path / "none.json"), "does not exist"),
        (("--cluster", tmp_path / "none.toml"), "cannot be read"),
        (("--ranks", -1), "ranks = -1: must be at least 0 and at most"),
        (("--svg", config / "plan.svg"), "cannot be written (Not a directory); try"),
        (("--svg", profile, "--profile", profile), "is what is read, and would be lost; try"),
        (("--svg", tmp_path / "plan.toml"), "is what output writes; try"),
        (("--grid", "tp=x"), "must give the sizes of tp, cp, pp, dp and ep"),
        (("--grid", "cp=9"), "parallel.cp = 9: must be at most"),
    ):
        code, out, err = run(capsys, "plan", config, *args, "--output", tmp_path / "plan.toml")
        assert code == 1
        assert message in err
        assert "Traceback" not in err
        assert not out
    assert not (tmp_path / "plan.toml").exists()


@pytest.mark.thorough
def test_check_prices_the_devices_of_a_cluster_or_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    flags = ("check", config, "--train.device", "cuda", "--train.dtype", "bf16")
    hosted = ("--memory.host_optimizer", "true")
    for extra in ((), hosted):
        code, out, err = run(capsys, *flags, *extra)
        assert code == 0, err
        assert "no step time is predicted, as no --cluster or --profile says which GPUs" in out
        assert " ms" not in out
    code, out, err = run(capsys, *flags, *hosted, "--cluster", cluster)
    assert code == 0, err
    assert "no step time is predicted: memory.host_optimizer = 'true': has known costs on" in out
    assert "predicted peak memory" in out
    code, out, err = run(capsys, *flags, *hosted, "--cluster", cluster, "--json")
    assert json.loads(out)["step_ms"] is None
    code, out, err = run(capsys, *flags, "--cluster", cluster)
    assert "tokens/s, MFU " in out


@pytest.mark.thorough
def test_plan_says_which_axes_it_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    flags = ("plan", config, "--train.dtype", "bf16", "--cluster", cluster, "--batch_size", 8)
    output = ("--output", tmp_path / "plan.toml")
    code, out, err = run(capsys, *flags, *output, "--parallel.pp", 2, "--grid", "tp=2")
    assert code == 0, err
    assert "kept as given, so not searched: pp = 2 (parallel.pp), tp = 2 (--grid)" in out
    assert "MFU" in out
    code, out, err = run(capsys, *flags, *output, "--grid", "tp=1,pp=2,dp=4", "--json")
    assert json.loads(out)["kept"] == {"tp": 1, "pp": 2, "dp": 4}
    assert json.loads(out)["ranked"][0]["mfu"] > 0


@pytest.mark.parametrize(("efficiency", "is_quiet"), [(0.24, False), (0.95, True)])
def test_a_profile_of_a_busy_machine_says_so(
    efficiency: float,
    is_quiet: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = write_config(tmp_path)
    measured = made.profile(load_toml(config), cores=2)
    measured = replace(measured, hardware=replace(measured.hardware, efficiency=efficiency))
    monkeypatch.setattr(measure_machine, "measure_machine", lambda *_, **__: measured)
    output = tmp_path / "profile.json"
    code, out, err = run(capsys, "profile", config, "--output", output, "--json")
    assert code == 0, err
    assert json.loads(out)["was_quiet"] is is_quiet
    assert ("other programs took 76 % of the cores" in err) is not is_quiet
    assert ("profile again when they are done" in err) is not is_quiet
    assert read_profile(output).hardware.was_quiet is is_quiet
