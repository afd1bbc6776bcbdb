"""TCP connections of this process to other hosts: bytes that went over them, and how long they have
been silent.

Whoever opened a connection (Gloo, NCCL, torch's store), it is found by its descriptor. Linux alone
tells these numbers; elsewhere there are no connections.

A link that is out looks to TCP like one that loses packets: it sends again, each time after twice
as long a pause, so that after an outage of 30 s the next attempt may be another 30 s away.
`prepare` bounds that pause where the kernel can (Linux 6.15), and lets the kernel ask a silent host
whether it is there, so that silence tells an outage from a host that has nothing to say.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ASK_EVERY_S = 2
"""Silence after which a host is asked whether it is there, and the time between two such
questions."""
_RETRY_S = 3
"""Longest pause between two attempts to send."""
_KERNEL_GIVES_UP_S = 924
"""Time after which Linux gives a connection up: 15 attempts, each after twice as long a pause as
the one before."""
_TCP_RTO_MAX_MS = 44  # of linux/tcp.h; socket does not have it
_TCP_USER_TIMEOUT = 18
_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
_ESTABLISHED = 1
_HEADERS = {socket.AF_INET: 52, socket.AF_INET6: 72}
"""Bytes of IP and TCP in a packet, with time stamps."""
# struct tcp_info: state, retransmits; last_data_recv, last_ack_recv (ms); bytes_received, segs_out,
# segs_in; bytes_sent
_INFO = struct.Struct("=BxB49xII68xQII56xQ")
_MAPPED = "::ffff:"
"""An IPv4 address on an IPv6 socket."""
_DESCRIPTORS = Path("/proc/self/fd")
_NAMESPACE = Path("/proc/self/ns/net")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection from this host's address `own` to another one's, `host`.

    number: the kernel's, for the life of the connection. silent_s: time since anything came from
    there, be it only an acknowledgement. retries: of what was sent last, and not acknowledged.
    sent, received: bytes, headers included.
    """

    number: int
    host: str
    own: str
    silent_s: float
    retries: int
    sent: int
    received: int


def connections() -> list[Connection]:
    """The connections of this process to other hosts."""
    found = []
    for number, connected in _sockets():
        with suppress(OSError):
            own, host = (
                name[0].removeprefix(_MAPPED)
                for name in (connected.getsockname(), connected.getpeername())
            )
            info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            if not _are_apart(own, host) or len(info) < _INFO.size:
                continue
            state, retries, data_ms, answer_ms, received, packets_out, packets_in, sent = (
                _INFO.unpack(info)
            )
            if state == _ESTABLISHED:
                headers = _HEADERS[socket.AF_INET6 if ":" in host else socket.AF_INET]
                found.append(
                    Connection(
                        number,
                        host,
                        own,
                        min(data_ms, answer_ms) / 1e3,
                        retries,
                        sent + headers * packets_out,
                        received + headers * packets_in,
                    )
                )
    return found


def _are_apart(own: str, host: str) -> bool:
    """Whether two addresses of a connection are of two hosts: one that talks to itself has the same
    at both ends."""
    return own != host


def network() -> str:
    """A name for the network that this process has: containers of one host may have one each, or
    share the host's."""
    with suppress(OSError):
        return _BOOT.read_text() + os.readlink(_NAMESPACE)
    return platform.node()


def own_address() -> str:
    """The address that this host's name leads to, which Gloo offers others unless it is given an
    interface."""
    with suppress(OSError):
        for family, kind, *_, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return str(address[0])
    return "127.0.0.1"  # as Gloo does


def interfaces() -> list[str]:
    """Network interfaces of this host, the loopback one apart."""
    return [name for _, name in socket.if_nameindex() if name != "lo"]


def prepare(limit_s: float) -> None:
    """Has the kernel ask silent hosts, send again often, and not give up before `limit_s`
    seconds."""
    last = int(1e3 * min(max(2 * limit_s, _KERNEL_GIVES_UP_S), 2**21))
    for _, connected in _sockets():
        with suppress(OSError):  # not TCP, or closed meanwhile
            connected.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, last)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_EVERY_S)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_EVERY_S)
            connected.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000 * _RETRY_S)


@contextmanager
def deaf() -> Iterator[None]:
    """A context in which the kernel drops whatever comes to this process by TCP, as if its host
    were off the network.

    Connections stay, and go on afterwards. For tests of what an outage does.
    """
    nothing = ctypes.create_string_buffer(
        struct.pack("=HBBI", 0x06, 0, 0, 0), 8
    )  # BPF: return 0, that is, keep none
    program = struct.pack("@HP", 1, ctypes.addressof(nothing))
    for _, connected in _sockets():
        connected.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    try:
        yield
    finally:
        for _, connected in _sockets():
            with suppress(OSError):  # made meanwhile
                connected.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """TCP sockets of this process that are connected, each with its number, by a handle that is
    closed afterwards."""
    for name in os.listdir(_DESCRIPTORS) if sys.platform == "linux" else ():
        with suppress(OSError):  # closed meanwhile
            kind, _, number = os.readlink(_DESCRIPTORS / name).partition(":")
            if kind != "socket":
                continue
            with socket.socket(fileno=os.dup(int(name))) as handle:
                if handle.family in _HEADERS and handle.type == socket.SOCK_STREAM:
                    handle.getpeername()  # raises where it only listens
                    yield int(number.strip("[]")), handle
