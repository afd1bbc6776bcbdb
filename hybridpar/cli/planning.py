"""The commands `profile` and `plan`."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import FlagConversionOff, Positional, arg

from hybridpar.config import Config, Launch
from hybridpar.errors import config_error

if TYPE_CHECKING:
    from hybridpar.planner.cost import Machine
    from hybridpar.planner.profile import Profile
    from hybridpar.planner.search import Candidate

ConfigFile = Positional[Annotated[Path, arg(metavar="CONFIG.toml")]]
Overrides = Annotated[Config, arg(name=""), FlagConversionOff]


@dataclass(frozen=True)
class ProfileMachine:
    """Measure what the blocks of a model, and messages, take on this machine; alone, or under torchrun."""

    path: ConfigFile
    config: Overrides
    out: str = "profile.json"
    tp: tuple[int, ...] = ()
    """Tensor-parallel degrees; empty: 1, 2, 4, .. as many as ranks."""
    micro_batch: tuple[int, ...] = ()
    """Micro-batch sizes; empty: the configuration's and twice that."""
    ranks: int = 0
    """Processes on a CPU, where torchrun has not started any; 0: one a core."""
    quick: bool = False
    """A few seconds: less of everything."""
    json: bool = False

    def run(self, launch: Launch) -> int:
        from hybridpar.planner.profile import write_profile
        from hybridpar.planner.survey import survey

        resolved(self.config)
        if self.ranks < 0:
            raise config_error("ranks", self.ranks, "must not be negative", "0")
        profile = survey(self.config, launch, degrees=self.tp, sizes=self.micro_batch, quick=self.quick,
                         ranks=self.ranks)
        if launch.rank:
            return 0
        write_profile(profile, Path(self.out))
        print(json.dumps({"ok": True, "profile": self.out}) if self.json else "\n".join(profile_lines(profile)))
        if not self.json:
            print(self.out)
        return 0


@dataclass(frozen=True)
class Plan:
    """Choose grid, split, micro-batch size, schedule and recomputation, and say why; writes a plan for `train`."""

    path: ConfigFile
    config: Overrides
    profile: str = ""
    """What `hybridpar profile` has measured; empty: this machine is measured, quickly, and that is kept."""
    cluster: str = ""
    """A cluster.toml: plan for machines that are not at hand. With a profile, its blocks are used, and these links."""
    devices: int = 0
    """How many to use; 0: all GPUs or cores here, or all of the cluster."""
    batch_size: int = 0
    """Samples of a step, however they are divided; 0: the configuration's micro-batches on its replicas."""
    grid: str = ""
    """Sizes to keep, such as tp=2,pp=1. Axes to which the configuration gives more than one rank are kept, too."""
    schedules: tuple[str, ...] = ()
    """Schedules to choose from; empty: the configuration's, and 1f1b where it trains alike."""
    micro_batches: tuple[int, ...] = ()
    """Micro-batch sizes to choose from; empty: those profiled, and powers of two between."""
    top: int = 5
    """How many to rank."""
    out: str = "plan.toml"
    svg: str = ""
    """Also draw the pipeline, to this file."""
    brief: bool = False
    """One line, on stderr."""
    json: bool = False

    def run(self, launch: Launch) -> int:
        from hybridpar.planner import report
        from hybridpar.planner.search import Request, search

        resolved(replace(self.config, parallel=replace(self.config.parallel, tp=1, pp=1, dp=1),
                         pipeline=replace(self.config.pipeline, split=(), recompute="none", schedule="1f1b",
                                          early_switch="off", warmup="depth", gradient_buffers=0, sync_steps=0),
                         optim=replace(self.config.optim, staleness="none")))
        for name, value in (("devices", self.devices), ("top", self.top - 1)):
            if value < 0:
                raise config_error(name, value, "is too small", "1")
        request = Request(self._keep(), self.batch_size, self.schedules, self.micro_batches, self.top, quick=self.brief)
        machine = machine_for(self.config, launch, self.profile, self.cluster, self.devices)
        result = search(self.config, machine, request)
        if self.json:
            print(json.dumps(report.as_json(result)))
        elif not self.brief:
            from rich.console import Console

            source = "estimated" if machine.profile.estimated else "measured"
            print(f"{machine.num_devices} x {machine.profile.hardware.name}, {source} times of blocks")
            Console(width=None if sys.stdout.isatty() else 160).print(report.table(result))
            print("\n".join(report.failures(result)))
        if not result.ranked:
            print("hybridpar plan: nothing fits: " + "; ".join(report.failures(result)), file=sys.stderr)
            return 1
        best = result.ranked[0]
        report.write_plan(best, Path(self.out))
        if self.svg:
            self._draw(best)
        out = sys.stdout if not self.json and not self.brief else sys.stderr
        print(f"plan: {report.describe(best.config)}: {1e3 * best.model.step_time:.4g} ms a step, "
              f"{best.model.tokens_per_s:,.0f} tokens/s predicted; {report.bound_by(best, result.limit)}", file=out)
        if not self.brief:
            ranks = machine.num_devices
            print(f"{self.out}: torchrun --nproc-per-node {ranks} -m hybridpar train {self.out}", file=out)
        return 0

    def _keep(self) -> dict[str, int]:
        from hybridpar.cli.commands import parse_grid

        parallel = self.config.parallel
        kept = {axis: size for axis, size in (("tp", parallel.tp), ("pp", parallel.pp)) if size > 1}
        kept |= {"dp": parallel.dp} if parallel.dp > 0 else {}
        return kept | (parse_grid(self.grid) if self.grid else {})

    def _draw(self, best: Candidate) -> None:
        from hybridpar.pipeline.plan.draw import draw_svg
        from hybridpar.planner.report import describe

        model = best.model
        timeline = model.ordering.timeline(model.sizes, model.costs, 2)
        Path(self.svg).write_text(
            draw_svg(timeline.scaled(1e3), title=f"{describe(best.config)} (milliseconds)"), encoding="utf-8")


