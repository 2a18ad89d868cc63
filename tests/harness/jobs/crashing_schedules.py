"""Runs schedules in processes that are killed while they write, with a clock that all of them share.

Run as `python crashing_schedules.py FOLDER SEED KILLS ROUNDS`; each round is 20 s later than the previous one.
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

from cortex.home import Home
from harness.jobs.schedules import open_schedules, task_api

BEGIN = 1_700_000_000.0
STEP_S = 20.0


class SharedClock:
    """A clock in memory that is shared by successive child processes."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)
        self.set(BEGIN)

    def __call__(self) -> float:
        return float(struct.unpack_from("d", self._memory)[0])

    def set(self, now: float) -> None:
        struct.pack_into("d", self._memory, 0, now)


async def work(folder: Path, clock: SharedClock, progress: int, rounds: int) -> None:
    async with open_schedules(Home(folder), clock) as made:
        if made.apis.get("train") is None:
            made.deploy(task_api())
        for _ in range(rounds):
            submitting = await made.schedules.submit_due()
            os.write(progress, b".")
            await asyncio.gather(*submitting)
            clock.set(clock() + STEP_S)


def fork_child(folder: Path, clock: SharedClock, rounds: int) -> tuple[int, int]:
    """Fork a process that submits due runs; return its pid and a pipe that receives a byte per round."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        asyncio.run(work(folder, clock, write, rounds))
        os._exit(0)
    os.close(write)
    return pid, read


def main() -> None:
    folder, chance, kills, rounds = Path(sys.argv[1]), random.Random(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    clock = SharedClock()
    for _ in range(kills):
        pid, read = fork_child(folder, clock, sys.maxsize)
        for _ in range(chance.randrange(1, rounds)):
            os.read(read, 1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
    pid, read = fork_child(folder, clock, 5)
    assert os.waitpid(pid, 0)[1] == 0
    print(clock())


if __name__ == "__main__":
    main()
