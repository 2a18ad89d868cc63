from __future__ import annotations

import json
import socket

from cortex.processes.jsonl import LineBuffer, encode, receive_line


def test_a_message_is_one_line() -> None:
    line = encode({"text": "two\nlines"})

    assert line.count(b"\n") == 1
    assert json.loads(line) == {"text": "two\nlines"}


def test_lines_are_joined_from_pieces() -> None:
    lines = LineBuffer()

    assert lines.feed(b"fir") == []
    assert lines.feed(b"st") == []
    assert lines.feed(b"\nsecond\nth") == [b"first", b"second"]
    assert lines.feed(b"ird\n") == [b"third"]
    assert lines.feed(b"\n") == [b""]


def test_receives_one_line() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b'{"ok": true}\n')
        assert receive_line(here) == b'{"ok": true}\n'


def test_a_line_that_breaks_off_is_empty() -> None:
    here, there = socket.socketpair()
    with here:
        with there:
            there.sendall(b'{"ok"')
        assert receive_line(here) == b""
