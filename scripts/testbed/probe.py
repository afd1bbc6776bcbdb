"""Measures the network between two hosts with plain TCP: round trip and rate. `testbed.py check`
runs both ends.

    probe.py serve ADDRESS PORT            answers until it is ended
    probe.py measure ADDRESS PORT PID      prints one JSON object; PID: a process whose CPU time
                                           counts too

A connection begins with one letter, what the server shall do: `p` send every byte back, `s` send,
`r` receive and then tell the rate. Rates leave out the first moments, when TCP has not found the
link's rate yet.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import threading
import time
from pathlib import Path

PINGS = 100
START_S = 0.5
MEASURE_S = 1.5
CHUNK = 1 << 16


def send(connection: socket.socket) -> None:
    """Sends until the other side has had enough."""
    data = bytes(CHUNK)
    try:
        while True:
            connection.sendall(data)
    except OSError:
        pass


def receive(connection: socket.socket) -> float:
    """The rate at which bytes arrive, in Mbit/s."""
    buffer = bytearray(CHUNK)
    begin = time.monotonic()
    while time.monotonic() < begin + START_S:
        connection.recv_into(buffer)
    begin = time.monotonic()
    total = 0
    while time.monotonic() < begin + MEASURE_S:
        total += connection.recv_into(buffer)
    return total * 8e-6 / (time.monotonic() - begin)


def answer(connection: socket.socket) -> None:
    """Serves one connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    task = connection.recv(1)
    if task == b"p":
        while byte := connection.recv(1):
            connection.sendall(byte)
    elif task == b"s":
        send(connection)
    elif task == b"r":
        rate = receive(connection)
        connection.sendall(json.dumps(rate).encode())
    connection.close()


def serve(address: str, port: int) -> None:
    with socket.create_server((address, port)) as server:
        while True:
            threading.Thread(target=answer, args=[server.accept()[0]], daemon=True).start()


class Client:
    def __init__(self, address: str, port: int):
        self.where = address, port

    def connect(self, task: bytes) -> socket.socket:
        deadline = time.monotonic() + 10
        while True:
            try:
                connection = socket.create_connection(self.where)
                break
            except ConnectionRefusedError:  # the server is not up yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(task)
        return connection

    def round_trips(self) -> list[float]:
        """Milliseconds of each ping."""
        times = []
        with self.connect(b"p") as connection:
            for _ in range(PINGS):
                start = time.perf_counter()
                connection.sendall(b".")
                connection.recv(1)
                times.append(1e3 * (time.perf_counter() - start))
        return times

    def back(self) -> float:
        with self.connect(b"s") as connection:
            return receive(connection)

    def there(self) -> float:
        with self.connect(b"r") as connection:
            sender = threading.Thread(target=send, args=[connection], daemon=True)
            sender.start()
            rate = float(json.loads(connection.recv(100)))
            sender.join()  # the server has closed the connection
            return rate


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used; 0 where there is none."""
    if not pid:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(address: str, port: int, pid: int) -> dict[str, float]:
    client = Client(address, port)
    trips = client.round_trips()
    found = {
        "rtt_ms": statistics.median(trips),
        "rtt_p90_ms": statistics.quantiles(trips, n=10)[-1],
    }
    found |= {"there_mbit": client.there(), "back_mbit": client.back()}
    start = time.monotonic()
    cpu = cpu_seconds(pid)
    other = threading.Thread(target=lambda: found.update(both_there_mbit=client.there()))
    other.start()
    found["both_back_mbit"] = client.back()
    other.join()
    found["emulator_cpu"] = (cpu_seconds(pid) - cpu) / (time.monotonic() - start)
    return found


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    print(json.dumps(measure(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
