"""The command line: flags over the file over the defaults, and for each thing that can be wrong one
clear message."""

from __future__ import annotations

import contextlib
import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from train.runs import write_config, write_corpus

from hybridpar.cli import main
from hybridpar.cli.commands import COMMANDS
from hybridpar.cli.entry import flags_of, parse
from hybridpar.cli.values import parse_grid
from hybridpar.config import Config
from hybridpar.data import prepare
from hybridpar.errors import ConfigError


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def fails(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    """The message of a command that must fail with 1, without a traceback and with nothing on
    stdout."""
    assert main([str(a) for a in args]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert "Traceback" not in err
    return err


def refuses(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    """The message about a command line that must be refused with 2."""
    with pytest.raises(SystemExit) as exit_:
        main([str(a) for a in args])
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    return out + err


def test_flags_come_over_the_file_and_the_file_over_the_defaults(config: Path) -> None:
    command = parse(
        [
            "train",
            str(config),
            "--parallel.tp",
            "2",
            "--optim.lr=0.5",
            "--model.tie_embeddings",
            "False",
            "--data.corpus",
            "a",
            "b",
            "--json",
        ]
    )
    assert (command.config.parallel.tp, command.config.optim.lr) == (2, 0.5)
    assert command.config.model.num_layers == 2  # the file's
    assert command.config.model.init_std == Config().model.init_std
    assert command.config.model.tie_embeddings is False
    assert command.config.data.corpus == ("a", "b")
    assert command.json


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--model.bias"], True),
        (["--model.bias", "true"], True),
        (["--model.bias", "True"], True),
        (["--model.bias=false"], False),
        (["--model.bias", "FALSE"], False),
        (["--model.bias", "False", "--json"], False),
    ],
)
def test_booleans_are_written_as_anyone_writes_them(
    config: Path, words: list[str], value: bool
) -> None:
    assert parse(["train", str(config), *words]).config.model.bias is value


def test_every_key_of_the_configuration_is_a_flag_of_train(config: Path) -> None:
    flags = flags_of(COMMANDS["train"], Config())
    own = {"json", "ranks", "inject", "verbose"}
    assert {"model.hidden_size", "optim.betas", "run.name", *own} <= flags
    usual: dict[str, Any] = {}
    for flag in flags - own - {"data.valid_sets"}:  # a table, whose names are part of its flags
        section, key = flag.split(".")
        usual[flag] = getattr(getattr(Config(), section), key)
    given = [
        text
        for flag, value in usual.items()
        for text in (f"--{flag}", *(map(str, value) if isinstance(value, tuple) else [str(value)]))
    ]
    read = parse(["train", str(config), *given]).config
    for flag, value in usual.items():
        section, key = flag.split(".")
        assert getattr(getattr(read, section), key) == value


def test_help_needs_no_torch() -> None:
    script = (
        "import sys; from hybridpar.cli import main\nfor command in sys.argv[1:]:\n"
        "    try: main([*command.split(), '--help'])\n    except SystemExit: pass\n"
        "    assert 'torch' not in sys.modules, command"
    )
    commands = ["", "train", "generate", "export", "import", "place", "graph"]
    run = subprocess.run(
        [sys.executable, "-c", script, *commands], capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith("hybridpar: train GPT, BERT and your own models")
    assert run.stdout.count("usage: hybridpar") == len(commands) - 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ("train", "CONFIG", "--model.hiden_size", "3"),
            "flag --model.hiden_size; did you mean --model.hidden_size?",
        ),
        (
            ("train", "CONFIG", "--hidden_size=3"),
            "unknown flag --hidden_size; did you mean --model.hidden_size?",
        ),
        (("train", "CONFIG", "--model.num-layer", "3"), "did you mean --model.num_layers?"),
        (
            ("train", "CONFIG", "--train.lr", "3"),
            "unknown flag --train.lr; did you mean --optim.lr or --outer.lr?",
        ),
        (("generate", "--chekpoint", "x"), "did you mean --checkpoint?"),
        (("plan", "CONFIG", "--out", "plan.toml"), "unknown flag --out; did you mean --output?"),
        (("train", "--parallel.tp", "2"), "the first argument must be a configuration file"),
        (("trian", "CONFIG"), "did you mean train?"),
        (
            ("train", "CONFIG", "--model.num_layers", "two"),
            "num_layers two: must be a whole number; try --model.",
        ),
        (
            ("check", "CONFIG", "--data.weights", "a"),
            "weights a: must be any number of numbers; try --data.weights 1",
        ),
        (
            ("train", "CONFIG", "--optim.betas", "1"),
            "--optim.betas 1: must be 2 numbers; try --optim.betas 0.9 0.999",
        ),
        (("train", "CONFIG", "--ranks=x"), "--ranks x: must be a whole number; try --ranks 1"),
        (("train", "CONFIG", "--model.kind", "t5"), "gpt"),
        (("train", "CONFIG", "--model.bias", "maybe"), "model.bias"),
        (("TRAIN", "CONFIG"), "did you mean train?"),
        (("export", "runs/run"), "OUTPUT"),
        (
            ("check", "CONFIG", "--world_size", "8"),
            "hybridpar check: --world_size is named --ranks",
        ),
        (("memory", "CONFIG", "--world-size=8"), "--world-size is named --ranks"),
        (("plan", "CONFIG", "--devices", "8"), "--devices is named --ranks"),
        (("train", "CONFIG", "--devices", "8"), "--devices is named --ranks"),
        (("train", "CONFIG", "--nproc-per-node", "8"), "--nproc-per-node is named --ranks"),
        (("generate", "--world_size", "8"), "--world_size is named --ranks"),
        (
            ("verify", "CONFIG", "--ranks", "4"),
            "the number of processes follows from --parallel.tp",
        ),
        (
            ("simulate", "CONFIG", "--world_size", "4"),
            "the number of processes follows from --parallel.tp",
        ),
        (("profile", "CONFIG", "--micro_batch", "4"), "--micro_batch is named --micro_batch_sizes"),
        (
            ("plan", "CONFIG", "--micro-batches", "4"),
            "--micro-batches is named --micro_batch_sizes",
        ),
        (("check", "CONFIG", "--device-gb", "4"), "--device-gb is named --memory_gb"),
        (("memory", "CONFIG", "--steps", "4"), "--steps is named --batches"),
        (
            ("train", "CONFIG", "--tensor-model-parallel-size", "2"),
            "is called --parallel.tp here (docs/coming_from.md)",
        ),
        (
            ("train", "CONFIG", "--bf16"),
            "hybridpar train: --bf16 is called --train.dtype bf16 here",
        ),
        (("plan", "CONFIG", "--mock-data"), "is called --data.corpus stdlib here"),
        (("train", "CONFIG", "--overlap-grad-reduce"), "not needed: hybridpar always does this"),
        (
            ("check", "CONFIG", "--moe-token-dispatcher-type", "alltoall"),
            "not supported; docs/coming_from.md says what to use instead",
        ),
        (
            ("train", "CONFIG", "--nnodes", "2"),
            "give it before -m hybridpar train CONFIG.toml",
        ),
    ],
)
def test_a_wrong_command_line_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], says: str
) -> None:
    message = refuses(capsys, *(str(config) if a == "CONFIG" else a for a in args))
    assert says in message
    assert not (config.parent / "runs").exists()


