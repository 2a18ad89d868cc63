"""Memory of processes that share pages."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from cortex.processes.memory import MemoryUse, memory_use, parse_smaps

MIB = 1024 * 1024
TEXT = """\
55d0c0a00000-7ffd1c5f1000 ---p 00000000 00:00 0                          [rollup]
Rss:                2048 kB
Pss:                1024 kB
Pss_Dirty:           512 kB
Shared_Clean:        900 kB
Private_Clean:       100 kB
Private_Dirty:       200 kB
Private_Hugetlb:       4 kB
"""


def test_the_shared_part_is_what_is_not_private() -> None:
    use = parse_smaps(TEXT)
    assert use == MemoryUse(2048 * 1024, 1024 * 1024, 304 * 1024)
    assert use.shared_bytes == 720 * 1024
    assert (use + use).shared_bytes == 2 * 720 * 1024


def test_a_process_that_has_ended_has_no_memory() -> None:
    assert memory_use(2**22 + 1) == MemoryUse()


@pytest.mark.processes
def test_pages_of_a_fork_are_shared_until_they_are_written() -> None:
    pages = bytearray(os.urandom(1)) * (64 * MIB)

    def in_fork(work: Callable[[], object]) -> MemoryUse:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                work()
                use = memory_use(os.getpid())
                os.write(write, b" ".join(b"%d" % number for number in vars_of(use)))
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as result:
            numbers = result.read().split()
        os.waitpid(pid, 0)
        return MemoryUse(*map(int, numbers))

    reading = in_fork(lambda: sum(pages[::4096]))
    assert reading.shared_bytes > 30 * MIB
    assert reading.private_bytes < 32 * MIB
    writing = in_fork(lambda: pages.__setitem__(slice(None), bytes(len(pages))))
    assert writing.private_bytes > 64 * MIB


def vars_of(use: MemoryUse) -> tuple[int, int, int]:
    return use.resident_bytes, use.proportional_bytes, use.private_bytes
