"""Supervised ranks that are forks of the program that calls `fit`.

    program    fit() ---------------- watches, passes signals on --------------> returns rank 0's
               result
    a thread   forks rank 0, 1, ..    waits until the job has ended
    ranks              run(config) ------------------------------------> exit

Forks inherit the program's functions, modules and data sets, even lambdas, definitions of a
notebook or of stdin, and lists in memory. New processes would have to define them again, and the program
would need a guard (`if __name__ == "__main__"`) around code that must not run in each process.

A fork has only the forking thread. OpenMP's pool belongs to the thread that first computed in
parallel, so that in a fork of that thread the next parallel loop would wait for missing threads.
The thread that forks here has never computed, so that ranks create their own pools. It lives as
long as its ranks, because Linux counts it as their parent (stop.end_with).
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from hybridpar.config import Config, become_rank, passing_on_signals
from hybridpar.train.faults.agent import run_agent
from hybridpar.train.faults.diagnose import Diagnosis
from hybridpar.train.faults.supervisor import HANDLED_SIGNALS, Supervisor
from hybridpar.train.stop import numbers_of, signals_as_before

Run = Callable[[Config], int]
"""Runs a rank with the configuration of its job, and returns its exit code."""
_POLL_S = 0.02


def supervise_forks(config: Config, run: Run) -> tuple[int, Diagnosis | None]:
    """Run a function on forks of this process until the job ends or must be given up.

    Args:
        config: The resolved configuration of the job. If a rank keeps failing, `run` receives a
            smaller one.
        run: Called on each rank, in the rank's environment.

    Returns:
        The exit code, and the diagnosis of the last failure, if there was one.
    """
    names = [
        number.name for number in numbers_of(sorted({*HANDLED_SIGNALS, *config.train.stop_signals}))
    ]
    with _Forker() as forker, signals_as_before(), passing_on_signals(names):
        agent = ForkingSupervisor(config, run, forker)
        try:
            code = run_agent(agent)
        finally:
            agent.close()
    ended = agent.exit_code if code == 1 else code, agent.last_failure
    del agent
    gc.collect()  # frees the agent's store and the thread that serves it
    return ended


class ForkingSupervisor(Supervisor):
    """Supervise ranks that are forks."""

    def __init__(self, config: Config, run: Run, forker: _Forker):
        self._run = run
        self._forker = forker
        super().__init__(config, [], [])

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._begin_start()
        spec = worker_group.spec
        common = {
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "WORLD_SIZE": worker_group.workers[0].world_size,
            "MASTER_ADDR": worker_group.master_addr,
            "MASTER_PORT": worker_group.master_port,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
        }
        texts = {}
        for worker in worker_group.workers:
            env = common | {"RANK": worker.global_rank, "LOCAL_RANK": worker.local_rank}
            texts[worker.local_rank] = {name: str(value) for name, value in env.items()}
        run = partial(self._run, self._config)
        self._pcontext = _ForkContext(
            texts, self._logs_specs, lambda env: self._forker.fork(env, run)
        )
        self._pcontext.start()
        return self._pcontext.pids()


class _ForkContext(SubprocessContext):
    """Torch's process context for an agent, with forks as processes."""

    def __init__(
        self,
        envs: dict[int, dict[str, str]],
        logs_specs: Any,
        fork: Callable[[dict[str, str]], int],
    ):
        super().__init__("rank", sys.executable, dict.fromkeys(envs, ()), envs, logs_specs)
        self._fork = fork

    def _start(self) -> None:
        self.subprocess_handlers = {
            rank: _Fork(self._fork(env))  # type: ignore[misc]
            for rank, env in self.envs.items()
        }


class _Fork:
    """A fork: both torch's handler of a process and the process, as `subprocess.Popen` has it."""

    def __init__(self, pid: int):
        self.proc = self
        self.pid = pid
        self.returncode: int | None = None

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signal the fork's process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, death_sig or signal.SIGTERM)

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal that ended the fork; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # the program itself has waited for its children
                self.returncode = 1
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the fork to end. Raises: TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(_POLL_S)
        return code


class _Forker:
    """Runs the thread that forks, while entered."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="hybridpar forks", daemon=True)

    def __enter__(self) -> _Forker:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._requests.put(None)
        self._thread.join()

    def fork(self, env: Mapping[str, str], run: Callable[[], int]) -> int:
        """Fork a process that runs a function in a new session; return its pid."""
        for stream in (sys.stdout, sys.stderr):
            # otherwise the fork would write buffered output a second time
            with contextlib.suppress(Exception):
                stream.flush()
        pids: queue.SimpleQueue[int | OSError] = queue.SimpleQueue()

        def request() -> None:
            collects = gc.isenabled()
            gc.disable()
            try:
                with warnings.catch_warnings():  # about threads, which the fork does not need
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pid: int | OSError = os.fork()
            except OSError as error:
                pid = error
            if not pid:
                _become_rank(env, run)
            if collects:
                gc.enable()
            pids.put(pid)

        self._requests.put(request)
        pid = pids.get()
        if isinstance(pid, OSError):
            raise pid
        return pid

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            request()


def _become_rank(env: Mapping[str, str], run: Callable[[], int]) -> NoReturn:
    """Run a function in this fork and end the process, so that no code of the program follows."""
    code = 1
    try:
        # a destructor of current garbage could wait for a thread that the fork does not have
        gc.freeze()
        gc.enable()
        os.setsid()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, usual)
        become_rank(env)
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)
