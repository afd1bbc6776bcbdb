"""Run folders that somebody has crafted, or that are damaged: one line each, in bounded time and
memory, and never a traceback. Every entry is read by the board, by the page, over HTTP, and a
sample by the command line."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from train.runs import TOML

from hybridpar import flight
from hybridpar.cli import main
from hybridpar.config import read_run_config
from hybridpar.errors import ConfigError
from hybridpar.flight import Flight
from hybridpar.reading import open_regular, read_limited
from hybridpar.train.folder import CONFIG, COSTS, FLIGHT, METRICS, NOTES
from hybridpar.watch import Board, page
from watch.test_watch import get, line, served

SECRET = "a line of another user's file"
LIMIT_S = 60.0
"""Seconds for a folder on a busy machine; an endless reader would take for ever."""
LIMIT_MIB = 400
"""Memory that all these folders may add to this process."""
TERABYTE = 1 << 40
HUGE = "9" * 400
SVG = "<svg xmlns='http://www.w3.org/2000/svg'/>"


@pytest.fixture(scope="module")
def text() -> str:
    """A valid config.toml of a run."""
    made = TOML.format(schedule="1f1b", corpus="corpus.txt", runs="runs")
    return made.replace("[run]", "[parallel]\npp = 2\ndp = 1\n[run]")


@pytest.fixture
def run(tmp_path: Path, text: str) -> Path:
    """A run folder with a bit of everything, beside a file that is not of this run."""
    (tmp_path / "secret").write_text(f'{{"text": "{SECRET}"}}\n[model]\nkind = "{SECRET}"\n')
    folder = tmp_path / "run"
    (folder / FLIGHT).mkdir(parents=True)
    (folder / CONFIG).write_text(text)
    (folder / METRICS).write_text(line(1) + line(2))
    (folder / NOTES).write_text('{"text": "a note"}\n')
    (folder / "plan.svg").write_text(SVG)
    Flight(folder / FLIGHT / "rank_00000", {"rank": 0})
    return folder


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def listening_socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    before = Path.cwd()
    os.chdir(path.parent)  # the name of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def link_to(target: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return make


def folder_instead(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, TERABYTE)


def holding(data: bytes | str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(data.encode() if isinstance(data, str) else data)

    return make


def no_permission(path: Path) -> None:
    path.touch()
    path.chmod(0)


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": pipe,
    "socket": listening_socket,
    "device": link_to("/dev/zero"),
    "link out": link_to("../secret"),
    "link up and down": link_to("../run/../secret"),
    "link to itself": link_to(METRICS),
    "no end": sparse,
    "folder": folder_instead,
    "bytes": holding(b"\xff\xfe\0\x80" * 1000),
    "zeros": holding(bytes(1 << 16)),
    "deep JSON": holding("[" * 100_000),
    "deep object": holding('{"a":' * 100_000 + "\n"),
    "many digits": holding('{"step": ' + "9" * 5000 + ', "loss": 1}\n'),
}
FILES = (CONFIG, METRICS, NOTES, COSTS, "plan.svg", "flight/rank_00000", "failures.jsonl")


def in_bounds(folder: Path) -> list[str]:
    """Problems of a folder that a look, the page and a server name. Fails if that takes long."""
    begin = time.process_time()
    board = Board(folder)
    seen = board.look(4 << 20)
    assert SECRET not in page(Board(folder))
    json.dumps(seen, allow_nan=True)
    assert time.process_time() - begin < LIMIT_S
    for one in seen["problems"]:
        assert "\n" not in one
        assert one.isprintable()
    return list(seen["problems"])


def test_a_folder_in_order_has_no_problems(run: Path) -> None:
    assert in_bounds(run) == []
    seen = Board(run).look()
    assert (len(seen["memory"]), len(seen["ranks"]), seen["picture"]) == (2, 1, "plan.svg")


def test_the_page_goes_on_with_all_else(run: Path, text: str) -> None:
    """Every kind of entry in the place of every file; the other files are shown as ever. Links are
    of all others."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    board = Board(run)
    with served(board) as port:
        for kind, make in KINDS.items():
            for name in FILES:
                path = run / name
                kept = path.read_bytes() if path.exists() else None
                make(path)
                problems = look_once(board)
                damaged = kind in (
                    "pipe",
                    "socket",
                    "device",
                    "link out",
                    "link up and down",
                    "folder",
                )
                if damaged and not name.startswith("flight"):
                    assert any(name in line for line in problems), (kind, name, problems)
                answer, data = get(port, "/data.json")
                assert answer.status == 200, (kind, name)
                seen = json.loads(data)
                assert SECRET not in data.decode(), (kind, name)
                assert name == NOTES or seen["notes"][:1] == ["a note"], (kind, name)
                if name == "plan.svg":
                    assert get(port, "/plan.svg")[0].status in (200, 404)
                remove(path)
                if kept is not None:
                    path.write_bytes(kept)
        seen = json.loads(get(port, "/data.json")[1])
    assert seen["problems"] == []
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < LIMIT_MIB


