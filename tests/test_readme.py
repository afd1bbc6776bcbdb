"""Every snippet of the documentation runs, but for those that say why not. One run serves all that
need one.

The site builds without a warning, links checked, and its tables name what exists.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tomllib
from train.runs import fork_ranks, metrics, run_job, steps

import hybridpar
from hybridpar.cli import main
from hybridpar.config import Config, from_mapping, load_toml, to_mapping
from hybridpar.config.megatron_flags import ABSENT, ALWAYS, MEGATRON, TORCHRUN
from hybridpar.schedules.schedule_table import SCHEDULES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
SNIPPETS = [
    (page.name, language, body)
    for page in PAGES
    for language, body in re.findall(
        r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
    )
]
PYTHON = [(page, body) for page, language, body in SNIPPETS if language == "python"]
TOML = [(page, body) for page, language, body in SNIPPETS if language == "toml"]
IN_ORDER = ("README.md", "start.md", "own_models.md")
"""Pages that are a newcomer's first: all that they show works in their order, from an empty
folder."""

FINE_TUNING = "fine_tuning.md"


def commands_of(body: str) -> list[list[str]]:
    """The words of each command of a block that is run here."""
    lines = [] if "# not run here: " in body else body.replace("\\\n", "").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


COMMANDS = list(
    dict.fromkeys(
        shlex.join(words)
        for page, language, body in SNIPPETS
        if language == "bash" and page not in (*IN_ORDER, FINE_TUNING)
        for words in commands_of(body)
    )
)


def docs_hook() -> ModuleType:
    """scripts/docs.py, what the site is built with."""
    spec = importlib.util.spec_from_file_location("docs_hook", ROOT / "scripts" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what commands of the pages name: my.toml, my_text.jsonl, model.py, runs/my, and
    the checkout's."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("scripts", "examples", "docs"):
        (folder / name).symlink_to(ROOT / name)
    for _, body in PYTHON:
        if name := re.match(r"# (\w+\.py)\n", body):
            (folder / name[1]).write_text(body)
    before = Path.cwd()
    os.chdir(folder)
    try:
        run_job(2, *docs_hook().example(folder))
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def inside(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(shared)
    monkeypatch.setattr(sys, "path", [*sys.path, str(shared)])
    return shared


def test_every_block_says_what_it_is() -> None:
    """Output is `text`; what runs elsewhere is `ini`. All else runs."""
    assert {language for _, language, _ in SNIPPETS} <= {"python", "bash", "toml", "text", "ini"}
    assert PYTHON
    assert TOML
    commands = [
        words for _, language, body in SNIPPETS if language == "bash" for words in commands_of(body)
    ]
    strange = [words for words in commands if words[0] != "hybridpar"]
    assert not strange, "no command of ours: say '# not run here: ' and why"


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("page", "body"), PYTHON, ids=[f"{page}-{i}" for i, (page, _) in enumerate(PYTHON)]
)
def test_python_runs(
    page: str, body: str, inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (inside / "snippet.py").write_text(body)
    runpy.run_path(str(inside / "snippet.py"), run_name="__main__")


@pytest.mark.ranks
def test_the_layer_example_does_not_depend_on_the_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "snippet.py").write_text(next(body for page, body in PYTHON if page == "layers.md"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # as under torchrun
    sums = []  # on 3 ranks some keys and values are on two
    for num_ranks in (1, 3):
        out = fork_ranks(num_ranks, partial(_run_as_main, tmp_path / "snippet.py"))
        found = re.findall(r"sum (-?[\d.]+)", out)
        assert len(found) == num_ranks
        assert len(set(found)) == 1, out
        sums.append(float(found[0]))
    assert sums[0] == pytest.approx(
        sums[1], abs=1e-3
    )  # float32 sums of 3072 elements, in another order


def _run_as_main(path: Path) -> None:
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize(
    ("page", "body"), TOML, ids=[f"{page}-{i}" for i, (page, _) in enumerate(TOML)]
)
def test_a_configuration_is_read(page: str, body: str, inside: Path) -> None:
    (inside / "block.toml").write_text(body)
    load_toml(inside / "block.toml")


@pytest.mark.thorough(keep=3)
@pytest.mark.ranks
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr()


@pytest.mark.thorough(keep=1)
@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", IN_ORDER)
def test_a_first_page_works_in_its_order(
    page: str,
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On one run folder. Training is of fewer steps, on a small text, and its ranks are forks of
    this process. README's model is smaller, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    few: list[str] = []
    if page != "own_models.md":
        few = ["--data.corpus", str(shared / "my_text.jsonl"), "--train.threads", "1"]
    small = ["--model.hidden_size", "48", "--model.seq_length", "32"] * (page == "README.md")
    num_steps = 0
    for _, language, body in (snippet for snippet in SNIPPETS if snippet[0] == page):
        name = re.match(r"# (\w+\.\w+)\n", body)
        if language in ("toml", "python"):
            Path(name[1] if name else f"my.{language}").write_text(body)
        for words in commands_of(body) if language == "bash" else ():
            if words[1] != "train":
                takes_it = words[1] in ("check", "verify", "simulate")
                assert main(words[1:] + small * takes_it) == 0, capsys.readouterr()
                continue
            num_steps += 12  # of fewer nothing is measured
            at = words.index("--ranks")
            ranks = int(words[at + 1])
            following = words[at + 2 :]
            flags = [*following, *few, *small, "--train.num_steps", str(num_steps)]
            run_job(ranks, *words[1:at], *flags)
    (rows,) = Path("runs").glob("*/metrics.jsonl")
    assert [step for step, _, _ in steps(metrics(rows.parent))] == list(range(1, num_steps + 1))


@pytest.mark.ranks
def test_fine_tuning_works_in_its_order(
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From a tiny model to its adapters, with the text of the pages as its first corpus."""
    monkeypatch.chdir(tmp_path)
    for _, language, body in (snippet for snippet in SNIPPETS if snippet[0] == FINE_TUNING):
        if language in ("toml", "python"):
            name = re.match(r"# (\w+\.\w+)\n", body)
            assert name is not None
            Path(name[1]).write_text(body)
        if language == "python":
            runpy.run_path(name[1], run_name="__main__")  # type: ignore[index]
        for words in commands_of(body) if language == "bash" else ():
            if "--ranks" in words and words[1] == "train":
                at = words.index("--ranks")
                flags = [*words[at + 2 :], "--train.threads", "1"]
                corpus = ["--data.corpus", str(shared / "my_text.jsonl")]
                flags += [] if "--data.corpus" in flags else corpus
                run_job(int(words[at + 1]), *words[1:at], *flags)
            else:
                assert main(words[1:]) == 0, capsys.readouterr()
    rows = [row for row in metrics(tmp_path / "runs" / "tuned") if "val_accuracy" in row]
    assert len(rows) > 2
    assert rows[-1]["val_loss"] < rows[0]["val_loss"]
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()
    assert "chat_template.jinja" in {path.name for path in (tmp_path / "tuned-hf").iterdir()}


