"""Record changes of configuration and data when a run resumes, in changes.jsonl.

    {"step": 400, "settings": {"model.dropout": [0.1, 0.0]}, "corpus": ["8c1f..", "8c1f.."],
    "sample": 6400}

One line for each step after which a run resumed with changes that train.continue_with allows: old
and new values, data fingerprints, and the position of the next batch in the data.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridpar.checkpoint import read_manifest, saved_steps
from hybridpar.checkpoint.compatible import changes, setting
from hybridpar.checkpoint.folders import folder_of
from hybridpar.config import Config, from_plain, read_run_config
from hybridpar.data import DataStart
from hybridpar.errors import ConfigError, config_error
from hybridpar.job import JobPlan
from hybridpar.optim import learning_rate
from hybridpar.train import folder as run_folder
from hybridpar.train.reporting.run_metrics import read_metrics


def go_on(config: Config, step: int, corpus: str, start: DataStart) -> list[str]:
    """Record on rank 0 how the run resumes, and return lines to print.

    Args:
        step: Step that the run resumes after; 0 for a new run.
        start: Position of the run's batches in the data.
    """
    path = config.run.folder / run_folder.CHANGES
    rows = [row for change, row in _recorded(path).items() if change < step]
    lines = []
    if step:
        manifest = read_manifest(folder_of(config.run.folder / run_folder.CHECKPOINTS, step))
        before = manifest.config
        corpora = (manifest.corpus, corpus)
        if names := changes(before, config, corpora):
            position = start.position(step, config.global_batch_size)
            rows.append(
                {
                    "step": step,
                    "settings": {n: [setting(before, n), setting(config, n)] for n in names},
                    "corpus": corpora,
                    "sample": position,
                }
            )
            data = "these data" if corpora[0] == corpora[1] else "the new data"
            lines.append(
                f"train.continue_with: {', '.join(names)} changed after step {step} ({path.name}); "
                f"the next sample is number {position} of {data}"
            )
        lines += _rate_changes(before, config, step, manifest.state.num_updates)
    if rows or path.exists():
        run_folder.write_changed(path, "".join(f"{json.dumps(row)}\n" for row in rows))
    return lines


def _recorded(path: Path) -> dict[int, dict[str, Any]]:
    """Return the rows of a changes.jsonl by step, without invalid ones."""
    rows = {}
    for row in read_metrics(path):
        with contextlib.suppress(ValueError):
            from_plain(dict, row.get("settings"), "settings")
            from_plain(tuple[str, str], row.get("corpus"), "corpus")
            rows[row["step"]] = row
    return rows


def _rate_changes(before: Config, now: Config, step: int, num_updates: int) -> list[str]:
    was = _rate(before, step, num_updates)
    will_be = _rate(now, step, num_updates)
    if was == will_be:
        return []
    advice = ""
    if before.train.num_steps != now.train.num_steps:
        advice = '; a run with optim.decay = "wsd" can be made longer without that'
        if now.optim.decay == "wsd":
            advice = "; not if it resumes from before its decay: move the later checkpoints away"
    return [
        f"the learning rate of step {step + 1} was to be {was:.4g} (train.num_steps = "
        f"{before.train.num_steps}), and is {will_be:.4g} now (train.num_steps = "
        f"{now.train.num_steps}){advice}"
    ]


def _rate(config: Config, step: int, num_updates: int) -> float:
    job = JobPlan(config)
    delay = job.schedule.mean_delay(job.shape, 0) if step >= job.options.sync_steps else 0.0
    return learning_rate(num_updates, config.optim, config.train.num_steps, delay)


def settings_of(folder: Path, step: int, start: int) -> tuple[Config, str]:
    """Return the configuration that trained steps `start` + 1 to `step`, and the data fingerprint.

    train.continue_with names what changed after `start`. The fingerprint is empty unless the data
    changed then.

    Raises:
        ConfigError: The configuration changed between these steps, or is no longer known.
    """

    def lost(change: int, why: str) -> ConfigError:
        rule = f"settings changed after step {change} ({run_folder.CHANGES}), {why}"
        return config_error("step", step, rule, "a larger checkpoint.keep next time")

    rows = _recorded(folder / run_folder.CHANGES)
    if change := max((change for change in rows if start < change < step), default=0):
        raise lost(change, "whose checkpoint has been removed")
    root = folder / run_folder.CHECKPOINTS
    later = min((change for change in rows if change >= step), default=None)
    if later is None:
        config = read_run_config(folder / run_folder.CONFIG)
    elif saved := [saved for saved in saved_steps(root) if step <= saved <= later]:
        config = read_manifest(folder_of(root, saved[-1])).config
    else:
        raise lost(later, "and no checkpoint between the two is left")
    row = rows.get(start, {"settings": {}, "corpus": ["", ""]})
    train = replace(config.train, continue_with=tuple(row["settings"]))
    return replace(config, train=train), row["corpus"][1]
