"""Server-side batching of the Open Inference Protocol in real replicas."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from harness.connections import unread_bytes
from harness.replicas.replicas import Replica, read, running_replica
from harness.wait import wait_until

pytestmark = pytest.mark.processes

#: The first call waits at a gate, so that all requests sent meanwhile form the second.
SOURCE = """
    import asyncio, os, pathlib, time
    import numpy as np

    calls = []
    folder = pathlib.Path(os.environ["SHARED_FOLDER"])

    class Handler:
        def __init__(self, config):
            pass

        def handle_get(self):
            return calls

        DEF handle_v2(self, inputs, parameters):
            x = inputs["x"]
            calls.append(list(x.shape))
            if parameters.get("gate"):
                (folder / "begun").touch()
                while not (folder / "open").exists():
                    WAIT(0.001)
            if (x == 13).any():
                raise ValueError("poisonous")
            return {"sum": x.sum(axis=1)[: parameters.get("first")]}
"""
HEADERS = {"x-cortex-endpoint": "/api", "content-type": "application/json"}
Asked = tuple[bytes, dict[str, str]]


def request(rows: list[list[float]], datatype: str = "FP32", **parameters: Any) -> Asked:
    tensor = {"name": "x", "shape": [len(rows), len(rows[0])], "datatype": datatype, "data": rows}
    return json.dumps({"inputs": [tensor], "parameters": parameters}).encode(), {}


def binary(rows: list[list[float]]) -> Asked:
    data = b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)
    parameters = {"binary_data_size": len(data)}
    tensor = {"name": "x", "shape": [len(rows), len(rows[0])], "datatype": "FP32", "parameters": parameters}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + data, {"inference-header-content-length": str(len(head))}


def connect(replica: Replica) -> HTTPConnection:
    connection = replica.connection()
    connection.request("GET", "/")
    connection.getresponse().read()
    return connection


def ask_together(replica: Replica, requests: list[Asked]) -> list[Any]:
    """Send requests while a call is blocked, so that they form one batch; return their answers.

    The event loop reads them during that call, which does not block it: with so few calls it is on a thread.
    """
    connections = [connect(replica) for _ in requests]
    gate = replica.connection()
    path = "/api/v2/models/api/infer"
    gate.request("POST", path, request([[0]], gate=True)[0], HEADERS)
    folder = Path(replica.spec.run_dir)
    wait_until((folder / "begun").exists, message="the call has begun")
    for connection, (body, headers) in zip(connections, requests, strict=True):
        connection.request("POST", path, body, {**HEADERS, **headers})
    wait_until(lambda: not any(map(unread_bytes, connections)), message="all requests are read")
    (folder / "open").touch()
    gate.getresponse().read()
    return [read(connection.getresponse(), 0) for connection in connections]


@contextlib.contextmanager
def joining_replica(is_async: bool = False) -> Iterator[Replica]:
    words = ("async def", "await asyncio.sleep") if is_async else ("def", "time.sleep")
    source = SOURCE.replace("DEF", words[0]).replace("WAIT", words[1])
    with running_replica(source, max_batch_size=32, batch_interval_s=0.05) as started:
        started.wait_ready()
        yield started


def sums(answer: Any) -> Any:
    return answer.json["outputs"][0]["data"] if answer.status == 200 else answer.status


@pytest.mark.parametrize("is_async", [False, True])
def test_requests_are_joined_where_they_fit_and_each_has_its_own_answer(is_async: bool) -> None:
    asked = [
        request([[1, 2]]),
        binary([[3, 4], [5, 6]]),
        request([[1, 2, 3]]),
        request([[7, 8]], "FP64"),
        request([[1], [2]]),
        (b"nonsense", {}),
        request([[9, 9]]),
    ]
    with joining_replica(is_async) as replica:
        answers = ask_together(replica, asked)
        assert [sums(answers[index]) for index in (0, 2, 3, 4, 5, 6)] == [[3], [6], [15], [1, 2], 400, [18]]
        size = int(answers[1].headers["inference-header-content-length"])
        assert answers[1].body[size:] == struct.pack("<2f", 7, 11)
        assert sorted(replica.request(method="GET").json[1:]) == [[1, 2], [1, 3], [2, 1], [4, 2]]


def test_only_the_request_that_fails_has_the_error() -> None:
    with joining_replica() as replica:
        answers = ask_together(replica, [request([[1, 2]]), request([[13, 0]]), request([[3, 4]])])
        assert [sums(answer) for answer in answers] == [[3], 500, [7]]
        assert "ValueError in handle_v2()" in answers[1].json["error"]
        # Outputs with other rows than the inputs are those of calls of their own.
        (Path(replica.spec.run_dir) / "open").unlink()
        (Path(replica.spec.run_dir) / "begun").unlink()
        answers = ask_together(replica, [request([[1, 2], [3, 4]], first=1), request([[5, 6], [7, 8]], first=1)])
        assert [sums(answer) for answer in answers] == [[3], [11]]
