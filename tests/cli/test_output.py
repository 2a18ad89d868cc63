"""Tables, JSON and progress as written to the standard streams."""

from __future__ import annotations

import io
import json

from hypothesis import given
from hypothesis import strategies as st

from cortex.cli.output import Console

CELLS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)


def console(*, terminal: bool = False) -> Console:
    return Console(
        io.StringIO(), io.StringIO(), out_is_terminal=terminal, err_is_terminal=terminal, has_colors=terminal
    )


def written(made: Console) -> tuple[str, str]:
    assert isinstance(made.out, io.StringIO)
    assert isinstance(made.err, io.StringIO)
    return made.out.getvalue(), made.err.getvalue()


@given(rows=st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=5))
def test_columns_of_a_table_are_aligned(rows: list[tuple[str, str, str]]) -> None:
    made = console()
    made.table(["a", "b", "c"], rows)

    lines = written(made)[0].splitlines()
    assert [tuple(line.split()) for line in lines[1:]] == rows
    second = max(len(row[0]) for row in [("a",), *rows]) + 3
    assert [line[second:].split()[0] for line in lines] == ["b", *(row[1] for row in rows)]


def test_control_characters_are_escaped_in_cells() -> None:
    made = console(terminal=True)
    made.table(["class"], [["\x1b[31mcat\n"], ["größe 猫"], ["\ud800\u202e"]])

    assert written(made)[0].splitlines()[1:] == [r"\x1b[31mcat\n", "größe 猫", r"\ud800\u202e"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_of_others_is_escaped_on_terminals_only() -> None:
    hostile = "\x1b]0;owned\x07\r\u202e\x9b"
    for stream, expected in ((_Terminal, r"\x1b]0;owned\x07\r\u202e\x9b"), (io.StringIO, hostile)):
        made = Console(stream(), stream(), has_colors=True)
        made.line(hostile)
        made.note(hostile)
        made.error(hostile)
        made.ask(hostile)
        assert written(made) == (f"{expected}\n", f"{expected}\n" + f"error: {expected}\n" + expected)


def test_bytes_of_others_are_escaped_on_terminals() -> None:
    made = Console(_Terminal(), _Terminal())
    for part in ("größe\x1b".encode()[:3], "größe\x1b".encode()[3:], b"[2J\xff\n"):
        made.raw(part)
    assert written(made)[0] == "größe\\x1b[2J\ufffd\n"


def test_json_stays_valid_on_terminals() -> None:
    made = Console(_Terminal(), _Terminal())
    data = {"reason": "\x9b2J\u202eä\x1b"}
    made.json(data)
    assert written(made)[0].replace("\n", "").isprintable() and json.loads(written(made)[0]) == data


def test_a_status_is_coloured_on_a_terminal_only() -> None:
    plain, coloured = console(), console(terminal=True)
    for made in (plain, coloured):
        made.table(["status"], [["live"], ["error (out of memory)"]])

    assert "\x1b" not in written(plain)[0]
    assert "\x1b[32mlive\x1b[0m" in written(coloured)[0]
    assert "\x1b[31merror (out of memory)\x1b[0m" in written(coloured)[0]


def test_progress_is_erased_and_shown_only_on_terminals() -> None:
    plain, terminal = console(), console(terminal=True)
    for made in (plain, terminal):
        made.progress("waiting")
        made.line("done")

    assert written(plain) == ("done\n", "")
    assert written(terminal) == ("done\n", "\r\x1b[Kwaiting\r\x1b[K")


def test_the_begin_of_a_step_is_shown_everywhere_and_erased_on_terminals() -> None:
    plain, terminal = console(), console(terminal=True)
    for made in (plain, terminal):
        made.begin("starting")
        made.line("done")

    assert written(plain) == ("done\n", "starting\n")
    assert written(terminal) == ("done\n", "\r\x1b[Kstarting\r\x1b[K")


def test_json_is_indented_and_keeps_unicode() -> None:
    made = console(terminal=True)
    made.json({"name": "Zoë", "n": [1]})

    assert json.loads(written(made)[0]) == {"name": "Zoë", "n": [1]}
    assert "Zoë" in written(made)[0]
