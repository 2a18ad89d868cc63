"""What becomes of a batch that failed: another attempt, two halves, or a dead letter."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum, auto

from sqlalchemy import Connection, bindparam, delete, insert, select

from cortex.jobs.ledger import Ledger
from cortex.jobs.spec import BatchFailure
from cortex.state.job_tables import batches, dead_letters, first_key, pending

#: Longest wait before another attempt.
MAX_DELAY_S = 60.0

_BATCH = select(batches).where(batches.c.key == bindparam("at"))
_FORGET_BATCH = delete(batches).where(batches.c.key == bindparam("at"))
_DEATH = ("attempts", "error", "traceback", "failed_at")
_BURY = insert(dead_letters).from_select(
    ["key", "first_item", "items", "payload", *_DEATH],
    select(
        *(batches.c[name] for name in ("key", "first_item", "items", "payload")),
        *(bindparam(f"its_{name}", type_=dead_letters.c[name].type) for name in _DEATH),
    ).where(batches.c.key == bindparam("at")),
)


class Fate(Enum):
    """What a failed batch becomes."""

    RETRY = auto()
    SPLIT = auto()
    DEAD = auto()


@dataclass(frozen=True)
class Failed:
    """A batch that failed, and how often with this time."""

    failure: BatchFailure
    attempts: int
    is_part: bool
    items: int


def fate(failed: Failed, max_attempts: int, isolate_failures: bool) -> Fate:
    """Decide what becomes of a batch.

    A part of a batch that used up its attempts is split at once: it is known that something in there fails.
    """
    is_used_up = failed.attempts >= max_attempts
    if isolate_failures and failed.items > 1 and (failed.is_part or is_used_up):
        return Fate.SPLIT
    return Fate.DEAD if is_used_up else Fate.RETRY


def delay_s(attempts: int) -> float:
    """Return how long a batch waits after that many attempts."""
    return MAX_DELAY_S if attempts > 4 else float(3 ** (attempts - 1))


def split_payload(payload: bytes, items: int) -> tuple[bytes, bytes] | None:
    """Cut a JSON array of that many items in two, the first half the smaller; None if that can't be done.

    The text of each item stays as it is: to read and write it could change numbers.
    """
    try:
        texts = _item_texts(payload.decode())
    except (ValueError, RecursionError):  # an item may be nested as deep as its parser went, which is deeper than ours
        return None
    if len(texts) != items:
        return None
    middle = items // 2
    left, right = (f"[{','.join(half)}]".encode() for half in (texts[:middle], texts[middle:]))
    return left, right


def record_failures(connection: Connection, ledger: Ledger, failures: list[Failed], now: float) -> None:
    """Decide on each failed batch and store what becomes of it."""
    retries = []
    for failed in failures:
        ledger.failed_attempts += 1
        decision = fate(failed, ledger.max_attempts, ledger.isolate_failures)
        if decision is Fate.SPLIT and _split(connection, ledger, failed):
            continue
        if decision is Fate.RETRY:
            retries.append(_pending(ledger, failed.failure.seq, failed, now + delay_s(failed.attempts)))
        else:
            _bury(connection, ledger, failed, now)
    if retries:
        connection.execute(insert(pending), retries)


def _bury(connection: Connection, ledger: Ledger, failed: Failed, now: float) -> None:
    ledger.failed += 1
    ledger.failed_items += failed.items
    values = {
        "at": first_key(ledger.number) + failed.failure.seq,
        "its_attempts": failed.attempts,
        "its_error": failed.failure.error,
        "its_traceback": failed.failure.traceback,
        "its_failed_at": now,
    }
    connection.execute(_BURY, values)


def _split(connection: Connection, ledger: Ledger, failed: Failed) -> bool:
    """Put two halves in the place of a batch; False if its payload can't be cut."""
    key = first_key(ledger.number) + failed.failure.seq
    batch = connection.execute(_BATCH, {"at": key}).one()
    halves = split_payload(batch.payload, failed.items)
    if halves is None:
        return False
    left_items = failed.items // 2
    shapes = ((left_items, batch.first_item), (failed.items - left_items, batch.first_item + left_items))
    rows = []
    for seq, (items, first_item), payload in zip((ledger.next_seq, ledger.next_seq + 1), shapes, halves, strict=True):
        new_key = first_key(ledger.number) + seq
        rows.append({"key": new_key, "items": items, "first_item": first_item, "payload": payload})
    connection.execute(insert(batches), rows)
    connection.execute(_FORGET_BATCH, {"at": key})
    part = Failed(failed.failure, attempts=0, is_part=True, items=0)
    connection.execute(insert(pending), [_pending(ledger, ledger.next_seq + half, part, 0.0) for half in (0, 1)])
    ledger.next_seq += 2
    ledger.batches += 1
    return True


def _pending(ledger: Ledger, seq: int, failed: Failed, not_before: float) -> dict[str, object]:
    return {
        "number": ledger.number,
        "not_before": not_before,
        "first": seq,
        "last": seq,
        "attempts": failed.attempts,
        "is_part": failed.is_part,
    }


def _item_texts(text: str) -> list[str]:
    """Return the text of each item of a JSON array. Raises: ValueError."""
    decoder, texts = json.JSONDecoder(), list[str]()
    position = _after_space(text, 0)
    if text[position : position + 1] != "[":
        raise ValueError("not an array")
    separator = "["
    while separator != "]":
        start = _after_space(text, position + 1)
        if separator == "[" and text[start : start + 1] == "]":
            return texts
        _, end = decoder.raw_decode(text, start)
        texts.append(text[start:end])
        position = _after_space(text, end)
        separator = text[position : position + 1]
        if separator not in (",", "]"):
            raise ValueError("not an array")
    return texts


def _after_space(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\t", "\n", "\r") and position < len(text):
        position += 1
    return position
