"""cluster.toml: machines that are not at hand, and estimated times of a model's blocks on them.

docs/clusters.md explains the keys of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch

from hybridpar.config import MAX_TOML, Config, ModelConfig
from hybridpar.errors import ConfigError, Problem, config_error
from hybridpar.models.build import build_blocks
from hybridpar.planner.machines.hardware import (
    GIB,
    GIGABIT,
    Cluster,
    Device,
    Level,
    Link,
    device_like,
    find_device,
    find_link,
)
from hybridpar.planner.machines.kernel_times import (
    Kernels,
    block_times,
    kernels_for,
    remake_time,
    work_time,
)
from hybridpar.planner.machines.machine import Machine
from hybridpar.planner.measuring.profile import BlockCost, Hardware, Key, Profile, settings_of
from hybridpar.prediction.fake_neighbours import silent_axis
from hybridpar.prediction.limit import RESERVED
from hybridpar.prediction.work import block_kinds, block_work, messages_by_kind
from hybridpar.reading import nearest_path, read_toml

NORM_TRAFFIC = 4
UPDATE_TRAFFIC = 28 + 2 + 2
"""Bytes per parameter of an update: the norm reads the gradient; Adam reads and writes the fp32
weight and two moments, and reads and clears the gradient; the new weight version is written."""
SWEPT = (1, 2, 4, 8, 16)
"""Micro-batch sizes that are estimated; others are interpolated."""

_MOST = 1e9
_OWN_MATMUL_SHARE = 0.6
"""`matmul_share` of a device that the table does not have."""
_MOST_DEVICES = 100_000
_DEVICE = {
    "name": str,
    "tflops": float,
    "memory_gib": float,
    "memory_gb_per_s": float,
    "matmul_share": float,
    "launch_us": float,
}
_LINK = {
    "name": str,
    "gbit_per_s": float,
    "back_gbit_per_s": float,
    "latency_us": float,
    "share": float,
    "half_duplex": bool,
}
_KEYS = {
    "servers": int,
    "devices_per_server": int,
    "device": (str, dict),
    "inner": (str, dict),
    "outer": (str, dict),
    "outer_links": int,
    "levels": list,
    "price": float,
    "stragglers": float,
    "others": list,
}
_LEVEL = {"groups": int, "link": (str, dict), "links": int}
_OTHER = {"servers": int, "device": (str, dict)}
_USUAL = {
    "servers": "2",
    "devices_per_server": "8",
    "device": '"a100-80gb"',
    "inner": '"nvlink3"',
    "outer": '"ethernet-25"',
    "outer_links": "1",
    "levels": '[{ groups = 2, link = "infiniband-hdr" }]',
    "price": "2.5",
    "stragglers": "0.05",
    "others": '[{ servers = 2, device = "a100-80gb" }]',
    "groups": "2",
    "link": '"infiniband-hdr"',
    "links": "1",
    "name": '"mine"',
    "tflops": "312",
    "memory_gib": "80",
    "memory_gb_per_s": "2000",
    "matmul_share": "0.6",
    "launch_us": "57",
    "gbit_per_s": "25",
    "back_gbit_per_s": "25",
    "latency_us": "10",
    "share": "0.8",
    "half_duplex": "true",
}
"""A value in TOML that is always accepted, by key."""


_SAME = {
    "nodes": "servers",
    "hosts": "servers",
    "machines": "servers",
    "gpus": "devices_per_server",
    "gpu": "device",
    "gpus_per_node": "devices_per_server",
    "intra": "inner",
    "inter": "outer",
    "network": "outer",
    "nics": "outer_links",
    "bandwidth": "gbit_per_s",
    "latency": "latency_us",
    "memory": "memory_gib",
    "memory_gb": "memory_gib",
    "flops": "tflops",
}
"""Common other names of these keys."""


def read_cluster(path: Path) -> Cluster:
    """Read a cluster.toml.

    Raises:
        ConfigError: Lists everything that is wrong with the file.
    """
    try:
        document = read_toml(path, MAX_TOML)
    except OSError as error:
        raise config_error(
            "cluster", str(path), f"cannot be read ({error.strerror})", nearest_path(path)
        ) from None
    except (ValueError, RecursionError) as error:
        raise config_error("cluster", str(path), f"is not valid TOML: {error}") from None
    if (
        document
        and all(isinstance(table, dict) for table in document.values())
        and not set(document) & set(_KEYS)
    ):
        rule = f"not a description of a cluster: it has none of the keys {', '.join(_KEYS)}"
        raise config_error("cluster", str(path), rule, "the example in docs/clusters.md")
    try:
        return _cluster(document)
    except ConfigError as error:
        raise ConfigError(
            *(replace(p, field=f"{path.name}: {p.field}") for p in error.problems)
        ) from None


def _cluster(document: Mapping[str, Any]) -> Cluster:
    """Return the cluster of a document.

    Raises:
        ConfigError: Lists everything that is wrong with the document.
    """
    problems = [
        *_problems("", document, _KEYS, ("servers", "devices_per_server", "device", "inner"))
    ]
    wrong = {problem.field for problem in problems}
    usable = {key: value for key, value in document.items() if key not in wrong}
    levels = usable.get("levels", [])
    others = usable.get("others", [])
    problems += _tables("levels", levels, _LEVEL, ("groups", "link"))
    problems += _tables("others", others, _OTHER, ("servers", "device"))
    problems += [
        problem
        for key, make in _MAKERS.items()
        if key in usable
        for problem in _wrong_table(make, usable[key], key)
    ]
    if not problems:
        problems += _wrong_count(document, others)
    if problems:
        raise ConfigError(*problems)
    inner = _link(document["inner"], "inner")
    return Cluster(
        _device(document["device"], "device"),
        document["devices_per_server"],
        document["servers"] + sum(other["servers"] for other in others),
        inner,
        _link(document["outer"], "outer") if "outer" in document else inner,
        document.get("outer_links", 1),
        tuple(_levels(levels, document["devices_per_server"])),
        document.get("price", 0.0),
        tuple(
            (other["servers"], _device(other["device"], f"others[{i}].device"))
            for i, other in enumerate(others)
        ),
        document.get("stragglers", 0.0),
        tuple(_left_out(document, levels)),
    )


def _left_out(document: Mapping[str, Any], levels: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield the omitted keys of links whose default of 1 may be far off."""
    if "outer" in document and "outer_links" not in document:
        yield "outer_links"
    yield from (f"levels[{i}].links" for i, level in enumerate(levels) if "links" not in level)


