"""Launch options of attention's Triton kernels, timed on the run's shapes before training.

    <run folder>/kernels.json
        {"NVIDIA A100-SXM4-80GB, torch 2.11.0, triton 3.6.0":
            {"dq_kernel bfloat16 d128 s2048 causal dropout":
                {"chosen": [64, 32, 4, 2], "us": {"[64, 64, 8, 2]": 812.4, "[64, 32, 4, 2]":
                733.0}}}}

The options (block sizes, warps, stages) determine the order of a kernel's additions, so a run must
never change them: a resumed run takes them from the file. An entry is valid for one GPU model and
one version of torch and Triton. Each GPU model in the job has its own entries: the first rank with
such a GPU times the candidates, and all ranks with such GPUs take its choice. This happens between
the start of the process group and the first engine, so that no CUDA graph is being captured and no
rank trains yet.

Other Triton kernels are bound by memory: their sizes matter less, and their order of additions is
the same on any GPU (kernels/rows.py). Attention in custom models uses the default options, because
its shapes are unknown before it runs.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hybridpar.checkpoint.format.files import write_text
from hybridpar.config import Config, ModelConfig, from_plain
from hybridpar.grid import Axis
from hybridpar.models.blocks import rotary_scaling
from hybridpar.models.build import DTYPES
from hybridpar.nn.attention import HeadLayout, ParallelAttention
from hybridpar.ops.backends.libraries import triton_missing
from hybridpar.random import RandomKey
from hybridpar.reading import read_json
from hybridpar.train.launching.launch import Job

FILE = "kernels.json"
_MAX_BYTES = 1 << 20
_WORTH = 0.97
"""An option replaces the default only below this share of the default's time: measured times vary
by a percent or two, and the default is tested most."""
_SHORT_US = 50.0
"""Launches shorter than this, in microseconds, keep the default: the gain is small and the times
vary most."""
_WARM = 2
_ROUNDS = 9
_SPIN = 2_000_000
"""Clock cycles that the GPU spins before a timed launch, about a millisecond, so that the launch is
queued before the GPU reaches it and Python's time is not measured."""

Option = tuple[int, ...]
Time = Callable[[Callable[[], None]], float]
"""Runs a launch and returns its time on the device, in microseconds."""


@dataclass(frozen=True)
class Entry:
    """The option chosen for a class of launches, and the median time of each candidate in us."""

    chosen: Option
    us: Mapping[str, float]


Entries = dict[str, Entry]
"""Entries by class of launches."""


