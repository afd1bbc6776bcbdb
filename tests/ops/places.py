"""Backends and devices that operations without a derivative are tested on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridpar.ops.backends import registry


def places(op: str, *, reference: bool = True) -> list[Any]:
    """(backend, device): what runs on this CPU, and with a GPU also what is for one, able to run or
    not."""
    rows = [row for row in registry.backends(op) if reference or row.name != "torch"]
    on_gpu = [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    ]
    return [
        *(
            pytest.param(row.name, "cpu", id=row.name)
            for row in rows
            if not row.unsupported("cpu", torch.float32)
        ),
        *(
            pytest.param(row.name, "cuda", id=f"{row.name}-cuda", marks=on_gpu)
            for row in rows
            if row.name != "cpp"
        ),
    ]
