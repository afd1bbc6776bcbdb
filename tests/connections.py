"""Two ends of a TCP connection on this machine, between addresses that look like two hosts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

HERE = "127.0.0.2"
THERE = "127.0.0.3"
Pair = tuple[socket.socket, socket.socket]


@contextmanager
def connected() -> Iterator[Pair]:
    """The ends at `HERE` and at `THERE`."""
    with socket.create_server((THERE, 0)) as server:
        here = socket.create_connection(server.getsockname(), source_address=(HERE, 0))
        there, _ = server.accept()
    with here, there:
        yield here, there
