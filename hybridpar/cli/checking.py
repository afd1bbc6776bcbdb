"""`hybridpar check`: report the errors, memory and step time of a configuration."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated

from hybridpar.cli.fitting import Room, fit_report
from hybridpar.cli.planning import cost_on_machine, resolved
from hybridpar.cli.values import ConfigFile, JobRanks, Overrides, Within
from hybridpar.config import Config, Launch, from_mapping
from hybridpar.errors import CheckpointError


@dataclass(frozen=True)
class Check:
    """Report every error in a configuration at once, for any number of processes, without starting
    any."""

    path: ConfigFile
    config: Overrides
    ranks: JobRanks = 0
    """Number of processes of the job; none is started. 0 (default): the size of the grid."""
    profile: str = ""
    """A file of `hybridpar profile`. Adds the bandwidth that links need and have, the step time,
    and the cost of each setting that saves memory."""
    cluster: str = ""
    """A cluster.toml. Adds the same for those machines, with estimated times, or with the times of
    the profile."""
    memory_gb: Annotated[float, Within(0, 1e9)] = 0.0
    """Memory of a device, or of a process on CPUs, in 1e9 bytes. 0 (default): from the profile or
    cluster, else from this machine."""
    largest: bool = False
    """Also report how many layers of this width would fit, now and with each setting that saves
    memory, and the longest sequence of this model."""
    json: bool = False
    """Print the result as one JSON object on stdout."""

    def run(self, launch: Launch) -> int:
        from hybridpar.data.document_length import with_document_length

        config = with_document_length(resolved(self.config, self.ranks))
        _check_best_set(config)
        room = Room.of(config, launch, self.profile, self.cluster, self.memory_gb)
        from hybridpar.planner.costs.transfer_costs import UnknownCosts

        on_machine = self.profile or self.cluster
        cost = None
        if on_machine:
            with suppress(UnknownCosts):  # fit_report says so
                cost = cost_on_machine(config, self.profile, self.cluster, launch)
        absent = _absent(config)
        from torch.nn import ModuleList

        from hybridpar.grid import Axis
        from hybridpar.job import JobPlan
        from hybridpar.models.build import BlockOptions, build_blocks, global_placements
        from hybridpar.models.cost import mean_document_share, training_flops_per_token
        from hybridpar.models.groups import summarize
        from hybridpar.models.groups import table as group_table
        from hybridpar.optim.schedule import describe_points
        from hybridpar.planner.searching.links_report import link_lines, link_needs, step_line
        from hybridpar.prediction import predict, table
        from hybridpar.prediction.expert_load import expert_load
        from hybridpar.prediction.knobs import knobs, savings
        from hybridpar.prediction.memory_report import short_form
        from hybridpar.prediction.predict import default_device
        from hybridpar.train.folder import measured
        from hybridpar.train.forecasts.host_forecast import forecast_host
        from hybridpar.train.forecasts.offload_forecast import forecast_offload
        from hybridpar.train.forecasts.site_traffic import site_traffic
        from hybridpar.train.forecasts.tier_forecast import forecasts, segments_line

        device = default_device(config)
        config = from_mapping(measured(config), config)
        job = JobPlan(config)
        offload = forecast_offload(job) if device.type == "cpu" else None
        if offload is not None and config.memory.offload_activations == "auto":
            config = from_mapping({"memory": {"offload_activations": offload.away}}, config)
            job = JobPlan(config)
        memory = predict(job, device=device)
        numbers = range(config.model.num_blocks)
        options = BlockOptions(groups=config.optim.groups)
        model = ModuleList(
            build_blocks(config.model, Axis("tp"), numbers, options=options).values()
        )
        grid = config.parallel
        several = {"cp": grid.cp} if grid.cp > 1 else {}
        several |= {"ep": grid.ep} if grid.ep > 1 else {}
        several |= {"sites": grid.sites} if grid.sites > 1 else {}
        parameters = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        visible = mean_document_share(config.model, config.data.document_length)
        plain = {
            "ok": True,
            "grid": {"tp": grid.tp, "pp": grid.pp, "dp": grid.dp, **several},
            "stages": [[b.start, b.stop] for b in job.split],
            "parameters": parameters,
            "trained_parameters": trained,
            "batch_samples": config.global_batch_size,
            "batch_tokens": config.batch_tokens,
            "training_flops_per_token": training_flops_per_token(config.model, visible),
            "device": device.type,
            "peak_memory": [stage.as_json() for stage in memory],
            "absent": absent,
        }
        tiers = forecasts(job)
        host = forecast_host(job) if device.type == "cpu" else None
        sites = site_traffic(config)
        load = expert_load(config)
        name = job.shape.rank_name
        fullest = max(range(len(memory)), key=lambda rank: memory[rank].total)
        fit, fit_lines = fit_report(config, memory, room, name, largest=self.largest)
        groups = (
            summarize(config.optim, global_placements(config.model)) if config.optim.groups else []
        )
        if self.json:
            plain |= {"groups": [asdict(one) for one in groups]} if groups else {}
            plain |= {"tiers": [asdict(one) for one in tiers]} | fit
            forecasted = {"host": host, "offload": offload, "experts": load}
            plain |= {key: asdict(found) for key, found in forecasted.items() if found}
            plain |= {"sites": sites.as_json()} if sites else {}
            if cost is not None:
                plain |= {
                    "step_ms": 1e3 * cost.step_time,
                    "links": [need.as_json() for need in link_needs(cost)],
                }
            print(json.dumps(plain))
            return 0
        likeliest = knobs(config, fullest, memory[fullest])[:1]
        saving = next(iter(savings(config, fullest, memory[fullest], likeliest, device)), None)
        blocks = ", ".join(f"{b.start}-{b.stop - 1}" for b in job.split)
        if (chunks := config.pipeline.num_virtual_stages) > 1:
            blocks += (
                f"; rank r holds r and {2 * grid.pp - 1} - r"
                if config.pipeline.stage_layout == "v"
                else f"; each rank holds {chunks}, which are {grid.pp} apart"
            )
        of_which = f", of which {trained:,} are trained" if trained < parameters else ""
        rates = f"  {describe_points(config.optim.lr_points)}\n" if config.optim.lr_points else ""
        if groups:
            rates += f"\nparameters by group, with the highest learning rate of each\n{group_table(groups)}\n"
        at_sites = f" ep={grid.ep}" * (grid.ep > 1) + f" cp={grid.cp}" * (grid.cp > 1)
        at_sites += f" at {grid.sites} sites" * (grid.sites > 1)
        print(
            f"{self.path}: fine on tp={grid.tp} pp={grid.pp} dp={grid.dp}{at_sites}, "
            f"{grid.num_ranks} processes\n"
            f"  {parameters:,} parameters{of_which}; blocks of the stages: {blocks} (0 the embedding, the "
            "last one the head)\n"
            f"  a batch: {config.global_batch_size} samples, {config.batch_tokens:,} tokens\n"
            f"{rates}"
            f"\npredicted peak memory of a process of each {name} with train.device = "
            f"{device.type}, in MiB\n"
            f"{table(memory, name)}\n"
            + "\n".join([*short_form(memory, name, saving), *(load.lines() if load else [])])
        )
        for number, tier in enumerate(tiers):
            print(f"{name} {number}: {tier}")
        if segments := segments_line(job, tiers):
            print(segments)
        for found in (host, offload, sites):
            if found is not None:
                print(f"\n{found}")
        if fit_lines:
            print("\n" + "\n".join(fit_lines))
        if cost is not None:
            print("", step_line(cost), *link_lines(cost), sep="\n")
        elif device.type != "cpu" and not on_machine:
            print("\nno step time is predicted, as no --cluster or --profile says which GPUs")
        for text in absent:
            print(f"\nnot on this machine, or of no use: {text}")
        return 0


def _check_best_set(config: Config) -> None:
    """Check that checkpoint.best_by and train.stop_by name one of the validation sets that a GPT or
    BERT reads; a program may give others to its own model. Raises: ConfigError."""
    from hybridpar.train.evaluation import require_best_set

    data = config.data
    if config.model.text_format is config.model and config.train.eval_interval:
        held_out = {"": ()} if data.split > 0 else {}
        require_best_set(config, data.valid_sources or held_out)


def _absent(config: Config) -> list[str]:
    """Return the files that the configuration names and that are missing on this machine; the
    training machine may have them."""
    from hybridpar.checkpoint import find_start
    from hybridpar.data import absent_sources

    found = absent_sources(config.data)
    if config.train.start_from:
        try:
            find_start(config.train.start_from, config.model)
        except CheckpointError as error:
            found.append(f"train.start_from = {error}")
    return found
