"""Differences between a recorded answer and the answer of now. Pure.

JSON is compared value by value: numbers within a tolerance, everything else exactly. Other bodies are compared by their
bytes. If the status differs, the bodies are not compared, because an error has another form than a result.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from cortex.payloads.json_bodies import parse_json
from cortex.recording.exchange import Exchange, RecordedBody
from cortex.recording.json_path import JsonPath, Step, shown

STATUS, BODY = "status", "(body)"
#: More differences of one answer are not listed.
MAX_DIFFERENCES = 1000
_SHOWN_CHARACTERS = 120


@dataclass(frozen=True)
class ComparisonRules:
    """Tolerance of numbers, and values that are not compared."""

    tolerance: float = 1e-6  #: of numbers, relative and absolute
    ignored: tuple[JsonPath, ...] = ()
    redacted: tuple[JsonPath, ...] = ()  #: removed from the recording


@dataclass(frozen=True)
class ReplayedAnswer:
    """The answer of now."""

    status: int
    body: bytes
    headers: Mapping[str, str]  #: names in lower case

    @property
    def request_id(self) -> str:
        """Return the id of the request that was sent."""
        return self.headers.get("x-cortex-request-id", "")


@dataclass(frozen=True)
class Difference:
    """One difference. Those of several answers belong together if field and kind are the same."""

    field: str  #: path without indexes, such as `$.items[*].score`; STATUS; BODY
    kind: str  #: "value", "type", "missing", "extra", "length", "status", "bytes", "text", "no answer"
    place: str  #: the path with indexes
    recorded: str  #: for people
    now: str
    distance: float | None = None  #: of two numbers


def compare(exchange: Exchange, answer: ReplayedAnswer, rules: ComparisonRules) -> list[Difference]:
    """Return the differences of an answer; at most `MAX_DIFFERENCES`."""
    if exchange.status != answer.status:
        return [Difference(STATUS, "status", STATUS, str(exchange.status), str(answer.status))]
    recorded = exchange.response
    if recorded.is_omitted:
        return []
    content = _decoded(answer.body, answer.headers.get("content-encoding", ""))
    if recorded.is_truncated:
        return _compare_bytes(recorded, content[: len(recorded.content)])
    if recorded.form != "json":
        expected = recorded.content
        if recorded.form == "text" and answer.request_id and exchange.id:
            expected = expected.replace(exchange.id.encode(), answer.request_id.encode())
        expected = _decoded(expected, recorded.content_encoding)
        if expected == content:
            return []
        return _compare_bytes(recorded, content)
    try:
        now = parse_json(content)
    except ValueError:
        return [Difference(BODY, "type", BODY, "JSON", f"{len(content)} bytes that are not JSON")]
    if recorded.is_redacted:
        for path in rules.redacted:
            path.remove(now)
    ids = (exchange.id, answer.request_id) if exchange.id and answer.request_id else None
    found = []
    for difference in _compare_json(recorded.value, now, rules, ids):
        found.append(difference)
        if len(found) == MAX_DIFFERENCES:
            break
    return found


def _compare_json(recorded: Any, now: Any, rules: ComparisonRules, ids: tuple[str, str] | None) -> Iterator[Difference]:
    waiting: list[tuple[tuple[Step, ...], Any, Any]] = [((), recorded, now)]
    while waiting:
        steps, old, new = waiting.pop()
        if any(path.matches(steps) for path in rules.ignored):
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            for key in reversed([*old, *(key for key in new if key not in old)]):
                inner = (*steps, key)
                if key in old and key in new:
                    waiting.append((inner, old[key], new[key]))
                elif not any(path.matches(inner) for path in rules.ignored):
                    kind = "missing" if key in old else "extra"
                    before, after = (_short(each[key]) if key in each else "" for each in (old, new))
                    yield _difference(inner, kind, before, after)
        elif isinstance(old, list) and isinstance(new, list):
            if len(old) != len(new):
                yield _difference(steps, "length", str(len(old)), str(len(new)))
            waiting.extend(((*steps, i), old[i], new[i]) for i in reversed(range(min(len(old), len(new)))))
        elif _is_number(old) and _is_number(new):
            if not math.isclose(old, new, rel_tol=rules.tolerance, abs_tol=rules.tolerance):
                yield _difference(steps, "value", _short(old), _short(new), abs(old - new))
        elif type(old) is not type(new):
            yield _difference(steps, "type", _short(old), _short(new))
        elif old != new and not (ids and isinstance(old, str) and old.replace(*ids) == new):
            yield _difference(steps, "value", _short(old), _short(new))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _difference(
    steps: tuple[Step, ...], kind: str, recorded: str, now: str, distance: float | None = None
) -> Difference:
    return Difference(shown(steps, with_indexes=False), kind, shown(steps), recorded, now, distance)


def _compare_bytes(recorded: RecordedBody, now: bytes) -> list[Difference]:
    expected = _decoded(recorded.content, recorded.content_encoding) if not recorded.is_truncated else recorded.content
    if expected == now:
        return []
    at = next((i for i, (a, b) in enumerate(zip(expected, now, strict=False)) if a != b), min(len(expected), len(now)))
    kind = "text" if recorded.form in ("text", "json") else "bytes"

    def text(content: bytes) -> str:
        if kind == "bytes":
            return f"{len(content)} bytes, {content[at : at + 8].hex(' ') or 'the end'} at {at}"
        return _short(content[max(0, at - 20) : at + 60].decode(errors="replace"))

    return [Difference(BODY, kind, f"{BODY} from byte {at} on", text(expected), text(now))]


def _decoded(content: bytes, encoding: str) -> bytes:
    """Return a body without its compression, as far as the standard library can."""
    try:
        if encoding.lower() in ("gzip", "x-gzip"):
            return gzip.decompress(content)
        if encoding.lower() == "deflate":
            return zlib.decompress(content)
    except (OSError, EOFError, zlib.error):
        pass
    return content


def _short(value: Any) -> str:
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return "(nested deeply)"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
