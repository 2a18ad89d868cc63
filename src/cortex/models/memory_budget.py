"""Keeps what a process has loaded within the API's limits: makes room before each load, and measures what it took.

It must not know who asks for models, nor how they are fetched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic

from cortex.errors import ModelError
from cortex.models import memory
from cortex.models.handles import Holder, here
from cortex.models.loaded_models import Entry, Shelf, choose
from cortex.models.loading import T
from cortex.models.sizes import Sizes
from cortex.models.spec import ModelSource, Version

_MIB = 1024 * 1024
#: How often a waiter looks for calls that ended without saying so.
_SWEEP_S = 0.5
#: So long a newer version waits for a moment without calls before calls have to wait for it.
_PATIENCE_S = 5.0
#: The process may be so much above the budget by its own measure before models go for it: requests take memory too.
_TOLERATED_SHARE, _TOLERATED_BYTES = 0.05, 8 * _MIB


#: Beyond this, and twice its files, a model is not taken to be that big at once.
_CREDIBLE_BYTES = 32 * _MIB


class NoRoomError(ModelError):
    """The limits leave no room for a version."""


class TooBigError(NoRoomError):
    """The limits leave no room for a version at any time."""


class _Measurement:
    """How the process grows from now on, models apart that come or go meanwhile: they are accounted for."""

    def __init__(self, sizes: Sizes, version: Version, used: Callable[[], int], has_unloaded: bool) -> None:
        self._sizes = sizes
        self._version = version
        self._used = used
        self._has_unloaded = has_unloaded
        self._used_before = used()
        self._before = memory.resident_bytes()
        self._peak_before = memory.peak_bytes()

    def is_absurd(self) -> bool:
        return self._grown() > 2 * self._version.size_bytes + _CREDIBLE_BYTES

    def learn(self) -> int:
        grown, peak = self._grown(), memory.peak_bytes()
        highest = peak - self._before if peak > self._peak_before else None
        return self._sizes.learn(
            self._version.digest, self._version.size_bytes, grown, highest, is_pure=not self._has_unloaded
        )

    def _grown(self) -> int:
        memory.trim()
        return memory.resident_bytes() - self._before - (self._used() - self._used_before)


Measurement = _Measurement | None


class Room(Generic[T]):
    """Makes room on a shelf. Its methods belong to whoever has the turn to load, of which there is one."""

    def __init__(
        self, source: ModelSource, shelf: Shelf[T], unload: Callable[[Entry[T]], None], timeout_s: float
    ) -> None:
        self._count = source.cache_size
        self._budget = source.cache_memory_bytes
        self._is_limited = source.is_cached
        self._shelf = shelf
        self._unload_entry = unload
        self._timeout_s = timeout_s
        self._sizes = Sizes()
        self._reserved: list[int] = []  #: by the loads under way: a model's loading may load another
        self._has_doubted = False
        self._has_unloaded = False  #: then models fill holes that others left, by which the process does not grow
        self._baseline = 0  #: what the process takes without models

    @contextmanager
    def reserved(
        self, name: str, version: Version, holder: Holder | None, spared: Entry[T] | None
    ) -> Iterator[Callable[[], Measurement]]:
        """Hold room for one version; yields what begins to measure, just before it is loaded.

        What is least recently used and not in use goes. Raises: NoRoomError if there is none in time, or can be none.
        """
        if not self._is_limited:
            yield lambda: None
            return
        need = self._refuse_or_expect(name, version)
        self._make(need, name, version, holder, spared)
        try:
            self._mind_process()
            yield lambda: _Measurement(self._sizes, version, self._used, self._has_unloaded)
        finally:
            self._reserved.pop()

    def learn(self, measurement: Measurement) -> int:
        """Return what a version is taken to need from now on, in bytes, by how the process grew with it."""
        if measurement is None:
            return 0
        self._reserved[-1] = measurement.learn()
        return self._reserved[-1]

    def is_doubtful(self, measurement: Measurement) -> bool:
        """Tell whether to load a version once more to see what it takes: what loads it may have been loaded with it.

        Libraries are imported with the first model, if not before; they stay, and are no model's.
        """
        if self._has_doubted or self._budget is None or measurement is None or not measurement.is_absurd():
            return False
        self._has_doubted = True
        return True

    def rebase(self) -> None:
        """Take it that whatever else there is now is no model's."""
        self._baseline = memory.resident_bytes() - self._used()

    def forget_all_but(self, digests: set[str]) -> None:
        """Forget what other contents took."""
        self._sizes.forget_all_but(digests)

    def check(self, name: str, version: Version) -> None:
        """Refuse a version that can't be within the budget. Raises: TooBigError."""
        if self._budget is None:
            return
        measured = self._sizes.measured(version.digest)
        taken = version.size_bytes if measured is None else measured
        if taken > self._budget:
            what = "has files of" if measured is None else "takes"
            raise TooBigError(
                f"model {name} of version {version.number} {what} {_mib(taken)}, more than cache_memory: "
                f"{_mib(self._budget)}; set cache_memory above that"
            )

    def settle(self) -> None:
        """Evict what is not in use if more is loaded than may be, since a model took more than was expected."""
        while self._budget is not None and self._used() > self._budget:
            victim = self._take_unused()
            if victim is None:
                return
            self._unload(victim)

    def _refuse_or_expect(self, name: str, version: Version) -> int:
        self.check(name, version)
        expected = self._sizes.expect(version.digest, version.size_bytes)
        # Alone it may still fit: that is known only once it was loaded.
        return expected.peak_bytes if self._budget is None else min(expected.peak_bytes, self._budget)

    def _make(self, need: int, name: str, version: Version, holder: Holder | None, spared: Entry[T] | None) -> None:
        began = time.monotonic()
        place = here()
        shelf = self._shelf
        while True:
            with shelf.changed:
                shelf.sweep()
                if self._fits(need):
                    if not shelf.all and not self._reserved:
                        self._baseline = memory.resident_bytes()
                    self._reserved.append(need)
                    return
                victim, may_wait = choose(shelf.all, holder, place, spared)
                if victim is not None:
                    shelf.remove(victim)
                elif not may_wait or time.monotonic() - began > self._timeout_s:
                    raise self._no_room(name, version)
                else:
                    if spared is not None and time.monotonic() - began > _PATIENCE_S:
                        shelf.retire(spared.key)  # else calls that come and go could keep it for ever
                    shelf.changed.wait(_SWEEP_S)
            if victim is not None:
                self._unload(victim)
                del victim

    def _fits(self, need: int) -> bool:
        if self._count is not None and len(self._shelf.all) + len(self._reserved) >= self._count:
            return False
        return self._budget is None or self._used() + sum(self._reserved) + need <= self._budget

    def _used(self) -> int:
        return sum(entry.size_bytes for entry in self._shelf.all)

    def _mind_process(self) -> None:
        """Evict for what the process really takes, which models may have grown to since they were measured."""
        if self._budget is None:
            return
        tolerated = int(self._budget * _TOLERATED_SHARE) + _TOLERATED_BYTES
        limit = self._baseline + self._budget - sum(self._reserved) + tolerated
        if memory.resident_bytes() <= limit:
            return
        memory.trim()
        # Not for more than half of what may be loaded: the rest of the process may have grown for good.
        while memory.resident_bytes() > limit and self._used() + sum(self._reserved) > self._budget / 2:
            victim = self._take_unused()
            if victim is None:
                return
            self._unload(victim)
            del victim

    def _unload(self, victim: Entry[T]) -> None:
        self._has_unloaded = True
        self._unload_entry(victim)

    def _take_unused(self) -> Entry[T] | None:
        with self._shelf.changed:
            self._shelf.sweep()
            unused = next((entry for entry in self._shelf.all if not entry.holders), None)
            if unused is not None:
                self._shelf.remove(unused)
            return unused

    def _no_room(self, name: str, version: Version) -> NoRoomError:
        used = sorted({f"{entry.model} of version {entry.version.number}" for entry in self._shelf.all})
        limits = []
        if self._count is not None:
            limits.append(f"cache_size: {self._count}")
        if self._budget is not None:
            limits.append(f"cache_memory: {_mib(self._budget)}")
        in_use = f"in use: {', '.join(used)}" if used else "another model, which loads it, takes all of it"
        return NoRoomError(
            f"there is no room to load model {name} of version {version.number} within {', '.join(limits)}; "
            f"{in_use}; raise the limit, or let fewer requests run at the same time"
        )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.0f}Mi" if size_bytes >= 10 * _MIB else f"{size_bytes / _MIB:.2f}Mi"
