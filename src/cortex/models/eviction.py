"""Decides which model contents leave the disk. Pure; what is on disk and who holds it is told."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """One content on disk."""

    digest: str
    apis: frozenset[str]  #: for which it was put there; it counts against the limit of each
    used_at: float  #: UNIX time, seconds: when it was last asked for
    size_bytes: int = 0  #: of its files when they came


def choose_victim(held: Iterable[Held], api: str, kept: Collection[str]) -> Held | None:
    """Return the content of an API that was not asked for the longest and that nobody keeps; None if there is none."""
    candidates = [item for item in held if api in item.apis and item.digest not in kept]
    return min(candidates, key=lambda item: (item.used_at, item.digest), default=None)


def unneeded(held: Iterable[Held], wanted: Iterable[Collection[str]], kept: Collection[str]) -> set[str]:
    """Return the contents that no catalogue has and that nobody keeps."""
    needed = set(kept).union(*wanted)
    return {item.digest for item in held if item.digest not in needed}
