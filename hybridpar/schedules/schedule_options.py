"""The options of a pipeline schedule and of the passes over it, made once from a configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridpar.config import Config

_BESIDE_REDUCTION = 2 / 3
"""The host's share of the slack with several replicas, whose reduction needs the rest."""


@dataclass(frozen=True)
class ScheduleOptions:
    """A schedule's name and options, and the options of the passes that lower it.

    Together with the sizes of a pipeline they decide the order of all its actions.

    Args:
        schedule: Name of the schedule, as in `pipeline.schedule`.
        warmup: Name of the number of forwards that run ahead (`schedules.WARMUPS`).
        early_switch: L, if only the first p-1+L micro-batches of a batch use older weights. None:
            all of them do.
        gradient_buffers: Batches whose gradients are alive at once. 0: as many as the schedule can
            use.
        clip: Each batch has a NORM, for which updates wait.
        gather: Replicas share the update (ZeRO), and gather the new weights.
        split: Each backward is an I and a W.
        host: The host's share of the slack to make the new weights. 0: the rank makes them.
        zero_bubble: The W of a batch fill the time in which the pipeline drains.
        stage_layout: Order of the stages on the ranks, "loop" or "v".
        activations: On a V, how many micro-batches a rank may keep: "full", "half" or "min".
        order: A custom schedule: what each rank computes of a batch.
        feedback: Replicas keep what they have not sent of a batch's gradients, and add it to the
            next batch's.
        offload: Micro-batches whose activations are away at once, of all ranks or by rank.
        sync_steps: Batches that run as 1f1b before the schedule begins.
        virtual_stages: Stages on each rank. 0: the schedule's default.
    """

    schedule: str
    warmup: str = "depth"
    early_switch: int | None = None
    gradient_buffers: int = 0
    clip: bool = True
    gather: bool = False
    split: bool = False
    host: float = 0.0
    zero_bubble: bool = False
    stage_layout: str = "loop"
    activations: str = "full"
    order: tuple[str, ...] = ()
    feedback: bool = False
    offload: int | tuple[int, ...] = 0
    sync_steps: int = 0
    virtual_stages: int = 0

    @staticmethod
    def of(config: Config) -> ScheduleOptions:
        """Return the options of a run with this configuration; "auto" counts as off."""
        host_share = 1.0 if config.parallel.dp_cp == 1 else _BESIDE_REDUCTION
        pipeline = config.pipeline
        early_switch = pipeline.early_switch
        return ScheduleOptions(
            pipeline.schedule,
            warmup=pipeline.warmup,
            early_switch=early_switch if isinstance(early_switch, int) else None,
            gradient_buffers=pipeline.gradient_buffers,
            clip=config.norms_first,
            gather=config.parallel.zero > 0,
            split=pipeline.split_backward,
            host=host_share * config.memory.host_optimizer,
            zero_bubble=pipeline.zero_bubble,
            stage_layout=pipeline.stage_layout,
            activations=pipeline.activations,
            order=pipeline.order,
            feedback=config.feeds_back,
            offload=config.memory.num_away,
            sync_steps=pipeline.sync_steps,
            virtual_stages=pipeline.virtual_stages,
        )

    @property
    def steady(self) -> ScheduleOptions:
        """These options without the synchronous batches."""
        return replace(self, sync_steps=0)