def _wrong_count(
    document: Mapping[str, Any], others: Sequence[Mapping[str, Any]]
) -> Iterable[Problem]:
    """Yield what is wrong if there are too many devices, or several servers without a link between
    them."""
    servers = {"servers": document["servers"]}
    servers |= {f"others[{i}].servers": other["servers"] for i, other in enumerate(others)}
    number = sum(servers.values())
    per = document["devices_per_server"]
    if number > 1 and "outer" not in document:
        yield Problem(
            "outer", None, f"missing: it is the link between the {number} servers", _USUAL["outer"]
        )
    if number * per <= _MOST_DEVICES:
        return
    rule = f"must give at most {_MOST_DEVICES} devices in all; this gives {number * per}"
    if number <= _MOST_DEVICES:
        yield Problem("devices_per_server", per, rule, str(_MOST_DEVICES // number))
    else:
        most = max(servers, key=servers.__getitem__)
        yield Problem(most, servers[most], rule, "1024")


def _tables(
    name: str, tables: Iterable[object], known: Mapping[str, Any], needed: Iterable[str]
) -> Iterable[Problem]:
    """Yield what is wrong with the tables of an array."""
    for i, table in enumerate(tables):
        if not isinstance(table, dict):
            yield Problem(f"{name}[{i}]", table, "must be a table", _USUAL[name].strip("[]"))
            continue
        where = f"{name}[{i}]."
        found = [*_problems(where, table, known, needed)]
        yield from found
        wrong = {problem.field for problem in found}
        for key, make in _MAKERS.items():
            if key in known and key in table and f"{where}{key}" not in wrong:
                yield from _wrong_table(make, table[key], f"{where}{key}")


def _wrong_table(
    make: Callable[[Any, str], object], given: object, where: str
) -> Sequence[Problem]:
    """Return what keeps a device or a link from being made."""
    try:
        make(given, where)
    except ConfigError as error:
        return error.problems
    return ()


def _levels(tables: Iterable[Mapping[str, Any]], devices: int) -> Iterable[Level]:
    for i, table in enumerate(tables):
        devices *= table["groups"]
        yield Level(devices, _link(table["link"], f"levels[{i}].link"), table.get("links", 1))


def _problems(
    where: str, table: Mapping[str, Any], known: Mapping[str, Any], needed: Iterable[str]
) -> Iterable[Problem]:
    for key, value in table.items():
        if key not in known:
            near = _meant(key, table, known)
            yield Problem(
                f"{where}{key}",
                value,
                f"unknown key. Keys: {', '.join(known)}",
                near or "without it",
                is_guess=bool(near),
            )
            continue
        kinds = (int, float) if known[key] is float else known[key]
        if not isinstance(value, kinds) or isinstance(value, bool) is not (kinds is bool):
            yield Problem(f"{where}{key}", value, "has the wrong type", _USUAL[key])
        elif kinds is bool:
            continue
        elif (
            isinstance(value, int | float) and not 0 < value <= _MOST and key != "latency_us"
        ):  # true for NaN
            yield Problem(
                f"{where}{key}", value, f"must be positive, and at most {_MOST:g}", _USUAL[key]
            )
        elif key == "latency_us" and not 0 <= value <= _MOST:
            yield Problem(f"{where}{key}", value, "must not be negative, or too large", _USUAL[key])
        elif key in ("share", "matmul_share", "stragglers") and value > 1:
            yield Problem(f"{where}{key}", value, "must be at most 1", _USUAL[key])
    misspelled = {_meant(key, table, known) for key in table if key not in known}
    for key in needed:
        if key not in table and key not in misspelled:
            yield Problem(f"{where}{key}", None, "is missing", _USUAL[key])


def _meant(key: str, table: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Return the key that an unknown one probably stands for; empty if none is like it."""
    free = [one for one in known if one not in table]
    if (elsewhere := _SAME.get(key.lower())) in free and elsewhere is not None:
        return elsewhere
    return next(iter(get_close_matches(key.lower(), free, 1)), "")


def _device(given: str | Mapping[str, Any], where: str) -> Device:
    if isinstance(given, str):
        return find_device(
            given,
            where,
            ", or a table of any other: { tflops = .., memory_gib = .., memory_gb_per_s = .. }",
        )
    if found := [
        *_problems(f"{where}.", given, _DEVICE, ("tflops", "memory_gib", "memory_gb_per_s"))
    ]:
        raise ConfigError(*found)
    if GIB * given["memory_gib"] <= RESERVED:
        rule = f"must be above {RESERVED / GIB}, which a GPU's context and communicators take"
        raise config_error(f"{where}.memory_gib", given["memory_gib"], rule, _USUAL["memory_gib"])
    device = Device(
        given.get("name", "own device"),
        1e12 * given["tflops"],
        GIB * given["memory_gib"],
        1e9 * given["memory_gb_per_s"],
        _OWN_MATMUL_SHARE,
    )
    if (known := device_like(device)) is not None:
        device = replace(
            known, name=given.get("name", known.name), memory_bytes=device.memory_bytes
        )
    return replace(
        device,
        matmul_share=given.get("matmul_share", device.matmul_share),
        launch=1e-6 * given["launch_us"] if "launch_us" in given else device.launch,
    )


def _link(given: str | Mapping[str, Any], where: str) -> Link:
    if isinstance(given, str):
        return find_link(given, where)
    if found := [*_problems(f"{where}.", given, _LINK, ("gbit_per_s",))]:
        raise ConfigError(*found)
    return Link(
        given.get("name", where),
        GIGABIT * given["gbit_per_s"],
        1e-6 * given.get("latency_us", 10.0),
        given.get("share", 0.8),
        back_bandwidth=GIGABIT * given.get("back_gbit_per_s", 0.0),
        half_duplex=given.get("half_duplex", False),
    )


_MAKERS: dict[str, Callable[[Any, str], object]] = {
    "device": _device,
    "inner": _link,
    "outer": _link,
    "link": _link,
}
"""Keys whose value is a name or a table, and the function that makes a device or a link of it."""


# -- the cluster as a planner sees it


def estimated(
    config: Config, cluster: Cluster, num_devices: int = 0, profile: Profile | None = None
) -> Machine:
    """Return a cluster as a machine, with estimated times of a model's blocks.

    Args:
        config: The configuration of the model.
        cluster: The cluster.
        num_devices: Number of devices to use; 0 for all.
        profile: Measured times on its first devices; None to estimate these, too.

    Raises:
        ConfigError: As `estimate` and `machine_of`.
    """
    others = [estimate(config, replace(cluster, device=device)) for _, device in cluster.others]
    return machine_of(cluster, profile or estimate(config, cluster), num_devices, others)


def machine_of(
    cluster: Cluster, profile: Profile, num_devices: int = 0, others: Sequence[Profile] = ()
) -> Machine:
    """Return a cluster as a machine, with these times of blocks.

    Args:
        cluster: The cluster.
        profile: Times on its first kind of device.
        num_devices: Number of devices to use, from the first on; 0 for all.
        others: Times on its other kinds of devices.

    Raises:
        ConfigError: The cluster has fewer devices.
    """
    if num_devices > cluster.num_devices:
        raise config_error(
            "ranks",
            num_devices,
            f"must be at most {cluster.num_devices}, the number of devices in the cluster",
            str(cluster.num_devices),
        )
    assert len(others) == len(cluster.others), "a profile for each kind of device"
    counts = [servers * cluster.devices_per_server for servers, _ in cluster.others]
    starts = accumulate(counts, initial=cluster.num_devices - sum(counts))
    return Machine(
        profile,
        num_devices or cluster.num_devices,
        cluster.devices_per_server,
        cluster.inner,
        cluster.outer if cluster.num_servers > 1 else None,
        cluster.device.memory_bytes,
        cluster.outer_links,
        measured=False,
        levels=cluster.levels,
        price=cluster.price,
        others=tuple(zip(starts, others, strict=False)),
        stragglers=cluster.stragglers,
        devices=(
            *([cluster.device] if profile.estimated else []),
            *(one for _, one in cluster.others),
        ),
        assumed=cluster.assumed,
    )


def measured_machine(profile: Profile, num_devices: int = 0) -> Machine:
    """Return the measured machine.

    Args:
        profile: The measurement.
        num_devices: Number of devices to use; 0 for all.

    Raises:
        ConfigError: There are fewer devices, or a link that they need was not measured.
    """
    hardware = profile.hardware
    most = hardware.devices_per_host * hardware.hosts
    number = num_devices or most
    if number > most and hardware.cores == 0:
        raise config_error(
            "ranks",
            number,
            f"must be at most {most}, the number of ranks in the profile, unless a --cluster is "
            f"given",
            str(most),
        )
    per = (
        hardware.devices_per_host if hardware.hosts > 1 else max(hardware.devices_per_host, number)
    )
    inner = profile.links.get("local")
    outer = profile.links.get("network")
    inner = inner or outer
    outer = outer if hardware.hosts > 1 else None
    if number > 1 and inner is None:
        raise config_error(
            "profile",
            "no links",
            f"was measured with one rank, so it has no links to plan {number} ranks with",
            f"hybridpar profile with {number} ranks, or a --cluster",
        )
    if number > per and outer is None:
        raise config_error(
            "ranks",
            number,
            f"must be at most {per}, as the profile has no links between more devices",
            str(per),
        )
    memory = hardware.memory * hardware.devices_per_host / per
    return Machine(profile, number, per, inner or Link("none", 1.0, 0.0), outer, memory)


def estimate(
    config: Config,
    cluster: Cluster,
    sizes: Sequence[int] = SWEPT,
    kernels: Kernels | None = None,
) -> Profile:
    """Return the estimated profile of a model on a cluster's device: GPT and BERT by formulas,
    other models by their operators.

    Args:
        config: The configuration of the model.
        cluster: The cluster.
        sizes: Micro-batch sizes.
        kernels: Kernels of a framework; None for ours.

    Raises:
        ConfigError: The model is not in 16 bits.
    """
    if config.train.dtype not in ("bf16", "fp16"):
        raise config_error(
            "train.dtype",
            config.train.dtype,
            "estimated profiles support bf16 and fp16 only; measured profiles support every dtype",
            "bf16",
        )
    device = cluster.device
    kernels = kernels or kernels_for(device)
    degrees = [
        t for t in (1, 2, 4, 8, 16, 32) if t <= min(config.model.max_tp, cluster.num_devices)
    ]
    if (formulas := config.model.cost_model) is None:
        blocks = _counted_costs(config, device, degrees, sizes, kernels)
    else:
        blocks = _transformer_costs(formulas, device, degrees, sizes, kernels)
    hardware = Hardware(
        device.name, cluster.devices_per_server, device.memory_bytes, hosts=cluster.num_servers
    )
    settings = settings_of(replace(config, parallel=replace(config.parallel, sequence=False)))
    return Profile(
        hardware, blocks, {}, settings, estimated=True, about={"source": "planner.kernels"}
    )


def _counted_costs(
    config: Config, device: Device, degrees: Sequence[int], sizes: Sequence[int], kernels: Kernels
) -> dict[Key, BlockCost]:
    """Estimate each kind of block from its operators, run on ghosts."""
    kinds = block_kinds(config.model)
    blocks = dict[Key, BlockCost]()
    for tp, b in product(degrees, sizes):
        at = replace(
            config,
            # otherwise blocks of one kind may differ in which parameters are trained
            optim=replace(config.optim, groups=()),
            train=replace(config.train, micro_batch_size=b),
            parallel=replace(config.parallel, tp=tp, pp=1, dp=1, zero=0),
        )
        for kind in dict.fromkeys(kinds):
            work = block_work(at, kinds.index(kind), torch.device("cuda"))
            forward, idle = work_time(work.forward, device, kernels)
            backward, idle_back = work_time(work.backward, device, kernels)
            n = work.parameters
            blocks[kind, tp, b] = BlockCost(
                forward,
                backward,
                device.memory_time(NORM_TRAFFIC * n),
                device.memory_time(UPDATE_TRAFFIC * n),
                forward_messages=work.forward_messages,
                backward_messages=work.backward_messages,
                parameters=n,
                kept=work.kept,
                forward_idle=idle,
                backward_idle=idle_back,
            )
    return blocks


def _transformer_costs(
    model: ModelConfig,
    device: Device,
    degrees: Sequence[int],
    sizes: Sequence[int],
    kernels: Kernels,
) -> dict[Key, BlockCost]:
    """Estimate embedding, layer and head of a GPT or BERT by formulas."""
    kinds = block_kinds(model)
    blocks = dict[Key, BlockCost]()
    for tp in degrees:
        parameters = count_parameters(model, tp)
        messages = (
            messages_by_kind(model, 2) if tp > 1 else dict.fromkeys(kinds, ((), ()))
        )  # a message of the same size over more ranks
        for b in sizes:
            times = block_times(model, b, device, tp, kernels)
            for kind in dict.fromkeys(kinds):
                number = kinds.index(kind)
                time = times[number]
                is_layer = 0 < number < len(kinds) - 1
                forward, backward = (tuple(b * n for n in sizes) for sizes in messages[kind])
                n = parameters[kind]
                blocks[kind, tp, b] = BlockCost(
                    time.forward,
                    time.backward,
                    device.memory_time(NORM_TRAFFIC * n),
                    device.memory_time(UPDATE_TRAFFIC * n),
                    forward_messages=forward,
                    backward_messages=backward,
                    remake=remake_time(model, number - 1, b, device, tp) if is_layer else 0.0,
                    parameters=n,
                    forward_idle=time.forward_idle,
                    backward_idle=time.backward_idle,
                    forward_attention=time.forward_attention,
                    backward_attention=time.backward_attention,
                )
    return blocks


def count_parameters(model: ModelConfig, tp: int) -> dict[str, int]:
    """Return the parameters of each kind of block on the first of `tp` ranks, without allocating
    them."""
    kinds = block_kinds(model)
    numbers = {kind: kinds.index(kind) for kind in kinds}
    untied = replace(model, tie_embeddings=False)
    built = build_blocks(untied, silent_axis("tp", tp), list(numbers.values()))
    return {kind: sum(p.numel() for p in built[n].parameters()) for kind, n in numbers.items()}
