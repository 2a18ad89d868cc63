"""Requests that are kept for the process after the one that read them."""

from __future__ import annotations

import os

import pytest

from cortex.replica import request_journal as kept
from cortex.replica.request_journal import KeptRequests

SIZE = 1024


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_BYTES", SIZE)


def keep(requests: KeptRequests, *pieces: bytes, index: int = 1) -> None:
    """Keep a request that comes in pieces."""
    requests.begin(index)
    for piece in pieces:
        requests.keep(index, memoryview(piece))


def restored(requests: KeptRequests, index: int = 1) -> bytes:
    buffer = memoryview(bytearray(SIZE))
    return bytes(buffer[: requests.restore(index, buffer)])


def test_a_request_that_came_in_pieces_is_read_again_as_a_whole() -> None:
    requests = KeptRequests(3)
    keep(requests, b"POST /", b" HTTP/1.1\r\n", b"\r\n")

    assert requests.is_whole(1)
    assert restored(requests) == b"POST / HTTP/1.1\r\n\r\n"


def test_connections_do_not_touch_each_other() -> None:
    requests = KeptRequests(3)
    for index in range(3):
        keep(requests, bytes([index]) * SIZE, index=index)

    assert [restored(requests, index) for index in range(3)] == [bytes([index]) * SIZE for index in range(3)]


def test_a_request_that_is_too_large_is_not_kept() -> None:
    requests = KeptRequests(3)
    keep(requests, b"x" * SIZE, b"y")

    assert not requests.is_whole(1)
    keep(requests, b"small")
    assert requests.is_whole(1)


def test_the_last_request_is_forgotten_once_the_next_is_about_to_be_read() -> None:
    requests = KeptRequests(3)
    assert requests.is_empty(1)
    keep(requests, b"old")
    assert not requests.is_empty(1)
    requests.begin(1)

    assert requests.is_empty(1)
    assert not requests.is_whole(1)


def test_what_a_fork_read_its_parent_has() -> None:
    requests = KeptRequests(3)
    if (pid := os.fork()) == 0:
        keep(requests, b"from the fork")
        os._exit(0)
    os.waitpid(pid, 0)

    assert restored(requests) == b"from the fork"