def look_once(board: Board) -> list[str]:
    """The problems at one look of a server, which does not read all of a very long file."""
    return list(board.look(4 << 20)["problems"])


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()


CONFIGS = {
    f"num_steps = {HUGE}": "train.num_steps",
    "num_steps = " + "9" * 5000: "not valid TOML",
    "num_steps = -1": "train.num_steps",
    "micro_batch_size = 1_000_000": "tokens in a micro-batch",
    "seed = nan": "train.seed",
    "timeout_s = inf": "train.timeout_s",
    "timeout_s = nan": "train.timeout_s",
    "[model]\nnum_layers = 1_000_000_000": "",
    "num_steps = " + "[" * 5000: "not valid TOML",
}


@pytest.mark.parametrize("entry", CONFIGS, ids=range(len(CONFIGS)))
def test_a_configuration_out_of_range_predicts_nothing(run: Path, entry: str) -> None:
    (run / CONFIG).write_text(f"[train]\n{entry}\n")
    problems = in_bounds(run)
    assert len(problems) == 1
    assert CONFIGS[entry] in problems[0]
    seen = Board(run).look()
    assert (seen["memory"], seen["latest"]["step"]) == ([], 2)


@pytest.mark.parametrize(
    "section",
    [
        "[model]\nnum_layers = 10_000",
        "[parallel]\ndp = 1_000_000_000_000",
        "[parallel]\ndp = 1_000_000\npp = 6\ntp = 8",
        "[pipeline]\nnum_microbatches = 1_000_000",
        "[pipeline]\nschedule = '2bw'\nchunks = 1_000_000_000_000",
    ],
)
def test_a_very_large_configuration_predicts_nothing(
    run: Path, section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / CONFIG).write_text(section)
    (problem,) = in_bounds(run)
    assert problem.startswith(CONFIG) or "parallel.dp" in problem
    assert main(["memory", "--run", str(run)]) == 1
    assert main(["simulate", "--run", str(run)]) == 1
    assert "Traceback" not in capsys.readouterr().err


METRIC_LINES = (
    f'{{"step": 3, "loss": {HUGE}}}',
    f'{{"step": {HUGE}, "loss": 1}}',
    '{"step": -1, "loss": 1}',
    '{"step": 3, "loss": 1e308}\n' * 3000,
    '{"step": 3, "loss": NaN, "lr": Infinity, "step_ms": 1e400}',
    f'{{"step": 3, "step_ms": {HUGE}}}',
    '{"step": 3, "loss": true}',
    '{"step": 3, "loss": [[[[]]]]}',
    "\n".join(f'{{"step": 3, "{i}": 1}}' for i in range(2000)),
)


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("lines", METRIC_LINES, ids=range(len(METRIC_LINES)))
def test_odd_numbers_are_left_out(run: Path, lines: str) -> None:
    with (run / METRICS).open("a") as file:
        file.write(f"{lines}\n{line(4)}")
    assert in_bounds(run) == []
    seen = Board(run).look()
    assert seen["latest"]["step"] == 4
    assert [point[0] for point in seen["curves"]["tokens_per_s"]] == [1, 2, 4]
    assert len(seen["latest"]) < 10


