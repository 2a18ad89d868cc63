"""Text of others on terminals."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.terminal import printable, shown, styled, without_overwritten


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x1b[2J\x1b[H", r"\x1b[2J\x1b[H"),
        (
            "\x1b]8;;http://evil.example\x1b\\here\x1b]8;;\x1b\\",
            r"\x1b]8;;http://evil.example\x1b\here\x1b]8;;\x1b" "\\",
        ),
        ("passed\rfailed", r"passed\rfailed"),
        ("gnp.\u202eexe", r"gnp.\u202eexe"),
        ("\x9b2J \x90q\x9c", r"\x9b2J \x90q\x9c"),  # C1 controls
        ("\x1b[8mhidden\x1b[0m", "\\x1b[8mhidden\x1b[0m"),
        ("\x1b[38;5;8mgrey\x1b[0m \x1b[48;2;1;2;3;1mx\x1b[0m", "\x1b[38;5;8mgrey\x1b[0m \x1b[48;2;1;2;3;1mx\x1b[0m"),
        ("\x1b[97;101mloud\x1b[39;49m", "\x1b[97;101mloud\x1b[39;49m\x1b[0m"),
        ("\x1b[38;8mhidden \x1b[38;5mx \x1b[5mx \x1b[>4m", r"\x1b[38;8mhidden \x1b[38;5mx \x1b[5mx \x1b[>4m"),
        ("\x1b[31", r"\x1b[31"),
        ("a\x08\x7f\x00", r"a\x08\x7f\x00"),
        ("\ud800", r"\ud800"),
        ("\x1b[01;33mwarning\x1b[m: x", "\x1b[01;33mwarning\x1b[m: x\x1b[0m"),
        ("\x1b[31mred\n", "\x1b[31mred\n\x1b[0m"),  # it ends with its line
        (styled("live", "green"), "\x1b[32mlive\x1b[0m"),
        ("größe\t猫\u3000猫\u00a0\n", "größe\t猫\u3000猫\u00a0\n"),
    ],
)
def test_only_lines_and_colours_reach_a_terminal(text: str, expected: str) -> None:
    assert shown(text) == expected


@given(st.text(st.sampled_from("\x1b[]0123;mJ\r\n\x07\x9b\u202ea") | st.characters()))
def test_no_text_controls_a_terminal(text: str) -> None:
    rest = re.sub(r"\x1b\[[0-9;]*m", "", shown(text)).replace("\n", "").replace("\t", "")
    assert all(character.isprintable() or character.isspace() for character in rest)
    assert not set(rest) & set("\x1b\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\u2028\u2029")
    assert printable(text).isprintable()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", ""),
        ("a", "a"),
        ("a\r", "a"),
        (" 0%\r50%\r100%", "100%"),
        (" 0%\r50%\r\r", "50%"),
        ("abc\rd", "dbc"),
    ],
)
def test_carriage_returns_overwrite_their_line(line: str, expected: str) -> None:
    assert without_overwritten(line) == expected


def test_long_texts_take_linear_time() -> None:
    began = time.process_time()
    shown("\x1b[" + "2;" * 100_000 + "\x1b[" + "2" * 200_000)
    assert time.process_time() - began < 5
