"""The models that a process has loaded: found by model and version, least recently used first, kept for who uses them.

It loads and unloads nothing. All of it is guarded by `changed`, which is notified when a waiter may find things better.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Condition
from typing import Any, Generic, TypeVar

from cortex.models.handles import Holder
from cortex.models.loading import Key, T
from cortex.models.spec import Version


@dataclass(eq=False, slots=True)
class Entry(Generic[T]):
    """One loaded version."""

    model: str
    version: Version
    value: T
    size_bytes: int = 0  #: memory that it is taken to need
    frozen_before: int = 0  #: objects that no garbage collection looked at when it was loaded
    holders: set[Holder] = field(default_factory=set)

    @property
    def key(self) -> Key:
        """Return what it is found by."""
        return self.model, self.version.number


E = TypeVar("E", bound=Entry[Any])


class Shelf(Generic[T]):
    """Holds entries; the caller of each method but `release` and `abandon` holds `changed`."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.entries: OrderedDict[Key, Entry[T]] = OrderedDict()
        self.leaving: list[Entry[T]] = []  #: no longer found, not unloaded yet
        self._held: dict[Holder, set[Entry[T]]] = {}
        self._abandoned: SimpleQueue[Holder] = SimpleQueue()

    @property
    def all(self) -> list[Entry[T]]:
        """Return all that is in memory, what should go first at the front."""
        return [*self.leaving, *self.entries.values()]

    def find(self, key: Key, holder: Holder | None) -> Entry[T] | None:
        """Return an entry, now the one most recently used, and keep it for `holder`."""
        entry = self.entries.get(key)
        if entry is not None:
            self.entries.move_to_end(key)
            self.keep(entry, holder)
        return entry

    def keep(self, entry: Entry[T], holder: Holder | None) -> None:
        """Keep an entry until its holder ends."""
        if holder is None or holder in entry.holders:
            return
        if holder not in self._held:
            self._held[holder] = set()
            holder.pinnings.append(self)
        entry.holders.add(holder)
        self._held[holder].add(entry)
        if holder.has_ended:  # meanwhile, on another thread: it may have looked at `pinnings` before we added to it
            self._let_go(holder)

    def put(self, entry: Entry[T]) -> None:
        """Add an entry; the one that it replaces leaves."""
        self.retire(entry.key)
        self.entries[entry.key] = entry
        self.changed.notify_all()

    def retire(self, key: Key) -> None:
        """Let an entry be found no more; it is to be unloaded once nobody uses it."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.leaving.append(entry)
            self.changed.notify_all()

    def remove(self, entry: Entry[T]) -> None:
        """Take an entry out; the caller unloads it."""
        if self.entries.get(entry.key) is entry:
            del self.entries[entry.key]
        else:
            self.leaving.remove(entry)
        for holder in entry.holders:
            self._held[holder].discard(entry)

    def release(self, holder: Holder) -> None:
        """Keep nothing for a holder any more."""
        with self.changed:
            self._let_go(holder)

    def abandon(self, holder: Holder) -> None:
        """Keep nothing for a holder any more, as soon as somebody calls `sweep`."""
        self._abandoned.put(holder)

    def sweep(self) -> None:
        """Let go of the holders that finalisers have abandoned."""
        while True:
            try:
                self._let_go(self._abandoned.get_nowait())
            except Empty:
                return

    def _let_go(self, holder: Holder) -> None:
        for entry in self._held.pop(holder, ()):
            entry.holders.discard(holder)
        self.changed.notify_all()


def choose(
    entries: Iterable[E], holder: Holder | None, place: object, spared: E | None = None
) -> tuple[E | None, bool]:
    """Choose which entry is to go, and tell whether to wait for one instead; `entries` come in the order of leaving.

    What a running call uses is waited for. Once no such call is left, what calls use that wait themselves, or that
    can't go on while `place` is blocked, must go, or all would wait for each other. `spared` goes last.
    """
    own = stalled = None
    must_wait = False
    for entry in entries:
        if entry is spared:
            continue
        if not entry.holders:
            return entry, False
        if entry.holders == {holder}:
            own = own or entry
        elif _is_stalled(entry, place):
            stalled = stalled or entry
        else:
            must_wait = True
    if own is not None or must_wait:
        return own, own is None
    if stalled is None and spared is not None:
        return choose([spared], holder, place)
    return stalled, False


def _is_stalled(entry: Entry[Any], place: object) -> bool:
    return all(holder.waiting or holder.place == place for holder in entry.holders)
