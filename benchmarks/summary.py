"""The table at the top of README.md, a row a claim, from the result files:
`python -m benchmarks.summary` writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
BEGIN = "<!-- summary: python -m benchmarks.summary -->\n\n"
END = "\n<!-- end of summary -->"


class Row(NamedTuple):
    """A claim: the numbers at `path` of a result file, regular expressions with slashes between
    them."""

    claim: str
    file: str
    path: str
    command: str


SECTIONS: dict[str, tuple[Row, ...]] = {
    "Speed on CPUs": (
        Row(
            "one thread: transformers under torch.compile, its time / ours",
            "single_zen5",
            "cases/.*/ratio/HF (autocast )?gelu_new compiled/median",
            "single --keep-memory",
        ),
        Row(
            "the same on an older machine (Zen 4)",
            "single_zen4",
            "cases/.*/ratio/HF (autocast )?gelu_new compiled/median",
            "single --keep-memory",
        ),
        Row(
            "tp = 2: DTensor's time / ours",
            "tensor_parallel",
            "cases/.*/ratio/DTensor/median",
            "tensor_parallel",
        ),
        Row(
            "dp = 2: DDP's time / ours",
            "data_parallel",
            "cases/.*/ratio/DDP/median",
            "data_parallel",
        ),
        Row(
            "2bw, two stages, fp32: share of two independent cores",
            "pipeline_balanced_2bw",
            "cases/.* fp32 .*/ratio/ideal/median",
            "pipeline --shapes balanced --schedules 2bw",
        ),
        Row(
            "interleaved with zero bubbles: our 1f1b's time / its",
            "pipeline_drains_v",
            "cases/.*/ratio/hybridpar 1f1b/median",
            "pipeline --schedules drains",
        ),
        Row(
            "the same: time of torch's Schedule1F1B",
            "pipeline_drains_v",
            "cases/.*/ratio/Schedule1F1B/median",
            "pipeline --schedules drains",
        ),
        Row(
            "the same: time of torch's ScheduleZBVZeroBubble",
            "pipeline_drains_v",
            "cases/.*/ratio/ScheduleZBVZeroBubble/median",
            "pipeline --schedules drains",
        ),
        Row("ZeRO-3, dp = 2: FSDP2's time / ours", "zero", "cases/.*/ratio/FSDP2/median", "zero"),
        Row(
            "the same at `ref`: time of DeepSpeed stage 3",
            "zero_peers",
            "cases/ref zero=3.*/ratio/DeepSpeed, stage 3/median",
            "zero --name zero_peers",
        ),
        Row(
            "a layer of experts: time of transformers' fastest / ours",
            "experts",
            "cases/.*/ratio/transformers grouped_mm/median",
            "experts",
        ),
        Row(
            "two ranks that share a sample: time of one process a core with the whole sample / ours",
            "context_parallel",
            "cases/.*/ratio/apart/median",
            "context_parallel --shapes 2048 2048_wide",
        ),
        Row(
            "attention over eight packed documents: time of one long document / ours",
            "packed_attention",
            "cases/.*/ratio/long/median",
            "packed_attention",
        ),
        Row(
            "the same: time of torch's SDPA with a mask",
            "packed_attention",
            "cases/.*/ratio/SDPA with a mask/median",
            "packed_attention",
        ),
        Row(
            "operators: torch.compile's time / ours",
            "ops_zen5",
            "cases/.*/ratio/compile/median",
            "ops",
        ),
        Row(
            "greedy text: transformers' time / ours",
            "generate",
            "cases/.*/ratio/transformers/median",
            "generate",
        ),
    ),
    "GPU": (
        Row(
            "GPT 345M: transformers under torch.compile, its time / ours",
            "gpu_single",
            "cases/.*/ratio/.* compiled/median",
            "single --device cuda",
        ),
        Row(
            "GPT 1.3B: the same",
            "gpu_single_1.3B",
            "cases/.*/ratio/.* compiled/median",
            "single --device cuda",
        ),
    ),
    "Memory": (
        Row(
            "importing 16 GB of weights: GB taken beyond the largest tensor",
            "large_import",
            "cases/8B/gb_beyond_largest",
            "large_import --shapes 8B",
        ),
        Row(
            "peak memory: predicted / measured - 1", "memory", "cases/.*/stages/.*/error", "memory"
        ),
        Row(
            "20 GB of state in 8 GB: time / computing alone",
            "budget_large",
            "cases/large, 5.5 GB/ratio",
            "budget",
        ),
        Row(
            "bytes moved with a limit / with the best budget, gpipe fp32 (345M)",
            "tide",
            "cases/345M, gpipe, fp32, .*/ratio",
            "tide",
        ),
        Row(
            "optimizer on an emulated host, hidden by 2bw: share of the speed",
            "host_overlap",
            "cases/2bw, (0.5 of|0.8 of|0.6, link).*/ratio",
            "host_overlap",
        ),
        Row(
            "AdamW on the host: DeepSpeed CPUAdam's time / ours",
            "host_optimizer",
            "cases/hybridpar, .*/ratio/CPUAdam/median",
            "host_optimizer",
        ),
        Row(
            "selective recomputation: time of a step",
            "recompute",
            "cases/.*/ratio/selective/median",
            "recompute",
        ),
    ),
    "Planning": (
        Row(
            "`plan` on two cores: predicted / measured time",
            "planner",
            "cases/tp=.*/ratio",
            "planner",
        ),
        Row(
            "`plan` where state moves: the same",
            "planner_moves",
            "cases/tp=.*/ratio",
            "planner --moves --ranks 2",
        ),
        Row(
            "`plan` over 200 Mbit/s: the same",
            "planner_lan",
            "cases/tp=.*/ratio",
            "planner --link lan=200:1",
        ),
        Row(
            "`simulate --run`: simulated / measured time",
            "simulator",
            r"cases/\w+ pp=\d m=\d+/ratio/median",
            "simulator",
        ),
        Row(
            "PipeDream-2BW's stated speed-ups: error when simulated",
            "paper",
            "claims/.*/error",
            "paper",
        ),
        Row(
            "Megatron-LM's table and our H200: error of `plan`",
            "estimates",
            "cases/.*/error",
            "estimates",
        ),
        Row(
            "`plan` for 1,536 devices: seconds of one core",
            "plan_speed",
            "cases/plan/cpu_s",
            "plan_speed",
        ),
        Row(
            "`plan` for 175 billion parameters on 1,024 devices: seconds of one core",
            "plan_speed",
            "cases/plan_175b/cpu_s",
            "plan_speed",
        ),
    ),
    "Slow links, between emulated hosts": (
        Row(
            "50 Mbit/s, 2bw, paced at 100 ms: share of its speed",
            "slow_link",
            "cases/paced light .*=100 ms/sides/2bw, latency/wan/share/median",
            "slow_link",
        ),
        Row(
            "50 Mbit/s: Schedule1F1B's time / 2bw's time with int4 messages",
            "link_peers",
            "cases/stages .* wan/ratio/Schedule1F1B/median",
            "link_peers",
        ),
        Row(
            "the same: DTensor's time",
            "link_peers",
            "cases/stages .* wan/ratio/DTensor/median",
            "link_peers",
        ),
        Row(
            "10 Mbit/s, sites: share of their speed",
            "sites",
            "cases/.*150 ms/sides/streamed/far/share/median",
            "sites",
        ),
    ),
    "Faults": (
        Row(
            "a checkpoint stops training: share of the time of its write",
            "checkpoint",
            "cases/save, hybridpar beside/blocked_share/median",
            "checkpoint",
        ),
        Row(
            "the same with DCP's async_save",
            "checkpoint",
            "cases/save, dcp beside/blocked_share/median",
            "checkpoint",
        ),
        Row(
            "what was wrong after a kill in a save, for each of 100",
            "kills",
            "cases/.*/wrong",
            "kills",
        ),
        Row(
            "readers that failed on mutated files, by run of `tests.fuzz`",
            "fuzz",
            "runs/.*/failures",
            "",
        ),
    ),
}


def table() -> str:
    """All rows, least and greatest number each."""
    lines = [
        "| claim | measured | command, `python -m benchmarks.` | file | machine |",
        "|---|---|---|---|---|",
    ]
    for title, rows in SECTIONS.items():
        lines.append(f"| **{title}** | | | | |")
        for row in rows:
            document = json.loads((HERE / "results" / f"{row.file}.json").read_text())
            found = sorted(
                _found(document, row.path.split("/"), document["machine"]), key=itemgetter(0)
            )
            ends = dict.fromkeys(
                f"{number:.3g}".replace("-0", "0") if not number else f"{number:#.3g}".rstrip(".")
                for number, _ in (found[0], found[-1])
            )
            lines.append(
                f"| {row.claim} | {' to '.join(ends)} | "
                f"{f'`{row.command}`' if row.command else ''} "
                f"| [{row.file}](results/{row.file}.json) "
                f"| {', '.join(dict.fromkeys(_name(machine) for _, machine in found))} |"
            )
    return "\n".join(lines)


def _found(
    found: Any, path: list[str], machine: Mapping[str, Any]
) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """All numbers at a path, and the machine of each. A case goes by its name, other elements by
    their position."""
    if not path:
        yield float(len(found) if isinstance(found, list) else found), machine
        return
    if isinstance(found, dict):
        machine = found.get("machine", machine)
    items = (
        found.items()
        if isinstance(found, dict)
        else enumerate(found)
        if isinstance(found, list)
        else ()
    )
    for key, value in items:
        name = (
            value.get("case", key) if isinstance(found, list) and isinstance(value, dict) else key
        )
        if re.fullmatch(path[0], str(name)):
            yield from _found(value, path[1:], machine)


def _name(machine: Mapping[str, Any]) -> str:
    cpu = machine["cpu"].replace("(R)", "").removesuffix(" Processor")
    return machine.get("gpu") or f"{cpu} {machine['capability'].replace('AVX512', 'AVX-512')}"


if __name__ == "__main__":
    text = (HERE / "README.md").read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    (HERE / "README.md").write_text(before + BEGIN + table() + END + after)
