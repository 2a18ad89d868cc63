"""Path templates of routes, such as `/users/{id}` and `/files/{name:path}`: parse them, match paths of requests. Pure.

`{id}` stands for a part of one segment, `{name:path}` for the rest of the path, slashes included. A slash at the end
is ignored. Paths are compared as they are sent, segment by segment, except for the choice of what is percent-encoded:
`%2F` in a segment does not separate segments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import quote, unquote

_PARAMETER = re.compile(r"\{([^{}]*)\}")
#: Characters of a segment that are never encoded here, of RFC 3986: `sub-delims`, `:`, `@`.
_PLAIN = "!$&'()*+,;=:@"
_REST = "path"


class RouteError(ValueError):
    """A route that is not valid: the reason, and what to do."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(f"{message}; {fix}")
        self.message = message
        self.fix = fix


@dataclass(frozen=True)
class PathTemplate:
    """A valid template."""

    text: str  #: without a slash at its end
    parameters: tuple[str, ...]  #: in the order of the path

    @cached_property
    def shape(self) -> str:
        """Return the template without the names of its parameters: equal for templates that match the same paths."""
        return _PARAMETER.sub(lambda found: "{:path}" if found[1].endswith(f":{_REST}") else "{}", self._canonical)

    @cached_property
    def plain(self) -> str:
        """Return the template as OpenAPI documents write it, without `:path`."""
        return self.text.replace(f":{_REST}}}", "}")

    @cached_property
    def rank(self) -> tuple[tuple[int, ...], str]:
        """Return the sort key of templates: the one that is more specific from the left comes first."""
        kinds = []
        for segment in self.shape.split("/")[1:]:
            is_whole = segment in ("{}", "{:path}")
            kinds.append((3 if ":" in segment else 2) if is_whole else 1 if "{}" in segment else 0)
        return tuple(kinds), self.shape

    def match(self, path: str) -> tuple[str, ...] | None:
        """Return the values of the parameters in a path that `canonical_path` returned; None if it does not match."""
        found = self._pattern.fullmatch(path)
        return found.groups() if found is not None else None

    @cached_property
    def _canonical(self) -> str:
        parts = [part if part.startswith("{") else _canonical(part) for part in re.split(r"(\{[^{}]*\})", self.text)]
        return "".join(parts)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        pattern = re.escape(self.shape).replace(re.escape("{:path}"), "(.+)").replace(re.escape("{}"), "([^/]+)")
        return re.compile(pattern if self.shape.endswith("{:path}") else f"{pattern}/?")


def parse_template(text: str) -> PathTemplate:
    """Parse a template. Raises: RouteError."""
    if not text.startswith("/"):
        raise RouteError(f'the path "{text}" does not begin with a slash', f'write "/{text}"')
    trimmed = text[:-1] if text.endswith("/") else text
    if not trimmed:
        raise RouteError('the path "/" is the endpoint itself', "define handle_get, handle_post, … for it")
    parameters: list[str] = []
    segments = trimmed.split("/")[1:]
    for number, segment in enumerate(segments):
        parameters += _parameters(text, segment, is_last=number == len(segments) - 1)
    twice = next((name for name in parameters if parameters.count(name) > 1), None)
    if twice:
        raise RouteError(f'the path "{text}" has the parameter {twice} twice', "give each parameter its own name")
    return PathTemplate(trimmed, tuple(parameters))


def canonical_path(path: str) -> str:
    """Return the path of a request in the form that templates match."""
    return _canonical(path) if "%" in path else path


def decode_value(value: str) -> str:
    """Return the value of a parameter. Raises: UnicodeDecodeError."""
    return unquote(value, errors="strict") if "%" in value else value


def _parameters(text: str, segment: str, is_last: bool) -> list[str]:
    if segment in ("", ".", ".."):
        raise RouteError(f'the path "{text}" has the segment "{segment}"', "remove it: clients don't send it")
    found = [match[1] for match in _PARAMETER.finditer(segment)]
    literal = _PARAMETER.sub("", segment)
    if "{" in literal or "}" in literal:
        raise RouteError(f'the path "{text}" has a brace without its counterpart', "write parameters as {name}")
    if re.search(r"[?#\s\x00-\x1f\x7f]", literal):
        raise RouteError(
            f'the path "{text}" has a character that no path has', "remove it; queries are read as query_params"
        )
    if len(found) > 1:
        raise RouteError(f'the path "{text}" has two parameters in one segment', "separate them by a slash")
    for each in found:
        name, colon, kind = each.partition(":")
        if not name.isidentifier():
            raise RouteError(f'the path "{text}" has the parameter "{name}"', "use the name of an argument")
        if colon and kind != _REST:
            raise RouteError(
                f'the path "{text}" has the convertor "{kind}"', f"write {{{name}}}, and annotate the argument {name}"
            )
        if colon and not (is_last and literal == ""):
            raise RouteError(
                f'the path "{text}" continues after {{{each}}}', "put it at the end: it matches the rest of the path"
            )
        return [name]
    return []


def _canonical(path: str) -> str:
    """Encode exactly the characters that must be encoded. Bytes that are not UTF-8 stay encoded as they are."""
    return "/".join(quote(unquote(segment, "latin-1"), _PLAIN, "latin-1") for segment in _encoded(path).split("/"))


def _encoded(path: str) -> str:
    return path if path.isascii() else "".join(c if c.isascii() else quote(c) for c in path)
