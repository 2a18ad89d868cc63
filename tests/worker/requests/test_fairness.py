"""Connections that wait for a busy worker are served in turn, and long calls of a process don't delay others."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.replicas.replicas import running_replica
from harness.wait import PATIENCE_S

pytestmark = pytest.mark.processes

SOURCE = """
import time

class Handler:
    def __init__(self, config):
        pass

    def handle_post(self, payload):
        time.sleep(0.01)
        return payload
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_no_connection_is_starved(threads: int) -> None:
    served: Counter[int] = Counter()
    all_started = threading.Barrier(10)
    with running_replica(SOURCE, "handler", threads=threads) as replica:

        def call(number: int) -> None:
            connection = replica.connection()
            all_started.wait(PATIENCE_S)
            while sum(served.values()) < 200:
                connection.request("POST", "/", b"1", {"content-type": "application/json"})
                assert connection.getresponse().read() == b"1"
                served[number] += 1
            connection.close()

        callers = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(10)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(PATIENCE_S)

    assert len(served) == 10
    assert min(served.values()) > 5


def test_the_first_calls_of_a_process_run_at_once_on_all_threads() -> None:
    source = """
        import threading

        class Handler:
            def __init__(self, config):
                self.meeting = threading.Barrier(4)

            def handle_post(self, payload):
                self.meeting.wait(30)
                return payload
    """
    with running_replica(source, "handler", threads=4) as replica, ThreadPoolExecutor(4) as pool:
        replica.wait_ready()
        assert {answer.status for answer in pool.map(lambda _: replica.request({}), range(4))} == {200}
