"""Gets versions loaded: each once however many ask, one at a time, within the limits; frees them again.

It must not know catalogues, nor which version a call means.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, cast

from cortex.errors import ModelError
from cortex.models import memory
from cortex.models.failed_loads import FIRST_RETRY_S, Failure, Failures, describe
from cortex.models.handles import Holder
from cortex.models.load_lock import Turn
from cortex.models.loaded_models import Entry, Shelf
from cortex.models.loading import Events, Fetcher, Key, Loader, LoadRequest, T
from cortex.models.memory_budget import Measurement, NoRoomError, Room, TooBigError
from cortex.models.spec import Model, ModelSource, Version
from cortex.models.versions import label

#: To a value that only its entry refers to: the entry's, and the argument of the function that counts.
_OWN_REFERENCES = 2


@dataclass(eq=False)
class _Flight(Generic[T]):
    """One version being fetched and loaded, by one thread for all."""

    leader: int
    holders: list[Holder] = field(default_factory=list)  #: of the threads that wait for it
    value: T | None = None
    failure: Failure | None = None
    is_over: bool = False


class Loads(Generic[T]):
    """Fills a shelf. Safe for any thread; what it calls of the user's code runs without our locks but the turn."""

    def __init__(
        self,
        source: ModelSource,
        shelf: Shelf[T],
        loader: Loader[T],
        fetcher: Fetcher,
        events: Events,
        room_timeout_s: float,
    ) -> None:
        self.failures = Failures()  #: guarded by the shelf's condition
        self._source = source
        self._shelf = shelf
        self._loader = loader
        self._fetcher = fetcher
        self._events = events
        self._turn = Turn(shelf.changed)
        self._room = Room(source, shelf, self._unload, room_timeout_s)
        self._flights: dict[Key, _Flight[T]] = {}
        self._followed: dict[int, _Flight[T]] = {}  #: which flight each waiting thread waits for
        self._telling = threading.Lock()

    def obtain(
        self,
        model: Model,
        version: Version,
        holder: Holder | None,
        is_renewal: bool = False,
        stand_in: Entry[T] | None = None,
    ) -> T:
        """Return a version, loaded here or by another thread; kept for `holder`.

        A loaded one with other content is as good, but for a renewal, which replaces it, or `stand_in`: these go last
        where there is no room for both. Raises: ModelError.
        """
        key = (model.name, version.number)
        with self._shelf.changed:
            loaded = self._shelf.find(key, holder)
            if loaded is not None and not (is_renewal and loaded.version.digest != version.digest):
                return loaded.value
            flight = self._flights.get(key)
            leads = flight is None
            if flight is None:
                known = self.failures.find(key, version.digest, time.monotonic())
                if known is not None:
                    raise known.error() from known.cause
                flight = self._flights[key] = _Flight(threading.get_ident())
            elif self._waits_for_itself(flight):
                name = label(self._source, model.name)
                raise ModelError(f"model {name} of version {version.number} is asked for by what loads it")
            if holder is not None:
                flight.holders.append(holder)
                holder.waiting += 1
            if not leads:
                self._follow(flight)
        if leads:
            self._lead(flight, model, version, holder, loaded or stand_in)
        if flight.failure is not None:
            raise flight.failure.error() from flight.failure.cause
        return flight.value  # type: ignore[return-value]  # None is a model like any other

    def renew(self, model: Model, version: Version, stand_in: Entry[T] | None) -> float | None:
        """Load a version in place of what is served for it; returns when to try again if that failed (monotonic)."""
        try:
            self.obtain(model, version, None, is_renewal=True, stand_in=stand_in)
        except ModelError:  # has been told
            with self._shelf.changed:
                retry_at = self.failures.retry_at((model.name, version.number), version.digest)
            return retry_at or time.monotonic() + FIRST_RETRY_S
        return None

    def forget_all_but(self, versions: Iterable[tuple[Model, Version]]) -> None:
        """Forget what was learned of versions that there are no more; the caller holds the shelf's condition."""
        known = list(versions)
        self.failures.forget_all_but({(model.name, version.number) for model, version in known})
        self._room.forget_all_but({version.digest for _, version in known})

    def dispose(self) -> bool:
        """Unload what has left the shelf and is not in use; tells whether something is still in use."""
        while True:
            with self._turn.taken():
                with self._shelf.changed:
                    self._shelf.sweep()
                    unused = next((entry for entry in self._shelf.leaving if not self._is_used(entry)), None)
                    if unused is None:
                        return bool(self._shelf.leaving)
                    self._shelf.remove(unused)
                self._unload(unused)
                del unused

    def tell_loaded(self) -> None:
        """Say what is loaded, in order."""
        with self._telling:
            with self._shelf.changed:
                loaded = [(entry.model, entry.version) for entry in self._shelf.entries.values()]
            self._events.loaded(loaded)

    def _waits_for_itself(self, flight: _Flight[T]) -> bool:
        """Tell whether a flight waits, maybe by way of others, for the one that this thread leads."""
        next_one: _Flight[T] | None = flight
        while next_one is not None and not next_one.is_over:  # its followers may have yet to notice
            if next_one.leader == threading.get_ident():
                return True
            next_one = self._followed.get(next_one.leader)
        return False

    def _follow(self, flight: _Flight[T]) -> None:
        me = threading.get_ident()
        self._followed[me] = flight
        try:
            with self._turn.given_up():
                while not flight.is_over:
                    self._shelf.changed.wait()
        finally:
            del self._followed[me]

    def _lead(
        self, flight: _Flight[T], model: Model, version: Version, holder: Holder | None, spared: Entry[T] | None
    ) -> None:
        key = (model.name, version.number)
        name = label(self._source, model.name)
        flight.failure = Failure(f"loading model {name} of version {version.number} was interrupted")
        try:
            self._fetch_and_load(flight, model, version, holder, spared)
            flight.failure = None
        except NoRoomError as error:
            flight.failure = Failure(str(error), is_lasting=isinstance(error, TooBigError))
        except (Exception, SystemExit) as error:  # the edge of the user's code
            flight.failure = describe(name, version.number, error)
        finally:
            with self._shelf.changed:
                if flight.failure is None:
                    self.failures.forget(key)
                elif flight.failure.cause is not None:
                    self.failures.add(key, version.digest, flight.failure, time.monotonic())
                for holder in flight.holders:
                    holder.waiting -= 1
                flight.is_over = True
                del self._flights[key]
                self._shelf.changed.notify_all()
        if flight.failure is None:
            self.tell_loaded()
        elif flight.failure.is_lasting:
            self._events.failed(model.name, version, flight.failure.message, flight.failure.detail)

    def _fetch_and_load(
        self, flight: _Flight[T], model: Model, version: Version, holder: Holder | None, spared: Entry[T] | None
    ) -> None:
        self._room.check(label(self._source, model.name), version)
        path, is_leased = version.path, version.path is None
        if path is None:
            path = str(self._fetcher.fetch(model.name, version))
        try:
            with self._turn.taken():
                room = self._room.reserved(label(self._source, model.name), version, holder, spared)
                with room as measure:
                    self._load(flight, model, version, path, measure)
                self._room.settle()
        finally:
            # What is loaded may leave the disk: only what is being loaded has to be there.
            if is_leased:
                self._fetcher.release(version)

    def _load(
        self, flight: _Flight[T], model: Model, version: Version, path: str, measure: Callable[[], Measurement]
    ) -> None:
        self._events.loading(model.name, version)
        request = LoadRequest(model.name, version.number, path, version.digest, version.size_bytes, model.signature_key)
        measurement = measure()
        entry = Entry(model.name, version, self._loader.load(request), frozen_before=gc.get_freeze_count())
        if self._room.is_doubtful(measurement):
            self._unload(entry)
            self._room.rebase()
            measurement = measure()
            entry.value = self._loader.load(request)
        entry.size_bytes = self._room.learn(measurement)
        try:
            self._room.check(label(self._source, model.name), version)
        except TooBigError:
            self._unload(entry)
            raise
        with self._shelf.changed:
            self._shelf.put(entry)
            for each in flight.holders:
                self._shelf.keep(entry, each)
            flight.value = entry.value

    def _is_used(self, entry: Entry[T]) -> bool:
        if self._source.is_cached:
            return bool(entry.holders)
        # Calls are not counted where nothing is ever evicted; but who uses a model refers to it.
        return sys.getrefcount(entry.value) > _OWN_REFERENCES

    def _unload(self, entry: Entry[T]) -> None:
        before = memory.resident_bytes()
        model, entry.value = entry.value, cast("T", None)
        try:
            self._loader.unload(model)
        except Exception as error:  # the edge of a library's code: what it keeps can't be helped
            text = f"{label(self._source, entry.model)} of version {entry.version.number} could not be unloaded"
            self._events.failed(entry.model, entry.version, f"model {text}: {error!r}", "")
        del model
        memory.trim()
        if before - memory.resident_bytes() > (entry.size_bytes or entry.version.size_bytes) / 2:
            return  # a model without reference cycles: nothing to look for
        is_frozen = gc.get_freeze_count() > entry.frozen_before
        memory.give_back(is_frozen)
        if is_frozen:
            with self._shelf.changed:
                for each in self._shelf.all:
                    each.frozen_before = 0  # they are frozen too, now