@pytest.mark.thorough
def test_a_line_of_a_gigabyte_is_passed_over(run: Path) -> None:
    with (run / METRICS).open("ab") as file:
        file.truncate(1 << 30)
        file.seek(1 << 30)
        file.write(b"\n" + line(9).encode())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    board = Board(run)
    assert "bytes are not read yet" in board.look(8 << 20)["problems"][0]
    while board.look(512 << 20)["problems"]:
        pass
    assert board.look()["latest"]["step"] == 9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_long_events_are_cut(run: Path) -> None:
    with (run / NOTES).open("w") as file:
        for _ in range(60):
            file.write(json.dumps({"text": "x" * 500_000}) + "\n")
        file.write(json.dumps({"deep": [[["y" * 5000] * 5000] * 2]}) + "\n")
    notes = Board(run).look()["notes"]
    assert len(notes) == 50
    assert max(map(len, notes)) <= 2000


def record(who: str, when: float = 0.0) -> bytes:
    """A flight record of an action, with such a text about its rank."""
    data = bytearray(Path(__file__).with_name("none").name.encode().ljust(696, b"\0"))
    struct.pack_into("<Qd", data, 0, 1, when)
    struct.pack_into("<64sd", data, 16, b"steady", 0.0)
    struct.pack_into("<8sqqq", data, 88, b"F", 0, 2**62, 0)
    struct.pack_into("<24s16sq", data, 120, b"recv", b"pp", -1)
    return bytes(data) + who.encode()


WHO = (
    "[]",
    "7",
    '{"num_microbatches": 0}',
    '{"num_microbatches": "x"}',
    '{"axes": 3}',
    '{"axes": {"pp": 3}}',
    '{"axes": {"pp": ["<b>"]}}',
    "[" * 100_000,
    '{"rank": ' + "9" * 5000 + "}",
    '{"axes": {"pp": [null]}}',
)


@pytest.mark.parametrize("who", WHO, ids=range(len(WHO)))
def test_a_crafted_flight_record_is_none(run: Path, who: str) -> None:
    path = run / FLIGHT / "rank_00000"
    path.write_bytes(record(who))
    assert flight.read(path) is None
    assert Board(run).look()["ranks"] == []


def test_thousands_of_ranks_are_shown_in_part(run: Path) -> None:
    for rank in range(3000):
        (run / FLIGHT / f"rank_{rank:05d}").write_bytes(record("{}", float("nan")))
    for name in (b"rank_\xff", b"rank_" + b"9" * 200, b"\x1b[2J"):
        Path(os.fsdecode(bytes(run / FLIGHT) + b"/" + name)).touch()
    (run / FLIGHT / "rank_00001").unlink()
    (run / FLIGHT / "rank_00001").symlink_to(run.parent / "secret")
    assert in_bounds(run) == []
    ranks = Board(run).look()["ranks"]
    assert len(ranks) == 255
    assert ranks[1]["rank"] == 2


def test_a_folder_with_an_odd_name_is_shown(run: Path) -> None:
    odd = Path(os.fsdecode(bytes(run.parent) + b"/r\xff<script>"))
    run.rename(odd)
    (odd / "anomalies").mkdir()
    Path(os.fsdecode(bytes(odd) + b"/anomalies/\xff.json")).touch()
    with served(Board(odd)) as port:
        assert get(port, "/data.json")[0].status == 200
    assert page(Board(odd)).isascii()
    link = run.parent / "link"
    link.symlink_to(odd)
    assert in_bounds(link) == []


def test_links_lead_only_to_files_of_the_folder(run: Path) -> None:
    (run / "kept").mkdir()
    (run / METRICS).rename(run / "kept" / "mine")
    (run / METRICS).symlink_to("kept/mine")
    assert Board(run).look()["latest"]["step"] == 2
    for target in (run.parent, run.parent / "secret", Path("/etc")):
        (run / "out").unlink(missing_ok=True)
        (run / "out").symlink_to(target)
        for path in (run / "out", run / "out" / "secret", run / "kept" / ".." / "out"):
            with pytest.raises(OSError, match=r"leads out of its folder|No such file"):
                open_regular(path, within=run)
    for path in (run, run / "..", run / "." / ".." / "secret", Path("/etc/passwd")):
        with pytest.raises(OSError, match="leads out of its folder"):
            open_regular(path, within=run)