@pytest.mark.thorough
@pytest.mark.full_report
def test_the_site_builds_without_warnings(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    commands = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config").load_config(
        str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path / "site")
    )
    monkeypatch.setenv("SITE_RUN", str(shared / "runs" / "my"))
    commands.build(config)  # strict: a broken link, anchor or reference raises
    site = tmp_path / "site"
    settings, names = ((site / page / "index.html").read_text() for page in ("settings", "api"))
    for section in to_mapping(Config()):
        assert f'id="{section}"' in settings
    assert "Memory that the tensors of a process may take in all" in settings
    for name in hybridpar.__all__:
        assert re.search(rf'<h2 id="hybridpar[.\w]*\.{name}"', names), name
    for picture in (
        "pictures/2bw.svg",
        "run/executed.svg",
        "run/loss.png",
        "run/watch.html",
        "repository/examples/vit.py",
    ):
        assert (site / picture).stat().st_size > 1000


@pytest.mark.thorough
def test_the_page_of_all_schedules_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "schedule_gallery.py"))
    assert made["FILE"].read_text() == made["page"](), "run scripts/schedule_gallery.py"
    assert {name for _, name, _ in made["SCHEDULES"]} == SCHEDULES.keys()


def test_the_pictures_of_2bw_are_up_to_date_and_show_no_idle_time() -> None:
    made = docs_hook().pictures_of_readme()
    for name, content in made.items():
        assert (ROOT / "docs" / name).read_text() == content, "run python scripts/docs.py"
    shares = {name: set(re.findall(r">(\d+\.\d %)<", content)) for name, content in made.items()}
    assert shares == {"1f1b.svg": {"42.9 %"}, "2bw.svg": {"0.0 %"}}


def test_the_page_of_settings_is_up_to_date() -> None:
    made = docs_hook()
    assert made.SETTINGS.read_text() == made.settings(), "run python scripts/docs.py"
    text = made.SETTINGS.read_text()
    for section, keys in to_mapping(Config()).items():
        assert f"\n## {section}\n" in text
        for key in keys:
            assert f"\n| `{key}` |" in text, key


