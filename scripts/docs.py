"""What the documentation site has besides docs/, made as it is built (a hook of mkdocs).

    pictures/*.svg    schedules, simulated            api.md    the public names, for mkdocstrings
    run/*             pictures of a run ($SITE_RUN)
    repository/       the files of the repository that pages link to, as ../FILE, and those that
                      they link to in turn

`python scripts/docs.py` writes docs/settings.md, every section of the configuration, from its
source, and the two pictures of README.md. They are committed, so that links work in a checkout; a
test says when they are out of date.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ROOT / "docs" / "settings.md"
_LINK = re.compile(r"(\]\()([^)\s#]+)")
PICTURES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "virtual_stages": 2},
    "zero_bubble": {"schedule": "1f1b", "split_backward": True, "zero_bubble": True},
    "v": {"schedule": "1f1b", "split_backward": True, "stage_layout": "v"},
    "2bw": {"schedule": "2bw"},
    "2bw_v_half": {
        "schedule": "2bw",
        "split_backward": True,
        "stage_layout": "v",
        "activations": "half",
    },
}
"""Settings of the schedules that are drawn."""
_RUN = ("plan.svg", "executed.svg", "loss.png")


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated files to those of docs/."""
    from mkdocs.structure.files import File

    made = {"api.md": api()} | {f"pictures/{name}.svg": picture(name) for name in PICTURES}
    run = Path(os.environ.get("SITE_RUN") or train(ROOT / "build" / "site-run"))
    made |= {f"run/{name}": (run / name).read_bytes() for name in _RUN} | {
        "run/watch.html": dashboard(run)
    }
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    for path in linked(ROOT / "docs"):
        files.append(
            File.generated(config, f"repository/{path.relative_to(ROOT)}", abs_src_path=str(path))
        )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links out of docs/ to the copies in repository/, and links of those into docs/ back."""
    here = Path(page.file.src_uri)
    if here.parts[0] != "repository":
        return _LINK.sub(lambda m: m[1] + re.sub(r"^\.\./", "repository/", m[2]), markdown)
    up = "../" * (len(here.parts) - 1)
    return _LINK.sub(lambda m: m[1] + re.sub(r"^(\.\./)*docs/", up, m[2]), markdown)


def linked(folder: Path) -> list[Path]:
    """The files of the repository outside docs/ that its pages link to, directly or by way of such
    a file."""
    found: dict[Path, None] = {}
    waiting = [(page, link) for page in sorted(folder.glob("*.md")) for link in links(page)]
    while waiting:
        page, link = waiting.pop()
        target = (page.parent / link).resolve()
        if target.is_file() and target.is_relative_to(ROOT) and not target.is_relative_to(folder):
            if target not in found and target.suffix == ".md":
                waiting += [(target, further) for further in links(target)]
            found[target] = None
    return sorted({*found, ROOT / "ARCHITECTURE.md", ROOT / "benchmarks/README.md"})


def links(page: Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return (found[2] for found in _LINK.finditer(text) if "://" not in found[2])


def picture(name: str) -> str:
    """Two batches of eight micro-batches on four ranks, as an SVG picture."""
    from hybridpar.config import from_mapping
    from hybridpar.job import JobPlan
    from hybridpar.schedules.draw.svg import FORWARDS, draw_svg
    from hybridpar.train.forecasts.preview import preview

    chunks = 2 if {"virtual_stages", "stage_layout"} & set(PICTURES[name]) else 1
    sizes = {"num_microbatches": 8, "split": [2] + [1] * (4 * chunks - 2) + [2]}
    config = from_mapping(
        {
            "model": {"num_layers": 4 * chunks, "vocab_size": 64},
            "parallel": {"pp": 4, "dp": 1},
            "pipeline": PICTURES[name] | sizes,
        }
    )
    shown = preview(JobPlan(config), 2)
    title = name.replace("_", " ")
    return draw_svg(shown.drawn(), title=title, unit=FORWARDS, steady_idle=shown.bubble)


def pictures_of_readme() -> dict[str, str]:
    """1F1B and 2BW in the time of three synchronous batches of four micro-batches on four ranks, as
    SVG pictures by the names of their files in docs/."""
    from hybridpar.config import from_mapping
    from hybridpar.job import JobPlan
    from hybridpar.schedules.draw.svg import draw_svg
    from hybridpar.schedules.simulate.costs import Costs
    from hybridpar.train.forecasts.preview import preview

    found = {}
    until = 0.0
    for schedule, title, batches in (("1f1b", "1F1B", 3), ("2bw", "2BW", 6)):
        config = from_mapping(
            {
                "model": {"num_layers": 4, "vocab_size": 64},
                "parallel": {"pp": 4, "dp": 1},
                "pipeline": {"schedule": schedule, "num_microbatches": 4, "split": [2, 1, 1, 2]},
            }
        )
        shown = preview(JobPlan(config), batches, Costs(1.0, 2.0))
        until = until or shown.timeline.makespan
        drawn = shown.drawn().cut_at(until)
        found[f"{schedule}.svg"] = draw_svg(drawn, title=title, steady_idle=shown.bubble)
    return found


def example(folder: Path) -> list[str]:
    """Writes the example of start.md and text for it, and returns the arguments that train it on
    two ranks."""
    page = (ROOT / "docs" / "start.md").read_text()
    (folder / "my.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    lines = (json.dumps({"text": paragraph}) for paragraph in text.split("\n\n"))
    (folder / "my_text.jsonl").write_text("\n".join(lines))
    return ["train", "my.toml", "--data.corpus", "my_text.jsonl", "--train.threads", "1"]


def train(folder: Path) -> Path:
    """The folder of a run of the example: of an earlier build, or trained now."""
    if (run := folder / "runs" / "my").is_dir():
        return run
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "hybridpar", *example(folder), "--ranks", "2"]
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return run


def dashboard(run: Path) -> str:
    """The page of `hybridpar watch`."""
    from hybridpar.watch import Board, page

    return page(Board(run))


def settings() -> str:
    """A page with a table for each section: key, default and what the source says of it."""
    from hybridpar.cli.help import descriptions
    from hybridpar.config import Config

    lines = [
        "# Settings",
        "",
        "<!-- written by scripts/docs.py: change the descriptions in hybridpar/config -->",
        "",
        "Every key is a line of a TOML file under its section, or a flag: `--section.key value`. "
        "`hybridpar "
        "check` names all that are wrong at once.",
    ]
    for section in dataclasses.fields(Config):
        defaults = section.default_factory()  # type: ignore[misc]
        kind = type(defaults)
        lines += ["", f"## {section.name}", "", "| key | default | |", "|---|---|---|"]
        notes = descriptions(kind)
        hints = typing.get_type_hints(kind)
        for key in dataclasses.fields(kind):
            note = " ".join([notes[key.name], *_choices(hints[key.name])]).replace("|", "\\|")
            lines.append(f"| `{key.name}` | `{_spelled(getattr(defaults, key.name))}` | {note} |")
    return "\n".join(lines) + "\n"


def _choices(kind: Any) -> list[str]:
    """A sentence that names the values of a key, if it has a few."""
    names = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    return [f"One of {', '.join(f'`{_spelled(name)}`' for name in names)}."] if names else []


def _spelled(value: Any) -> str:
    """A default as TOML spells it."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_spelled, value))}]"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, str)
        else str(value)
    )


def api() -> str:
    """A page of all public names."""
    import hybridpar
    from hybridpar import conformance

    lines = ["# Python"]
    for module, use in (
        (hybridpar, "`import hybridpar as hp` and `hp.NAME`"),
        (conformance, "`from hybridpar.conformance import NAME` ([what for](verify.md))"),
    ):
        names = [
            name
            for name in sorted(module.__all__, key=str.lower)
            if hasattr(getattr(module, name), "__module__")
        ]
        lines += [
            "",
            f"All public names of {module.__name__}: {use}.",
            "",
            *(
                f"::: {getattr(module, name).__module__}.{name}\n"
                for name in names
                if name != "Factory"
            ),
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    SETTINGS.write_text(settings(), encoding="utf-8")
    for name, content in pictures_of_readme().items():
        (ROOT / "docs" / name).write_text(content, encoding="utf-8")