@dataclass(frozen=True)
class KernelOptions:
    """The options of a run: entries for kernels.json, and the options that this rank uses."""

    entries: Mapping[str, Entries]
    """Entries by GPU model, including models of the file that this job lacks."""
    used: Mapping[str, Option] = field(default_factory=dict)
    is_new: bool = False

    def write(self, folder: Path, say: Callable[[str], None]) -> None:
        """Write kernels.json if it has new entries; training continues if that fails."""
        if not self.is_new:
            return
        content = {kind: _as_json(entries) for kind, entries in self.entries.items()}
        try:
            write_text(folder / FILE, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            say(
                f"{folder / FILE} cannot be written ({error.strerror}): when this run resumes, it "
                "will time kernels again, and may then compute other bits"
            )


def prepare(
    config: Config, job: Job, device: torch.device, say: Callable[[str], None]
) -> KernelOptions:
    """Choose the kernels' launch options, or read them from the run folder, and apply them here.

    Collectives: on all processes of the job, through its store, on GPUs.
    """
    if device.type != "cuda":
        return KernelOptions({})
    kind = "" if torch.are_deterministic_algorithms_enabled() else _kind(device)
    measure = partial(time_candidates, partial(_attend, config, device), _time)
    found = choose(job, config.run.folder, say, kind, measure)
    if triton_missing("attention", device.type, None) is None:
        importlib.import_module("hybridpar.kernels.options").OPTIONS.use(found.used)
    return found


def choose(
    job: Job,
    folder: Path,
    say: Callable[[str], None],
    kind: str,
    measure: Callable[[Entries], Entries],
) -> KernelOptions:
    """Return the launch options that all ranks with this kind of GPU use.

    Args:
        job: The job, which communicates through its store.
        kind: Name of this rank's GPU and of the versions that its kernels are compiled with; empty
            if no kernel here has options.
        measure: Returns the entries of this run's launches, given the known entries for this GPU
            model. Called on the first rank of each model.

    Collectives: on all processes of the job.
    """
    kinds: list[str] = job.gather(kind)
    if not any(kinds):
        return KernelOptions({})
    path = folder / FILE
    known, problem = job.decide(partial(_read, path))
    before = {name: _entries(each, name) for name, each in known.items()}
    is_first = bool(kind) and kinds.index(kind) == job.launch.rank
    mine = job.together(lambda: _as_json(measure(before.get(kind, {}))), here=is_first)
    everyone = enumerate(job.gather(mine))
    now = {kinds[rank]: _entries(each, FILE) for rank, each in everyone if each}
    if problem:
        say(problem)
    for name, entries in now.items():
        if before and name not in before:
            say(
                f"{path} has no times of {name}, but of {', '.join(before)}: its kernels are timed "
                "here"
            )
        _tell(name, before.get(name, {}), entries, say)
    after = before | {name: before.get(name, {}) | entries for name, entries in now.items()}
    used = {key: entry.chosen for key, entry in now.get(kind, {}).items()}
    return KernelOptions(after, used, is_new=after != before)


def time_candidates(run: Callable[[], None], time: Time, known: Entries) -> Entries:
    """Return an entry for each class of launches with several candidates that `run` makes.

    A known entry stays if its option is still a candidate. Otherwise every candidate that fits the
    device is timed on the launch's tensors. The fastest is chosen, or the default if no other one
    is clearly faster.

    Args:
        run: Calls operators on the shapes of the run.
        time: Runs a launch and returns its time in microseconds.
        known: Entries from earlier starts.
    """
    options = importlib.import_module("hybridpar.kernels.options")
    found: Entries = {}

    def chosen(key: str, candidates: Sequence[Option], start: Callable[[Any], None]) -> Option:
        if len(candidates) == 1:
            return candidates[0]
        entry = found.get(key) or known.get(key)
        if entry is not None and entry.chosen in map(tuple, candidates):
            found[key] = entry
            return entry.chosen
        fitting = [one for one in candidates if options.can_run(start, one)]
        if len(fitting) < 2:
            return (fitting or candidates)[0]
        times = _times(fitting, start, time)
        best = fastest(times)
        found[key] = Entry(tuple(best), {str(list(one)): round(us, 2) for one, us in times.items()})
        return best

    with options.OPTIONS.choosing(chosen):
        run()
    return found


def fastest(times: Mapping[Any, float]) -> Any:
    """Return the fastest option, or the first (the default) if no other one is clearly faster."""
    default = next(iter(times))
    best = min(times, key=lambda one: times[one])
    is_worth_it = times[default] >= _SHORT_US and times[best] < _WORTH * times[default]
    return best if is_worth_it else default


def _times(candidates: Sequence[Any], start: Callable[[Any], None], time: Time) -> dict[Any, float]:
    """Return the median time of each candidate.

    Candidates take turns, so that a changing clock rate affects all of them alike.
    """
    rounds: dict[Any, list[float]] = {one: [] for one in candidates}
    for _ in range(_WARM):
        for one in candidates:
            start(one)
    for _ in range(_ROUNDS):
        for one, seen in rounds.items():
            seen.append(time(partial(start, one)))
    return {one: median(seen) for one, seen in rounds.items()}


def _time(launch: Callable[[], None]) -> float:
    """Return the time of a launch on the GPU, in microseconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_SPIN)
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def _kind(device: torch.device) -> str:
    """Return the name of this GPU, torch and Triton; empty if Triton does not run on the GPU."""
    if triton_missing("attention", device.type, None) is not None:
        return ""
    triton = importlib.import_module("triton")
    return (
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, triton "
        f"{triton.__version__}"
    )


def _attend(config: Config, device: torch.device) -> None:
    """Run attention like the first tp rank: forward and backward with dropout, then evaluation."""
    if (layers := config.model.cost_model) is not None:
        attend(config, layers, device)


def attend(config: Config, model: ModelConfig, device: torch.device) -> None:
    """Run attention on the local heads of the first tp rank and one micro-batch of random numbers.

    The heads form a whole layer without tensor parallelism, so that strides equal the training's
    and nothing is communicated. A separate generator leaves the run's random numbers unchanged.
    """
    layout = HeadLayout(
        model.hidden_size, model.num_heads, model.kv_heads, config.parallel.tp, model.head_dim
    )
    groups = layout.group_heads(0)
    heads = layout.heads[0][1]
    hidden = heads * layout.head_dim
    num_kv_heads = len(groups) if heads % len(groups) == 0 else 1
    rotary_base = model.rotary_base if model.position == "rotary" else None
    layer = ParallelAttention(
        hidden,
        heads,
        Axis("tp"),
        num_kv_heads=num_kv_heads,
        causal=model.kind == "gpt",
        rotary_base=rotary_base,
        rotary_fraction=model.rotary_fraction,
        rotary_scaling=rotary_scaling(model),
        scale=model.attention_scale or None,
        softcap=model.attention_softcap,
        attention_dropout=model.attention_dropout,
        kernels=config.kernels,
        bias=model.bias,
        qkv_bias=model.has_qkv_bias,
        device=device,
        dtype=DTYPES[config.train.dtype],
    )
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, layer.layout.hidden**-0.5, generator=generator)
    b = config.train.micro_batch_size
    s = model.seq_length
    x = torch.randn(b, s, hidden, device=device, generator=generator).to(DTYPES[config.train.dtype])
    real = None if model.kind == "gpt" else torch.ones(b, s, dtype=torch.bool, device=device)
    first = None
    if config.data.is_packed:
        first = torch.zeros(b, s, dtype=torch.int32, device=device)
    y = layer(x.requires_grad_(), real, RandomKey.of(0, 0, 0, b, device), first_key=first)
    y.backward(torch.ones_like(y))
    if config.train.eval_interval and model.attention_dropout:
        with torch.no_grad():
            layer(x, real, first_key=first)


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """Return the contents of kernels.json and a problem with it; both empty if there is no file."""
    try:
        known = from_plain(
            dict[str, dict[str, Entry]], read_json(path, _MAX_BYTES, within=path.parent), path.name
        )
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError) as error:
        return {}, (
            f"{path} cannot be read ({error}): kernels are timed again, so results may differ "
            f"in rounding from the run's earlier steps. To keep them equal to the bit, restore "
            f"the earlier file and start again"
        )
    return {kind: _as_json(entries) for kind, entries in known.items()}, ""


def _as_json(entries: Mapping[str, Entry]) -> dict[str, Any]:
    return {key: asdict(entry) for key, entry in entries.items()}


def _entries(plain: Mapping[str, Any], where: str) -> Entries:
    entries: Entries = from_plain(dict[str, Entry], plain, where)
    return entries


def _tell(kind: str, before: Entries, now: Entries, say: Callable[[str], None]) -> None:
    """Report in one line which classes of launches do not use their default option."""
    others = []
    for key, entry in now.items():
        chosen = str(list(entry.chosen))
        default = next(iter(entry.us), "")
        if chosen != default:
            slow = entry.us.get(default, 0.0)
            fast = entry.us.get(chosen, 0.0)
            gain = f", {slow / fast:.2f} x as fast as {default}" if min(slow, fast) > 0 else ""
            others.append(f"{key}: {chosen}{gain}")
    if others:
        how = "timed here"
        if all(before.get(key) == entry for key, entry in now.items()):
            how = f"as {FILE} has them"
        say(
            f"kernels on {kind.partition(',')[0]}, {how} (rows, keys, warps, stages): "
            f"{'; '.join(others)}"
        )
