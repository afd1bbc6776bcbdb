"""Result files of the benchmarks."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from benchmarks.common import write_results


def test_cases_that_stay_keep_the_machine_that_they_were_measured_on(tmp_path: Path) -> None:
    path = write_results("x", [{"case": "a"}, {"case": "b"}], Namespace(out=str(tmp_path)))
    before = json.loads(path.read_text())
    before["machine"]["cpu"] = "another"
    path.write_text(json.dumps(before))
    for _ in range(2):
        write_results("x", [{"case": "b"}], Namespace(out=str(tmp_path), add=True))
    a, b = json.loads(path.read_text())["cases"]
    assert a["machine"]["cpu"] == "another"
    assert b == {"case": "b"}
