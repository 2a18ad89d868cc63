from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortex.errors import ConfigError
from cortex.projects.dotenv import check_dotenv, parse_dotenv, read_dotenv

pytestmark = pytest.mark.processes

AMBIENT = {"HOME": "/home/me", "WORD": "two words", "EMPTY": ""}

GOOD = [
    ("A=1", {"A": "1"}),
    ("", {}),
    ("# comment\n\n   \nA=1 # why\nB=x#y\n", {"A": "1", "B": "x#y"}),
    ("export A=1\nexport  B=2 C=3", {"A": "1", "B": "2", "C": "3"}),
    ("  A=1\n\tB=2", {"A": "1", "B": "2"}),
    ("A=", {"A": ""}),
    ("A=\"two words\"\nB='two  words'\nC=two\\ words", {"A": "two words", "B": "two  words", "C": "two words"}),
    ('A="it\'s"\nB=\'say "hi"\'', {"A": "it's", "B": 'say "hi"'}),
    ("A=x'y'\"z\"w", {"A": "xyzw"}),
    (r'A="\$x \"q\" \\ \n"', {"A": '$x "q" \\ \\n'}),
    (r"A=\$x\'\"", {"A": "$x'\""}),
    (
        "A='$WORD'\nB=$WORD\nC=\"$WORD!\"\nD=${WORD}s",
        {"A": "$WORD", "B": "two words", "C": "two words!", "D": "two wordss"},
    ),
    ("A=1\nB=$A$A\nA=2\nC=$A", {"A": "2", "B": "11", "C": "2"}),
    ("A=$NOT_SET.", {"A": "."}),
    ("A=~/models:~:x~\nB='~'\nC=\"~\"\nD=x~/y", {"A": "/home/me/models:/home/me:x~", "B": "~", "C": "~", "D": "x~/y"}),
    ('KEY="-----BEGIN\nabc\n-----END"\nB=1', {"KEY": "-----BEGIN\nabc\n-----END", "B": "1"}),
    ('A=one\\\ntwo\nB="one\\\ntwo"', {"A": "onetwo", "B": "onetwo"}),
    ("A=a=b==\nB=https://example.com/?x=1%20y", {"A": "a=b==", "B": "https://example.com/?x=1%20y"}),
    ("A=*\nB=[x]\nC={a,b}\nD=!\nE=a%b^c@d+e,f", {"A": "*", "B": "[x]", "C": "{a,b}", "D": "!", "E": "a%b^c@d+e,f"}),
    ('A=5$\nB=5$%\nC="5$"\nD="$\'x\'"', {"A": "5$", "B": "5$%", "C": "5$", "D": "$'x'"}),
    ("NAME=é\nB='日本'", {"NAME": "é", "B": "日本"}),
]

BAD = [
    ("A 1", [(1, 1, "is not an assignment")]),
    ("A=1\n2B=3", [(2, 1, "is not an assignment")]),
    ("A = 1", [(1, 1, "is not an assignment")]),
    ("A=two words", [(1, 7, "is after the end of the value")]),
    ("A=1\n  B=x y", [(2, 7, "is after the end of the value")]),
    ("A=$(whoami)", [(1, 3, "only $NAME and ${NAME} are expanded")]),
    ("A=`whoami`", [(1, 3, "only $NAME")]),
    ('A="x $(whoami)"', [(1, 6, "only $NAME")]),
    ("A=${B:-default}", [(1, 3, "only $NAME")]),
    ("A=$1", [(1, 3, "only $NAME")]),
    ("A=x;B=y", [(1, 4, "';' has a special meaning")]),
    ("A=x&y", [(1, 4, "'&' has a special meaning")]),
    ("A=1\nB='x\nC=3", [(2, 3, "the quote is never closed")]),
    ('A="x', [(1, 3, "the quote is never closed")]),
    ("A=1\n export # x", [(2, 2, "has no variable to export")]),
    ("A=\0", [(1, 3, "NUL")]),
    ("bad\nA=1\nworse\n", [(1, 1, "is not an assignment"), (3, 1, "is not an assignment")]),
]


@pytest.mark.parametrize(("text", "variables"), GOOD)
def test_parses_values_like_a_shell(text: str, variables: dict[str, str]) -> None:
    assert parse_dotenv(text, AMBIENT) == variables


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@pytest.mark.parametrize(("text", "variables"), GOOD)
def test_a_real_shell_parses_the_same_values(tmp_path: Path, text: str, variables: dict[str, str]) -> None:
    assert by_bash(tmp_path, text) == variables


def by_bash(folder: Path, text: str) -> dict[str, str] | None:
    """Return the variables that a shell with `set -a` exports; None if it fails or runs a command."""
    (folder / "env").write_bytes(text.encode())
    script = "set -ae; . ./env; exec /usr/bin/env -0"
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=AMBIENT, capture_output=True)
    if done.returncode or done.stderr:
        return None
    pairs = (item.partition("=") for item in done.stdout.decode().split("\0") if item)
    shell_own = {"PWD", "SHLVL", "_", "OLDPWD"}
    return {name: value for name, _, value in pairs if name not in AMBIENT and name not in shell_own}


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@settings(max_examples=2 * settings().max_examples)
@given(
    text=st.lists(
        st.sampled_from([*"AB==  \n\n'\"\\$$#~x:/;{}", "A=", "\nB=", "$A", "${A}", "export "]), max_size=14
    ).map("".join)
)
def test_a_real_shell_agrees_on_all_accepted_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    try:
        found = parse_dotenv(text, AMBIENT)
    except ConfigError:
        return
    assert by_bash(tmp_path_factory.mktemp("env"), text) == found


def test_reports_reserved_names_of_new_projects_only(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text('A=1\nCORTEX_X="two\nlines" B=2\nCORTEXT=3\nexport CORTEX_Y=\n')

    with pytest.raises(ConfigError) as caught:
        check_dotenv(tmp_path)

    assert [str(found) for found in caught.value.diagnostics] == [
        f'.env:{place}: "{name}" cannot start with CORTEX_ (such names are reserved) (rename the variable)'
        for place, name in (("2:1", "CORTEX_X"), ("5:8", "CORTEX_Y"))
    ]
    variables = {"A": "1", "CORTEX_X": "two\nlines", "B": "2", "CORTEXT": "3", "CORTEX_Y": ""}
    assert read_dotenv(tmp_path) == variables


@pytest.mark.parametrize(("text", "expected"), BAD)
def test_reports_bad_lines_with_positions(text: str, expected: list[tuple[int, int, str]]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_dotenv(text)
    found = caught.value.diagnostics
    assert [(item.line, item.column) for item in found] == [(line, column) for line, column, _ in expected]
    for item, (_, _, message) in zip(found, expected, strict=True):
        assert item.file == ".env" and message in item.message


@given(st.text())
def test_any_text_is_parsed_or_rejected(text: str) -> None:
    try:
        assert all("\0" not in value for value in parse_dotenv(text).values())
    except ConfigError as error:
        assert error.diagnostics


def test_accepts_a_missing_file_and_windows_line_endings(tmp_path: Path) -> None:
    assert read_dotenv(tmp_path) == {}
    (tmp_path / ".env").write_bytes(b"\xef\xbb\xbfA=1\r\nB='x y'\r\n")
    assert read_dotenv(tmp_path) == {"A": "1", "B": "x y"}
    (tmp_path / ".env").write_bytes(b"A=\xff\n")
    with pytest.raises(ConfigError, match=r"\.env: is not UTF-8"):
        read_dotenv(tmp_path)
