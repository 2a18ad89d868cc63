"""Requests that were inside a process that died, and that are kept for the next one."""

from __future__ import annotations

import socket

import pytest

from cortex.lifecycle import DeathCause
from cortex.replica.shared_state import ConnectionState
from cortex.replica.spec import Death
from cortex.supervisor.batch_bisection import BatchBisection
from cortex.supervisor.connection_table import ConnectionTable

REQUEST = b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n42"


@pytest.mark.processes
def test_requests_that_no_process_will_run_again_are_answered() -> None:
    statuses: list[int] = []
    holding = ConnectionTable(statuses.append, keeps_requests=True)
    ours, theirs = socket.socketpair()
    idle, _peer = socket.socketpair()
    index, other = holding.add(ours), holding.add(idle)
    assert index is not None and other is not None and holding.cells.journal is not None
    holding.cells.journal.begin(index)
    holding.cells.journal.append(index, memoryview(REQUEST))
    holding.cells.begin(index, 2**62, b"a")
    holding.cells.set_state(index, ConnectionState.QUEUED)

    holding.answer_after_death(Death(DeathCause.SEGMENTATION_FAULT, "segmentation fault", 0.0), BatchBisection())
    assert holding.cells.state(index) is ConnectionState.AGAIN
    holding.answer_again()

    assert theirs.recv(4096).startswith(b"HTTP/1.1 503 ")
    assert statuses == [503]
    assert list(holding.held) == [other], "what has no request is passed on"
    holding.close_all()
    theirs.close()
    _peer.close()
