"""Files that flags name: one that cannot be written is refused at once, and nothing of the user's
is lost."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from train.runs import write_config

from hybridpar.checkpoint.format.files import write_text
from hybridpar.cli import main
from hybridpar.cli.outputs import check_outputs, write_output
from hybridpar.errors import ConfigError


def refused(read: list[Path | str], **paths: str | None) -> str:
    with pytest.raises(ConfigError) as caught:
        check_outputs(read, **paths)
    return str(caught.value)


def test_unwritable_outputs_are_refused_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    for path, rule in (
        (tmp_path, "is a folder, not a file; try"),
        ("", "is a folder, not a file; try FILE"),
        (mine / "x", "cannot be written (Not a directory); try"),
        (mine / "deep" / "x", "cannot be written (Not a directory); try"),
        (tmp_path / ("x" * 300), "cannot be written (File name too long); try"),
    ):
        assert rule in refused([], out=str(path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "cannot be written (Permission denied)" in refused([], out=str(mine))
    assert os.listdir(tmp_path) == ["mine.txt"]
    assert mine.read_text() == "mine"


def test_an_output_takes_the_place_of_no_input_and_of_no_other_output(tmp_path: Path) -> None:
    read = tmp_path / "a.toml"
    new = str(tmp_path / "new")
    read.write_text("")
    (tmp_path / "link").symlink_to(read)
    assert "is what is read, and would be lost; try" in refused([read, ""], out=str(read))
    assert "is what is read, and would be lost; try" in refused([read], out=str(tmp_path / "link"))
    assert "is what out writes; try" in refused([read], out=new, svg=new)
    check_outputs([read], out=new, svg=None)
    check_outputs([read], out=str(tmp_path / "made" / "é x.json"))
    assert not (tmp_path / "made").exists()


def test_folders_are_made_and_links_followed(tmp_path: Path) -> None:
    write_output("out", str(tmp_path / "made" / "é x.json"), "{}")
    assert (tmp_path / "made" / "é x.json").read_text() == "{}"
    (tmp_path / "link").symlink_to(tmp_path / "made" / "é x.json")
    write_output("out", str(tmp_path / "link"), "[]")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "made" / "é x.json").read_text() == "[]"
    with pytest.raises(ConfigError, match="is a folder"):
        write_output("out", str(tmp_path), "x")


def test_a_pipe_is_written_into_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_outputs([], out=str(pipe), svg=str(pipe))
    write_output("out", str(pipe), "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")
    with pytest.raises(
        ConfigError, match=r"out = .*cannot be written \(No space left on device\); try"
    ):
        write_output("out", str(path), "new")
    assert os.listdir(tmp_path) == ["plan.toml"]
    assert path.read_text() == "old"


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("plan", "output"),
        ("plan", "svg"),
        ("profile", "output"),
        ("simulate", "svg"),
        ("simulate", "perfetto"),
        ("graph", "output"),
        ("place", "output"),
    ],
)
def test_every_command_looks_first(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    flag: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before it reads the profile, which is not there, or measures anything."""
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path)
    before = sorted(os.listdir(tmp_path))
    others = {
        "plan": ["--profile", "none.json"],
        "simulate": ["--profile", "none.json"],
        "graph": ["--profile", "none.json"],
    }.get(command, [])
    for path, rule in (
        (tmp_path, "is a folder, not a file"),
        (config / "x", "cannot be written (Not a directory)"),
        (config, "is what is read, and would be lost"),
    ):
        assert main([command, str(config), *others, f"--{flag}", str(path)]) == 1
        out, err = capsys.readouterr()
        assert f"hybridpar: {flag} = " in err
        assert rule in err
        assert len(err.splitlines()) == 1
        assert not out
    assert sorted(os.listdir(tmp_path)) == before
