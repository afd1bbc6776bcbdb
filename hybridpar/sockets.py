"""TCP connections of this process to other hosts: bytes sent and received, and how long they have
been silent.

Connections are found by their descriptors, whether Gloo, NCCL or torch's store has opened them.
Only Linux reports these numbers; on other systems there are no connections.

To TCP, a link that is down looks like one that loses packets: it retries, each time after twice as
long a pause, so that after an outage of 30 s the next attempt may be another 30 s away. `prepare`
bounds that pause if the kernel can (Linux 6.15), and makes the kernel probe a silent host, so that
silence distinguishes an outage from a host that has nothing to send.
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
"""Silence after which a host is probed, and the time between two probes."""
_RETRY_S = 3
"""Longest pause between two attempts to send."""
_KERNEL_GIVES_UP_S = 924
"""Time after which Linux gives a connection up: 15 attempts, each after twice as long a pause as
the previous one."""
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

    Attributes:
        number: The kernel's number, for the life of the connection.
        silent_s: Time since anything was received, even an acknowledgement.
        retries: Retransmissions of the last data that is not acknowledged.
        sent: Bytes sent, headers included.
        received: Bytes received, headers included.
    """

    number: int
    host: str
    own: str
    silent_s: float
    retries: int
    sent: int
    received: int


def connections() -> list[Connection]:
    """Return the connections of this process to other hosts."""
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
    """Return whether two addresses of a connection belong to two hosts. A host that connects to
    itself has the same address at both ends.
    """
    return own != host


def network() -> str:
    """Return a name for the network that this process has: containers of one host may have one
    each, or share the host's.
    """
    with suppress(OSError):
        return _BOOT.read_text() + os.readlink(_NAMESPACE)
    return platform.node()


def own_address() -> str:
    """Return the address that this host's name resolves to, which Gloo offers others unless it is
    given an interface.
    """
    with suppress(OSError):
        for family, kind, *_, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return str(address[0])
    return "127.0.0.1"  # as Gloo does


def interfaces() -> list[str]:
    """Return the network interfaces of this host, without the loopback one."""
    return [name for _, name in socket.if_nameindex() if name != "lo"]


def prepare(limit_s: float) -> None:
    """Make the kernel probe silent hosts, retry often, and not give up before `limit_s` seconds."""
    last = int(1e3 * min(max(2 * limit_s, _KERNEL_GIVES_UP_S), 2**21))
    for _, connected in _sockets():
        with suppress(OSError):  # not TCP, or closed since it was listed
            connected.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, last)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_EVERY_S)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_EVERY_S)
            connected.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000 * _RETRY_S)


@contextmanager
def deaf() -> Iterator[None]:
    """Make the kernel drop whatever comes to this process by TCP while in this context, as if its
    host were off the network.

    Connections stay, and continue afterwards. For tests of outages.
    """
    # BPF program: return 0, that is, keep no byte
    nothing = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0), 8)
    program = struct.pack("@HP", 1, ctypes.addressof(nothing))
    for _, connected in _sockets():
        connected.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    try:
        yield
    finally:
        for _, connected in _sockets():
            with suppress(OSError):  # opened inside the context
                connected.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the connected TCP sockets of this process, each with its number, as a handle that is
    closed afterwards.
    """
    for name in os.listdir(_DESCRIPTORS) if sys.platform == "linux" else ():
        with suppress(OSError):  # closed since it was listed
            kind, _, number = os.readlink(_DESCRIPTORS / name).partition(":")
            if kind != "socket":
                continue
            with socket.socket(fileno=os.dup(int(name))) as handle:
                if handle.family in _HEADERS and handle.type == socket.SOCK_STREAM:
                    handle.getpeername()  # raises if it only listens
                    yield int(number.strip("[]")), handle
