"""Requests sent at given times, each on its own connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """One request: its due time, its latency from then on, and its status (0: no response)."""

    due_s: float
    latency_s: float
    status: int


async def send_all(port: int, path: str, body: bytes, due_s: Sequence[float]) -> list[Call]:
    """Send requests to the gateway at these times from now, independent of the responses."""
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    start = time.monotonic()
    tasks = []
    for due in due_s:
        await asyncio.sleep(max(0.0, start + due - time.monotonic()))
        tasks.append(asyncio.create_task(_send(port, request, start, due)))
    return list(await asyncio.gather(*tasks))


async def _send(port: int, request: bytes, start: float, due_s: float) -> Call:
    status = 0
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            answer = await reader.read()
            status = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0
        finally:
            writer.close()
    except OSError:
        pass
    return Call(due_s, time.monotonic() - start - due_s, status)
