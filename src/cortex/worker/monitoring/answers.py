"""Digests of the answers to requests that two revisions of an API get, in a ring file like that of predictions.

The gateway marks such requests and their copies while a canary gets copies. A digest has two halves of 32 bits, and
answers agree if either half is the same. Numbers with a fraction are rounded to three significant digits for the first
half and truncated to three for the second, so that numbers that differ by a rounding error agree even if a boundary of
the rounding lies between them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from cortex.worker.monitoring.metrics import COPIES_FOLDER
from cortex.worker.monitoring.request_log import write_log
from cortex.worker.monitoring.tracker import PredictionKind, PredictionRing

#: Subfolder of a replica's metrics folder.
ANSWERS_FOLDER = "answers"
#: Longer answers are not compared: a digest takes about 10 µs per kilobyte, on the event loop.
MAX_ANSWER_BYTES = 64 * 1024
#: Smaller magnitudes are equal to 0.
_SMALLEST = 1e-6
_HALF_BITS = 32


class AnswerDigests:
    """Stores the digests of one process. Event-loop thread only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rings: dict[bool, PredictionRing | None] = {}

    def add(self, request_id: bytes, media_type: bytes | None, body: bytes, is_copy: bool) -> None:
        """Store the digest of an answer, unless it is too long."""
        if len(body) <= MAX_ANSWER_BYTES:
            if is_copy not in self._rings:
                self._rings[is_copy] = _open(self._folder / COPIES_FOLDER if is_copy else self._folder)
            ring = self._rings[is_copy]
            if ring is not None:
                ring.append(request_id, answer_digest(media_type, body))


def answer_digest(media_type: bytes | None, body: bytes) -> int:
    """Return the digest of an answer: of its values if it is JSON, and otherwise of its bytes."""
    if media_type is not None and media_type.startswith(b"application/json"):
        try:
            value = orjson.loads(body)
            halves = [
                orjson.dumps(_with_floats(value, each), option=orjson.OPT_SORT_KEYS) for each in (_rounded, _truncated)
            ]
            return _hash(halves[0]) << _HALF_BITS | _hash(halves[1])
        except (ValueError, TypeError, RecursionError):  # not JSON, or nested too deeply
            pass
    return _hash(body) << _HALF_BITS | _hash(body)


def answers_agree(old: int, new: int) -> bool:
    """Return whether the digests of two answers agree."""
    return old >> _HALF_BITS == new >> _HALF_BITS or (old ^ new) % (1 << _HALF_BITS) == 0


def _with_floats(value: Any, shown: Callable[[float], str]) -> Any:
    kind = type(value)
    if kind is float:
        return shown(value)
    if kind is dict:
        return {key: _with_floats(each, shown) for key, each in value.items()}
    return [_with_floats(each, shown) for each in value] if kind is list else value


def _rounded(number: float) -> str:
    return f"{number:.2e}" if abs(number) >= _SMALLEST else "0"


def _truncated(number: float) -> str:
    if abs(number) < _SMALLEST:
        return "0"
    mantissa, _, exponent = f"{number:.12e}".partition("e")
    return f"{mantissa[: mantissa.index('.') + 3]}e{exponent}"


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=_HALF_BITS // 8).digest(), "little")


def _open(folder: Path) -> PredictionRing | None:
    try:
        return PredictionRing(folder / ANSWERS_FOLDER, PredictionKind.ANSWER)
    except OSError as error:
        write_log(f"canary: cannot store digests of answers for their comparison: {error.strerror or error}\n")
        return None
