"""The iterators of messages that a client streams."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cortex.worker.grpc.streams import MAX_UNREAD_BYTES, AsyncRequests, ThreadRequests


def test_a_thread_gets_messages_in_order_until_the_end() -> None:
    requests = ThreadRequests(bytes.decode, lambda: None)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(requests))
    thread.start()
    for message in (b"a", b"", b"c"):
        requests.add(message)
    requests.end()
    thread.join()
    assert found == ["a", "", "c"]
    assert list(requests) == []


def test_a_thread_that_waits_gets_the_error_of_a_call_that_is_over() -> None:
    requests = ThreadRequests(bytes.decode, lambda: None)
    requests.end(KeyError("over"))
    for _ in range(2):
        with pytest.raises(KeyError):
            next(requests)


def test_reading_pauses_while_many_bytes_wait_for_a_thread() -> None:
    rooms: list[int] = []
    requests = ThreadRequests(len, lambda: rooms.append(1))
    while not requests.is_full():
        requests.add(bytes(50_000))
    requests.end()
    assert sum(requests) > MAX_UNREAD_BYTES - 50_000
    assert rooms == [1]
    assert not requests.is_full()


def test_empty_messages_fill_a_stream_too() -> None:
    requests = ThreadRequests(len, lambda: None)
    for _ in range(MAX_UNREAD_BYTES):
        requests.add(b"")
        if requests.is_full():
            return
    raise AssertionError("never full")


async def test_a_coroutine_gets_messages_in_order_until_the_end() -> None:
    rooms: list[int] = []
    requests = AsyncRequests(len, lambda: rooms.append(1))
    task = asyncio.create_task(_all(requests))
    await asyncio.sleep(0)
    requests.add(b"a")
    await asyncio.sleep(0)
    while not requests.is_full():
        requests.add(bytes(50_000))
    requests.end()
    found = await task
    assert found[:2] == [1, 50_000]
    assert rooms == [1]
    broken = AsyncRequests(len, lambda: None)
    broken.end(KeyError("over"))
    with pytest.raises(KeyError):
        await anext(broken)


async def _all(requests: AsyncRequests) -> list[int]:
    return [message async for message in requests]
