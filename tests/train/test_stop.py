"""Signals as requests to stop, in a process of their own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, time
from functools import partial
from hybridpar.train import stop
from hybridpar.train.stop import ERROR_TIME_S, SAME_REQUEST_S
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup
noting_signals = partial(stop.noting_signals, ("INT", "TERM", "HUP"))
now = 100.0
time.monotonic = lambda: now
noted, before = [], {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
def send(number): os.kill(os.getpid(), number)
def as_before(): return before == {number: signal.getsignal(number) for number in before}
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, timeout=200
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_is_noted_and_a_later_one_ends(number: int) -> None:
    """Not one that comes soon after it, which is part of the same request."""
    done = run(f"""
with noting_signals(noted.append) as wish:
    send({number}); send(2); send(15); print(wish.number, noted, flush=True)
    now += SAME_REQUEST_S + 0.1; send({number}); print("not reached")
""")
    assert (done.returncode, done.stdout) == (128 + number, f"{number} [{number}]\n")


def test_all_is_as_it_was_after_the_block() -> None:
    done = run("""
with noting_signals(noted.append): send(15)
print(noted, as_before())
""")
    assert done.stdout == "[15] True\n", done.stderr


@pytest.mark.parametrize(
    ("earlier", "expected"), [("pass", "[] False [] True"), ("send(15)", "[15] True")]
)
def test_an_error_lets_one_signal_pass(earlier: str, expected: str) -> None:
    """So that its reason is said; a launcher's request that came before the error was that
    signal."""
    done = run(f"""
try:
    with noting_signals(noted.append):
        {earlier}
        raise RuntimeError
except RuntimeError:
    print(noted, as_before(), flush=True)
if not noted:
    send(15); print(noted, as_before(), flush=True)
send(15); print("not reached")
""")
    assert (done.returncode, done.stdout.split()) == (-signal.SIGTERM, expected.split())


def test_a_signal_long_after_an_error_acts_as_before() -> None:
    done = run("""
try:
    with noting_signals(noted.append): raise RuntimeError
except RuntimeError:
    now += ERROR_TIME_S + 0.1; print(as_before(), flush=True)
try:
    send(2); print("not reached")
except KeyboardInterrupt:
    print(as_before())
""")
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_only_those_that_are_named_are_noted_and_not_one_that_nohup_ignores() -> None:
    done = run("""
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with stop.noting_signals(("HUP", "USR1"), noted.append):
    send(signal.SIGHUP); send(signal.SIGUSR1); print(noted == [signal.SIGUSR1], flush=True); send(signal.SIGTERM)
""")
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "True\n"), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_rank_ends_with_its_supervisor() -> None:
    """The rank is killed; or was, before it could ask for a stop."""
    program = """
import os, time
from hybridpar.train.stop import end_with
if not os.fork():
    end_with(os.getppid())
    print("asked", flush=True)
time.sleep(600)  # longer than pytest waits
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "asked\n"
        supervisor.kill()
        assert supervisor.stdout.read() == ""  # at once: both ends of the pipe are closed
    done = run("stop.end_with(1); print('not reached')")
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


def test_handlers_are_restored_after_an_error() -> None:
    done = run("""
try:
    with noting_signals(noted.append, alone=True): raise RuntimeError
except RuntimeError:
    print(as_before())
""")
    assert done.stdout == "True\n", done.stderr


def test_handlers_are_as_before_where_signals_are_handled() -> None:
    """In the main thread; another one leaves them alone."""
    done = run("""
import threading
with stop.signals_as_before() as usual:
    print(usual[signal.SIGTERM] == signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    print(as_before())
    def elsewhere():
        with stop.signals_as_before() as usual: print(usual)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
print(as_before())
""")
    assert done.stdout == "True\nFalse\n{}\nTrue\n", done.stderr
