from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from cortex.processes.filelock import LockHeldError, hold_lock, locked


def test_a_held_lock_is_refused_and_can_be_taken_once_it_is_released(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with hold_lock(file), pytest.raises(LockHeldError), hold_lock(file):
        pass

    with hold_lock(file):
        pass


def test_waits_for_a_lock_that_is_released_in_time(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    is_held, is_released = threading.Event(), threading.Event()

    def hold() -> None:
        with hold_lock(file):
            is_held.set()
            is_released.wait(60)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    assert is_held.wait(60)
    threading.Timer(0.05, is_released.set).start()
    with hold_lock(file, timeout_s=60):
        assert is_released.is_set()
    holder.join()


def test_the_holder_can_write_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with hold_lock(file) as stream:
        stream.write("held by a test")

    assert file.read_text() == "held by a test"


def test_a_lock_is_released_though_a_child_has_the_file_open(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with hold_lock(file) as stream:
        inherited = os.dup(stream.fileno())
    try:
        with hold_lock(file):
            pass
    finally:
        os.close(inherited)


def test_tasks_wait_for_each_other(tmp_path: Path) -> None:
    entered: list[str] = []

    async def use(name: str) -> None:
        async with locked(tmp_path / "folder" / "lock"):
            entered.append(f"{name} enters")
            await asyncio.sleep(0)
            entered.append(f"{name} leaves")

    async def both() -> None:
        await asyncio.gather(use("a"), use("b"))

    asyncio.run(both())

    assert entered == ["a enters", "a leaves", "b enters", "b leaves"]
