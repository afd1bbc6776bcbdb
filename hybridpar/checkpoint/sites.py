"""Checkpoints of several sites: each resumes from its own files.

k sites -> k, as they were            each from its own, to the bit on the same grid; messages under
                                      way leave again
k -> fewer                            the first ones each from its own, as if the others had never
                                      been
k -> more                             sites that come back have the anchor, and the first site's
                                      moments
1 -> k                                all from the one's state; its weights are the anchor
another every, fragments,             all from the first site's state, where the weights of all are
                                      the same: after
delay or precision                    an outer step without fragments, delay and mix
generate, export, train.start_from    the anchor: what all sites had in common last
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hybridpar.checkpoint.format.manifest import Manifest
from hybridpar.checkpoint.format.part import Trainee
from hybridpar.config import Config
from hybridpar.state.reduction.outer_timeline import OuterTimeline

_NUMBER = ["parallel.sites"]
_TIMELINE = ("outer.every", "outer.fragments", "outer.delay", "outer.precision")


def mismatch(manifest: Manifest, wanted: Config, where: Path) -> str:
    """Return why `wanted` cannot resume from a checkpoint of several sites; "" if it can."""
    saved = manifest.config
    step = manifest.step
    changed = _changed(saved, wanted)
    if saved.parallel.sites == 1 or changed in ([], _NUMBER):
        return ""
    timeline = OuterTimeline(saved.outer, manifest.state.outer_start)
    if timeline.is_common(step):
        return ""
    ahead = timeline.next_common(step)
    remedy = (
        f"they next are after step {ahead}: train on until then as before"
        if ahead is not None
        else (
            "with these settings they never all are: start a new run from their anchor with "
            "train.start_from = "
            f"{str(where)!r}"
        )
    )
    return (
        f"{where} was saved by {saved.parallel.sites} sites whose weights differ at step "
        f"{step}, so {', '.join(changed)} cannot change here; {remedy}"
    )


def _changed(saved: Config, wanted: Config) -> list[str]:
    sites = _NUMBER if saved.parallel.sites != wanted.parallel.sites else []
    return sites + [
        name
        for name in _TIMELINE
        if wanted.parallel.sites > 1 and _of(saved, name) != _of(wanted, name)
    ]


def _of(config: Config, name: str) -> object:
    return getattr(config.outer, name.partition(".")[2])


def source(manifest: Manifest, engine: Trainee) -> int:
    """Return the site whose files a rank resumes from."""
    rank = engine.grid.site.rank
    saved = manifest.config
    return (
        rank
        if rank < saved.parallel.sites and _changed(saved, engine.config) in ([], _NUMBER)
        else 0
    )


def comes_back(manifest: Manifest, engine: Trainee) -> bool:
    """Return whether a rank belongs to a site that joins several others."""
    sites = manifest.config.parallel.sites
    return (
        engine.grid.site.rank >= sites > 1 and _changed(manifest.config, engine.config) == _NUMBER
    )


def going_on(manifest: Manifest, wanted: Config) -> Manifest:
    """Return the manifest with the step after which sites train apart under the settings of
    `wanted`."""
    changed = _changed(manifest.config, wanted)
    if not changed or (changed == _NUMBER and manifest.config.parallel.sites > 1):
        return manifest
    return replace(manifest, state=replace(manifest.state, outer_start=manifest.step))