def test_links_of_the_pages_work_in_a_checkout() -> None:
    """All but those to pictures, which are drawn as the site is built (pictures/, run/): gallery.md
    says so."""
    made = docs_hook()
    for page in PAGES:
        for link in made.links(page):
            if not link.startswith(("pictures/", "run/")):
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def rows_of_other_systems() -> dict[str, list[tuple[str, str]]]:
    """The rows of docs/coming_from.md, two cells each, by framework."""
    found = {}
    for part in (ROOT / "docs/coming_from.md").read_text().split("\n## ")[1:]:
        rows = [line.split(" | ") for line in part.splitlines() if line.startswith("| `")]
        found[part.partition("\n")[0]] = [(row[0], row[1].removesuffix(" |")) for row in rows]
    return found


def names_elsewhere() -> dict[str, list[str]]:
    """The settings of tests/names_elsewhere.txt, by framework."""
    lines = (ROOT / "tests" / "names_elsewhere.txt").read_text().splitlines()
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("["):
            found[line.strip("[]")] = []
        elif line and not line.startswith("#"):
            [*found.values()][-1].append(line)
    return found


def known_keys() -> set[str]:
    known = {f"{section}.{key}" for section, keys in to_mapping(Config()).items() for key in keys}
    return known | {"model.spec", "optim.groups"}  # which not every configuration has


def keys_of(cell: str) -> set[str]:
    return set(re.findall(r"`([a-z]+\.[a-z0-9_]+)(?:`| =)", cell))


def test_keys_of_other_systems_lead_to_keys_that_exist() -> None:
    files = {"metrics.jsonl", "config.toml", "tokenizer.json"}
    for system, rows in rows_of_other_systems().items():
        assert len(rows) > 40, system
        for theirs, ours in rows:
            assert keys_of(ours) - files <= known_keys(), ours
            answers = keys_of(ours) - files or re.search(
                r"^(always so|not there)|`--ranks`|hybridpar \w+|Trainer|SequentialSpec|NNODES",
                ours,
            )
            assert answers, f"{theirs}: {ours!r} is no key, nor 'always so', nor 'not there'"


@pytest.mark.parametrize(
    ("system", "least"), [("Megatron-LM", 130), ("torchtitan", 80), ("DeepSpeed", 70)]
)
def test_every_setting_of_another_system_has_a_row(system: str, least: int) -> None:
    names = names_elsewhere()[system]
    assert len(names) >= least
    cells = " ".join(theirs for theirs, _ in rows_of_other_systems()[system])
    found = [name for quoted in re.findall(r"`([^`]+)`", cells) for name in quoted.split()]
    assert not [name for name in names if name not in found]
    assert not [name for name in found if name.startswith("--") and found.count(name) > 1]


def test_the_command_line_answers_to_flags_of_megatron_as_the_page_does() -> None:
    for theirs, ours in rows_of_other_systems()["Megatron-LM"]:
        for flag in re.findall(r"`--([a-z0-9_-]+)", theirs):
            setting = MEGATRON[flag.replace("-", "_")]
            if setting == ALWAYS:
                assert ours.startswith("always so"), flag
            elif setting == TORCHRUN:
                assert ours.startswith("torchrun's"), flag
            elif setting == ABSENT:
                assert ours.startswith("not there"), flag
            else:
                key, _, value = setting.partition(" = ")
                assert key in known_keys(), flag
                assert f"`{key}" in ours, flag
                if value:
                    from_mapping(tomllib.loads(setting))  # raises if the value is none of the key's
    assert {
        name[2:].replace("-", "_") for name in names_elsewhere()["Megatron-LM"]
    } <= MEGATRON.keys()


def test_keys_in_the_pages_exist() -> None:
    sections: dict[str, Any] = to_mapping(Config())
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    found = {
        (page.name, section, key)
        for page in pages
        if page.name != "coming_from.md"
        for section, key in re.findall(r"`(?:--)?([a-z]+)\.([a-z_]+)(?:`| =)", page.read_text())
        if section in sections
    }
    own = {
        "model": {"depth", "width", "spec", "py"},
        "plan": {"toml", "svg"},
        "memory": {"html"},
        "kernels": {"json"},
    }
    assert not {
        name for name in found if name[2] not in {*sections[name[1]], *own.get(name[1], ())}
    }


def test_every_file_that_is_named_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) < 1500
    text = "".join(body for *_, body in SNIPPETS) + readme
    named = set(re.findall(r"\b(?:scripts|docs|benchmarks|examples)/[\w/.]*\w", text))
    assert named
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing, missing


@pytest.mark.parametrize("script", sorted(ROOT.glob("scripts/*.s*")), ids=lambda p: p.name)
def test_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
