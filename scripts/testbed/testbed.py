#!/usr/bin/env python3
"""Several hosts on one machine, as network namespaces, and links between them with a rate and a
delay; see README.md.

    testbed.py up [--hosts N] [--link NAME[=UP[/DOWN]:DELAY_MS]]... [--congestion NAME]   makes them, in place of any
    testbed.py run [--link NAME] NPROC_PER_HOST [-m MODULE | SCRIPT] ARGS...       torchrun across them
    testbed.py outage [--link NAME] [--lost WHAT] SECONDS           takes a link away, and gives it back
    testbed.py check                                                rate and delay as measured
                                                                    against those asked for
    testbed.py down                                                 ends what runs in them and
                                                                    removes them

Needs root, iproute2, /dev/net/tun and a C++ compiler; says so, with exit status 77, where it cannot
run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CANNOT_RUN = 77
FREE = "free"
DEFAULT_LINKS = (FREE, "slow=200:1")
QUEUE_KB = 512
NAMESPACE_FILES = Path("/var/run/netns")
STATE_VARIABLE = "TESTBED_STATE"
"""In the environment of what `run` starts: the file that describes the test bed."""
MTU = 9000
LOST = {"all": b"l", "there": b"t", "back": b"b"}
"""What may be lost of what hosts send, as link.cpp knows it: all, what host 0 sends, what is sent
to it."""
DOWN = "down"
"""Instead, the interface of host 0 is down."""
END_S = 5.0
"""How long a process may take to end when asked, or when another one of the job has ended."""


class TestbedError(Exception):
    """What went wrong, for the user."""

    status = 1


class CannotRunError(TestbedError):
    """This machine lacks something; what, and what to do."""

    status = CANNOT_RUN


@dataclass(frozen=True)
class Link:
    """A network between all hosts: device `name` in each, host i with address
    10.77.`number`.`i + 1`.

    mbit: 0 is a plain virtual cable, as fast as the machine. back_mbit: of what is sent to host 0;
    mbit is then that of what host 0 sends, and the other hosts have the larger of both, each way.
    delay_ms: one way. pid: of the emulator, or 0.
    """

    name: str
    number: int
    mbit: float = 0.0
    back_mbit: float = 0.0
    delay_ms: float = 0.0
    pid: int = 0

    @property
    def slowest(self) -> float:
        """The lower of both rates; of a cable infinity."""
        return min(self.mbit, self.back_mbit) or float("inf")

    def address(self, host: int) -> str:
        return f"10.77.{self.number}.{host + 1}"

    @staticmethod
    def parse(text: str, number: int) -> Link:
        """`NAME`, `NAME=MBIT:DELAY_MS` or `NAME=UP/DOWN:DELAY_MS`. Raises: TestbedError."""
        name, _, values = text.partition("=")
        rates, _, delay = values.partition(":")
        up, _, down = rates.partition("/")
        try:
            numbers = [float(up), float(down or up), float(delay)] if values else [0.0, 0.0, 0.0]
        except ValueError:
            raise TestbedError(
                f"--link {text}: must be NAME, NAME=MBIT:DELAY_MS or NAME=UP/DOWN:DELAY_MS, such "
                "as "
                "slow=200:1 or dsl=20/100:15"
            ) from None
        if (
            not (name.isalnum() and len(name) <= 12)
            or (values and min(numbers[:2]) <= 0)
            or numbers[2] < 0
        ):
            raise TestbedError(
                f"--link {text}: a name has up to 12 letters and digits, rates are above 0, "
                "DELAY_MS is "
                "not below 0, such as slow=200:1"
            )
        return Link(name, number, *numbers)


@dataclass(frozen=True)
class State:
    """A test bed that is up."""

    hosts: tuple[str, ...]
    links: tuple[Link, ...]

    @staticmethod
    def load(path: Path) -> State:
        try:
            document = json.loads(path.read_text())
        except FileNotFoundError:
            raise TestbedError("there is no test bed; make one with: testbed.py up") from None
        return State(tuple(document["hosts"]), tuple(Link(**link) for link in document["links"]))

    def link(self, name: str) -> Link:
        """The link of that name; an empty one is the slowest. Raises: TestbedError."""
        if not name:
            return min(self.links, key=lambda link: link.slowest)
        for link in self.links:
            if link.name == name:
                return link
        raise TestbedError(
            f"--link {name}: must be one of {', '.join(link.name for link in self.links)}"
        )


def command(*words: str, check: bool = True) -> str:
    """Runs a command; returns its output. Raises: TestbedError with what it said."""
    result = subprocess.run(words, capture_output=True, text=True)
    if check and result.returncode:
        raise TestbedError(f"{' '.join(words)}: {result.stderr.strip() or result.returncode}")
    return result.stdout


# -- up and down


class Testbed:
    """The namespaces `NAME-0`, `NAME-1`, ..., and a folder of root's with the emulator, logs and
    state."""

    def __init__(self, name: str):
        if not name.isalnum():
            raise TestbedError(f"--name {name}: must be letters and digits")
        self.name = name
        self.folder = Path(tempfile.gettempdir(), f"hybridpar-testbed-{name}")
        self.state_file = self.folder / "state.json"

    @property
    def state(self) -> State:
        return State.load(self.state_file)

    def namespaces(self) -> list[str]:
        """Those there are, whether or not their making was completed."""
        names = sorted(path.name for path in NAMESPACE_FILES.glob(f"{self.name}-*"))
        return [
            name
            for name in names
            if name.removeprefix(f"{self.name}-").isdigit() or name == self.switch
        ]

    @property
    def switch(self) -> str:
        return f"{self.name}-switch"

    def up(self, num_hosts: int, links: list[Link], congestion: str = "") -> State:
        """Makes it, in place of any there was; leaves nothing behind if that fails. congestion:
        control of TCP, if not the machine's own."""
        need_machine()
        if not 2 <= num_hosts <= 250:
            raise TestbedError(f"--hosts {num_hosts}: must be from 2 to 250")
        if len({link.name for link in links}) < len(links):
            raise TestbedError("--link: the same name twice")
        self.down()
        hosts = tuple(f"{self.name}-{i}" for i in range(num_hosts))
        try:
            self._make_folder()
            for host in hosts:
                command("ip", "netns", "add", host)
                command("ip", "-n", host, "link", "set", "lo", "up")
                if congestion:
                    inside(
                        host, "sysctl", "-q", "-w", f"net.ipv4.tcp_congestion_control={congestion}"
                    )
            state = State(hosts, tuple(self._connect(link, hosts) for link in links))
            self.state_file.write_text(json.dumps(asdict(state), indent=1) + "\n")
        except BaseException:
            self.down()
            raise
        return state

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o700)
        except FileExistsError:  # not ours: down() removes ours
            raise TestbedError(
                f"{self.folder} is in the way: remove it, or choose another --name"
            ) from None

    def _connect(self, link: Link, hosts: tuple[str, ...]) -> Link:
        pid = 0
        if link.mbit:
            pid = self._start_emulator(link, hosts)
        else:
            self._lay_cable(link, hosts)
        for i, host in enumerate(hosts):
            command("ip", "-n", host, "address", "add", f"{link.address(i)}/24", "dev", link.name)
            command("ip", "-n", host, "link", "set", link.name, "mtu", str(MTU), "up")
        return replace(link, pid=pid)

    def _lay_cable(self, link: Link, hosts: tuple[str, ...]) -> None:
        """Two hosts are joined directly, more of them through a bridge."""
        if len(hosts) == 2:
            command(
                "ip",
                "link",
                "add",
                link.name,
                "netns",
                hosts[0],
                "type",
                "veth",
                "peer",
                "name",
                link.name,
                "netns",
                hosts[1],
            )
            return
        if self.switch not in self.namespaces():
            command("ip", "netns", "add", self.switch)
        command(
            "ip", "-n", self.switch, "link", "add", link.name, "mtu", str(MTU), "type", "bridge"
        )
        command("ip", "-n", self.switch, "link", "set", link.name, "up")
        for i, host in enumerate(hosts):
            port = f"p{link.number}.{i}"
            command(
                "ip",
                "link",
                "add",
                link.name,
                "netns",
                host,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                self.switch,
            )
            command(
                "ip",
                "-n",
                self.switch,
                "link",
                "set",
                port,
                "mtu",
                str(MTU),
                "master",
                link.name,
                "up",
            )

    def _start_emulator(self, link: Link, hosts: tuple[str, ...]) -> int:
        program = self.folder / "link"
        if not program.exists():
            command(compiler(), "-O2", "-std=c++17", "-o", str(program), str(HERE / "link.cpp"))
        log = self.folder / f"link.{link.name}.log"
        control = self.control(link)
        os.mkfifo(control)
        with log.open("w") as file:
            process = subprocess.Popen(
                [
                    program,
                    link.name,
                    str(link.mbit),
                    str(link.back_mbit),
                    str(link.delay_ms),
                    str(QUEUE_KB),
                    control,
                    *hosts,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            process.wait()
            raise TestbedError(
                f"the emulator of link {link.name} did not start: {log.read_text().strip()}"
            )
        return process.pid

    def control(self, link: Link) -> Path:
        """The FIFO that tells a link's emulator what is lost."""
        return self.folder / f"link.{link.name}.control"

    def outage(self, link: Link, lost: str, seconds: float) -> None:
        """Takes a link away for some seconds, and gives it back, also where this is interrupted.

        lost: a key of LOST, or DOWN. Raises: TestbedError.
        """
        host = self.state.hosts[0]
        if lost == DOWN:

            def switch(away: bool) -> None:
                command("ip", "-n", host, "link", "set", link.name, DOWN if away else "up")
        elif link.pid:

            def switch(away: bool) -> None:
                self.control(link).write_bytes(LOST[lost] if away else b"n")
        else:
            raise TestbedError(
                f"--lost {lost}: link {link.name} is a cable without an emulator; use --lost {DOWN}"
            )
        switch(True)
        try:
            time.sleep(seconds)
        finally:
            switch(False)

    def down(self) -> None:
        """Ends what runs in the namespaces, emulators included (they stay in one), and removes
        all."""
        if self.namespaces():
            need_root()
        spaces = self.namespaces()
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for pid in (pids := _inhabitants(spaces)):
                _signal(pid, sign)
            deadline = time.monotonic() + END_S
            while pids and (pids := _inhabitants(spaces)) and time.monotonic() < deadline:
                time.sleep(0.05)
        for space in spaces:
            command("ip", "netns", "delete", space)
        if (
            self.folder.exists()
            and self.folder.lstat().st_uid == os.geteuid()
            and not self.folder.is_symlink()
        ):
            shutil.rmtree(self.folder)


def inside(host: str, *words: str) -> str:
    """Runs a command in a namespace; returns its output. Raises: TestbedError with what it said."""
    return command("ip", "netns", "exec", host, *words)


def _inhabitants(spaces: list[str]) -> list[int]:
    found = (command("ip", "netns", "pids", space, check=False) for space in spaces)
    return [int(pid) for text in found for pid in text.split() if int(pid) != os.getpid()]


def _signal(pid: int, sign: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sign)


def compiler() -> str:
    return os.environ.get("CXX", "") or shutil.which("g++") or shutil.which("clang++") or ""


def need_root() -> None:
    """Raises: CannotRunError."""
    if os.geteuid() != 0:
        raise CannotRunError("network namespaces need root: run it with sudo")


def need_machine() -> None:
    """Raises: CannotRunError naming what this machine lacks."""
    if not sys.platform.startswith("linux"):
        raise CannotRunError("network namespaces need Linux")
    need_root()
    if not shutil.which("ip"):
        raise CannotRunError("ip is not installed: it is in the package iproute2")
    if not compiler():
        raise CannotRunError("no C++ compiler: install g++, or name one in CXX")
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise CannotRunError("/dev/net/tun is not there: load the kernel module tun (modprobe tun)")
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    if probe.returncode:
        raise CannotRunError(f"no network namespace can be made here: {probe.stderr.strip()}")


# -- run
def run(bed: Testbed, link_name: str, num_procs: int, words: list[str]) -> int:
    """torchrun on every host, joined over one link; shows host 0's output, and that of the others
    if it fails."""
    state = bed.state
    link = state.link(link_name)
    port = 20000 + os.getpid() % 10000
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        STATE_VARIABLE: str(bed.state_file),
        "GLOO_SOCKET_IFNAME": link.name,
        "TP_SOCKET_IFNAME": link.name,
    }
    logs = [bed.folder / f"run.{host}.log" for host in state.hosts]
    jobs: list[subprocess.Popen[bytes]] = []
    try:
        for i, host in enumerate(state.hosts):
            torchrun = [
                "ip",
                "netns",
                "exec",
                host,
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                str(len(state.hosts)),
                "--node-rank",
                str(i),
                "--nproc-per-node",
                str(num_procs),
                "--master-addr",
                link.address(0),
                "--master-port",
                str(port),
                "--local-addr",
                link.address(i),
                *words,
            ]
            with logs[i].open("wb") as log:
                jobs.append(
                    subprocess.Popen(
                        torchrun,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=None if i == 0 else log,
                        stderr=None if i == 0 else log,
                        start_new_session=True,
                    )
                )
        status = _wait(jobs)
    finally:
        _end(jobs, state)
    if status:
        for host, path in list(zip(state.hosts, logs, strict=True))[1:]:
            lines = path.read_text(errors="replace").splitlines()[-100:]
            print(f"-- the end of {host}'s output", *lines, sep="\n", file=sys.stderr)
    return status


def _wait(jobs: list[subprocess.Popen[bytes]]) -> int:
    """Waits for all; once one has failed the others get END_S. Returns the exit status of the first
    that failed."""
    failed = 0
    deadline = float("inf")
    while any(job.poll() is None for job in jobs) and time.monotonic() < deadline:
        time.sleep(0.05)
        if not failed and (failed := next((job.returncode for job in jobs if job.returncode), 0)):
            deadline = time.monotonic() + END_S
    return failed or next((job.returncode for job in jobs if job.returncode), 0)


def _end(jobs: list[subprocess.Popen[bytes]], state: State) -> None:
    """Ends what is left of a job, on all hosts."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + END_S
        for job in jobs:
            if job.poll() is None:
                _signal(job.pid, sign)
        while any(job.poll() is None for job in jobs) and time.monotonic() < deadline:
            time.sleep(0.05)
    for pid in set(_inhabitants(list(state.hosts))) - {link.pid for link in state.links}:
        _signal(pid, signal.SIGKILL)


# -- check


def check(bed: Testbed) -> bool:
    """Prints rate and round trip of every link, from host 0 to each other host, beside those asked
    for."""
    state = bed.state
    print(
        "link          hosts    Mbit/s    there     back   both at once   round trip   median      "
        "p90  emulator CPU"
    )
    print(
        "                       asked                                      asked ms       ms       "
        "ms"
    )
    good = True
    for link in state.links:
        for i in range(1, len(state.hosts)):
            found = probe(state, link, i)
            as_asked = _within(link, found)
            rate, trip = (f"{link.mbit:g}", f"{2 * link.delay_ms:g}") if link.mbit else ("-", "-")
            if link.back_mbit != link.mbit:
                rate += f"/{link.back_mbit:g}"
            both = f"{found['both_there_mbit']:.0f} + {found['both_back_mbit']:.0f}"
            print(
                f"{link.name:<12}  0 - {i} {rate:>9} {found['there_mbit']:8.1f} "
                f"{found['back_mbit']:8.1f} {both:>14} "
                f"{trip:>12} {found['rtt_ms']:8.2f} {found['rtt_p90_ms']:8.2f} "
                f"{found['emulator_cpu']:13.1%}" + ("" if as_asked else "   NOT AS ASKED"),
                flush=True,
            )
            good &= as_asked
    return good


def probe(state: State, link: Link, host: int) -> dict[str, Any]:
    """What probe.py measures between host 0 and another one over a link."""
    where = [link.address(host), str(20000 + os.getpid() % 10000)]
    python = [sys.executable, str(HERE / "probe.py")]
    server = subprocess.Popen(
        ["ip", "netns", "exec", state.hosts[host], *python, "serve", *where], start_new_session=True
    )
    try:
        return json.loads(inside(state.hosts[0], *python, "measure", *where, str(link.pid)))
    finally:
        _end([server], state)


def _within(link: Link, found: dict[str, Any]) -> bool:
    """Whether a link is what was asked for. Headers take 1 % of the rate, a busy machine some more,
    and up to 1 ms."""
    one_way = both_ways = True
    for way, mbit in (("there", link.mbit), ("back", link.back_mbit)):
        low = 0.9 * mbit
        high = 1.05 * (mbit or float("inf"))
        one_way &= low <= found[f"{way}_mbit"] <= high
        both_ways &= 0.75 * low <= found[f"both_{way}_mbit"] <= high
    return (
        one_way and both_ways and 1.98 * link.delay_ms <= found["rtt_ms"] <= 2.2 * link.delay_ms + 1
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--name", default="testbed", help="of this test bed, if there are several")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="make hosts and links, in place of any there were")
    up.add_argument("--hosts", type=int, default=2)
    up.add_argument(
        "--link",
        action="append",
        metavar="NAME[=UP[/DOWN]:DELAY_MS]",
        help="a link between all hosts, "
        "with its rate (of what host 0 sends, and of what it is sent) and one-way delay, or as "
        "fast as the "
        f"machine; default: {' '.join(DEFAULT_LINKS)}",
    )
    up.add_argument(
        "--congestion",
        default="",
        help="TCP's control of it, such as reno; default: the machine's own",
    )
    job = commands.add_parser("run", help="torchrun across the hosts")
    job.add_argument("--link", default="", help="the link it uses; default: the slowest")
    job.add_argument("num_procs", type=int, metavar="NPROC_PER_HOST")
    job.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="-m MODULE | SCRIPT", help="and its arguments"
    )
    outage = commands.add_parser("outage", help="take a link away for some seconds")
    outage.add_argument("--link", default="", help="which one; default: the slowest")
    outage.add_argument(
        "--lost",
        choices=[*LOST, DOWN],
        default="all",
        help="packets of both ways, those that host 0 "
        f"sends, or those sent to it; {DOWN}: the interface of host 0 is down",
    )
    outage.add_argument("seconds", type=float)
    commands.add_parser("check", help="measure the links")
    commands.add_parser("down", help="end what runs in the hosts and remove them")
    args = parser.parse_args()
    for sign in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            sign, lambda number, _: sys.exit(128 + number)
        )  # an exception, so that everything is cleaned up
    try:
        bed = Testbed(args.name)
        if args.command == "up":
            links = [Link.parse(text, i) for i, text in enumerate(args.link or DEFAULT_LINKS)]
            state = bed.up(args.hosts, links, args.congestion)
            print(
                f"hosts {' '.join(state.hosts)}, links "
                f"{' '.join(link.name for link in state.links)}; {bed.folder}"
            )
        elif args.command == "run":
            need_root()
            return run(bed, args.link, args.num_procs, args.words)
        elif args.command == "outage":
            need_root()
            bed.outage(bed.state.link(args.link), args.lost, args.seconds)
        elif args.command == "check":
            need_root()
            return 0 if check(bed) else 1
        else:
            bed.down()
    except TestbedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
