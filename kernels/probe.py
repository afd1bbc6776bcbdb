"""A kernel that does nothing. Its launch shows that Triton can compile and start kernels on this
machine.

Triton compiles its launcher with the machine's C compiler at the first launch, not when it is
imported.
"""

from __future__ import annotations

import triton


def probe() -> None:
    """Launch the kernel on the current GPU. Raises: whatever Triton, the C compiler or the driver
    raises."""
    nothing_kernel[(1,)](1)


@triton.jit
def nothing_kernel(number):
    pass
