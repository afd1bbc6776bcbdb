"""Run the ranks of one host of several:
`python -m hybridpar.train.launching.hosts --nnodes 2 --node-rank 0 .. CONFIG.toml`.

This is torchrun (same agent and static rendezvous, so that each host may use either), and more:

    it reports every 15 s that it waits for other hosts, and what it knows about them
    after a signal ranks have 600 s to finish and save (torchrun: 30), after a second signal 5 s
    a signal ends the ranks of all hosts, even before the hosts have met
    its exit code is 128 + n after signal n, and 1 if ranks have failed
"""

from __future__ import annotations

import argparse
import logging
import platform
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from hybridpar.config import AGENT, STOP_SIGNALS, pass_on_signals
from hybridpar.train.faults.agent import RankAgent, run_agent
from hybridpar.train.faults.diagnose import end_text
from hybridpar.train.launching.launch import leave_word, says_every
from hybridpar.train.reporting.console import say
from hybridpar.train.stop import numbers_of

_SAY_EVERY_S = 15.0
_LOOK_EVERY_S = 0.1
_PROBE_S = 3.0
_MEET_S = 900
"""Time that hosts wait for each other, as with torchrun."""
_STOP_S = 600
"""Time that ranks have to finish and save after a signal."""
_LEFT_S = 30
"""Time that the remaining ranks have to report a lost rank after a failure, as with torchrun."""
_LINGER_S = 2.0
"""Time that host 0, which serves the store, gives the others to read why the job is over."""


def main(argv: Sequence[str]) -> int:
    """Run the ranks of this host until they have ended, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridpar.train.launching.hosts", allow_abbrev=False
    )
    for name in ("nnodes", "node-rank", "nproc-per-node", "master-port", "max-restarts"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("train", nargs=argparse.REMAINDER, help="arguments of `hybridpar train`")
    given = parser.parse_args(argv)
    host = Host(given.node_rank, given.nnodes, given.master_addr, given.master_port)
    # as with torchrun: ranks find the process to stop by this name
    torch.multiprocessing._set_thread_name(AGENT)
    # every stop signal ends the ranks too, so that none is left behind
    pass_on_signals(number.name for number in numbers_of(STOP_SIGNALS))
    return HostAgent(host, given.nproc_per_node, given.max_restarts, given.train).exit_code()


@dataclass(frozen=True)
class Host:
    """A host of a job. address, port: of host 0, which serves the store."""

    number: int
    count: int
    address: str
    port: int

    @property
    def store(self) -> str:
        """Return address and port of the store."""
        return f"{self.address}:{self.port}"

    def waiting(self, seconds: float) -> str:
        """Return a line that says which hosts are missing, and what is known about them."""
        others = "host 0"
        if self.number == 0:
            others = f"{self.count - 1} other host{'s' * (self.count > 2)}"
        line = (
            f"host {self.number} of 0 to {self.count - 1} has waited {seconds:.0f} s for {others} "
            f"at {self.store}"
        )
        if self.number == 0:
            return (
                f"{line}: start the same command on each of them, with NODE_RANK=1 to "
                f"{self.count - 1}; from there, this address and port must reach this host"
            )
        return f"{line}: {self._probe()}"

    def _probe(self) -> str:
        """Try to connect to the store, and return a description of the result."""
        try:
            socket.create_connection((self.address, self.port), _PROBE_S).close()
        except socket.gaierror as error:
            return (
                f"MASTER_ADDR is not the name of a host that this one can resolve "
                f"({error.strerror})"
            )
        except OSError as error:
            why = error.strerror or str(error)
            return (
                f"it cannot be reached ({why}). Check that its command runs, with "
                f"NODE_RANK=0, that MASTER_ADDR and MASTER_PORT are right, and that firewalls "
                f"allow all TCP ports"
            )
        return "it is up, and waits for other hosts too"


class HostAgent(RankAgent):
    """torchrun's agent on one host."""

    def __init__(self, host: Host, num_ranks: int, restarts: int, args: Sequence[str]):
        self._host = host
        meeting = StaticTCPRendezvous(
            host.address, host.port, host.number, host.count, "none", _MEET_S
        )
        super().__init__(
            WorkerSpec(
                role="default",
                local_world_size=num_ranks,
                rdzv_handler=meeting,
                entrypoint=sys.executable,
                args=("-u", "-m", "hybridpar", "train", *args),
                max_restarts=restarts,
                monitor_interval=_LOOK_EVERY_S,
                master_addr=host.address,
                master_port=host.port,
            ),
            _STOP_S,
        )

    def exit_code(self) -> int:
        """Run the ranks; return 0, 1 if some have failed, 128 + n if signal n has ended them."""
        try:
            code = run_agent(self, logging.CRITICAL)
        except dist.DistError as error:
            reason = str(error).partition("\n")[0]
            say(
                f"host {self._host.number} has no contact with the store of host 0 at "
                f"{self._host.store} ({reason})"
            )
            return 1
        if code < 128:
            return code
        if self._host.number == 0:
            time.sleep(_LINGER_S)
        return 1 if any(0 < one < 128 for one in self._exit_codes()) else code

    def _invoke_run(self, role: str = "default") -> RunResult:
        try:
            return super()._invoke_run(role)
        except SignalException as stopped:
            leave_word(
                self._host.store,
                f"host {self._host.number}, {platform.node()}, was stopped by "
                f"{stopped.sigval.name}",
            )
            raise

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        with says_every(_SAY_EVERY_S, self._host.waiting):
            super()._rendezvous(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        for rank, failure in sorted(result.failures.items()):
            code = failure.exitcode
            left = self._remaining_restarts
            what = "no restarts are left"
            if left:
                what = f"starting again, {left - 1} restarts are left"
            say(f"rank {rank} {end_text(code)}; {what}")
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """End the ranks that still run, because they wait for a failed one, before a restart."""
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGTERM, _LEFT_S)

    def _exit_codes(self) -> list[int]:
        if not isinstance(self._pcontext, SubprocessContext):
            return []
        return [one.proc.poll() or 0 for one in self._pcontext.subprocess_handlers.values()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
