"""What a YAML parser complains of, in words that say what the author did and what to write instead."""

from __future__ import annotations

import re
from typing import NamedTuple

import yaml


class _Row(NamedTuple):
    """The parser's words (problem, context) and ours; `opener` points at where the broken thing began."""

    problem: str
    context: str
    message: str
    fix: str
    opener: bool = False


_ROWS = (
    _Row(r"character '\\t'", "", "a tab cannot be used here", "use spaces"),
    _Row(
        "mapping values are not allowed",
        "",
        'a second ": " is not allowed here',
        "check the indentation, or put the value in quotes",
    ),
    _Row("end of stream", "quoted scalar", "a quote is never closed", "close it", True),
    _Row("document separator", "quoted scalar", "a quote is never closed", "close it", True),
    _Row(
        "",
        "flow sequence",
        'a list opened with "[" is not closed properly',
        'separate its items with "," and end it with "]"',
        True,
    ),
    _Row(
        "",
        "flow mapping",
        'a map opened with "{" is not closed properly',
        'separate its entries with "," and end it with "}"',
        True,
    ),
    _Row(
        "block sequence start|block sequence entr|sequence entries",
        "",
        'a list item ("- ") is not allowed here',
        "check the indentation",
    ),
    _Row(
        "block mapping start",
        "",
        "the indentation does not match the lines above",
        "align the key with those beside it",
    ),
    _Row(
        "expected <block end>",
        "block collection",
        'a list item ("- ") was expected here',
        'start the line with "- ", or check the indentation',
    ),
    _Row("expected <block end>", "", "a key was expected here", 'check the indentation; write "key: value"'),
    _Row("expected ':'", "", 'a ":" is missing after the key', 'write "key: value"'),
    _Row("undefined alias", "", "the alias has no anchor", "define it before with &"),
    _Row("second occurrence", "", "the anchor is defined twice", "rename one of them"),
    _Row("another document", "", "must be a single YAML document", 'remove the "---"'),
    _Row("cannot start any token", "", "this character cannot start a value", "put the value in quotes"),
    _Row(
        "escape",
        "",
        "invalid escape in a quoted string",
        "use single quotes, or write \\\\ for a backslash",
    ),
)


def explain(error: yaml.MarkedYAMLError) -> tuple[yaml.Mark | None, str, str]:
    """Translate a parser's error: where it is, the message, the fix."""
    problem, context = error.problem or "", error.context or ""
    for row in _ROWS:
        if re.search(row.problem, problem) and re.search(row.context, context):
            mark = error.context_mark if row.opener else error.problem_mark
            return mark or error.problem_mark or error.context_mark, row.message, row.fix
    return error.problem_mark or error.context_mark, f"is not valid YAML: {problem or context}", ""
