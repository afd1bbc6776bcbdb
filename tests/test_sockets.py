"""Connections to other hosts: here two loopback addresses, which are two hosts to whoever compares
addresses."""

from __future__ import annotations

import platform
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from connections import HERE, THERE, Pair, connected

from hybridpar import sockets

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells these numbers")


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ends of a connection between two addresses."""
    with connected() as both:
        yield both


def connection_to(host: str) -> sockets.Connection:
    (found,) = [one for one in sockets.connections() if one.host == host]
    return found


def wait_until_silent(host: str, seconds: float) -> sockets.Connection:
    end = time.monotonic() + 200
    while (found := connection_to(host)).silent_s < seconds:
        assert time.monotonic() < end, f"{found} is not silent"
        time.sleep(0.1)
    return found


def test_bytes_are_counted_with_their_headers(pair: Pair) -> None:
    here, there = pair
    before = connection_to(THERE)
    here.sendall(bytes(100_000))
    received = 0
    while received < 100_000:
        received += len(there.recv(1 << 16))
    there.sendall(b"1234567")
    assert here.recv(7) == b"1234567"
    one = connection_to(THERE)
    other = connection_to(HERE)
    sent = one.sent - before.sent
    assert 100_000 < sent < 200_000, "TCP may repeat segments, of up to 64 KiB, on a busy machine"
    assert 7 < one.received - before.received < 10_000
    assert other.received > 100_000
    assert (one.own, other.own) == (HERE, THERE)


def test_a_host_is_no_other_one_to_itself() -> None:
    with socket.create_server((HERE, 0)) as server:
        here = socket.create_connection(server.getsockname(), source_address=(HERE, 0))
        there, _ = server.accept()
    with here, there:
        assert HERE not in {one.host for one in sockets.connections()}


@pytest.mark.thorough
def test_a_host_that_has_nothing_to_say_is_not_silent_and_one_that_is_away_is(pair: Pair) -> None:
    """Afterwards what was sent meanwhile arrives, soon after, and no connection is lost."""
    here, there = pair
    sockets.prepare(60.0)
    wait_until_silent(THERE, 0.5)
    silent_s = 0.0
    while (now := connection_to(THERE).silent_s) >= silent_s:
        assert now < 60, "it was asked, and has answered"
        silent_s = now
        time.sleep(0.1)
    with sockets.deaf():
        here.sendall(b"?")
        found = wait_until_silent(THERE, sockets.ASK_EVERY_S + 1.0)
        assert found.retries > 0
        there.setblocking(False)
        with pytest.raises(BlockingIOError):
            there.recv(1)
    there.setblocking(True)
    there.settimeout(200)
    assert there.recv(1) == b"?"
    began = time.monotonic()
    there.sendall(b"!")
    assert here.recv(1) == b"!"
    silent_s = connection_to(THERE).silent_s
    assert silent_s < time.monotonic() - began + 0.1, "as long at most as since then"


def test_pauses_between_attempts_are_bounded(pair: Pair) -> None:
    """And the kernel gives up later than who waits."""
    here, _ = pair
    sockets.prepare(1000.0)
    assert here.getsockopt(socket.IPPROTO_TCP, 18) == 2_000_000  # TCP_USER_TIMEOUT, ms
    try:
        assert here.getsockopt(socket.IPPROTO_TCP, 44) == 3000  # TCP_RTO_MAX_MS
    except OSError:
        pytest.skip("this kernel cannot bound them")


def test_a_network_has_its_own_name_or_its_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "host7")
    assert "net:[" in sockets.network()
    monkeypatch.setattr(sockets, "_NAMESPACE", Path("/proc/nothing"))
    assert sockets.network() == "host7"
