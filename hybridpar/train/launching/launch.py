"""A job of launched processes: device, threads, agreement before the process group, the group.

Ranks agree through the launcher's key-value store without a time limit, so that one of them may
prepare data for an hour while the others wait. The process group is created afterwards, with
train.timeout_s or faults.patience_s.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import os
import platform
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybridpar import sockets
from hybridpar.config import Launch, TrainConfig
from hybridpar.cores import available_cores
from hybridpar.errors import HybridparError, config_error
from hybridpar.flight import NO_FLIGHT, RENDEZVOUS, Flight, Waiting
from hybridpar.reading import parse_json
from hybridpar.train.faults.errors import TO_CONNECT, LostContactError, RankError
from hybridpar.train.reporting import console

T = TypeVar("T")
_POLL_S = 0.002, 0.5
"""First and longest pause between two polls of the store."""
_PART_S = 30.0
"""Time that rank 0 waits before an error, until the other ranks have read it from its store."""
_SAY_EVERY_S = 15.0
"""Interval of messages while a rank waits for others."""
_HELLOS = "hellos"
"""Key of the number of processes that have joined all starts of the job. In the store of one start:
that number when the start was complete."""
_ENDED = "ended"
"""Key of the note that the job is over, in the store of all its starts."""
_WORD_S = 2.0
"""Time limit for leaving that note."""
_FIRST_S = 10.0
"""Time that the first rank of a host has to report and to end what the others have already left."""
_MOST_NAMED = 8
"""Most ranks that a message names."""
_PREFIX = "hybridpar"
LOOPBACK = "127.0.0.1"
# constants of malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


class Job:
    """The processes of one run. A single process acts at once, without a store.

    Collectives: all processes must call every method, in the same order.
    """

    def __init__(
        self,
        launch: Launch,
        store: dist.Store | None = None,
        lobby: dist.Store | None = None,
        flight: Flight = NO_FLIGHT,
    ):
        """Create a job of processes that have met.

        Args:
            store: Store of this start only.
            lobby: Store of all starts of the job.
        """
        assert store is not None or launch.world_size == 1
        self.launch = launch
        self.store = store
        self._lobby = lobby
        self.flight = flight
        self._rounds = 0

    @staticmethod
    def connect(launch: Launch, flight: Flight = NO_FLIGHT) -> Job:
        """Join the store that torchrun (or MASTER_ADDR and MASTER_PORT) names.

        Raises:
            RankError: The store cannot be reached.
            ConfigError: Environment variables are missing.
            HybridparError: A rank has left a note that the job is over.
        """
        if launch.world_size == 1:
            return Job(launch, flight=flight)
        if not launch.launched:
            rule = f"this environment variable must be set with WORLD_SIZE = {launch.world_size}"
            raise config_error("RANK", "", rule, "0")
        where = f"at {launch.store} (MASTER_ADDR and MASTER_PORT, the same on all)"
        missing: set[int] = set()
        try:
            waits = _says_if_it_waits(launch, lambda: f"for {_named(missing, launch)} {where}")
            with waits, Waiting(flight, RENDEZVOUS, "world"):
                store: dist.Store
                if launch.own_store_port:
                    store = _loopback_store(launch)
                else:
                    store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.world_size))
                store = dist.PrefixStore(_PREFIX, store)
                return Job(
                    launch, dist.PrefixStore(meet(store, launch, missing), store), store, flight
                )
        except dist.DistError as error:
            raise _lost_store(launch.rank, error) from None
        except (OSError, ValueError) as error:  # the port is in use; MASTER_ADDR is not set
            raise RankError(
                f"rank {launch.rank} cannot reach the other ranks: {error}; MASTER_ADDR and "
                f"MASTER_PORT must be set, as torchrun sets them, to a host of the job and a "
                f"free port on it"
            ) from None

    def together(self, action: Callable[[], T], *, here: bool = True) -> T | None:
        """Run `action` where `here` is true; if it fails on some processes, all fail alike."""
        result = None
        error = None
        if here:
            try:
                result = action()
            except HybridparError as caught:
                error = caught
        self._fail_together(error)
        return result

    def decide(self, action: Callable[[], Any]) -> Any:
        """Return rank 0's result of `action`, plain JSON, on all processes. Raises: as `together`."""
        return self.gather(self.together(action, here=self.launch.rank == 0))[0]

    def _fail_together(self, error: HybridparError | None) -> None:
        if self.launch.world_size == 1:
            if error is not None:
                raise error
            return
        ranks: dict[str, list[int]] = {}
        mine = None if error is None else str(error)
        for rank, text in enumerate(self.gather(mine)):
            if text is not None:
                ranks.setdefault(text, []).append(rank)
        if not ranks:
            return
        with contextlib.suppress(dist.DistError):
            self._part()
        if error is not None and len(ranks) == 1 and 0 in ranks[str(error)]:
            raise error
        lines = []
        for text, where in ranks.items():
            if len(ranks) > 1 or 0 not in where:
                text = f"rank {', '.join(map(str, where))}: {text}"
            lines.append(text)
        raise HybridparError("\n".join(lines))

    def _part(self) -> None:
        """Let rank 0, which may serve the store, end last; it waits for _PART_S at most."""
        store = self.store
        end = time.monotonic() + _PART_S
        assert store is not None
        others = [f"parted/{rank}" for rank in range(1, self.launch.world_size)]
        if self.launch.rank:
            store.set(f"parted/{self.launch.rank}", "")
        else:
            _poll(lambda: store.check(others) or time.monotonic() > end)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes (plain JSON), in rank order."""
        if self.store is None:
            return [value]
        place = self._rounds
        self._rounds = self._rounds + 1
        rank = self.launch.rank
        store = self.store
        try:
            store.set(f"{place}/{rank}", json.dumps(value))
            if rank == 0:
                everyone = [
                    self._await(f"{place}/{other}") for other in range(self.launch.world_size)
                ]
                store.set(f"{place}/all", json.dumps(everyone))
            return self._await(f"{place}/all")
        except dist.DistError as error:
            raise _lost_store(rank, error) from None

    def _await(self, key: str) -> Any:
        assert self.store is not None
        with Waiting(self.flight, RENDEZVOUS, "world"):
            return _await(self.store, key, self._raise_if_over)

    def _raise_if_over(self) -> None:
        """Check that this start of the job is still current.

        Raises:
            HybridparError: The job is over.
            LostContactError: Another host has begun a new start.
        """
        lobby = self._lobby
        store = self.store
        if lobby is None or store is None:
            return
        _raise_if_ended(lobby)
        if store.check([_HELLOS]) and lobby.add(_HELLOS, 0) > int(store.get(_HELLOS)):
            raise LostContactError(
                f"rank {self.launch.rank} lost contact with the other ranks, which have been "
                f"restarted"
            )

    def require_addresses(self, backend: str) -> None:
        """Check that other hosts can reach the address that Gloo offers. Raises: ConfigError."""
        if backend == "gloo" and self.store is not None:
            several = len(set(self.gather(sockets.network()))) > 1
            self.together(lambda: _require_address(self.launch.interface, several))

    def start_group(self, device: torch.device, backend: str, timeout_s: float) -> None:
        """Create the process group. Communication times out after `timeout_s` seconds.

        `ProcessGrid.wait_at_most` changes that time. If all processes are on this machine, Gloo
        listens on the loopback interface only.
        """
        if self.store is None:
            return
        options = None
        if self.launch.loopback and backend == "gloo":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        with _says_if_it_waits(self.launch, lambda: f"for the others to connect: {TO_CONNECT}"):
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", self.store),
                rank=self.launch.rank,
                world_size=self.launch.world_size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if backend == "nccl" else None,
                pg_options=options,
            )

    def end_group(self) -> None:
        """Leave the process group, if there is one, after all ranks have got here."""
        if self.store is not None and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


@contextlib.contextmanager
def _says_if_it_waits(launch: Launch, text: Callable[[], str]) -> Iterator[None]:
    """Print `text()` every 15 s while entered, on the first rank of a host without a supervisor."""
    with says_every(
        _SAY_EVERY_S,
        lambda seconds: f"rank {launch.rank} has waited {seconds:.0f} s {text()}",
        speaks=launch.local_rank == 0 and not launch.supervisor,
    ):
        yield


@contextlib.contextmanager
def says_every(
    interval_s: float, text: Callable[[float], str], *, speaks: bool = True
) -> Iterator[None]:
    """Print `text(seconds since the start)` to stderr at intervals while entered, from a thread."""
    over = threading.Event()
    began = time.monotonic()

    def say() -> None:
        while not over.wait(interval_s):
            line = text(time.monotonic() - began)
            if not over.is_set():
                console.say(line)

    if speaks:
        threading.Thread(target=say, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _named(missing: set[int], launch: Launch) -> str:
    """Return the missing ranks as text; only rank 0 knows which ranks are missing."""
    ranks = sorted(missing)
    if not ranks:
        return f"the other {launch.world_size - 1}"
    some = ", ".join(map(str, ranks[:_MOST_NAMED]))
    return f"rank {some}" + f" and {len(ranks) - _MOST_NAMED} more" * (len(ranks) > _MOST_NAMED)


def meet(store: dist.Store, launch: Launch, missing: set[int] | None = None) -> str:
    """Agree on a name for this start of the job that no earlier start has used.

    torchrun keeps its store with all its contents when it restarts ranks, and its count of restarts
    may differ between hosts. So each process leaves a random token, and rank 0 answers each with
    its own token until all know it.

    Args:
        store: Store of all starts of the job.
        missing: On rank 0 it is filled with the ranks that have not come yet.

    Raises:
        HybridparError: A rank has left a note that the job is over.
    """
    mine = secrets.token_hex(8)
    rank = launch.rank
    _raise_if_ended(store)
    store.add(_HELLOS, 1)
    if rank:
        store.set(f"hello/{rank}", json.dumps(mine))
        name = _await(store, f"answer/{mine}", partial(_raise_if_ended, store))
        store.set(f"{name}/{rank}", "")
        return name
    missing = set() if missing is None else missing
    missing.update(range(1, launch.world_size))
    answered: set[str] = set()

    def everyone_knows() -> bool:
        for other in [rank for rank in missing if store.check([f"hello/{rank}"])]:
            token = _value(store, f"hello/{other}")
            if token not in answered:  # an earlier start may have left the first one
                store.set(f"answer/{token}", json.dumps(mine))
                answered.add(token)
        missing.difference_update([rank for rank in missing if store.check([f"{mine}/{rank}"])])
        return not missing

    _poll(everyone_knows, partial(_raise_if_ended, store))
    store.set(f"{mine}/{_HELLOS}", str(store.add(_HELLOS, 0)))
    return mine


def leave_word(address: str, text: str) -> None:
    """Leave a note in torchrun's store that the job is over, for waiting and restarted ranks.

    address: host and port of the store. If it cannot be reached, its owner has ended too.
    """
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, ValueError, dist.DistError):
        # first a plain connection, because torch's client retries for long
        socket.create_connection((host, int(port)), _WORD_S).close()
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=_WORD_S))
        dist.PrefixStore(_PREFIX, store).compare_set(_ENDED, "", json.dumps(text))


def _raise_if_ended(lobby: dist.Store) -> None:
    """Raise HybridparError if a rank has left a note that the job is over."""
    if lobby.check([_ENDED]):
        raise HybridparError(f"this job is over: {_value(lobby, _ENDED)}")


def leave(launch: Launch, text: str) -> None:
    """Start to end a job that torchrun must not restart: leave a note for other hosts.

    The first rank of a host ends first, so that its report comes before torchrun ends the others.

    text: the reason.
    """
    who = f"rank {launch.rank} on {platform.node()}"
    leave_word(launch.store, f"{who} {text}")
    if launch.local_rank:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_FIRST_S)  # torchrun ends this process once the first rank has stopped it


def stop_agent(launch: Launch) -> None:
    """Make torchrun end this host's other ranks without a restart; this rank ends by itself."""
    if os.getppid() == launch.agent:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(launch.agent, signal.SIGTERM)


