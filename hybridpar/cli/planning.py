"""The commands `profile` and `plan`, which measure a machine and plan for it, and the cost of a
configuration on a machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from hybridpar.cli.fitting import closest_remedies
from hybridpar.cli.outputs import check_outputs, write_output
from hybridpar.cli.values import (
    ConfigFile,
    Devices,
    MicroBatches,
    Overrides,
    Ranks,
    Within,
    parse_grid,
)
from hybridpar.config import Config, Launch, PipelineConfig, read_run_config, to_toml
from hybridpar.errors import config_error
from hybridpar.schedules.simulate.predict import predict_timeline
from hybridpar.schedules.simulate.timeline import milliseconds

if TYPE_CHECKING:
    from hybridpar.planner.costs.step_cost import StepCost
    from hybridpar.planner.machines.machine import Machine
    from hybridpar.planner.measuring.profile import Hardware
    from hybridpar.planner.searching.candidates import Candidate, Request
    from hybridpar.planner.searching.search import Result


@dataclass(frozen=True)
class Profile:
    """Measure blocks of the model and messages on this machine, alone or under torchrun."""

    path: ConfigFile
    config: Overrides
    output: str = "profile.json"
    """File for the profile."""
    tp: Annotated[tuple[int, ...], Within(1, 2**16)] = ()
    """Tensor-parallel sizes to measure. Empty (default): 1, 2, 4, .. up to the number of ranks."""
    micro_batch_sizes: MicroBatches = ()
    """Micro-batch sizes to measure. Empty (default): the configuration's, and twice as large."""
    ranks: Ranks = 0
    """Number of processes on CPUs, if torchrun has not started any. 0 (default): one per core."""
    quick: bool = False
    """Measure less, within a few seconds."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.planner.measuring.measure_machine import measure_machine
        from hybridpar.planner.measuring.profile_file import profile_json
        from hybridpar.planner.searching.plan_report import profile_lines

        resolved(self.config)
        check_outputs([self.path], output=self.output)
        profile = measure_machine(
            self.config,
            launch,
            degrees=self.tp,
            sizes=self.micro_batch_sizes,
            quick=self.quick,
            ranks=self.ranks,
        )
        if launch.rank:
            return 0
        write_output("output", self.output, profile_json(profile))
        hardware = profile.hardware
        if not hardware.was_quiet:
            print(_busy(hardware, "profile"), file=sys.stderr)
        said = {"ok": True, "profile": self.output, "efficiency": hardware.efficiency}
        print(
            json.dumps(said | {"was_quiet": hardware.was_quiet})
            if self.json
            else "\n".join(profile_lines(profile))
        )
        if not self.json:
            print(self.output)
        return 0


@dataclass(frozen=True)
class Plan:
    """Choose grid, split, micro-batch size, schedule and recomputation, explain the choice, and
    write a plan for `train`."""

    path: ConfigFile
    config: Overrides
    profile: str = ""
    """A file of `hybridpar profile`. Empty (default): measure this machine quickly, and cache the
    times."""
    cluster: str = ""
    """A cluster.toml: plan for those machines. With a profile: block times from the profile, links
    from the cluster."""
    ranks: Devices = 0
    """Number of processes of the job, each with its own device. 0 (default): all GPUs or cores of
    this machine, or all devices of the cluster."""
    batch_size: Annotated[int, Within(0, 2**30)] = 0
    """Samples of a step over all replicas. 0 (default): the configuration's micro-batches, on its
    replicas."""
    grid: str = ""
    """Axes of the grid to keep, such as tp=2,pp=1. Axes with more than one rank in the
    configuration are kept, too. Without cp, context parallelism is tried if nothing else fits;
    without ep, expert parallelism is tried if the model has experts."""
    schedules: tuple[str, ...] = ()
    """Schedules to choose from. Empty (default): the configuration's, 1f1b and interleaved. A
    schedule with stale gradients (2bw, pipedream) is chosen only if it is 5 % faster than all
    others, or if it is the only one named."""
    micro_batch_sizes: MicroBatches = ()
    """Micro-batch sizes to choose from. Empty (default): the profiled ones, and powers of two
    between them."""
    top: Annotated[int, Within(1, 10_000)] = 5
    """Number of plans to show."""
    compression: bool = False
    """Also try codecs of activations and gradients, which change training."""
    output: str = "plan.toml"
    """File for the plan, a configuration for `hybridpar train`."""
    svg: str = ""
    """Also write a picture of the pipeline to this file."""
    brief: bool = False
    """Print one line, on stderr, and keep the grid of a run that has started. For scripts."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.data.document_length import with_document_length

        command = self._with_context()
        command._check()
        return replace(command, config=with_document_length(command.config))._run(launch)

    def _check(self) -> None:
        """Check the configuration, except for the settings that are to be chosen. Raises: ConfigError."""
        _require_known_costs(self.config)
        resolved(
            replace(
                self.config,
                parallel=replace(
                    self.config.parallel, tp=1, pp=1, dp=self.config.parallel.least_dp
                ),
                memory=self.config.memory.on_another_grid(),
                pipeline=PipelineConfig(num_microbatches=self.config.pipeline.num_microbatches),
                optim=replace(self.config.optim, staleness="none"),
            )
        )

    def _run(self, launch: Launch) -> int:
        from hybridpar.planner.measuring.local_profile import machine_for
        from hybridpar.planner.searching import plan_report as report
        from hybridpar.planner.searching.candidates import Request
        from hybridpar.planner.searching.search import search
        from hybridpar.schedules.schedule_table import find_schedule

        check_outputs(
            [self.path, self.profile, self.cluster], output=self.output, svg=self.svg or None
        )
        if self.brief and (begun := self._begun()) is not None:
            write_output("output", self.output, to_toml(begun))
            print(
                f"plan: {report.describe(begun)}, as {self.config.run.folder} began",
                file=sys.stderr,
            )
            return 0
        for name in self.schedules:
            find_schedule(name)  # refuse an unknown schedule before the machine is measured
        request = Request(
            self._keep(),
            self.batch_size,
            self.schedules,
            self.micro_batch_sizes,
            self.top,
            quick=self.brief,
            compression=self.compression,
        )
        machine = machine_for(
            self.config, launch, self.profile, self.cluster, self.ranks, self._keep()
        )
        if not (hardware := machine.profile.hardware).was_quiet:
            print(_busy(hardware, "plan"), file=sys.stderr)
        result = search(self.config, machine, request)
        self._show(result, machine)
        if not result.ranked:
            said = [
                "hybridpar plan: nothing fits: " + "; ".join(report.failures(result)),
                *closest_remedies(result.failed, result.limit),
            ]
            print("\n".join(said), file=sys.stderr)
            return 1
        write_output("output", self.output, report.plan_toml(result.ranked[0]))
        if self.svg:
            self._draw(result.ranked[0])
        self._show_choice(result, machine, request)
        return 0

    def _show(self, result: Result, machine: Machine) -> None:
        from hybridpar.planner.searching import plan_report as report

        if self.json:
            said = {"assumptions": self._assumptions(machine), "kept": self._keep()}
            print(json.dumps(report.as_json(result) | said))
        elif not self.brief:
            from rich.console import Console

            source = "estimated" if machine.profile.estimated else "measured"
            print(
                f"{machine.num_devices} x {machine.profile.hardware.name}, {source} times of blocks"
            )
            if kept := self._keep():
                print(self._kept(kept))
            Console(width=None if sys.stdout.isatty() else 160).print(report.table(result))
            print("\n".join([*report.reasons(result), *report.failures(result)]))
            lines = [f"  {line}" for line in self._assumptions(machine)]
            print("assumed:", *lines, sep="\n")

    def _assumptions(self, machine: Machine) -> list[str]:
        from hybridpar.planner.machines.assumptions import assumption_lines, document_lines

        return [*document_lines(self.config, machine.profile), *assumption_lines(machine)]

    def _show_choice(self, result: Result, machine: Machine, request: Request) -> None:
        from hybridpar.planner.searching import plan_report as report
        from hybridpar.planner.searching.links_report import link_lines
        from hybridpar.planner.searching.scale_down import as_fast_on_fewer

        best = result.ranked[0]
        hardware = machine.profile.hardware
        out = sys.stdout if not self.json and not self.brief else sys.stderr
        price = f", {best.cost.price:.4g} for a million" if best.cost.price else ""
        share = f"; measured with {hardware.efficiency:.0%} of the cores" if hardware.cores else ""
        print(
            f"plan: {report.describe(best.config)}: {milliseconds(best.cost.step_time)} ms a step, "
            f"{report.speed(best.cost)} "
            f"predicted{price}; {report.bound_by(best, result.limit)}{share}",
            file=out,
        )
        for line in link_lines(best.cost):
            print(f"  {line}", file=out)
        if not self.brief:
            if (fewer := as_fast_on_fewer(self.config, machine, request, best)) is not None:
                number = fewer.cost.machine.num_devices
                print(
                    f"  {number} devices are as fast: {milliseconds(fewer.cost.step_time)} ms with "
                    f"{report.describe(fewer.config)} (--ranks {number})",
                    file=out,
                )
            print(f"{self.output}: {self._command(machine)}", file=out)

    def _command(self, machine: Machine) -> str:
        """Return the command line that trains with the plan."""
        servers = -(-machine.num_devices // machine.devices_per_server)
        if servers == 1:
            return f"hybridpar train {self.output} --ranks {machine.num_devices}"
        return (
            f"on each of the {servers} servers, R = 0 to {servers - 1}: torchrun --nnodes "
            f"{servers} --node-rank R "
            f"--nproc-per-node {machine.devices_per_server} --master-addr SERVER0 -m hybridpar "
            f"train {self.output}"
        )

    def _begun(self) -> Config | None:
        """Return this configuration with the grid of the existing run in its folder, or None if
        there is no such run."""
        path = self.config.run.folder / "config.toml"
        if not path.exists():
            return None
        before = read_run_config(path)
        given = self._keep()
        grid = {axis: getattr(before.parallel, axis) for axis in ("tp", "cp", "pp", "dp", "ep")}
        if any(grid[axis] != size for axis, size in given.items()):
            return None  # `train` reports what is wrong with the folder
        return replace(
            self.config,
            parallel=before.parallel,
            pipeline=before.pipeline,
            optim=before.optim,
            plan=before.plan,
            train=replace(self.config.train, micro_batch_size=before.train.micro_batch_size),
        )

    def _keep(self) -> dict[str, int]:
        parallel = self.config.parallel
        kept = {axis: size for axis, size in (("tp", parallel.tp), ("pp", parallel.pp)) if size > 1}
        kept |= {"dp": parallel.dp} if parallel.dp > 0 else {}
        kept |= {"cp": parallel.cp} if parallel.cp > 1 else {}
        kept |= {"ep": parallel.ep} if parallel.ep > 1 else {}
        return kept | (parse_grid(self.grid) if self.grid else {})

    def _kept(self, kept: Mapping[str, int]) -> str:
        """Return a line about the axes whose sizes are not the planner's choice."""
        given = parse_grid(self.grid) if self.grid else {}
        named = [
            f"{axis} = {size} ({'--grid' if axis in given else f'parallel.{axis}'})"
            for axis, size in kept.items()
        ]
        free = "" if set(kept) <= set(given) else "; 1 for tp and pp, 0 for dp leave them open"
        return f"kept as given, so not searched: {', '.join(named)}{free}"

    def _with_context(self) -> Plan:
        """Return the command with the grid's cp and ep in its configuration."""
        given = parse_grid(self.grid) if self.grid else {}
        parallel = self.config.parallel
        sizes = {axis: given.get(axis, getattr(parallel, axis)) for axis in ("cp", "ep")}
        parallel = replace(parallel, **sizes)
        return replace(self, config=replace(self.config, parallel=parallel))

    def _draw(self, best: Candidate) -> None:
        from hybridpar.planner.searching.plan_report import describe
        from hybridpar.schedules.draw.svg import draw_svg

        timeline = predict_timeline(best.cost.schedule_options, best.cost.shape, best.cost.costs, 2)
        write_output(
            "svg",
            self.svg,
            draw_svg(timeline.scaled(1e3), title=describe(best.config), unit="milliseconds"),
        )


def _busy(hardware: Hardware, command: str) -> str:
    """Return a line about the other programs that ran while a machine was measured."""
    return (
        f"other programs took {100 * hardware.taken:.0f} % of the cores while this machine was "
        f"measured: its times are not to be trusted; {command} again when they are done"
    )


def cost_on_machine(config: Config, profile: str, cluster: str, launch: Launch) -> StepCost:
    """Return the cost of the configuration, with its grid filled in, on the machine of a profile or
    cluster."""
    from hybridpar.planner.costs.step_cost import StepCost
    from hybridpar.planner.measuring.local_profile import machine_for

    _require_known_costs(config)
    devices = config.parallel.num_ranks if config.parallel.dp else 0
    machine = machine_for(config, launch, profile, cluster, devices)
    return StepCost(resolved(config, machine.num_devices), machine)


def _require_known_costs(config: Config) -> None:
    """Raise a ConfigError for several sites, which train separately, so each one is planned
    separately."""
    if (sites := config.parallel.sites) > 1:
        raise config_error(
            "parallel.sites", sites, "not supported by plan, which plans the grid of one site", "1"
        )


def resolved(config: Config, ranks: int = 0) -> Config:
    """Return the configuration with its grid filled in.

    Args:
        ranks: Number of processes; 0 for the size of the configuration's grid.

    Raises:
        ConfigError: The configuration does not fit the number of processes.
    """
    from hybridpar.validate import resolve

    return resolve(config, ranks or max(1, config.parallel.num_ranks))
