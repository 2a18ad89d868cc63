"""Attribution of printed lines to requests."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.engine.log_writer import MAX_LINE_BYTES, LogWriter
from cortex.engine.logs import read_logs
from cortex.worker.monitoring.request_log import REQUEST, MarkedStream, log_id

Printed = list[tuple[bytes, str]]


def logged(tmp_path: Path, printed: Printed) -> list[tuple[str, str]]:
    """Print like calls of requests do; return the id and text of each logged line."""
    raw = io.BytesIO()
    stream = MarkedStream(io.TextIOWrapper(raw, "utf-8"))
    for request, text in printed:
        token = REQUEST.set(request)
        stream.write(text)
        REQUEST.reset(token)
    stream.flush()
    path = tmp_path / "api" / "r1.log"
    path.unlink(missing_ok=True)
    writer = LogWriter(path)
    writer.feed(0, "o", raw.getvalue())
    writer.close()
    return [(line.request_id, line.text) for line in read_logs(tmp_path / "api")]


@pytest.mark.parametrize(
    ("printed", "lines"),
    [
        ([(b"", "hello\n")], [("", "hello")]),
        ([(b"1-a", "hello"), (b"1-a", "\n")], [("1-a", "hello")]),
        (
            [(b"1", "one\ntwo\n\nfour"), (b"", "five\n")],
            [("1", "one"), ("1", "two"), ("1", ""), ("1", "four"), ("", "five")],
        ),
        (
            [(b"1", "o"), (b"2", "other"), (b"1", "\n"), (b"2", "\n"), (b"1", "x\n")],
            [("1", "o"), ("2", "other"), ("1", "x")],
        ),
        ([(b"", "start "), (b"1", "a\n"), (b"", "end\n")], [("", "start "), ("1", "a"), ("", "end")]),
        ([(b"not an id", "a\n"), (b"x" * 100, "b\n")], [("", "a"), ("", "b")]),
        ([(b"1", ""), (b"1", "größe\n")], [("1", "größe")]),
        ([(b"1", "\n"), (b"1", "a\n")], [("1", ""), ("1", "a")]),
    ],
)
def test_each_line_is_attributed_to_its_request(tmp_path: Path, printed: Printed, lines: list[tuple[str, str]]) -> None:
    assert logged(tmp_path, printed) == lines


@given(st.lists(st.tuples(st.sampled_from([b"", b"1-a", b"2-b"]), st.text("ab\n", max_size=5)), max_size=20))
def test_no_character_is_lost_or_attributed_to_another_request(
    tmp_path_factory: pytest.TempPathFactory, printed: Printed
) -> None:
    found = logged(tmp_path_factory.getbasetemp(), printed)
    for request in (b"", b"1-a", b"2-b"):
        meant = "".join(text for owner, text in printed if owner == request)
        got = "".join(text for owner, text in found if owner == request.decode())
        assert got == meant.replace("\n", "")


@pytest.mark.parametrize("owner", [b"", b"1"])
@pytest.mark.parametrize("forged", ["\x1e2\x1fFORGED", "a\x1e2\x1fFORGED", f"\x1e{'0' * 16}:2\x1fFORGED"])
def test_callers_cannot_forge_a_mark(tmp_path: Path, owner: bytes, forged: str) -> None:
    printed = [(owner, f"{forged}\n{forged}\n"), (b"3", "other\n")]
    assert logged(tmp_path, printed) == [(owner.decode(), forged), (owner.decode(), forged), ("3", "other")]


@pytest.mark.parametrize("read_bytes", [10_000, 3 * MAX_LINE_BYTES, 10 * MAX_LINE_BYTES])
def test_all_pieces_of_a_long_line_have_the_same_request(tmp_path: Path, read_bytes: int) -> None:
    raw = io.BytesIO()
    stream = MarkedStream(io.TextIOWrapper(raw, "utf-8"))
    long = "x" * (4 * MAX_LINE_BYTES + 1)
    for request, text in [(b"1", long[:1000]), (b"1", long[1000:] + "\n"), (b"2", "other\n"), (b"", "none\n")]:
        REQUEST.set(request)
        stream.write(text)
    REQUEST.set(b"")
    stream.flush()
    writer = LogWriter(tmp_path / "api" / "r1.log")
    for start in range(0, len(raw.getvalue()), read_bytes):
        writer.feed(0, "o", raw.getvalue()[start : start + read_bytes])
    writer.close()
    found = [(line.request_id, line.text) for line in read_logs(tmp_path / "api")]
    assert found[-2:] == [("2", "other"), ("", "none")]
    assert {request for request, _ in found[:-2]} == {"1"}
    assert "".join(text for _, text in found[:-2]) == long


def test_an_incomplete_line_does_not_continue_in_the_next_process(tmp_path: Path) -> None:
    raw = io.BytesIO()
    stream = MarkedStream(io.TextIOWrapper(raw, "utf-8"))
    REQUEST.set(b"1")
    stream.write("x" * MAX_LINE_BYTES)
    REQUEST.set(b"")
    stream.flush()
    writer = LogWriter(tmp_path / "api" / "r1.log")
    writer.feed(0, "o", raw.getvalue())
    writer.flush(0)
    writer.feed(0, "o", b"starting\n")
    writer.close()
    assert [line.request_id for line in read_logs(tmp_path / "api")] == ["1", ""]


def test_threads_that_print_concurrently_have_separate_lines(tmp_path: Path) -> None:
    raw = io.BytesIO()
    stream = MarkedStream(io.TextIOWrapper(raw, "utf-8"))

    def work(request: bytes) -> None:
        REQUEST.set(request)
        for number in range(300):
            print(f"{request.decode()} {number}\n", end="", file=stream)  # in a single write

    threads = [threading.Thread(target=work, args=(b"request-%d" % number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.flush()
    writer = LogWriter(tmp_path / "api" / "r1.log")
    for start in range(0, len(raw.getvalue()), 1000):  # in chunks, like a pipe is read
        writer.feed(0, "o", raw.getvalue()[start : start + 1000])
    writer.close()
    found = [(line.request_id, line.text) for line in read_logs(tmp_path / "api") if line.text]
    assert sorted(found) == sorted(
        (f"request-{thread}", f"request-{thread} {number}") for thread in range(4) for number in range(300)
    )


def test_lines_have_the_trace_of_their_request(tmp_path: Path) -> None:
    raw = io.BytesIO()
    stream = MarkedStream(io.TextIOWrapper(raw, "utf-8"))
    traceparent = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    for owner in (log_id(b"1763690000000-4711-12", traceparent), b"1763690000000-4711-13", b""):
        REQUEST.set(owner)
        stream.write("a\n")
    stream.flush()
    writer = LogWriter(tmp_path / "api" / "r1.log")
    writer.feed(0, "o", raw.getvalue())
    writer.close()
    assert [(line.request_id, line.trace_id) for line in read_logs(tmp_path / "api")] == [
        ("1763690000000-4711-12", "4bf92f3577b34da6a3ce929d0e0e4736"),
        ("1763690000000-4711-13", ""),
        ("", ""),
    ]