def _lost_store(rank: int, error: dist.DistError) -> LostContactError:
    return LostContactError(f"rank {rank} lost contact with the launcher's store ({error})")


def _loopback_store(launch: Launch) -> dist.Store:
    """Return the store of a job on one machine, on loopback, unlike torch's rendezvous."""
    listening = None
    if launch.rank == 0:
        with socket.create_server((LOOPBACK, launch.own_store_port)) as server:
            listening = server.detach()
    return dist.TCPStore(
        LOOPBACK,
        launch.own_store_port,
        launch.world_size,
        listening is not None,
        master_listen_fd=listening,
    )


def _await(store: dist.Store, key: str, give_up: Callable[[], None]) -> Any:
    """Wait for a key and return its value; Ctrl-C works. `give_up`: see `_poll`."""
    _poll(lambda: store.check([key]), give_up)
    return _value(store, key)


def _value(store: dist.Store, key: str) -> Any:
    """Return the value of an existing key. Raises: HybridparError if it is not JSON."""
    try:
        return parse_json(store.get(key))
    except ValueError:
        raise HybridparError(
            f"the launcher's store has no valid JSON under {key}: another program has written "
            f"into it. Start the job again on a machine whose users you trust"
        ) from None


def _poll(done: Callable[[], bool], give_up: Callable[[], None] = lambda: None) -> None:
    """Wait until `done()`, at growing intervals; `give_up()` raises if waiting is pointless."""
    pause, longest = _POLL_S
    while not done():
        give_up()
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _require_address(interface: str, several_hosts: bool) -> None:
    """Check the address that Gloo offers to other hosts. Raises: ConfigError."""
    there = sockets.interfaces() if interface or several_hosts else []
    found = f"this host, {platform.node()}, has {', '.join(there) or 'none but lo'}"
    for name in interface.split(",") if interface else ():
        if name.partition(":")[0] not in (*there, "lo"):  # eth0:1 is a second address of eth0
            raise config_error(
                "GLOO_SOCKET_IFNAME", interface, f"unknown network interface; {found}", *there[:1]
            )
    address = sockets.own_address() if several_hosts and not interface else ""
    if address and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        rule = (
            f"must name the network interface that leads to the other hosts: this host's own "
            f"name resolves to {address}, which other hosts cannot reach; {found}"
        )
        raise config_error("GLOO_SOCKET_IFNAME", "", rule, *there[:1])


