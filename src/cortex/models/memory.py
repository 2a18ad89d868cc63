"""The memory of this process: how much it takes, and how freed memory gets back to the operating system.

It knows the C library and nothing of models. Where the C library is not glibc, only the measuring and the garbage
collection are left.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_M_ARENA_MAX = -8  # <malloc.h>
#: By default there are eight heaps per core, each with holes of its own. The sizes from which on glibc maps blocks, and
#: gives the end of a heap back, stay as they are: fixed lower ones would return memory without `trim`, but requests
#: whose temporary arrays are mapped and unmapped each time take half as long again.
ARENAS = 2
# From Python 3.13 on the one is called the other.
_clear_type_cache: Callable[[], None] = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache


def configure_allocator() -> bool:
    """Keep freed models from leaving many holes; call it before threads start. Returns False without glibc."""
    libc = _glibc()
    if libc is None:
        return False
    return bool(libc.mallopt(_M_ARENA_MAX, ARENAS))


def resident_bytes() -> int:
    """Return the physical memory that this process has mapped, shared pages included."""
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 – on the path of every load; pathlib takes twice as long
        return int(file.read().split()[1]) * _PAGE_BYTES


def peak_bytes() -> int:
    """Return the most that `resident_bytes` ever was; 0 where the kernel does not say."""
    for line in Path("/proc/self/status").read_bytes().splitlines():
        if line.startswith(b"VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def trim() -> None:
    """Give free memory of the heaps back; the interpreter's lock is free meanwhile."""
    # It holds on to names of attributes that were looked up: of each model that was unpickled, a few strings, each of
    # which keeps a whole arena of 1 MiB.
    _clear_type_cache()
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def give_back(is_frozen: bool = False) -> None:
    """Collect garbage, then give free memory back.

    `is_frozen` says that the garbage may be from before `gc.freeze()`, which no collection looks at: it is looked at
    once, and what lives is frozen again.
    """
    if is_frozen and gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    else:
        gc.collect()
    trim()


@cache
def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        _ = libc.gnu_get_libc_version  # musl has neither this nor the two functions used above
        _ = libc.mallopt, libc.malloc_trim
    except (OSError, AttributeError):
        return None
    return libc
