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


def explain(error: yaml.MarkedYAMLError, text: str) -> tuple[tuple[int, int] | None, str, str]:
    """Translate a parser's error about `text`: line and column (from 1), the message, the fix."""
    problem, context = error.problem or "", error.context or ""
    if error.problem_mark and "mapping values are not allowed" in problem:
        return _explain_colon(text.split("\n"), error.problem_mark.line, error.problem_mark.column)
    for row in _ROWS:
        if re.search(row.problem, problem) and re.search(row.context, context):
            mark = (error.context_mark if row.opener else None) or error.problem_mark or error.context_mark
            return _position(mark), row.message, row.fix
    message = f"is not valid YAML: {problem or context}"
    return _position(error.problem_mark or error.context_mark), message, "put the value in quotes"


def _position(mark: yaml.Mark | None) -> tuple[int, int] | None:
    return (mark.line + 1, mark.column + 1) if mark else None


def _explain_colon(lines: list[str], line: int, column: int) -> tuple[tuple[int, int], str, str]:
    """Tell a second colon in a value from a line that the parser took to be the end of the one above."""
    key = lines[line][:column].lstrip(" -") if line < len(lines) else ":"
    above = next((index for index in range(line - 1, -1, -1) if lines[index].split("#")[0].strip()), None)
    if ": " in key or above is None:
        fix = "check the indentation, or put the value in quotes"
        return (line + 1, column + 1), 'a second ": " is not allowed here', fix
    indent = len(lines[above]) - len(lines[above].lstrip(" -"))
    if ":" not in lines[above]:
        return (above + 1, indent + 1), 'a ":" is missing after the key', 'write "key: value"'
    message = "the indentation does not match the lines above"
    return (line + 1, column - len(key) + 1), message, "align the key with those beside it"
