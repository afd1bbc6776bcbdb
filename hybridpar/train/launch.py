"""From launched processes to one job: device, threads, agreement before there is a process group, and the group itself.

Ranks agree through the launcher's key-value store without a time limit, so that one of them may prepare data for an
hour while the others wait. The process group comes after that, with train.timeout_s.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybridpar.config import Launch
from hybridpar.errors import HybridparError, config_error
from hybridpar.train.errors import LostContactError

T = TypeVar("T")
_LOOPBACK = "127.0.0.1"
_POLL_S = 0.02, 0.5
"""First and longest pause between two looks into the store."""
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


class Job:
    """The processes of one run. With a single process every method acts at once and nothing is set up.

    Collectives: every method must be called by all processes, in the same order.
    """

    def __init__(self, launch: Launch, store: dist.Store | None = None):
        assert store is not None or launch.world_size == 1
        self.launch, self.store = launch, store
        self._rounds = 0

    @staticmethod
    def connect(launch: Launch) -> Job:
        """Joins the store that torchrun (or MASTER_ADDR and MASTER_PORT) names."""
        if launch.world_size == 1:
            return Job(launch)
        launch.stay_on_this_machine()
        store: dist.Store
        if launch.own_store_port:
            store = _loopback_store(launch)
        else:
            store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.world_size))
        return Job(launch, dist.PrefixStore("hybridpar", store))

    def together(self, action: Callable[[], T], *, here: bool = True) -> T | None:
        """Runs `action` on the processes where `here` is true; what fails on one fails on all.

        Raises: on every process, the HybridparError that `action` raised on some, as one message.
        """
        result, error = None, None
        if here:
            try:
                result = action()
            except HybridparError as caught:
                error = caught
        self._fail_together(error)
        return result

    def decide(self, action: Callable[[], Any]) -> Any:
        """What `action` returns on rank 0 (plain JSON values), on every process. Raises: as `together`."""
        value, error = None, None
        if self.launch.rank == 0:
            try:
                value = action()
            except HybridparError as caught:
                error = caught
        self._fail_together(error)
        return self._exchange(value)[0]

    def _fail_together(self, error: HybridparError | None) -> None:
        if self.launch.world_size == 1:
            if error is not None:
                raise error
            return
        ranks: dict[str, list[int]] = {}
        for rank, text in enumerate(self._exchange(None if error is None else str(error))):
            if text is not None:
                ranks.setdefault(text, []).append(rank)
        if not ranks:
            return
        if error is not None and len(ranks) == 1 and 0 in ranks[str(error)]:
            raise error
        raise HybridparError("\n".join(
            text if len(ranks) == 1 and 0 in where else f"rank {', '.join(map(str, where))}: {text}"
            for text, where in ranks.items()))

    def _exchange(self, value: Any) -> list[Any]:
        """The values of all processes, in rank order."""
        if self.store is None:
            return [value]
        place, self._rounds = self._rounds, self._rounds + 1
        rank, store = self.launch.rank, self.store
        try:
            store.set(f"{place}/{rank}", json.dumps(value))
            if rank == 0:
                everyone = [_await(store, f"{place}/{other}") for other in range(self.launch.world_size)]
                store.set(f"{place}/all", json.dumps(everyone))
            return _await(store, f"{place}/all")
        except dist.DistError as error:
            raise LostContactError(f"rank {rank} lost contact with the launcher's store ({error})") from None

    def start_group(self, device: torch.device, timeout_s: float) -> None:
        """Creates the process group: Gloo on CPU, NCCL on GPUs. Communication gives up after `timeout_s` seconds."""
        if self.store is None:
            return
        cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=dist.PrefixStore("group", self.store), rank=self.launch.rank,
            world_size=self.launch.world_size, timeout=timedelta(seconds=timeout_s),
            device_id=device if cuda else None)

    def end_group(self) -> None:
        """Leaves the process group, where there is one, after everyone has got here."""
        if self.store is not None and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def _loopback_store(launch: Launch) -> dist.Store:
    """The store of a job on one machine. That of torch's rendezvous would listen on all interfaces."""
    listening = None
    if launch.rank == 0:
        with socket.create_server((_LOOPBACK, launch.own_store_port)) as server:
            listening = server.detach()
    return dist.TCPStore(_LOOPBACK, launch.own_store_port, launch.world_size, listening is not None,
                         master_listen_fd=listening)


def _await(store: dist.Store, key: str) -> Any:
    """The value of a key once it is there; Ctrl-C works meanwhile."""
    pause, longest = _POLL_S
    while not store.check([key]):
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return json.loads(store.get(key))


def choose_device(wanted: str, launch: Launch) -> torch.device:
    """The device of this process: a GPU for each process of this machine, or the CPU.

    Raises: ConfigError if GPUs are asked for and there are not as many as processes here.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and gpus < launch.local_world_size:
        rule = f"this machine has {gpus} GPUs for its {launch.local_world_size} processes"
        raise config_error("train.device", wanted, rule, "cpu")
    if wanted == "cpu" or gpus < launch.local_world_size:
        return torch.device("cpu")
    torch.cuda.set_device(launch.local_rank)
    return torch.device("cuda", launch.local_rank)


def set_threads(wanted: int, launch: Launch) -> int:
    """Sets the CPU threads of this process (0: cores of this machine / its processes, at least 1); returns how many."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = wanted or max(1, cores // launch.local_world_size)
    torch.set_num_threads(threads)
    return threads


def keep_freed_memory() -> bool:
    """Has glibc's malloc keep what is freed; whether this is glibc.

    By default it returns large tensors to the system at once, and every step takes them anew, page by page, which
    costs more than the work on them.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
