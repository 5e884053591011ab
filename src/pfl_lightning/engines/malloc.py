"""Keep freed CPU memory in the process for the next step, instead of returning pages to the system."""

import ctypes
import os
import platform

KEPT = 64 * 2**20
"""Bytes of free memory at the end of the heap above which glibc returns memory."""
MAPPED = 32 * 2**20
"""Bytes from which a tensor gets pages of its own; the largest value that glibc's own adjustment reaches."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed() -> None:
    """Let glibc keep up to 64 MiB of freed memory, unless ``MALLOC_*`` or ``GLIBC_TUNABLES`` variables are set.

    By default each training step grows and shrinks the heap, and the kernel fills returned pages with zeros: hundreds
    of pages a step for a net of a million parameters. Other C libraries are left alone.
    """
    told = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if platform.libc_ver()[0] == "glibc" and not told:
        libc = ctypes.CDLL(None)
        # Both values: setting one switches off glibc's own adjustment of the other.
        libc.mallopt(M_MMAP_THRESHOLD, MAPPED)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT)
