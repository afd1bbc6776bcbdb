"""Detect whether the kernel's OOM killer sent a rank's SIGKILL, which this project did not send.

    counter    oom_kill of this process's control group has grown (v2: memory.events, v1:
               memory.oom_control)
    log        the kernel's log names the process: "Out of memory: Killed process 4711 (python)"
    memory     neither can be read: the least free memory before, for people to decide

A container reads the counter of its own group, and its processes have other numbers in the kernel's
log than here.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_KERNEL_LOG = Path("/dev/kmsg")
_CGROUPS = Path("/sys/fs/cgroup")
_SAMPLES = 30
"""Number of recent readings of free memory that are kept, covering some seconds."""
_LONGEST_LINE = 8192
"""Buffer size: the kernel returns a log line in one piece, and refuses a smaller buffer."""


@dataclass
class OomKiller:
    """Finds evidence that the kernel ended a process for lack of memory.

    Attributes:
        counters: Files with a line "oom_kill N"; they need not exist.
        log: The kernel's log.
        meminfo: File in the format of /proc/meminfo.
    """

    counters: tuple[Path, ...] = field(
        default_factory=lambda: tuple(_counters(Path("/proc/self/cgroup")))
    )
    log: Path = _KERNEL_LOG
    meminfo: Path = Path("/proc/meminfo")
    _before: int | None = None
    _reader: int = -1
    _free: deque[int] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    def begin(self) -> None:
        """Record the counters before processes start, and skip older lines of the log."""
        self._before = self._count()
        self._free.clear()
        self.close()
        with contextlib.suppress(OSError):
            self._reader = os.open(self.log, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._reader, 0, os.SEEK_END)

    def close(self) -> None:
        """Close the kernel's log."""
        if self._reader >= 0:
            os.close(self._reader)
        self._reader = -1

    def look(self) -> None:
        """Record how much memory is free; call it several times a second."""
        if (free := self._free_bytes()) is not None:
            self._free.append(free)

    def evidence(self, pid: int) -> str:
        """Return the evidence that the OOM killer ended the process `pid` by SIGKILL.

        Empty if the kernel's data say nothing. Otherwise "out of memory: ..", or
        "perhaps out of memory: .." if the data cannot be read.
        """
        if sys.platform != "linux":
            return ""
        after = self._count()
        log = self._log()
        if log is not None and re.search(rf"Killed process {pid}\b", log):
            return "out of memory: the kernel's OOM killer ended it, as the kernel's log says"
        if after is not None and self._before is not None and after > self._before:
            return (
                "out of memory: the kernel's OOM killer ended it (oom_kill of its control group "
                f"went to {after})"
            )
        if after is not None or log is not None:
            return ""
        free = f"; at least {min(self._free) / 1e9:.3g} GB were free before" if self._free else ""
        return (
            "perhaps out of memory: the kernel's OOM killer sends this signal, and neither its "
            f"counter nor the kernel's log can be read here{free}. Ask `dmesg`, and `free -m` while "
            "it runs"
        )

    def _count(self) -> int | None:
        """Return how often the OOM killer has acted in this process's control groups, or None."""
        counts = [
            int(match[1])
            for path in self.counters
            if (match := re.search(r"^oom_kill (\d+)$", _text(path), re.MULTILINE))
        ]
        return sum(counts) if counts else None

    def _free_bytes(self) -> int | None:
        match = re.search(r"^MemAvailable: +(\d+) kB$", _text(self.meminfo), re.MULTILINE)
        return 1024 * int(match[1]) if match else None

    def _log(self) -> str | None:
        """Return the kernel's log since processes started, or None if it may not be read."""
        if self._reader < 0:
            return None
        lines: list[bytes] = []
        while True:
            try:
                line = os.read(self._reader, _LONGEST_LINE)
            except BrokenPipeError:  # the kernel has overwritten lines before they were read
                continue
            except BlockingIOError:  # end of the log for now
                line = b""
            except OSError:
                return None
            if not line:
                return b"".join(lines).decode(errors="replace")
            lines.append(line)


def _counters(membership: Path) -> Iterator[Path]:
    """Yield the counter files of this process's memory control group, versions 1 and 2.

    membership: file in the format of /proc/self/cgroup. In a container it may list the host's
    paths; if those do not exist here, the root of the mounted hierarchy is used.
    """
    root = _CGROUPS
    for line in _text(membership).splitlines():
        number, kinds, path = line.split(":", 2)
        if number == "0":
            folders = [root, root / "unified"]
            name = "memory.events"
        elif "memory" in kinds.split(","):
            folders = [root / "memory"]
            name = "memory.oom_control"
        else:
            continue
        inside = [folder / path.strip("/") / name for folder in folders]
        yield from [file for file in inside if file.exists()] or [
            folder / name for folder in folders
        ]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
