"""The journal of requests, from which the next worker can run them again."""

from __future__ import annotations

import pytest

from cortex.worker import shared_state
from cortex.worker.shared_state import RequestJournal
from harness.forks import in_forks

SIZE = 1024


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_state, "MAX_JOURNAL_BYTES", SIZE)


def append(journal: RequestJournal, *pieces: bytes, index: int = 1) -> None:
    journal.begin(index)
    for piece in pieces:
        journal.append(index, memoryview(piece))


def restored(journal: RequestJournal, index: int = 1) -> bytes:
    buffer = memoryview(bytearray(SIZE))
    return bytes(buffer[: journal.restore(index, buffer)])


def test_a_request_read_in_pieces_is_restored_completely() -> None:
    journal = RequestJournal(3)
    append(journal, b"POST /", b" HTTP/1.1\r\n", b"\r\n")

    assert journal.is_complete(1)
    assert restored(journal) == b"POST / HTTP/1.1\r\n\r\n"


def test_connections_have_separate_requests() -> None:
    journal = RequestJournal(3)
    for index in range(3):
        append(journal, bytes([index]) * SIZE, index=index)

    assert [restored(journal, index) for index in range(3)] == [bytes([index]) * SIZE for index in range(3)]


def test_a_request_that_is_too_large_is_not_restored() -> None:
    journal = RequestJournal(3)
    append(journal, b"x" * SIZE, b"y")

    assert not journal.is_complete(1)
    append(journal, b"small")
    assert journal.is_complete(1)


def test_begin_discards_the_last_request() -> None:
    journal = RequestJournal(3)
    assert journal.is_empty(1)
    append(journal, b"old")
    assert not journal.is_empty(1)
    journal.begin(1)

    assert journal.is_empty(1)
    assert not journal.is_complete(1)


@pytest.mark.processes
def test_a_parent_restores_a_request_that_its_fork_read() -> None:
    journal = RequestJournal(3)
    assert in_forks(1, lambda: append(journal, b"from the fork")) == [0]
    assert restored(journal) == b"from the fork"
