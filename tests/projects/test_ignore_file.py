"""Patterns of `.cortexignore` match what git matches."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from cortex.projects.ignore_file import IgnoreFile, parse_pattern

pytestmark = pytest.mark.processes

# fmt: off
_SEGMENTS = [
    "a", "b", "ab", "1", "x9", "A", "a*", "*", "?", "**", "[ab]", "[!a]", "[^a]", "[a-c]", "[[:digit:]]",
    "[[:alpha:]]x", "a[[:space:]]b", "[![:digit:]]", "[[:upper:]]", "[]a]", "[!]a]", "[a\\]b]", "\\a", "\\*", "a\\ ",
    "a b", "#a", "\\#a", "\\!a", "a]", "{a,b}", "a**", "**b", "*.*", ".a", "a.", "[[:digit:]-z]", "[9-[:alpha:]]",
    "[a-]", "[\\!a]", "é", "[é]", "??",
]
_ENDS = ("", "", "", "", " ", "\t", "\\ ", "  ", "\\  ", " \t", "\t ")
_NAMES = [
    "a", "b", "ab", "1", "x9", "A", "#a", "!a", "*", "a]", "[", "]", "{a,b}", "aab", ".a", "a.", "b.a", "1x", "9",
    "c", "-", "a\\", "\\", "z", "cb", "é", "a b", "a ", "ab ", "a\t",
]
# fmt: on


def ignore_file(lines: Iterable[str]) -> IgnoreFile:
    return IgnoreFile(pattern for line in lines if (pattern := parse_pattern(line)))


def is_excluded(ignored: IgnoreFile, path: str) -> bool:
    """Decide as a scan does, which does not enter excluded folders."""
    parts = path.split("/")
    folders = ("/".join(parts[:count]) for count in range(1, len(parts)))
    return any(ignored.excludes(folder, True) for folder in folders) or ignored.excludes(path, False)


def random_pattern(rng: random.Random) -> str:
    pattern = "/".join(rng.choice(_SEGMENTS) for _ in range(rng.choice([1, 1, 1, 2, 2, 3])))
    start = rng.choice(["", "", "", "", "!", "/"])
    return start + pattern + rng.choice(["", "", "", "/"]) + rng.choice(_ENDS)


def test_random_patterns_match_the_paths_that_git_ignores(tmp_path: Path) -> None:
    rng = random.Random(15)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    for _ in range(200):
        lines = [random_pattern(rng) for _ in range(rng.choice([1, 2, 3]))]
        paths = sorted({"/".join(rng.choice(_NAMES) for _ in range(rng.choice([1, 1, 2, 3]))) for _ in range(40)})
        (tmp_path / ".gitignore").write_text("\n".join(lines))
        answer = subprocess.run(
            ["git", "-C", tmp_path, "check-ignore", "--no-index", "-z", "--stdin"],
            input="\0".join(paths).encode(),
            capture_output=True,
        )
        ignored = ignore_file(lines)
        assert [path for path in paths if is_excluded(ignored, path)] == answer.stdout.decode().split("\0")[:-1], lines


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("!", "the pattern is empty"),
        ("/", "the pattern is empty"),
        ("a\\", "a backslash at the end escapes nothing"),
        ("[a", "a [ has no matching ]"),
        ("[a-\\", "a [ has no matching ]"),
        ("[[:digits:]]", "[:digits:] is not a character class"),
    ],
)
def test_a_pattern_that_can_match_nothing_is_refused_with_the_reason(line: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason.replace("[", r"\[")):
        parse_pattern(line)


@pytest.mark.parametrize("line", ["", "   ", "# comment", "#"])
def test_comments_and_empty_lines_are_no_patterns(line: str) -> None:
    assert parse_pattern(line) is None
