"""Streams of chunks that a thread produces and the event loop writes, over a real connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

from cortex.worker.http.connection import Connection
from cortex.worker.http.connection_pool import ConnectionPool
from cortex.worker.monitoring.metrics import RequestRecorder
from cortex.worker.requests.runner import CallDurations, Runner
from cortex.worker.requests.streaming import ResponseStream, StreamHead
from cortex.worker.shared_state import SharedConnectionState
from harness.replicas.specs import limits
from harness.wait import PATIENCE_S

_TIMEOUT_NS = 10_000_000_000


async def test_a_thread_does_not_wait_for_a_chunk_that_the_event_loop_cannot_write() -> None:
    loop = asyncio.get_running_loop()
    shared_state = SharedConnectionState()
    requests: asyncio.Future[Connection] = loop.create_future()
    pool = ConnectionPool(loop, shared_state, RequestRecorder(None), requests.set_result, limits(1_000))
    client, server = socket.socketpair()
    client.settimeout(PATIENCE_S)
    pool.add(server, 0, lambda _: None)
    client.sendall(b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
    connection = await requests
    runner = Runner(loop, 1, CallDurations(shared_state))
    errors: list[BaseException] = []
    invalid: Any = ((b"name", None),)
    stream = ResponseStream(connection, runner, _TIMEOUT_NS, 0, errors.append, StreamHead(headers=invalid))
    closed: list[bool] = []

    def chunks() -> Iterator[bytes]:
        try:
            while True:
                yield b"x" * 100_000
        finally:
            closed.append(True)

    connection.begin(_TIMEOUT_NS)
    assert await asyncio.wait_for(asyncio.to_thread(stream.run, chunks()), PATIENCE_S)
    assert ([type(error) for error in errors], closed) == ([TypeError], [True])
    assert client.recv(1) == b""
    client.close()
