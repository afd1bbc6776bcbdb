"""Several ranks of `hybridpar train --ranks N` that talk over NCCL and share one GPU.

NCCL refuses two ranks of one host on one GPU. Each rank therefore says that it is another host, and
all of them talk through sockets, as ranks of several hosts do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
"""NCCL's settings for ranks on one machine that talk as if they were on several."""

_SITE = """
import os
import sys
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from hybridpar.train import job as loop
from hybridpar.train.faults import rollback

os.environ["NCCL_HOSTID"] = "host" + os.environ.get("LOCAL_RANK", "")
_choose_device = loop.choose_device
loop.choose_device = lambda config, launch, gather: _choose_device(
    replace(config, share_gpus=config.device == "cuda"), launch, gather)
loop.Sampling = partial(loop.Sampling, max_tokens=4)
_train, _find_divergence = loop.Engine.train, rollback.find_divergence
_audits = []


def _find_and_count(*args):
    _audits.append(_find_divergence(*args))
    return _audits[-1]


def _train_and_tell(engine, *args, **options):
    _train(engine, *args, **options)
    backend, bound = "none", None
    if dist.is_initialized():
        backend = dist.get_backend()
        bound = dist.group.WORLD.bound_device_id
    graphs = engine.executor.graphs
    replayed = 0 if graphs is None else graphs.num_replayed
    print(f"rank {engine.grid.rank} talks over {backend}, bound to {bound}, replayed {replayed}, "
          f"audited {len(_audits)}", file=sys.stderr)


loop.Engine.train = _train_and_tell
rollback.find_divergence = _find_and_count
"""
"""A sitecustomize.py. Ranks share a GPU without `train.share_gpus`, which would choose Gloo, so
that all else is as on several GPUs. After each stretch of training every rank says which backend it
used, how many micro-batches it has replayed, and how often its replicas were compared."""


def _descendants(process: int) -> list[int]:
    """Return the processes below a process. Ranks have sessions of their own, so a signal to a
    group misses them."""
    found = []
    for task in Path(f"/proc/{process}/task").glob("*"):
        for child in (task / "children").read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def hybridpar(folder: Path, *args: str, timeout_s: float) -> str:
    """Run `hybridpar *args` with the patches of this module, and return what it printed.

    Args:
        folder: receives the sitecustomize.py.
        timeout_s: limit of the whole command, in seconds.

    Raises:
        AssertionError: if the command fails. The message is what it printed.
        subprocess.TimeoutExpired: after `timeout_s`.
    """
    (folder / "sitecustomize.py").write_text(_SITE)
    where = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | APART | {"PYTHONPATH": where}
    job = subprocess.Popen(
        [sys.executable, "-m", "hybridpar", *args],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed, _ = job.communicate(timeout=timeout_s)
    except BaseException:  # ranks that hang would keep the GPU from the tests that follow
        for process in [*_descendants(job.pid), job.pid]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        print(job.communicate()[0])
        raise
    assert job.returncode == 0, printed
    return printed
