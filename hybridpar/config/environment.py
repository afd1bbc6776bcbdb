"""Environment variables: the only module that reads and writes them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybridpar.errors import config_error, not_utf8

JOB = "hybridpar of process "
"""Beginning of a job's name as our supervisor gives it to ranks, where torch's elastic agent would;
its pid follows."""
AGENT = "pt_elastic"
"""Name of torchrun's process, as torchrun gives it to itself."""


def triton_is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


_ELASTIC_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


def pass_on_signals(names: Iterable[str]) -> None:
    """Has torch's elastic agents of this process hand these signals (SIGTERM, ..) to their ranks,
    and leave others."""
    os.environ[_ELASTIC_SIGNALS] = ",".join(names)


@contextlib.contextmanager
def passing_on_signals(names: Iterable[str]) -> Iterator[None]:
    """`pass_on_signals` while entered."""
    before = os.environ.get(_ELASTIC_SIGNALS)
    pass_on_signals(names)
    try:
        yield
    finally:
        del os.environ[_ELASTIC_SIGNALS]
        if before is not None:
            os.environ[_ELASTIC_SIGNALS] = before


def become_rank(variables: Mapping[str, str]) -> None:
    """Gives this process, a fork of a launcher, the environment of a rank."""
    os.environ.pop(_ELASTIC_SIGNALS, None)
    os.environ.update(variables)


_GPU_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def use_all_gpu_queues() -> None:
    """Give each CUDA stream of this process a hardware queue of its own, unless the environment
    names a number.

    To be called before CUDA is set up. By default streams share 8 queues, and this process has more
    streams. In a shared queue a kernel waits for all that was issued before it on other streams,
    too. A receive that was posted early then holds up the work that its sender waits for.
    """
    os.environ.setdefault(_GPU_QUEUES, "32")  # the most that CUDA takes


def require_gpu_queues(pp: int) -> None:
    """Refuse a single hardware queue for pipelines. Raises: ConfigError."""
    if pp > 1 and os.environ.get(_GPU_QUEUES) == "1":
        raise config_error(
            _GPU_QUEUES,
            "1",
            f"this environment variable must be unset or above 1 with parallel.pp = {pp}: with "
            f"a single hardware queue, receives that are posted early block the kernels that "
            f"their senders wait for",
            "32",
        )


@dataclass(frozen=True)
class Launch:
    """This process's place among those that the launcher (torchrun) started, and its arguments.

    launched: there is a launcher. loopback: it has started all processes on this machine, and
    nobody has named a network interface for them (GLOO_SOCKET_IFNAME).
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launched: bool = False
    loopback: bool = False
    args: tuple[str, ...] = ()
    own_store_port: int = 0
    """Port of the store, where all processes are on this machine and make it themselves."""
    supervisor: int = 0
    """The process that has started this one, as `hybridpar train --ranks` does (0: none of
    ours)."""
    agent: int = 0
    """The process of torchrun, or of train/launching/hosts.py, that has started this one (0: none)."""
    elastic: bool = field(default=False, compare=False)
    """Whether torchrun or our supervisor has started this process, and so its parent is to outlive
    it."""
    store: str = field(default="", compare=False)
    """Address and port of the launcher's store."""
    interface: str = field(default="", compare=False)
    """The network interface that Gloo is to use (GLOO_SOCKET_IFNAME); empty: the one that this
    host's name leads to."""

    @staticmethod
    def from_environment(args: Sequence[str] = ()) -> Launch:
        """The launch that torchrun's variables describe; without the local ones all processes count
        as on one machine.

        Raises: ConfigError.
        """

        def get(name: str, default: int, least: int = 0, most: int = 2**31, why: str = "") -> int:
            text = os.environ.get(name, str(default))
            if not text.isdecimal() or not least <= int(text) <= most:
                rule = (
                    f"this environment variable must be a whole number from {least} to {most}{why}"
                )
                raise config_error(name, text, rule, str(default))
            return int(text)

        for name, works in (("MASTER_ADDR", "127.0.0.1"), ("GLOO_SOCKET_IFNAME", "eth0")):
            if flaw := not_utf8(text := os.environ.get(name, "")):
                raise config_error(
                    name, text, f"this environment variable must be UTF-8 text; {flaw}", works
                )
        world = get("WORLD_SIZE", 1, 1)
        port = get("MASTER_PORT", 29500, 1, 2**16 - 1)
        rank = get("RANK", 0, 0, world - 1, f", below WORLD_SIZE = {world}")
        known = "LOCAL_WORLD_SIZE" in os.environ
        local = get("LOCAL_WORLD_SIZE", world, 1, world, f", at most WORLD_SIZE = {world}")
        local_rank = get(
            "LOCAL_RANK",
            rank % local,
            0,
            local - 1 if known else 2**31,
            f", below LOCAL_WORLD_SIZE = {local}" if known else "",
        )
        here = known and local == world and "GLOO_SOCKET_IFNAME" not in os.environ
        theirs = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        near = local == world and os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost")
        job = os.environ.get("TORCHELASTIC_RUN_ID", "")
        return Launch(
            rank,
            local_rank,
            world,
            local,
            "RANK" in os.environ,
            here,
            tuple(args),
            port if near and not theirs and "MASTER_PORT" in os.environ else 0,
            int(job.removeprefix(JOB)) if job.startswith(JOB) else 0,
            _parent_agent() if job and not job.startswith(JOB) else 0,
            bool(job),
            f"{os.environ.get('MASTER_ADDR', '')}:{port}",
            os.environ.get("GLOO_SOCKET_IFNAME", ""),
        )


def _parent_agent() -> int:
    """The process that has started this one, if it is torchrun's agent; 0 for any other, such as a
    user's program."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text().strip() == AGENT:
            return parent
    return 0