def choose_device(
    config: TrainConfig, launch: Launch, gather: Callable[[str], list[str]]
) -> torch.device:
    """Return this process's device: a GPU, not shared unless train.share_gpus is set, or the CPU.

    A launcher may show each process a single GPU (`srun --gpus-per-task=1`), so that GPUs are
    compared by UUID rather than by index.

    Args:
        gather: Returns the UUIDs of all processes in rank order.

    Collectives: `gather`, unless `config.device` is "cpu".

    Raises:
        ConfigError: GPUs are required, and some process has none or shares one. On all processes.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = launch.local_rank % max(gpus, 1)
    taken = gather(str(torch.cuda.get_device_properties(index).uuid) if gpus else "")
    if all(taken) and (config.share_gpus or len(set(taken)) == len(taken)):
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        return device
    if config.device == "cuda":
        rule = (
            f"requires one GPU per process; GPUs on this machine: {gpus}, "
            f"processes: {launch.local_world_size}"
        )
        raise config_error(
            "train.device", "cuda", rule, "cpu, or train.share_gpus = true" if all(taken) else "cpu"
        )
    return torch.device("cpu")


def choose_backend(config: TrainConfig, device: torch.device) -> str:
    """Return the backend of a job's process group. NCCL refuses two processes on one GPU."""
    return "nccl" if device.type == "cuda" and not config.share_gpus else "gloo"


def set_precision(config: TrainConfig, device: torch.device) -> None:
    """Set the precision of fp32 products on a GPU. Raises: ConfigError, if it lacks fp8."""
    if device.type == "cuda":
        if config.fp8 and (capability := torch.cuda.get_device_capability(device)) != (9, 0):
            rule = "requires a GPU of compute capability 9.0 (H100, H200), not {}.{}".format(
                *capability
            )
            raise config_error("train.fp8", "true", rule, "false")
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")


def set_threads(wanted: int, launch: Launch) -> int:
    """Set this process's CPU threads (0: its share of the machine's cores); return them."""
    threads = wanted or max(1, available_cores() // launch.local_world_size)
    torch.set_num_threads(threads)
    return threads


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep freed memory; return whether this is glibc.

    By default malloc returns large tensors to the system at once. Every step would then fault them
    in page by page, which costs more than computing on them.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
