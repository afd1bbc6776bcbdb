"""The dashboard: over HTTP while a run writes, from truncated and damaged files, and in bounded
memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest
from train.runs import TOML, write_corpus

from hybridpar.cli import main
from hybridpar.errors import ConfigError
from hybridpar.watch import Board
from hybridpar.watch.serve import server
from hybridpar.watch.tail import Curve, Tail

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def line(step: int, **numbers: float | str) -> str:
    return (
        json.dumps(
            {"step": step, "loss": 1.0 / step, "tokens_per_s": 100.0, "step_ms": 5.0} | numbers
        )
        + "\n"
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder as it is after two steps of ten."""
    folder = tmp_path / "runs" / "some"
    folder.mkdir(parents=True)
    text = TOML.format(schedule="2bw", corpus="corpus.txt", runs="runs").replace(
        "num_steps = 6", "num_steps = 10"
    )
    (folder / "config.toml").write_text(text.replace("[run]", "[parallel]\npp = 2\ndp = 1\n[run]"))
    (folder / "metrics.jsonl").write_text(line(1) + line(2))
    (folder / "plan.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    return folder


@contextmanager
def served(board: Board) -> Iterator[int]:
    """The port at which a board is served."""
    with server(board) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield listening.server_port
        finally:
            listening.shutdown()
            thread.join()


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=200)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    return answer, answer.read()


