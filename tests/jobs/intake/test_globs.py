"""Globs select the same paths as a simple reference implementation, in linear time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cortex.jobs.intake.globs import GlobError, Globs

LETTERS = "ab/.*[é"
TOKENS = st.recursive(
    st.one_of(
        st.tuples(st.just("letter"), st.sampled_from(LETTERS)),
        st.tuples(st.sampled_from(["star", "stars", "any"]), st.none()),
        st.tuples(st.sampled_from(["one of", "none of"]), st.text(LETTERS, min_size=1, max_size=3)),
    ),
    lambda inner: st.tuples(st.just("choice"), st.lists(st.lists(inner, max_size=3), min_size=1, max_size=3)),
    max_leaves=5,
)


def glob_of(tokens: Sequence[tuple[str, Any]]) -> str:
    parts = []
    for kind, value in tokens:
        if kind == "choice":
            parts.append("{" + ",".join(map(glob_of, value)) + "}")
        elif kind in ("one of", "none of"):
            parts.append("[" + ("!" if kind == "none of" else "") + "".join("\\" + letter for letter in value) + "]")
        else:
            parts.append({"star": "*", "stars": "**", "any": "?"}.get(kind) or _escaped(value))
    return "".join(parts)


def _escaped(letter: str) -> str:
    return f"\\{letter}" if letter in "*[" else letter


def ends(tokens: Sequence[tuple[str, Any]], text: str, begins: set[int]) -> set[int]:
    """Return all positions where a match that starts in `begins` can end (reference implementation)."""
    for kind, value in tokens:
        if kind in ("star", "stars"):
            begins = {
                end
                for begin in begins
                for end in range(begin, len(text) + 1)
                if kind == "stars" or "/" not in text[begin:end]
            }
        elif kind == "choice":
            begins = {end for tokens in value for end in ends(tokens, text, begins)}
        else:
            begins = {begin + 1 for begin in begins if begin < len(text) and _is_one(kind, value, text[begin])}
    return begins


def _is_one(kind: str, value: Any, letter: str) -> bool:
    if kind == "any":
        return letter != "/"
    return (letter in value) == (kind != "none of")


@given(st.lists(TOKENS, max_size=5), st.text(LETTERS, max_size=8))
def test_globs_match_like_the_reference(tokens: list[tuple[str, Any]], path: str) -> None:
    assume(not _has_adjacent_stars(tokens))
    assert Globs([glob_of(tokens)]).selects(path) == (len(path) in ends(tokens, path, {0})), glob_of(tokens)


def _has_adjacent_stars(tokens: Sequence[tuple[str, Any]]) -> bool:
    """Return whether stars are adjacent; those would be parsed as one."""
    pairs = zip(tokens, tokens[1:], strict=False)
    if any("star" in one[0] and "star" in other[0] for one, other in pairs):
        return True
    return any(_has_adjacent_stars(inner) for kind, value in tokens if kind == "choice" for inner in value)


CASES = [
    ("s3://b/*.json", "s3://b/x.json", True),
    ("s3://b/*.json", "s3://b/in/x.json", False),
    ("s3://b/**.json", "s3://b/in/x.json", True),
    ("**/x.json", "s3://b/in/x.json", True),
    ("**/in/**", "s3://b/in/x.json", True),
    ("*.json", "s3://b/x.json", False),
    ("s3://b/{in,out}/[a-c]?.{json,txt}", "s3://b/out/b1.txt", True),
    ("s3://b/[!a-c].txt", "s3://b/a.txt", False),
    ("s3://b/x\\*.txt", "s3://b/x*.txt", True),
    ("s3://b/x\\*.txt", "s3://b/xy.txt", False),
    ("s3://b/a,b}", "s3://b/a,b}", True),
    ("**/x.JSON", "s3://b/x.json", False),
    ("s3://b/x.json", "s3://b/xyjson", False),
    ("**line**", "s3://b/two\nlines", True),
]


@pytest.mark.parametrize(("pattern", "path", "expected"), CASES)
def test_globs_by_example(pattern: str, path: str, expected: bool) -> None:
    assert Globs([pattern]).selects(path) is expected


def test_a_path_is_selected_by_any_include_and_no_exclude() -> None:
    globs = Globs(["**.json", "**.txt"], ["**/tmp/**"])
    paths = ["s3://b/1.json", "s3://b/2.txt", "s3://b/3.csv", "s3://b/tmp/4.json"]
    assert [globs.selects(path) for path in paths] == [True, True, False, False]
    assert Globs().selects("anything")
    assert not Globs((), ["any*"]).selects("anything")


MISTAKES = [("[a", "has no ]"), ("{a", "has no }"), ("a\\", "ends in"), ("[]", "nothing in it"), ("[z-a]", "backwards")]


@pytest.mark.parametrize(("pattern", "message"), [*MISTAKES, ("a" * 1001, "1,000 characters"), ("{" * 9000, "1,000")])
def test_rejects_an_invalid_glob(pattern: str, message: str) -> None:
    with pytest.raises(GlobError, match=message.replace("}", r"\}")):
        Globs([pattern])


def test_rejects_patterns_over_the_total_limit() -> None:
    with pytest.raises(GlobError, match="too long, or too deeply nested"):
        Globs(["{" * 400 + "}" * 400])


def test_matching_takes_linear_time() -> None:
    globs = Globs(["**a" * 20 + "b", "*a*a*a*a*a*a*a*a*a*a*a*a*a*b", "{a,aa,aaa}" * 30 + "b"])
    began = time.thread_time()
    assert not globs.selects("a" * 1000)
    assert time.thread_time() - began < 1
