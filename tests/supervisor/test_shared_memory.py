"""Shared memory of processes that are killed: it is removed, before the next process starts."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.replicas.replicas import running_replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

SOURCE = """
    import os, signal, sys, threading
    from multiprocessing import shared_memory

    class Handler:
        def __init__(self, config):
            self.memory = shared_memory.SharedMemory(name=NAME, create=True, size=1 << 20)
            self.child = os.fork()
            if self.child == 0:
                signal.pause()

        def handle_post(self, payload):
            if payload == "hang":
                threading.Event().wait()
            if payload == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            if payload == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            return os.getpid()
"""


@pytest.fixture
def segment() -> Iterator[Path]:
    """The file of shared memory whose name no other test uses."""
    path = Path("/dev/shm", f"cortex-test-{os.getpid()}-{secrets.token_hex(4)}")
    yield path
    path.unlink(missing_ok=True)


def test_shared_memory_of_a_process_that_is_killed_is_removed_before_the_next_one_starts(segment: Path) -> None:
    source = SOURCE.replace("NAME", repr(segment.name))
    with running_replica(source, timeout_s=1.0) as replica:
        replica.wait_ready()
        for number, end in enumerate(["hang", "crash", "kill", "hang"], 1):
            assert segment.exists()
            assert replica.request(end).status in (500, 504)
            wait_until(lambda number=number: replica.status().processes[0].restarts == number)  # type: ignore[misc]
            status = replica.wait_ready().processes[0]
            assert (status.failed_starts, status.aborted_starts) == (0, 0), replica.log()
        replica.command(command="stop", drain_s=1.0)
        replica.process.wait()
        wait_until(lambda: not segment.exists())


def test_nothing_is_left_of_a_replica_whose_session_is_killed(segment: Path) -> None:
    with running_replica(SOURCE.replace("NAME", repr(segment.name))) as replica:
        replica.wait_ready()
        assert segment.exists()
    wait_until(lambda: not segment.exists())
