r"""Globs over whole paths, which select files of a listing.

`*` and `?` match within one part of a path, `**` crosses slashes; `[a-z]`, `[!a-z]` and `{one,two}` are alternatives;
`\` escapes the next character. Patterns come from clients, so they run on the regex engine of pydantic, whose time is
linear in the path's length: Python's own takes hours for some patterns. pathspec has neither braces nor this bound.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic_core import SchemaError, SchemaValidator, core_schema

_MAX_LENGTH = 1000
_MAX_TOTAL_LENGTH = 100_000


class GlobError(ValueError):
    """A pattern is invalid; the message has the reason."""


class Globs:
    """Selects paths that match any of `includes` (empty: all) and none of `excludes`. Raises: GlobError."""

    def __init__(self, includes: Sequence[str] = (), excludes: Sequence[str] = ()) -> None:
        self._includes = _compiled(includes) if includes else None
        self._excludes = _compiled(excludes) if excludes else None

    def selects(self, path: str) -> bool:
        """Return True if the path is selected."""
        if self._includes is not None and not self._includes.isinstance_python(path):
            return False
        return not self.excludes(path)

    def excludes(self, path: str) -> bool:
        """Return True if one of the excludes matches."""
        return self._excludes is not None and self._excludes.isinstance_python(path)


def _compiled(patterns: Sequence[str]) -> SchemaValidator:
    length = sum(map(len, patterns))
    if length > _MAX_TOTAL_LENGTH:
        raise GlobError(f"the patterns have {length:,} characters, and may have {_MAX_TOTAL_LENGTH:,}")
    expression = "|".join(f"(?:{to_regex(pattern)})" for pattern in patterns)
    try:
        return SchemaValidator(core_schema.str_schema(pattern=rf"\A(?s:{expression})\z"))
    except SchemaError:
        raise GlobError("the patterns are too long, or too deeply nested, together") from None


def to_regex(pattern: str) -> str:
    """Return the regular expression for a glob, in the syntax of Rust's engine. Raises: GlobError."""
    if len(pattern) > _MAX_LENGTH:
        raise GlobError(f"a pattern may have {_MAX_LENGTH:,} characters (this one has {len(pattern):,})")
    parts: list[str] = []
    position, depth = 0, 0
    while position < len(pattern):
        letter = pattern[position]
        position += 1
        if letter == "*":
            stars = 1
            while pattern[position : position + 1] == "*":
                stars, position = stars + 1, position + 1
            parts.append("[^/]*" if stars == 1 else ".*")
        elif letter == "?":
            parts.append("[^/]")
        elif letter == "[":
            text, position = _class(pattern, position)
            parts.append(text)
        elif letter == "{":
            parts.append("(?:")
            depth += 1
        elif letter == "}" and depth:
            parts.append(")")
            depth -= 1
        elif letter == "," and depth:
            parts.append("|")
        else:
            text, position = _letter(pattern, position - 1)
            parts.append(_escape(text))
    if depth:
        raise GlobError("a { has no }; close it, or write \\{ for the brace itself")
    return "".join(parts)


def _class(pattern: str, position: int) -> tuple[str, int]:
    """Parse a character class; `position` is after the opening bracket."""
    is_negated = pattern[position : position + 1] == "!"
    position += is_negated
    parts: list[str] = []
    while pattern[position : position + 1] != "]":
        first, position = _letter(pattern, position, within="a [")
        if pattern[position : position + 1] == "-" and pattern[position + 1 : position + 2] not in ("]", ""):
            last, position = _letter(pattern, position + 1, within="a [")
            if last < first:
                raise GlobError(f"[{first}-{last}] goes backwards; write [{last}-{first}]")
            parts.append(f"{_escape(first)}-{_escape(last)}")
        else:
            parts.append(_escape(first))
    if not parts:
        raise GlobError(
            "[] has nothing in it; write the characters between the brackets, or \\[ for the bracket itself"
        )
    return f"[{'^' if is_negated else ''}{''.join(parts)}]", position + 1


def _letter(pattern: str, position: int, within: str = "") -> tuple[str, int]:
    """Parse one character, which may be escaped."""
    if position >= len(pattern):
        raise GlobError(f"{within} has no ]; close it, or write \\[ for the bracket itself")
    if pattern[position] != "\\":
        return pattern[position], position + 1
    if position + 1 == len(pattern):
        raise GlobError("it ends in \\; write \\\\ for the backslash itself")
    return pattern[position + 1], position + 2


def _escape(letter: str) -> str:
    return letter if re.fullmatch(r"\w", letter) else f"\\x{{{ord(letter):x}}}"
