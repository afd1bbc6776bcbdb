"""Report a lack of memory or threads in one line, even while libraries are being imported.

Python raises MemoryError or ImportError only sometimes. Under a limit of the address space (ulimit
-v), torch's C++ code, OpenBLAS and the dynamic loader each end the process in their own way, so the
available address space is checked before they load.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from hybridpar.errors import first_line, is_out_of_memory, lacks_threads

_LIBRARIES = ("libtorch_cpu.so", "libtorch_cuda.so", "libtorch_python.so")
_BESIDE_LIBRARIES = 150_000_000
"""Address space in bytes that imports take in addition to torch's libraries; measured: 160 to 180
MB."""


def is_shortage(error: Exception) -> bool:
    """Return whether memory or threads have run out."""
    return is_out_of_memory(error) or lacks_threads(error)


def require_room() -> None:
    """Raise a MemoryError if torch's libraries do not fit into the address space of this
    process."""
    if "torch" in sys.modules:
        return
    limit = _address_limit()
    spec = importlib.util.find_spec("torch")
    if limit is None or spec is None or spec.origin is None:
        return
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return
    folder = Path(spec.origin).parent / "lib"
    need = (
        sum((folder / name).stat().st_size for name in _LIBRARIES if (folder / name).exists())
        + _BESIDE_LIBRARIES
    )
    if limit - used < need:
        raise MemoryError(f"torch's libraries take {need / 1e6:,.0f} MB of address space")


def describe(error: Exception, who: str) -> str:
    """Return one line that says what `who` lacks, and what a user can do about it."""
    what = "may start no more threads" if lacks_threads(error) else "is out of memory"
    return f"{who} {what}: {first_line(error)}; {_way_out()}"


def _way_out() -> str:
    limit = _address_limit()
    if limit is None:
        return (
            "free memory (free -m, ulimit -u, the limits of a container), or start fewer processes "
            "here (--ranks)"
        )
    allowed = f"this shell allows a process {limit / 1e6:,.0f} MB (ulimit -v)"
    return f"{allowed}; allow more, such as with ulimit -v unlimited"


def _address_limit() -> int | None:
    """Return the limit of this process's address space in bytes; None if there is no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit
