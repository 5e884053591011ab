"""Memory that was freed on the CPU: kept for the next step, where the C library would give it back each time."""

import ctypes
import os
import platform

KEPT = 64 * 2**20
"""Bytes at the end of the heap from which on they are given back."""
MAPPED = 32 * 2**20
"""Bytes from which on a tensor has pages of its own; the most that the library itself would make of it."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed() -> None:
    """Has glibc keep what is freed, up to 64 MiB; elsewhere, and where ``MALLOC_*`` or tunables say how, nothing.

    What a step allocates and frees makes the heap longer and shorter, and each page is filled with zeros when it comes
    back: for a net of a million parameters hundreds of pages a step.
    """
    told = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if platform.libc_ver()[0] == "glibc" and not told:
        libc = ctypes.CDLL(None)
        # either alone would stop the library from moving the other one
        libc.mallopt(M_MMAP_THRESHOLD, MAPPED)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT)
