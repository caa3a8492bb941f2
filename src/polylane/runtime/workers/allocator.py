"""Host memory allocator settings: glibc keeps freed memory in the process, because each step needs as much again."""

from __future__ import annotations

import ctypes
import functools
import sys

# Parameters of glibc's mallopt(3): free bytes at the top of the heap above which they are returned to the system, and
# size in bytes from which on a block gets a mapping of its own.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 32 << 20  # bytes; glibc accepts no larger threshold
_KEPT = (1 << 31) - 1  # bytes; the largest int


@functools.cache
def retain_freed_memory() -> bool:
    """Make glibc reuse freed blocks instead of returning them to the system after every step.

    By default blocks of more than some MB are mapped anew each time, and the system clears every page of them: so a
    backward pass of ten 1024 x 1024 layers over 64 samples takes 45 ms instead of 35. As with the caching allocators of
    accelerators, a process keeps its peak memory. Other allocators are left unchanged.

    Returns:
        Whether glibc accepted both settings.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT))