def machine_for(config: Config, launch: Launch, profile: str, cluster: str, devices: int) -> Machine:
    """What to plan for: a cluster's description, a profile, both, or the machine at hand, profiled now or before.

    Raises: ConfigError; DataError if a file is damaged.
    """
    from hybridpar.planner.cluster import estimate, machine_of, measured_machine, read_cluster
    from hybridpar.planner.profile import check_settings, read_profile

    found: Profile | None = None
    if profile:
        found = read_profile(Path(profile))
        check_settings(found, config)
    if cluster:
        described = read_cluster(Path(cluster))
        return machine_of(described, found or estimate(config, described), devices)
    return measured_machine(found or cached_profile(config, launch), devices)


def cached_profile(config: Config, launch: Launch) -> Profile:
    """A quick profile of this machine, from the cache of profiles where it has been made before."""
    from hybridpar.planner.profile import read_profile, write_profile
    from hybridpar.planner.survey import identity, survey

    key = hashlib.sha256(json.dumps(identity(config), sort_keys=True, default=str).encode()).hexdigest()[:16]
    path = Path(config.data.cache or Path(config.run.dir) / "data") / "profiles" / f"{key}.json"
    if path.exists():
        return read_profile(path)
    print("measuring this machine (kept for next time)", file=sys.stderr)
    profile = survey(config, launch, quick=True)
    write_profile(profile, path)
    return profile


def profile_lines(profile: Profile) -> list[str]:
    """A few lines for people."""
    hardware = profile.hardware
    lines = [f"{hardware.name}, {hardware.hosts} x {hardware.devices_per_host} ranks, {hardware.cores} cores",
             f"{'block':<10} {'tp':>3} {'micro-batch':>11} {'forward':>9} {'backward':>9} {'waits':>9} {'optimizer':>9}  ms"]
    for (kind, tp, b), cost in profile.blocks.items():
        numbers = (cost.forward, cost.backward, cost.forward_wait + cost.backward_wait, cost.norm + cost.update)
        lines.append(f"{kind:<10} {tp:>3} {b:>11} " + " ".join(f"{1e3 * x:9.3f}" for x in numbers))
    for name, link in profile.links.items():
        reduce = ", ".join(f"all-reduce over {n} {curve.bandwidth / 1e6:,.0f} MB/s" for n, curve in link.reduce.items())
        lines.append(f"{name}: {1e6 * link.send.latency:.0f} us, {link.send.bandwidth / 1e6:,.0f} MB/s; {reduce}")
    return lines


def resolved(config: Config) -> Config:
    """As the other commands."""
    from hybridpar.cli.commands import resolved as resolve

    return resolve(config)


COMMANDS: dict[str, type[Any]] = {"profile": ProfileMachine, "plan": Plan}