def test_ctrl_c_while_it_is_loaded_ends_it_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "hybridpar.cli.entry":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "hybridpar.cli.entry")
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    assert main(["check"]) == 130


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--parallel.tp", "2"], "tp * pp = 2 must divide the number of processes, 1"),
        (["--parallel.dp", "3"], "tp * pp * dp = 3 does not match the job's 1 processes"),
        (
            ["--model.num_heads", "3"],
            "model.num_heads = 3: must divide model.hidden_size = 16; try",
        ),
        (["--data.split", "0"], "data.split"),
        (["--data.corpus", "nowhere.txt"], "nowhere.txt: does not exist"),
        (["--model.vocab_size", "100"], "model.vocab_size = 100"),
        (
            ["--ranks", "4000000000"],
            "ranks = 4000000000: must be at least 0 and at most 4096; try 0",
        ),
        (
            ["--data.cache", "tiny.toml/x"],
            "cannot be written (Not a directory); name another folder",
        ),
        (["--data.corpus", ""], "data.corpus = ['']: must not have an empty entry"),
        (["--data.corpus", "corpus.tx"], "try corpus.txt"),
        (["--run.name", "x" * 300], "File name too long"),
        (
            ["--train.device", "cuda", "--train.threads", "1"],
            "train.device = 'cuda': requires one GPU per process; GPUs on this machine: 0",
        ),
    ],
)
def test_train_refuses_what_cannot_run(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.chdir(config.parent)
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("has a GPU")
    assert says in fails(capsys, "train", config, *flags)
    assert not (config.parent / "runs" / "run" / "config.toml").exists()


def test_a_missing_file_or_a_misspelt_key_names_the_nearest(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "tiny.toml" in fails(capsys, "train", config.with_name("tyny.toml"))
    config.write_text(config.read_text().replace("num_layers", "num_layrs"))
    said = fails(capsys, "train", config)
    assert "model.num_layrs = 2: unknown key; did you mean model.num_layers?" in said


def test_damaged_or_unfit_corpora_are_refused(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prepared = prepare(write_corpus(tmp_path / "text.txt"), tmp_path / "made", 300, quiet=True)
    prefix = tmp_path / "own"
    for suffix in (".bin", ".idx"):
        prefix.with_suffix(suffix).write_bytes(prepared.prefix.with_suffix(suffix).read_bytes())
    assert "the highest id of" in fails(
        capsys, "train", config, "--data.corpus", prefix, "--model.vocab_size", "260"
    )
    content = prefix.with_suffix(".bin").read_bytes()
    prefix.with_suffix(".bin").write_bytes(content[: len(content) // 2])
    assert "own.bin" in fails(capsys, "train", config, "--data.corpus", prefix)
    prefix.with_suffix(".idx").write_bytes(b"nonsense" * 30)
    assert "own.idx" in fails(capsys, "train", config, "--data.corpus", prefix)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x80" * 100)
    assert "binary.txt" in fails(capsys, "train", config, "--data.corpus", tmp_path / "binary.txt")
    assert not (tmp_path / "runs" / "run" / "config.toml").exists()


@pytest.mark.parametrize(
    "flags", [["--parallel.tp", "3"], ["--model.hiden_size", "3"], ["--model.kind", "t5"]]
)
def test_first_of_several_ranks_speaks(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = []
    for rank in range(2):
        for name, value in (
            ("RANK", rank),
            ("LOCAL_RANK", rank),
            ("WORLD_SIZE", 2),
            ("LOCAL_WORLD_SIZE", 2),
        ):
            monkeypatch.setenv(name, str(value))
        with contextlib.suppress(SystemExit):
            assert main(["train", str(config), *flags]) == 1
        said.append("".join(capsys.readouterr()))
    assert said[0]
    assert not said[1]


def test_check_reports_every_problem_at_once(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--parallel.pp", "4", "--model.num_heads", "3", "--ranks", "6"]
    message = fails(capsys, "check", config, *flags)
    for part in (
        "3 problems",
        "processes",
        "model.num_heads",
        "pipeline.num_microbatches = 2: must be at least",
    ):
        assert part in message
    assert main(["check", str(config), *flags, "--json"]) == 1
    out, _ = capsys.readouterr()
    plain = json.loads(out)
    assert not plain["ok"]
    assert {p["field"] for p in plain["problems"]} == {
        "parallel",
        "model.num_heads",
        "pipeline.num_microbatches",
    }


def test_check_says_what_fits(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "check",
                str(config),
                "--parallel.pp",
                "2",
                "--parallel.tp",
                "2",
                "--ranks",
                "8",
                "--json",
            ]
        )
        == 0
    )
    plain = json.loads(capsys.readouterr().out)
    assert plain["grid"] == {"tp": 2, "pp": 2, "dp": 2}
    assert plain["batch_samples"] == 2 * 2 * 2
    assert plain["stages"][-1][1] == 4
    assert main(["check", str(config)]) == 0
    out = capsys.readouterr().out
    assert "fine on tp=1 pp=1 dp=1" in out
    assert "not on this machine" not in out


def test_check_says_what_is_not_here(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be where the job will run, so it is no error."""
    flags = [
        "--data.corpus",
        "nowhere.txt",
        "stdlib",
        "--data.tokenizer",
        "none.json",
        "--train.start_from",
        "no-run",
    ]
    assert main(["check", str(config), *flags]) == 0
    said = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("not on this machine")
    ]
    assert [line.partition(": ")[2].partition(":")[0] for line in said] == [
        "data.corpus = nowhere.txt",
        "data.tokenizer = none.json",
        "train.start_from = no-run",
    ]
    assert main(["check", str(config), *flags, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["absent"]) == 3


def test_check_refuses_to_stop_by_a_set_that_the_run_has_not(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data.split", "0.1", "--train.eval_interval", "2", "--train.stop_patience", "2"]
    message = fails(capsys, "check", config, *flags, "--train.stop_by", "loss/wiki")
    assert "train.stop_by = 'loss/wiki': must name a validation set of this run" in message
    assert main(["check", str(config), *flags, "--train.stop_by", "loss"]) == 0


def test_simulate_draws_and_counts(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    svg = tmp_path / "plan.svg"
    flags = ["--parallel.pp", "2", "--pipeline.num_microbatches", "4", "--pipeline.split", "2", "2"]
    assert main(["simulate", str(config), *flags, "--svg", str(svg)]) == 0
    out = capsys.readouterr().out
    assert "stage 1" in out
    assert "F0" in out
    assert svg.read_text().startswith("<svg")
    assert main(["simulate", str(config), *flags, "--pipeline.schedule", "gpipe", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["peak_activations"] == [4, 4]
    assert plain["peak_versions"] == [1, 1]
    assert all(0 < share < 1 for share in plain["bubble"])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("check", "CONFIG", "--ranks", "-1"), "ranks = -1: must be at least 0"),
        (("verify", "CONFIG", "--batches", "0"), "batches = 0: must be at least 1"),
        (
            ("verify", "CONFIG", "--grid", "pp=\u00b2"),
            "must give the sizes of tp, cp, pp, dp and ep",
        ),
        (("replay", "CONFIG", "--threads", "-1"), "threads = -1: must be at least 0"),
        (("replay", "runs", "--step", "3"), "path = 'runs': does not exist"),
        (
            ("profile", "CONFIG", "--ranks", "1000000000"),
            "ranks = 1000000000: must be at least 0 and at most",
        ),
        (
            ("profile", "CONFIG", "--micro_batch_sizes", "4000000000"),
            "micro_batch_sizes = [4000000000]: must be at",
        ),
        (
            ("plan", "CONFIG", "--micro_batch_sizes", "0"),
            "micro_batch_sizes = [0]: must be at least 1",
        ),
        (
            ("graph", "CONFIG", "--accelerators", "4000000000"),
            "accelerators = 4000000000: must be at least 0 and at most",
        ),
        (
            ("simulate", "CONFIG", "--batches", "99999999999999999999"),
            "must be at least 1 and at most 10000; try 3",
        ),
        (
            ("preprocess", "CONFIG", "--vocab_size", "4000000000"),
            "vocab_size = 4000000000: must be at least 1",
        ),
        (
            ("preprocess", "CONFIG", "--vocab_size", "300", "--output", "tiny.toml"),
            "tiny.toml: cannot be written",
        ),
        (
            ("generate", "--checkpoint", "run", "--seed", "99999999999999999999"),
            "must be at least -9223372036854775808",
        ),
        (
            ("generate", "--checkpoint", "corpus"),
            "is neither a run folder nor a checkpoint in one; try corpus.txt",
        ),
        (
            ("generate", "--checkpoint", "run"),
            "run: is neither a run folder nor a checkpoint in one; try runs/run, runs/a\n",
        ),
        (("generate", "--checkpoint", "runs"), "runs: has no checkpoints; try runs/run, runs/a\n"),
        (("watch", "runs/nun"), "run = 'runs/nun': does not exist; try runs/run, runs/a\n"),
        (
            ("watch", "runs"),
            "run = 'runs': a folder of runs; name one run in it; try runs/run, runs/a\n",
        ),
        (("simulate", "--run", "runs/x"), "run = 'runs/x': does not exist; try runs/a, runs/run\n"),
        (
            ("replay", "runs/x", "--step", "3"),
            "path = 'runs/x': does not exist; try runs/a, runs/run\n",
        ),
        (
            ("export", "run", "out", "--max_file_gb", "1e300"),
            "max_file_gb = 1e+300: must be positive, and at most 1e9",
        ),
    ],
)
def test_numbers_and_names_that_cannot_be(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    args: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(config.parent)
    if "try runs/" in says:
        for name in ("a", "run"):
            (folder := config.parent / "runs" / name).mkdir(parents=True)
            (folder / "config.toml").touch()
    message = fails(capsys, *(str(config) if a == "CONFIG" else a for a in args))
    assert says in message
    assert not (config.parent / "data").exists()


def test_no_suggestion_is_the_wrong_file_itself(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    Path("folder.toml").mkdir()
    Path("link.txt").symlink_to("nowhere.txt")
    for args in (
        ("train", "folder.toml"),
        ("train", config, "--data.corpus", "link.txt"),
        ("plan", config, "--cluster", "cluster.toml"),
    ):
        message = fails(capsys, *args)
        assert str(args[-1]) in message
        assert f"try {args[-1]}" not in message
        assert not message.rstrip().endswith(f"try {config.parent / args[-1]}")


def test_preprocess_takes_its_text_by_the_name_of_megatron(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"content": "a text of some length " * 20}))
    flags = ["--output", str(tmp_path / "out"), "--vocab_size", "300", "--json"]
    assert (
        main(["preprocess", "--input", str(tmp_path / "a.json"), *flags, "--text_key", "content"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["documents"] == 1
    assert main(["preprocess", "--input", str(tmp_path / "a.json"), *flags]) == 1
    assert "set data.text_key to one of ['content']" in capsys.readouterr().err


def test_check_says_what_it_cannot_read(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    assert (
        main(
            [
                "check",
                str(config),
                "--data.corpus",
                str(tmp_path / "a.png"),
                "--data.valid_corpus",
                "nowhere",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "not on this machine, or of no use: data.corpus" in out.replace("\n", " ")
    assert "a.png: is a PNG image" in out
    assert "data.valid_corpus = nowhere: does not exist" in out


def test_preprocess_makes_a_corpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = write_corpus(tmp_path / "text.txt")
    assert (
        main(
            [
                "preprocess",
                str(text),
                "--output",
                str(tmp_path / "out"),
                "--vocab_size",
                "300",
                "--json",
            ]
        )
        == 0
    )
    plain = json.loads(capsys.readouterr().out)
    assert Path(plain["prefix"] + ".bin").exists()
    assert plain["vocab_size"] <= 300
    assert "must name at least one file" in fails(capsys, "preprocess")


@pytest.mark.ranks
def test_verify_says_whether_a_grid_agrees(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(config), "--grid", "pp=2", "--batches", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"]
    assert "tensors agree" in err
    assert "must give the sizes" in fails(capsys, "verify", config, "--grid", "tp=2,qq=3")


def test_refusals_of_the_system_are_said_in_a_line(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(error: OSError) -> None:
        def run(self: object, launch: object) -> int:
            raise error

        monkeypatch.setattr(COMMANDS["check"], "run", run)

    raises(OSError(errno.ENOSPC, "No space left on device"))
    assert fails(capsys, "check", config) == "hybridpar: a disk: No space left on device\n"
    raises(PermissionError(errno.EACCES, "Permission denied", "a/b"))
    assert fails(capsys, "check", config) == "hybridpar: a/b: Permission denied\n"
    raises(OSError(errno.ECHILD, "a defect of ours"))
    with pytest.raises(OSError, match="a defect of ours"):
        main(["check", str(config)])


def test_parse_grid() -> None:
    assert parse_grid("tp=2, dp=3") == {"tp": 2, "dp": 3}
    for text in ("", "tp", "tp=0", "tp=-1", "tp=2,tp=2", "xp=2"):
        with pytest.raises(ConfigError):
            parse_grid(text)
