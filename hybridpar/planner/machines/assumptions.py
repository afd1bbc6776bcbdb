"""Assumptions of a plan: values that nobody measured, and keys that a cluster file omits."""

from __future__ import annotations

from collections.abc import Iterator

from hybridpar.config import Config
from hybridpar.ops.backends.libraries import OLDEST_GPU
from hybridpar.planner.machines.hardware import GIB, Device, Link
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.measuring.profile import Profile
from hybridpar.prediction.limit import RESERVED


def assumption_lines(machine: Machine) -> list[str]:
    """Return a line for each assumption about this machine. A key that can set the value is
    named."""
    lines = (
        []
        if machine.measured
        else [
            *_links(machine),
            *map(_device, machine.devices),
            *_missing_types(machine),
            *_overlap(machine),
        ]
    )
    return [*lines, _memory(machine)]


def document_lines(config: Config, profile: Profile) -> list[str]:
    """Return a line about the packed documents that times are for; none if nothing is packed."""
    if not config.data.is_packed:
        return []
    length = config.data.document_length
    if not length:
        return [
            "documents fill a row, so attention costs the most that it can (data.document_length)"
        ]
    if not any(cost.forward_attention for cost in profile.blocks.values()):
        return [
            "documents fill a row, as the profile does not say how long attention takes (one that "
            "is made with data.packing does)"
        ]
    return [f"documents of {length:,.0f} tokens (data.document_length)"]


def _links(machine: Machine) -> Iterator[str]:
    per = machine.devices_per_server
    if machine.outer is not None:
        count = machine.outer_links
        outer = _name(machine.outer)
        if "outer_links" in machine.assumed and per > 1:
            yield (
                f"outer_links is left out, so a server has one {outer} link, which its {per} "
                "devices share; with a "
                f"link for each device: outer_links = {per}"
            )
        elif per > 1:
            yield f"the {per} devices of a server share its {count} {outer} link{'s' * (count > 1)} (outer_links)"
        for number, level in enumerate(machine.levels):
            if f"levels[{number}].links" in machine.assumed:
                yield (
                    f"levels[{number}].links is left out, so the {level.devices} devices of a "
                    "group share one "
                    f"{_name(level.link)} link beyond it"
                )
    found = dict.fromkeys(
        link
        for link in (machine.inner, machine.outer, *(one.link for one in machine.levels))
        if isinstance(link, Link)
    )
    yield (
        "links: "
        + ", ".join(
            f"{link.name} at {link.share:.0%} of {8e-9 * link.bandwidth:,.4g} Gbit/s and "
            f"{1e6 * link.latency:.3g} us"
            for link in found
        )
        + " (other numbers: in the cluster file, a table with gbit_per_s, share and latency_us instead "
        "of the name)"
    )


def _name(link: object) -> str:
    return getattr(link, "name", "measured")


def _device(device: Device) -> str:
    return (
        f"{device.name}: large matrix products at {device.matmul_share:.0%} of "
        f"{1e-12 * device.peak_flops:,.4g} "
        f"TFLOP/s (matmul_share), element-wise kernels at {device.memory_share:.0%} of "
        f"{1e-9 * device.memory_bandwidth:,.4g} GB/s; small products at less, by their shapes; the CPU "
        f"takes {1e6 * device.launch:.3g} us to launch a kernel (launch_us)"
    )


def _missing_types(machine: Machine) -> Iterator[str]:
    """Yield a line for each device that cannot multiply in the type that was asked for."""
    dtype = machine.profile.settings.get("train", {}).get("dtype")
    for device in machine.devices:
        if dtype == "bf16" and device.capability < OLDEST_GPU:
            yield (
                f"{device.name} has no products in bf16, so its times are for fp16: train with "
                'train.dtype = "fp16"'
            )


def _overlap(machine: Machine) -> Iterator[str]:
    late = (
        "no device is slower than the others (stragglers)"
        if not machine.stragglers
        else (
            f"devices are slower than the fastest by {machine.stragglers:.0%} on average "
            "(stragglers)"
        )
    )
    yield f"messages between stages and reductions of gradients overlap with kernels and do not slow them down; {late}"


def _memory(machine: Machine) -> str:
    limit = machine.memory_limit / GIB
    memory = machine.memory / GIB
    if machine.profile.hardware.cores:
        return (
            f"memory: a process may take {limit:.3g} of its {memory:.3g} GiB; a tenth is left to "
            "others"
        )
    return (
        f"memory: training may take {limit:.3g} of {memory:.3g} GiB, as context and communicators "
        "take "
        f"{RESERVED / GIB:g} GiB and an allocator cannot hand out all of the rest"
    )
