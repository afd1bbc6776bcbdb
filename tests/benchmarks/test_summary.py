"""benchmarks/README.md: its table of claims is what the result files say, and every file of results is named."""

from __future__ import annotations

import re

from benchmarks.summary import BEGIN, END, HERE, table


def test_the_table_of_claims_is_up_to_date() -> None:
    text = (HERE / "README.md").read_text()
    assert text.split(BEGIN)[1].split(END)[0] == table(), "run python -m benchmarks.summary"


def test_every_result_is_named_and_every_named_result_is_there() -> None:
    text = (HERE / "README.md").read_text()
    files = {path.stem for path in HERE.glob("results/*.json")}
    named = set(re.findall(r"([\w.]+)\.json", text))
    assert named == files
