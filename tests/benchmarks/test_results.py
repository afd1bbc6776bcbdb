"""Result files of the benchmarks: benchmarks/README.md says what they say, and cases keep their
machine."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path

from benchmarks.common import write_results
from benchmarks.summary import BEGIN, END, HERE, table


def test_the_readme_has_the_table_of_claims_and_names_every_result() -> None:
    text = (HERE / "README.md").read_text()
    assert text.split(BEGIN)[1].split(END)[0] == table(), "run python -m benchmarks.summary"
    assert set(re.findall(r"([\w.]+)\.json", text)) == {
        path.stem for path in HERE.glob("results/*.json")
    }


def test_cases_that_stay_keep_the_machine_that_they_were_measured_on(tmp_path: Path) -> None:
    path = write_results("x", [{"case": "a"}, {"case": "b"}], Namespace(out=str(tmp_path)))
    path.write_text(
        json.dumps(
            json.loads(path.read_text())
            | {"machine": dict.fromkeys(("cpu", "cores", "capability", "commit"), "another")}
        )
    )
    for _ in range(2):
        write_results("x", [{"case": "b"}], Namespace(out=str(tmp_path), add=True))
    a, b = json.loads(path.read_text())["cases"]
    assert a["machine"]["cpu"] == "another"
    assert b == {"case": "b"}
