"""Launches that every Triton kernel is compiled for, without a GPU: a module here for each module
of kernels/.

SPECS there: kernel -> [Spec, ..]. tests/kernels/test_compile.py fails for a kernel without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Spec:
    """One way a kernel is launched.

    `types`: argument -> 'i32', 'fp32', '*bf16', ..; pointers count as aligned to 16 bytes, the
    integers in `divisible` as multiples of 16. `constants`: the tl.constexpr arguments.
    `most_registers`: of a thread, on an A100 and an H100, for which it was chosen; None, and on
    other GPUs: what warps leave. `capabilities`: what it is launched on.
    """

    types: Mapping[str, str]
    constants: Mapping[str, object] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    divisible: tuple[str, ...] = ()
    most_registers: int | None = None
    capabilities: tuple[int, ...] = (80, 90, 100, 120)

    def __str__(self) -> str:
        pointers = "-".join(dict.fromkeys(t[1:] for t in self.types.values() if t.startswith("*")))
        values = "-".join(f"{name}{value}" for name, value in self.constants.items())
        return "-".join(
            part for part in (pointers, values, f"w{self.num_warps}", f"s{self.num_stages}") if part
        )
