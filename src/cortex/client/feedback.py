"""The client's method for what was right, of predictions made before. Knows the route only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cortex.client.environments import Environment
from cortex.client.routes import api_path
from cortex.errors import InputError

#: So much is sent at once.
_PART_BYTES = 8 * 1024 * 1024
_TIMEOUT_S = 300.0

Feedback = Mapping[str, Any] | Iterable[Mapping[str, Any]] | bytes


class FeedbackClient:
    """The part of `Client` that is about truth."""

    environment: Environment

    def post_feedback(self, api: str, feedback: Feedback) -> dict[str, Any]:
        """Tell what was right: truth by request id, objects with `request_id` and `truth`, or bytes of such as JSON.

        Returns `matched`, `unknown` and some `unknown_ids`; what is told twice of a request replaces the first. Much is
        sent in parts: where one is refused, those before it count. Raises: InputError.
        """
        answer: dict[str, Any] = {"matched": 0, "unknown": 0, "unknown_ids": []}
        transport = self.environment.connect()
        for part in _parts(feedback):
            found = transport.call("POST", f"{api_path(api)}/feedback", body=part, timeout_s=_TIMEOUT_S)
            answer = {name: answer[name] + found[name] for name in answer}
        return answer


def _parts(feedback: Feedback) -> Iterator[bytes]:
    if isinstance(feedback, bytes):
        yield from _cut(feedback)
        return
    if isinstance(feedback, Mapping):
        feedback = ({"request_id": request_id, "truth": truth} for request_id, truth in feedback.items())
    lines: list[bytes] = []
    size, has_sent = 0, False
    for number, item in enumerate(feedback, start=1):
        lines.append(_line(number, item))
        size += len(lines[-1]) + 1
        if size >= _PART_BYTES:
            yield b"\n".join(lines)
            lines, size = [], 0
            has_sent = True
    if lines or not has_sent:
        yield b"\n".join(lines)


def _line(number: int, item: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(item).encode()
    except (TypeError, ValueError) as error:
        raise InputError(f"truth {number} can't be written as JSON: {error}") from None


def _cut(body: bytes) -> Iterator[bytes]:
    """Cut at ends of lines; what has no such, a list for one, stays whole."""
    start = 0
    has_lines = body.lstrip()[:1] != b"["
    while has_lines and len(body) - start > _PART_BYTES:
        end = body.rfind(b"\n", start, start + _PART_BYTES) + 1
        if end <= start:
            break
        yield body[start:end]
        start = end
    yield body[start:]
