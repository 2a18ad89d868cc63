"""Paths in JSON documents, such as `$.user.email`, `$.items[*].id` or `$..token`: a part of JSONPath (RFC 9535).

They have names, indexes, `*` for all members, and `..name` for a name at any depth. No filters and no slices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

#: A pattern of all paths that `JsonPath.parse` accepts, also for the JSON Schema of cortex.yaml.
NAME = r"[^\s.\[\]'\"*$]+"
PATTERN = rf"^\$(\.\.?{NAME}|\.\*|\[\*\]|\[[0-9]+\]|\['[^']+'\]|\[\"[^\"]+\"\])+$"
_SEGMENT = re.compile(rf"(\.\.)({NAME})|\.({NAME})|(\.\*|\[\*\])|\[([0-9]+)\]|\['([^']+)'\]|\[\"([^\"]+)\"\]")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

#: The name of a member, or the index of an element.
Step = str | int
_MEMBERS, _DEPTHS = "*", ".."


@dataclass(frozen=True)
class JsonPath:
    """A parsed path."""

    text: str
    #: Each with its kind: a name or an index ("="), all members, or a name at any depth.
    segments: tuple[tuple[str, Step], ...]

    @classmethod
    def parse(cls, text: str) -> JsonPath:
        """Parse a path. Raises: ValueError."""
        if not re.fullmatch(PATTERN, text):
            raise ValueError(f"{text} is not a path such as $.user.email, $.items[*].id or $..token")
        segments: list[tuple[str, Step]] = []
        for found in _SEGMENT.finditer(text, 1):
            depths, deep, plain, members, index, single, double = found.groups()
            if depths:
                segments.append((_DEPTHS, deep))
            elif members:
                segments.append((_MEMBERS, _MEMBERS))
            else:
                segments.append(("=", int(index) if index else plain or single or double))
        return cls(text, tuple(segments))

    def matches(self, steps: Sequence[Step]) -> bool:
        """Return whether the path is that of the value at `steps`."""
        return _matches(self.segments, steps)

    def remove(self, value: Any) -> int:
        """Remove what the path leads to: members of objects; elements of arrays become null. Return their number."""
        return _remove(value, self.segments)


def _matches(segments: Sequence[tuple[str, Step]], steps: Sequence[Step]) -> bool:
    if not segments:
        return not steps
    if not steps:
        return False
    (kind, wanted), rest = segments[0], segments[1:]
    if kind == _DEPTHS:
        return any(step == wanted and _matches(rest, steps[index + 1 :]) for index, step in enumerate(steps))
    if kind != _MEMBERS and wanted != steps[0]:
        return False
    return _matches(rest, steps[1:])


def _remove(value: Any, segments: Sequence[tuple[str, Step]]) -> int:
    (kind, wanted), rest = segments[0], segments[1:]
    removed = 0
    for step, child in list(_children(value)):
        if kind == _MEMBERS or step == wanted:
            if rest:
                removed += _remove(child, rest)
            else:
                removed += 1
                if isinstance(value, dict):
                    del value[step]
                    continue
                value[step] = None
        if kind == _DEPTHS:
            removed += _remove(child, segments)
    return removed


def _children(value: Any) -> Iterable[tuple[Step, Any]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()


def shown(steps: Sequence[Step], with_indexes: bool = True) -> str:
    """Return the path of a value: `$.items[3].id`, or `$.items[*].id` without indexes."""
    parts = ["$"]
    for step in steps:
        if isinstance(step, int):
            parts.append(f"[{step}]" if with_indexes else "[*]")
        elif _PLAIN_NAME.fullmatch(step):
            parts.append(f".{step}")
        else:
            parts.append(f"[{json.dumps(step, ensure_ascii=False)}]")
    return "".join(parts)
