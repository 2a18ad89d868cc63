"""Processors of the processes of real replicas, `handler.pin_processes`."""

from __future__ import annotations

import os

import pytest

from cortex.processes.limits import usable_processors
from harness.replicas.replicas import running_replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

USABLE = os.sched_getaffinity(0)
SOURCE = """
    import os

    at_import = sorted(os.sched_getaffinity(0))

    class Handler:
        def __init__(self, config):
            pass

        def handle_get(self):
            return [at_import, sorted(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")]
"""


@pytest.mark.skipif(usable_processors() < len(USABLE), reason="a quota limits the CPU time of this container")
@pytest.mark.parametrize("preload", [False, True])
def test_each_process_runs_on_processors_of_its_own(preload: bool) -> None:
    processes = min(len(USABLE), 4)
    share = len(USABLE) // processes
    with running_replica(SOURCE, processes=processes, pin_processes=True, preload=preload) as replica:
        replica.wait_ready()
        answers = [replica.request(method="GET", index=index).json for index in range(processes)]
    now = [processor for _, processors, _ in answers for processor in processors]
    assert len(set(now)) == len(now) == share * processes
    assert set(now) <= USABLE
    for at_import, processors, threads in answers:
        assert at_import == (sorted(USABLE) if preload else processors), "libraries count processors when imported"
        assert threads == (str(share) if processes > 1 else None)


def test_a_replica_without_enough_processors_does_not_start() -> None:
    processes = len(USABLE) + 1
    with running_replica(SOURCE, processes=processes, pin_processes=True) as replica:
        failure = wait_until(lambda: replica.status().processes[0].failure)
        assert failure is not None
        refused = f"handler.pin_processes: {processes} processes cannot have processors of their own: {len(USABLE)} can"
        assert failure.message.startswith(refused)
