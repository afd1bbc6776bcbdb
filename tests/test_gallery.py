"""docs/all_schedules.md is what its script writes, and has every schedule."""

from __future__ import annotations

import runpy
from pathlib import Path

from hybridpar.pipeline.plan.schedules import SCHEDULES

ROOT = Path(__file__).parents[1]


def test_the_gallery_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "schedule_gallery.py"))
    assert made["FILE"].read_text() == made["page"](), "run scripts/schedule_gallery.py"
    assert {name for _, name, _ in made["SCHEDULES"]} == SCHEDULES.keys()