def test_a_page_is_served_and_follows_the_run(run: Path) -> None:
    with served(Board(run)) as port:
        answer, html = get(port, "/")
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert b"http://" not in html.replace(b"http://www.w3.org", b""), (
            "nothing comes from elsewhere"
        )
        seen = json.loads(get(port, "/data.json")[1])
        assert seen["curves"]["loss"] == [[1, 1.0, 1.0, 1.0], [2, 0.5, 0.5, 0.5]]
        assert (seen["steps"], seen["latest"]["step"], seen["eta_s"], seen["running"]) == (
            10,
            2,
            0.04,
            False,
        )
        assert len(seen["memory"]) == 2
        assert seen["memory"][0]["weights"] > 0
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line(3) + line(4)[:20])
        (run / "failures.jsonl").write_text(json.dumps({"text": "rank 1 hangs </script>"}) + "\n")
        seen = json.loads(get(port, "/data.json")[1])
        assert [point[0] for point in seen["curves"]["loss"]] == [1, 2, 3]
        assert seen["failures"] == ["rank 1 hangs </script>"]
        assert get(port, "/plan.svg")[1].startswith(b"<svg")
        assert seen["loads"] == ""
        (run / "expert_loads.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
        assert json.loads(get(port, "/data.json")[1])["loads"] == "expert_loads.svg"
        assert get(port, "/expert_loads.svg")[1].startswith(b"<svg")
        for path in (
            "/executed.svg",
            "/config.toml",
            "/../some/plan.svg",
            "/%2e%2e/some/config.toml",
        ):
            assert get(port, path)[0].status == 404
        assert get(port, "/data.json", host="evil.example:80")[0].status == 403


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_browser_draws_it(run: Path) -> None:
    (run / "failures.jsonl").write_text(json.dumps({"text": "rank 1 hangs <b>"}) + "\n")
    with served(Board(run)) as port:
        assert BROWSER is not None
        seen = subprocess.run(
            [
                BROWSER,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--virtual-time-budget=2000",
                "--dump-dom",
                f"http://127.0.0.1:{port}/",
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        ).stdout
    assert "<title>some: hybridpar</title>" in seen
    assert "rank 1 hangs &lt;b&gt;" in seen
    for card in ("Loss", "Peak memory by kind, predicted", "Timeline, simulated"):
        assert f">{card}<" in seen
    assert seen.count('stroke="var(--blue)"') == 3, "loss, speed, and time of a step"


def test_a_file_needs_no_other(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "failures.jsonl").write_text(
        json.dumps({"text": "rank 1 hangs <!--<script></script>"}) + "\n"
    )
    (run / "metrics.jsonl").open("a").write(line(3, loss=float("nan")))
    assert main(["watch", str(run), "--html", str(tmp_path / "page.html")]) == 0
    html = (tmp_path / "page.html").read_text()
    given = html.split("const GIVEN = ")[1].split(";\nconst COLOURS")[0]
    assert "<" not in given  # as a comment in a script hides its end
    assert json.loads(given)["failures"] == ["rank 1 hangs <!--<script></script>"]
    assert json.loads(given)["picture"].startswith("data:image/svg+xml;base64,")
    assert main(["watch", str(tmp_path / "none")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_an_empty_or_damaged_folder_is_shown(tmp_path: Path) -> None:
    seen = Board(tmp_path).look()
    assert (seen["steps"], seen["ranks"], seen["memory"], seen["picture"]) == (0, [], [], "")
    (tmp_path / "flight").mkdir()
    for name in ("config.toml", "metrics.jsonl", "costs.json", "notes.jsonl", "flight/rank_00000"):
        (tmp_path / name).write_bytes(b'\x00{\xff[]\n7\n[1]\n{"step": true, "loss": "x"}\n')
    seen = Board(tmp_path).look()
    assert seen["curves"]["loss"] == []
    assert "step" in seen["notes"][0]
    with pytest.raises(ConfigError, match="does not exist"):
        Board(tmp_path / "none")


def test_a_line_counts_once_it_is_whole_and_a_cut_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert list(tail.rows()) == []
    text = line(1) + line(2) + line(3)
    for end in (5, len(line(1)) + 3, len(text)):
        path.write_text(text[:end])
        seen = [row["step"] for row in tail.rows()]
        assert seen == {5: [], len(line(1)) + 3: [1], len(text): [2, 3]}[end]
    path.write_text(line(1) + line(2, loss=7.0))  # went on from step 1
    assert ([row["loss"] for row in tail.rows()], tail.begins) == ([1.0, 7.0], 1)
    path.write_text(
        line(1) + line(2, loss=8.0) + line(3)
    )  # cut off, and longer than before when next seen
    assert ([row["loss"] for row in tail.rows()], tail.begins) == ([1.0, 8.0, 1 / 3], 2)


def test_a_long_file_is_read_bit_by_bit(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(line(step + 1) for step in range(50)))
    tail = Tail(path)
    seen = list[int]()
    while new := [row["step"] for row in tail.rows(most_bytes=500)]:
        assert len(new) < 10
        seen += new
    assert seen == list(range(1, 51))


def test_curves_keep_means_and_extremes() -> None:
    curve = Curve(most=8)
    for step in range(1, 101):
        curve.add(step, float(step % 2))
    curve.add(101, float("inf"))
    points = curve.shown()
    assert len(points) <= 8
    assert points[-1][0] == 100
    assert all(
        (low, high) == (0.0, 1.0) and mean == pytest.approx(0.5, abs=0.01)
        for _, mean, low, high in points[:-1]
    )


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """A curve has a bounded number of points; a long file is read a piece at a time."""
    curve = Curve()
    path = tmp_path / "lines"
    with path.open("w") as file:
        file.writelines([line(step + 1, note="x" * 400) for step in range(12_000)])
    tracemalloc.start()
    for step in range(20_000):
        curve.add(step, 1.0)
    assert sum(1 for _ in Tail(path).rows()) == 12_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 5 << 20
    assert peak < 4 << 20
    assert len(curve.shown()) <= 1024


def test_the_board_follows_a_run_as_it_trains(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt")
    config = tmp_path / "tiny.toml"
    config.write_text(
        TOML.format(schedule="1f1b", corpus=tmp_path / "corpus.txt", runs=tmp_path / "runs")
    )
    assert main(["train", str(config), "--run.name", "own"]) == 0
    seen = Board(tmp_path / "runs" / "own").look()
    assert seen["latest"]["step"] == 6
    assert [point[0] for point in seen["curves"]["val_loss"]] == [0, 3, 6]
    assert (seen["picture"], seen["running"], len(seen["ranks"])) == ("executed.svg", False, 1)
