"""Audit of a job that is over, whatever was killed meanwhile. Pure: takes data, returns mistakes.

The items are the integers from 0, and every batch returned the items that it was called with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

_SHOWN = 5


def mistakes(
    items: int,
    guilty: Iterable[int],
    status: Mapping[str, Any],
    results: list[dict[str, Any]],
    dead_letters: list[dict[str, Any]],
) -> list[str]:
    """Return a line for each mistake; none if nothing was lost or doubled."""
    found = [*_each(results, "result"), *_each(dead_letters, "payload")]
    returned = Counter(item for result in results for item in result["result"])
    given_up = Counter(item for letter in dead_letters for item in letter["payload"])
    recorded = returned + given_up
    found += _items("never recorded", set(range(items)) - set(recorded))
    found += _items("recorded, and never submitted", set(recorded) - set(range(items)))
    found += _items("recorded more than once", {item for item, times in recorded.items() if times > 1})
    found += _items("a dead letter, and innocent", set(given_up) - set(guilty))
    found += _items("guilty, and no dead letter", set(guilty) - set(given_up))
    batches = Counter(each["seq"] for each in (*results, *dead_letters))
    found += _items("a batch with two outcomes", {seq for seq, times in batches.items() if times > 1})
    return found + _counts(items, status, len(results), len(dead_letters), given_up.total())


def _each(records: list[dict[str, Any]], of: str) -> list[str]:
    """Check that every record has the items of its batch."""
    wrong = {
        each["seq"]
        for each in records
        if each[of] != list(range(each["first_item"], each["first_item"] + each["items"]))
    }
    return _items(f"a batch whose {of} is not its items", wrong)


def _counts(items: int, status: Mapping[str, Any], results: int, dead: int, dead_items: int) -> list[str]:
    wanted = {
        "status": "completed_with_failures" if dead else "succeeded",
        "total_batch_count": results + dead,
        "batches_in_queue": 0,
        "results": results,
        "dead_letters": dead,
        "items": {"total": items, "succeeded": items - dead_items, "failed": dead_items},
    }
    found = [f"{name} is {status[name]}, not {value}" for name, value in wanted.items() if status[name] != value]
    metrics = {name: status["batch_metrics"][name] for name in ("succeeded", "failed")}
    if metrics != {"succeeded": results, "failed": dead}:
        found.append(f"batch_metrics are {metrics}, with {results} results and {dead} dead letters")
    return found


def _items(what: str, which: set[int]) -> list[str]:
    if not which:
        return []
    some = ", ".join(map(str, sorted(which)[:_SHOWN]))
    return [f"{what}: {len(which)} ({some}{', …' if len(which) > _SHOWN else ''})"]
