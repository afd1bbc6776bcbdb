"""Contents of valid files of the readers, as small as possible."""

from __future__ import annotations

import json

from hybridpar.config import Config, from_mapping
from hybridpar.memory_behaviour.events import Header, MemoryEvent, Span, What
from hybridpar.memory_behaviour.trace_file import header_line, span_line
from hybridpar.planner.measuring.links import Curve, MeasuredLink
from hybridpar.planner.measuring.profile import BlockCost, Hardware, Profile, settings_of
from hybridpar.prediction.work import KINDS

TINY: Config = from_mapping(
    {
        "model": {
            "num_layers": 1,
            "hidden_size": 8,
            "num_heads": 2,
            "ffn_hidden_size": 6,
            "seq_length": 8,
            "vocab_size": 20,
        },
        "parallel": {"dp": 1},
        "pipeline": {"num_microbatches": 2, "schedule": "2bw"},
        "train": {"micro_batch_size": 1, "num_steps": 10},
    }
)
RUN = """[model]
num_layers = 1
hidden_size = 8
num_heads = 2
ffn_hidden_size = 6
seq_length = 8
vocab_size = 20
[parallel]
dp = 1
[pipeline]
num_microbatches = 2
schedule = "2bw"
early_switch = 0
[train]
micro_batch_size = 1
num_steps = 10
"""
TEXT = "".join(
    f"The {word} stands by the river. It is {word}.\n"
    for word in ("stone", "lamp", "cloud", "bird") * 6
)
METRICS = "".join(
    f"{json.dumps({'step': step, 'loss': 3 - 0.1 * step, 'grad_norm': 1.0})}\n"
    for step in range(1, 6)
)
CHANGES = f"{json.dumps({'step': 4, 'settings': {'model.dropout': [0.1, 0.0]}, 'corpus': ['a', 'b'], 'sample': 0})}\n"
MEMORY = header_line(Header(1, "cpu", {"pp": 1}, more={"a": 1})) + "".join(
    span_line(
        Span(
            step,
            f"F{step - 1}@1v0" if step else "",
            float(step),
            step + 0.5,
            [
                MemoryEvent(What.MALLOC, step, 64, "aten::mm", step + 0.1, 2),
                MemoryEvent(What.READ, 0, 8, "aten::mm", 1.5, 2),
                MemoryEvent(What.WRITE, step, 64, "aten::mm", step + 0.1, 2),
                MemoryEvent(What.FREE, step, 64, "", step + 0.3),
            ]
            if step
            else [MemoryEvent(What.MALLOC, 0, 8, "", 0.0, name="weights 0")],
        )
    )
    for step in range(4)
)
DOCUMENTS = "".join(
    f"{json.dumps({'text': text})}\n" for text in ("a river", "two\nlines", "", "\u00e9t\u00e9")
)

CURVE = Curve(((1.0, 1e-6), (1e6, 1e-3)))
PROFILE = Profile(
    Hardware("made", 2, 1e9, cores=2),
    {
        (kind, 1, b): BlockCost(
            1e-3 * b, 2e-3 * b, 1e-5, 1e-4, parameters=100, forward_messages=(8 * b,)
        )
        for kind in KINDS
        for b in (1, 2)
    },
    {"local": MeasuredLink("local", CURVE, {2: CURVE}, CURVE, {2: CURVE}, 1e-6)},
    settings_of(TINY),
)

CLUSTER = (
    'servers = 8\ndevices_per_server = 8\ndevice = "v100-16gb"\ninner = "nvlink2"\nouter = '
    '"ethernet-25"\n'
    "outer_links = 1\n",
    "servers = 1\ndevices_per_server = 4\ninner = { gbit_per_s = 25, latency_us = 30.0, share = "
    "0.6 }\n[device]\n"
    'name = "own"\ntflops = 100.0\nmemory_gib = 16\nmemory_gb_per_s = 900\nmatmul_share = 0.5\n',
)
WORKLOAD = {
    "maxSizePerFPGA": 100.0,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [
        {
            "id": v,
            "supportedOnFpga": 1,
            "cpuLatency": 2.0,
            "fpgaLatency": 1.0,
            "isBackwardNode": int(v > 2),
            "size": 10.0,
            "colorClass": v % 3,
            "layerId": v // 2,
        }
        for v in range(5)
    ],
    "edges": [{"sourceId": v, "destId": v + 1, "cost": 0.5} for v in range(4)],
}
SPLIT = {"fpgas": [{"nodes": [0, 3]}, {"nodes": [1, 4]}], "cpus": [{"nodes": [2]}]}
INSTANCE = {
    "maxMemoryPerDevice": 1e9,
    "maxDevices": 4,
    "bandwidth": 1e9,
    "mbsInBatch": 8,
    "nodes": [
        {
            "id": v,
            "name": "layer",
            "TMPCs": {
                t: [
                    {
                        "id": "vanilla",
                        "timePerSample": 1.0,
                        "parameterSize": 10.0,
                        "memoryUsageA": 5.0,
                        "memoryUsageB": 7.0,
                        "syncTimeFw": {str(v - 1): 1.0} if v else {},
                        "syncTimeBw": {str(v + 1): 1.0} if v < 2 else {},
                    }
                ]
                for t in ("1", "2")
            },
        }
        for v in range(3)
    ],
    "edges": [{"sourceId": v, "destId": v + 1, "communicationCost": 3.0} for v in range(2)],
}