def test_a_folder_that_becomes_a_link_while_it_is_opened_leads_nowhere(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at a path and its opening, its folder is exchanged for a link to another
    one."""
    (run / "inner").mkdir()
    (run / "inner" / "secret").write_text("mine")
    resolve = os.path.realpath

    def exchange(path: str | Path) -> str:
        found = resolve(path)
        if Path(path).name == "secret":
            (run / "inner").rename(run / "other")
            (run / "inner").symlink_to(run.parent)
        return found

    monkeypatch.setattr("hybridpar.reading.os.path.realpath", exchange)
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        read_limited(run / "inner" / "secret", 100, within=run)


def test_a_configuration_that_is_a_link_tells_nothing(run: Path) -> None:
    (run / CONFIG).unlink()
    (run / CONFIG).symlink_to("../secret")
    for trust in (False, True):
        with pytest.raises(ConfigError, match="leads out of its folder") as error:
            read_run_config(run / CONFIG, trust=trust)
        assert SECRET not in str(error.value)


def test_a_picture_runs_no_script(run: Path) -> None:
    (run / "plan.svg").write_text(SVG.replace("/>", "><script>alert(1)</script></svg>"))
    with served(Board(run)) as port:
        answer, _ = get(port, "/plan.svg")
    assert "sandbox" in answer.headers["Content-Security-Policy"]
    assert "script" not in answer.headers["Content-Security-Policy"]


def test_whatever_a_look_raises_is_answered(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    board = Board(run)
    monkeypatch.setattr(board, "look", lambda most_bytes: 1 / 0)
    with served(board) as port:
        assert get(port, "/data.json")[0].status == 500
        assert get(port, "/")[0].status == 200
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_files_that_vanish_and_change_are_read_on(run: Path) -> None:
    board = Board(run)
    board.look()
    for name in FILES:
        (run / name).unlink(missing_ok=True)
    seen = board.look()
    assert seen["problems"] == []
    assert (seen["picture"], seen["ranks"], seen["steps"]) == ("", [], 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(run: Path) -> None:
    for name in (CONFIG, METRICS, "plan.svg"):
        no_permission(run / name)
    problems = in_bounds(run)
    assert len(problems) == 3
    assert all("Permission denied" in one for one in problems)


@pytest.fixture
def commands(run: Path) -> list[list[str]]:
    """Commands that read a run folder."""
    (run / "anomalies").mkdir()
    return [
        ["memory", "--run", str(run)],
        ["simulate", "--run", str(run)],
        ["replay", str(run), "--step", "2"],
        ["generate", "--checkpoint", str(run)],
        ["export", str(run), str(run.parent / "out")],
        ["replay", str(run / "anomalies" / "step_00000001.json")],
    ]


def test_commands_say_one_line_of_odd_folders(
    run: Path, commands: list[list[str]], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    by_name = {
        CONFIG: commands[:4],
        COSTS: commands[1:2],
        METRICS: commands[2:3],
        "checkpoints": commands[3:5],
        "anomalies/step_00000001.json": commands[5:],
    }
    for make in (pipe, link_to("../secret"), sparse, holding("[" * 100_000)):
        for name, chosen in by_name.items():
            path = run / name
            kept = path.read_bytes() if path.is_file() else None
            make(path)
            for command in chosen:
                assert main(command) == 1, (command, name)
                said = capsys.readouterr().err
                assert "Traceback" not in said
                assert SECRET not in said
                assert 1 <= len(said.splitlines()) < 6, said
            remove(path)
            if kept is not None:
                path.write_bytes(kept)


@pytest.mark.thorough
def test_a_shell_sees_one_line(run: Path) -> None:
    """In processes of their own, within a limit of memory."""
    pipe(run / METRICS)
    sparse(run / CONFIG)
    job = subprocess.run(
        [
            sys.executable,
            "-m",
            "hybridpar",
            "watch",
            str(run),
            "--html",
            str(run.parent / "x.html"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert job.returncode == 0, job.stderr
    assert "Traceback" not in job.stderr
    html = (run.parent / "x.html").read_text()
    assert "not a regular file" in html
    assert "at most 1048576" in html
