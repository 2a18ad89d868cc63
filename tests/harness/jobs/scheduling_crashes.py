"""Runs schedules in processes that are killed in mid-write, over a clock that outlives them.

Run as `python scheduling_crashes.py FOLDER SEED KILLS LOOKS`; looks at the schedules are 20 s apart.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import signal
import struct
import sys
from pathlib import Path

from harness.jobs.scheduled import scene, task_api

BEGIN = 1_700_000_000.0
STEP_S = 20.0


class SharedClock:
    """Memory that a child process changes and the next one reads."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)
        self.set(BEGIN)

    def __call__(self) -> float:
        return float(struct.unpack_from("d", self._memory)[0])

    def set(self, now: float) -> None:
        struct.pack_into("d", self._memory, 0, now)


async def work(folder: Path, clock: SharedClock, told: int, looks: int) -> None:
    async with scene(folder, clock) as made:
        if made.apis.get("train") is None:
            made.deploy(task_api())
        for _ in range(looks):
            submitting = await made.schedules.submit_due()
            os.write(told, b".")
            await asyncio.gather(*submitting)
            clock.set(clock() + STEP_S)


def child(folder: Path, clock: SharedClock, looks: int) -> tuple[int, int]:
    """Fork a process that runs the schedules; return its pid, and the descriptor to which it reports each run."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        asyncio.run(work(folder, clock, write, looks))
        os._exit(0)
    os.close(write)
    return pid, read


def main() -> None:
    folder, chance, kills, looks = Path(sys.argv[1]), random.Random(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    clock = SharedClock()
    for _ in range(kills):
        pid, read = child(folder, clock, sys.maxsize)
        for _ in range(chance.randrange(1, looks)):
            os.read(read, 1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
    pid, read = child(folder, clock, 5)
    assert os.waitpid(pid, 0)[1] == 0
    print(clock())


if __name__ == "__main__":
    main()
