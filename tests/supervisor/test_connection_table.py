"""Requests of a dead worker, which the supervisor answers."""

from __future__ import annotations

import json
import socket

import pytest

from cortex.lifecycle import DeathCause
from cortex.supervisor.connection_table import ConnectionTable
from cortex.worker.shared_state import ConnectionState
from cortex.worker.spec import Death


@pytest.mark.processes
def test_requests_that_shared_a_batch_are_told_so() -> None:
    table = ConnectionTable(lambda status: None)
    clients = []
    for batch in (0, 0, 1, 2, 2, 3, 3, 3):
        ours, theirs = socket.socketpair()
        index = table.add(ours)
        assert index is not None
        table.shared_state.begin(index, 2**62, b"a")
        if batch:
            table.shared_state.set_batch(index, batch)
        clients.append(theirs)
    table.answer_after_death(Death(DeathCause.SEGMENTATION_FAULT, "segmentation fault", 0.0))
    errors = [json.loads(client.recv(4096).partition(b"\r\n\r\n")[2])["error"] for client in clients]
    died = "the process that handled this request died: segmentation fault"
    one, two = f"{died}, in a batch with 1 other request", f"{died}, in a batch with 2 other requests"
    assert errors == [died] * 3 + [one] * 2 + [two] * 3
    table.close_all()
    for client in clients:
        client.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("state", "counted"),
    [
        (ConnectionState.RUNNING, 500),
        (ConnectionState.ANSWERING, None),
        (ConnectionState.WAITING, None),
        (ConnectionState.DRAINING, None),
        (ConnectionState.UPGRADED, None),
        (ConnectionState.LINGERING, "nothing"),
    ],
)
def test_responses_that_a_dead_worker_has_begun_count_as_incomplete(state: ConnectionState, counted: object) -> None:
    counts: list[int | None] = []
    table = ConnectionTable(counts.append)
    ours, theirs = socket.socketpair()
    index = table.add(ours)
    assert index is not None
    table.shared_state.begin(index, 2**62, b"a")
    table.shared_state.set_state(index, state)
    table.answer_after_death(Death(DeathCause.SEGMENTATION_FAULT, "segmentation fault", 0.0))
    assert counts == ([] if counted == "nothing" else [counted])
    table.close_all()
    theirs.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("state", "is_json", "counted"),
    [
        (ConnectionState.RUNNING, False, 503),
        (ConnectionState.RUNNING, True, 503),
        (ConnectionState.STREAMING, False, 503),
        (ConnectionState.ANSWERING, False, 503),
        (ConnectionState.ANSWERING, True, None),
        (ConnectionState.WAITING, False, 503),
        (ConnectionState.WAITING, True, None),
        (ConnectionState.DRAINING, False, None),
        (ConnectionState.DRAINING, True, None),
    ],
)
def test_a_call_of_a_grpc_api_counts_once(state: ConnectionState, is_json: bool, counted: int | None) -> None:
    """Calls in gRPC are counted at their end, those in JSON with their head; the response has the form of the call."""
    counts: list[int | None] = []
    table = ConnectionTable(counts.append, is_grpc=True)
    ours, theirs = socket.socketpair()
    index = table.add(ours)
    assert index is not None
    table.shared_state.begin(index, 2**62, b"a")
    if is_json:
        table.shared_state.set_json_call(index)
    table.shared_state.set_state(index, state)
    table.answer_after_death(Death(DeathCause.SEGMENTATION_FAULT, "segmentation fault", 0.0))
    assert counts == [counted]
    assert table.shared_state.request_id(index) == "a"
    if state is ConnectionState.RUNNING:
        response = theirs.recv(4096)
        assert response.startswith(b"HTTP/1.1 503 ")
        assert (b'"request_id": "a"}' in response, b"grpc-status: 14" in response) == (is_json, not is_json)
    table.close_all()
    theirs.close()


@pytest.mark.processes
def test_nothing_is_written_into_a_response_whose_call_is_late() -> None:
    counts: list[int | None] = []
    table = ConnectionTable(counts.append)
    ours, theirs = socket.socketpair()
    index = table.add(ours)
    assert index is not None
    table.shared_state.begin(index, 0, b"a")
    table.shared_state.set_state(index, ConnectionState.ANSWERING)
    table.end_late(index, "timed out after 1 s")
    assert theirs.recv(4096) == b""
    assert counts == [None]
    table.close_all()
    theirs.close()


@pytest.mark.parametrize(
    ("target", "endpoint", "may_have", "is_typed"),
    [
        ("/llm/v1/models?a=1", "/llm", True, True),
        ("/v1", "/", True, True),
        ("/llm/v10", "/llm", True, False),
        ("/llm/v1", None, True, False),  # the endpoint itself
        ("/llm/v1/models", "/llm", False, False),  # an application
    ],
)
def test_unread_requests_below_v1_get_errors_of_openai_s_form(
    target: str, endpoint: str | None, may_have: bool, is_typed: bool
) -> None:
    table = ConnectionTable(lambda status: None, may_have_openai_errors=may_have)
    ours, theirs = socket.socketpair()
    table.add(ours)
    field = f"x-cortex-endpoint: {endpoint}\r\n" if endpoint is not None else ""
    theirs.sendall(f"POST {target} HTTP/1.1\r\n{field}content-length: 2\r\n\r\n42".encode())
    table.answer_waiting("it starts")
    error = json.loads(theirs.recv(4096).partition(b"\r\n\r\n")[2])["error"]
    message = "no replica is ready: it starts"
    typed = {"message": message, "type": "server_error", "param": None, "code": None}
    assert error == (typed if is_typed else message)
    table.close_all()
    theirs.close()
