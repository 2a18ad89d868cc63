"""Load model versions into a process: single-flight, one at a time, within the memory budget; and unload them.

The path of a load: `LoadCoordinator.load` joins a pending load of the same version or leads a new one, which fetches
the files (`ModelFetcher`), acquires the `LoadLock`, reserves memory (`memory_budget`), calls the `ModelLoader`, and
adds the result to the `LoadedModels`. A failure is cached with a retry time (`FailedLoads`). This module has no notion
of catalogues or of "latest"; `registry` has.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, cast

from cortex.errors import ModelError, UserError, linked_exceptions
from cortex.models.loaded_models import CallHandle, LoadedModel, LoadedModels, T, VersionKey
from cortex.models.memory_budget import (
    MemoryBudget,
    MemoryMeasurement,
    NoRoomError,
    TooBigError,
    collect_and_trim,
    resident_bytes,
    trim_heap,
)
from cortex.models.spec import DEFAULT_MODEL, Model, ModelSource, Version
from cortex.processes.backoff import Backoff

#: Delay of the retry of a failed load.
RETRY_BACKOFF = Backoff(2.0, 60.0)
_MESSAGE_CHARACTERS = 1000
#: References to a value that only its `LoadedModel` has: that one, and the argument of `sys.getrefcount`.
_OWN_REFERENCES = 2


# Interfaces.


@dataclass(frozen=True)
class LoadRequest:
    """One version of a model to load, whose files are on this machine."""

    model: str
    version: str
    path: str
    digest: str
    size_bytes: int
    signature_key: str | None

    @property
    def label(self) -> str:
        """Return the name of the model and version for messages; the model of `path` has no name of its own."""
        if self.model == DEFAULT_MODEL:
            return f"the model of version {self.version}"
        return f"model {self.model!r} of version {self.version}"


class ModelLoader(Protocol[T]):
    """Loads model files into memory and unloads them; one implementation per handler type."""

    def load(self, request: LoadRequest) -> T:
        """Load one version; may raise anything. One call at a time per process, on any thread."""
        ...

    def unload(self, model: T) -> None:
        """Release what dropping the last reference does not: native memory, a model server's memory."""
        ...


class ModelFetcher(Protocol):
    """Downloads the files of a version to this machine."""

    def fetch(self, model: str, version: Version) -> Path:
        """Return the folder with the files, which exists until `release`. Blocks. Raises: ModelError."""
        ...

    def release(self, version: Version) -> None:
        """Release the files of one `fetch`."""
        ...


class LoadEvents(Protocol):
    """Callbacks of a registry, on any thread, in order. They must neither raise nor call the registry."""

    def loading(self, model: str, version: Version) -> None:
        """A load starts. If the process dies now, this load is the reason."""
        ...

    def requested(self, model: str, version: Version) -> None:
        """A call named this version by its number for the first time; only without caching."""
        ...

    def loaded(self, versions: Sequence[tuple[str, Version]]) -> None:
        """The set of loaded versions changed to `versions`."""
        ...

    def failed(self, model: str, version: Version, message: str, detail: str) -> None:
        """A version could not be fetched or loaded; `detail` holds the user's traceback."""
        ...


# Failures.


@dataclass(frozen=True)
class LoadFailure:
    """One failed attempt to load a version."""

    message: str
    detail: str = ""
    cause: BaseException | None = None
    is_lasting: bool = True  #: False: another call may succeed at once

    def error(self) -> ModelError:
        """Return a new error to raise `from` the cause; each caller needs its own, as raising modifies it."""
        return ModelError(self.message, self.detail)


@dataclass
class _FailedVersion:
    failure: LoadFailure
    digest: str
    failures: int
    retry_at: float


@dataclass
class FailedLoads:
    """Negative cache of failed loads, with retry times (monotonic, seconds)."""

    _by_key: dict[VersionKey, _FailedVersion] = field(default_factory=dict)

    def find(self, key: VersionKey, digest: str, now: float) -> LoadFailure | None:
        """Return the last failure of a content if its retry time has not come."""
        known = self._by_key.get(key)
        return known.failure if known is not None and known.digest == digest and now < known.retry_at else None

    def retry_at(self, key: VersionKey, digest: str) -> float | None:
        """Return the retry time of a failed content."""
        known = self._by_key.get(key)
        return known.retry_at if known is not None and known.digest == digest else None

    def add(self, key: VersionKey, digest: str, failure: LoadFailure, now: float) -> None:
        """Record a failure and set the next retry time."""
        known = self._by_key.get(key)
        failures = known.failures + 1 if known and known.digest == digest else 1
        self._by_key[key] = _FailedVersion(failure, digest, failures, now + RETRY_BACKOFF.delay_s(failures))

    def remove(self, key: VersionKey) -> None:
        """Remove the failure of a version."""
        self._by_key.pop(key, None)

    def keep_only(self, keys: set[VersionKey]) -> None:
        """Remove the failures of all other versions."""
        for key in self._by_key.keys() - keys:
            del self._by_key[key]


def describe_failure(name: str, number: str, cause: BaseException) -> LoadFailure:
    """Return the failure for an exception, whose frames are cleared: they may reference half a model."""
    if isinstance(cause, UserError):
        reason, detail = str(cause), cause.traceback
    else:
        lines = [line.strip() for line in _text(cause).splitlines() if line.strip()]
        reason = ": ".join([type(cause).__name__, *lines[:1]])[:_MESSAGE_CHARACTERS]
        detail = "".join(traceback.format_exception(cause))
    for linked in linked_exceptions(cause):
        traceback.clear_frames(linked.__traceback__)
    return LoadFailure(f"failed (re-)loading model {name} of version {number}: {reason}", detail, cause)


def _text(cause: BaseException) -> str:
    try:
        return str(cause)
    except BaseException:  # a broken `__str__` in user code must not hide the error
        return ""


def display_name(source: ModelSource, name: str) -> str:
    """Return a model's name for messages: for the one model of `path`, its location."""
    return source.paths[0].url if name == DEFAULT_MODEL and source.form == "path" else name


# Loading.


class LoadLock:
    """A re-entrant lock for loading, which a waiting thread can release temporarily.

    It shares a condition with other waiters, as a thread that waits for a load waits for both.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._owner: int | None = None
        self._depth = 0

    @contextmanager
    def acquired(self) -> Iterator[None]:
        """Hold the lock."""
        with self._changed:
            self._acquire(1)
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                self._notify_if_free()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the lock if this thread holds it, and re-acquire it at the end; the caller holds the condition."""
        depth = self._depth if self._owner == threading.get_ident() else 0
        if depth:
            self._depth = 0
            self._notify_if_free()
        try:
            yield
        finally:
            if depth:
                self._acquire(depth)

    def _acquire(self, depth: int) -> None:
        me = threading.get_ident()
        while self._owner not in (None, me):
            self._changed.wait()
        self._owner = me
        self._depth += depth

    def _notify_if_free(self) -> None:
        if self._depth == 0:
            self._owner = None
            self._changed.notify_all()


@dataclass(eq=False)
class _PendingLoad(Generic[T]):
    """One version that is being fetched and loaded by the leader's thread."""

    leader: int
    handles: list[CallHandle] = field(default_factory=list)  #: of the calls that wait for it
    value: T | None = None
    failure: LoadFailure | None = None
    is_done: bool = False


class LoadCoordinator(Generic[T]):
    """Loads versions into `loaded`. Thread-safe; user code runs without our locks, except for the load lock."""

    def __init__(
        self,
        source: ModelSource,
        loaded: LoadedModels[T],
        loader: ModelLoader[T],
        fetcher: ModelFetcher,
        events: LoadEvents,
        room_timeout_s: float,
    ) -> None:
        self._source = source
        self._loaded = loaded
        self._loader = loader
        self._fetcher = fetcher
        self._events = events
        self._lock = LoadLock(loaded.changed)
        self._budget = MemoryBudget(source, loaded, self._unload, room_timeout_s)
        self._failures = FailedLoads()  #: guarded by `loaded.changed`, as all below
        self._pending: dict[VersionKey, _PendingLoad[T]] = {}
        self._followed: dict[int, _PendingLoad[T]] = {}  #: by waiting thread
        self._publishing = threading.Lock()

    def load(
        self,
        model: Model,
        version: Version,
        handle: CallHandle | None,
        is_update: bool = False,
        evict_last: LoadedModel[T] | None = None,
    ) -> T:
        """Return a version, pinned for `handle`; load it, or wait for the thread that loads it. Raises: ModelError.

        A loaded version with other content is returned too. With `is_update` it is replaced instead. It, or
        `evict_last`, is evicted only if there is no room for both.
        """
        key = (model.name, version.number)
        with self._loaded.changed:
            loaded = self._loaded.find(key, handle)
            if loaded is not None and not (is_update and loaded.version.digest != version.digest):
                return loaded.value
            pending = self._pending.get(key)
            leads = pending is None
            if pending is None:
                known = self._failures.find(key, version.digest, time.monotonic())
                if known is not None:
                    raise known.error() from known.cause
                pending = self._pending[key] = _PendingLoad(threading.get_ident())
            elif self._would_deadlock(pending):
                name = display_name(self._source, model.name)
                raise ModelError(f"loading model {name} of version {version.number} requires this version itself")
            if handle is not None:
                pending.handles.append(handle)
                handle.waiting += 1
            if not leads:
                self._follow(pending)
        if leads:
            self._lead(pending, model, version, handle, loaded or evict_last)
        if pending.failure is not None:
            raise pending.failure.error() from pending.failure.cause
        return pending.value  # type: ignore[return-value]  # None is a valid model

    def update(self, model: Model, version: Version, evict_last: LoadedModel[T] | None) -> float | None:
        """Load a version in place of an older one; if that fails, return when to retry (monotonic, seconds)."""
        try:
            self.load(model, version, None, is_update=True, evict_last=evict_last)
        except ModelError:  # was reported
            with self._loaded.changed:
                retry_at = self._failures.retry_at((model.name, version.number), version.digest)
            return retry_at or time.monotonic() + RETRY_BACKOFF.first_s
        return None

    def keep_only(self, versions: Iterable[tuple[Model, Version]]) -> None:
        """Drop failures and measurements of all other versions; the caller holds `loaded.changed`."""
        known = list(versions)
        self._failures.keep_only({(model.name, version.number) for model, version in known})
        self._budget.keep_only({version.digest for _, version in known})

    def unload_retired(self) -> bool:
        """Unload retired versions that no call uses; return True if some are still in use."""
        while True:
            with self._lock.acquired():
                with self._loaded.changed:
                    self._loaded.release_abandoned()
                    unused = next((entry for entry in self._loaded.retired if not self._is_used(entry)), None)
                    if unused is None:
                        return bool(self._loaded.retired)
                    self._loaded.remove(unused)
                self._unload(unused)
                del unused

    def publish_loaded(self) -> None:
        """Report all loaded versions, in order."""
        with self._publishing:
            with self._loaded.changed:
                loaded = [(entry.model, entry.version) for entry in self._loaded.entries.values()]
            self._events.loaded(loaded)

    def _would_deadlock(self, pending: _PendingLoad[T]) -> bool:
        """Return whether a pending load waits, maybe through others, for one that this thread leads."""
        waits_for: _PendingLoad[T] | None = pending
        while waits_for is not None and not waits_for.is_done:  # followers of one that is done wake up soon
            if waits_for.leader == threading.get_ident():
                return True
            waits_for = self._followed.get(waits_for.leader)
        return False

    def _follow(self, pending: _PendingLoad[T]) -> None:
        me = threading.get_ident()
        self._followed[me] = pending
        try:
            with self._lock.released():
                while not pending.is_done:
                    self._loaded.changed.wait()
        finally:
            del self._followed[me]

    def _lead(
        self,
        pending: _PendingLoad[T],
        model: Model,
        version: Version,
        handle: CallHandle | None,
        evict_last: LoadedModel[T] | None,
    ) -> None:
        key = (model.name, version.number)
        name = display_name(self._source, model.name)
        pending.failure = LoadFailure(f"loading model {name} of version {version.number} was interrupted")
        try:
            self._fetch_and_load(pending, model, version, handle, evict_last)
            pending.failure = None
        except NoRoomError as error:
            pending.failure = LoadFailure(str(error), is_lasting=isinstance(error, TooBigError))
        except (Exception, SystemExit) as error:  # the edge of the user's code
            pending.failure = describe_failure(name, version.number, error)
        finally:
            with self._loaded.changed:
                if pending.failure is None:
                    self._failures.remove(key)
                elif pending.failure.cause is not None:
                    self._failures.add(key, version.digest, pending.failure, time.monotonic())
                for each in pending.handles:
                    each.waiting -= 1
                pending.is_done = True
                del self._pending[key]
                self._loaded.changed.notify_all()
        if pending.failure is None:
            self.publish_loaded()
        elif pending.failure.is_lasting:
            self._events.failed(model.name, version, pending.failure.message, pending.failure.detail)

    def _fetch_and_load(
        self,
        pending: _PendingLoad[T],
        model: Model,
        version: Version,
        handle: CallHandle | None,
        evict_last: LoadedModel[T] | None,
    ) -> None:
        name = display_name(self._source, model.name)
        self._budget.check(name, version)
        path, is_fetched = version.path, version.path is None
        if path is None:
            path = str(self._fetcher.fetch(model.name, version))
        try:
            with self._lock.acquired():
                with self._budget.reserve(name, version, handle, evict_last) as measure:
                    self._load_and_measure(pending, model, version, path, measure)
                self._budget.evict_excess()
        finally:
            # A loaded model no longer needs its files on disk.
            if is_fetched:
                self._fetcher.release(version)

    def _load_and_measure(
        self,
        pending: _PendingLoad[T],
        model: Model,
        version: Version,
        path: str,
        measure: Callable[[], MemoryMeasurement | None],
    ) -> None:
        self._events.loading(model.name, version)
        request = LoadRequest(model.name, version.number, path, version.digest, version.size_bytes, model.signature_key)
        measurement = measure()
        entry = LoadedModel(model.name, version, self._loader.load(request), frozen_before=gc.get_freeze_count())
        if self._budget.needs_reload(measurement):
            self._unload(entry)
            self._budget.reset_baseline()
            measurement = measure()
            entry.value = self._loader.load(request)
        entry.size_bytes = self._budget.record(measurement)
        try:
            self._budget.check(display_name(self._source, model.name), version)
        except TooBigError:
            self._unload(entry)
            raise
        with self._loaded.changed:
            self._loaded.put(entry)
            for each in pending.handles:
                self._loaded.pin(entry, each)
            pending.value = entry.value

    def _is_used(self, entry: LoadedModel[T]) -> bool:
        if self._source.is_cached:
            return bool(entry.handles)
        # Without caching nothing is evicted, so calls don't pin models; a call that uses one holds a reference.
        return sys.getrefcount(entry.value) > _OWN_REFERENCES

    def _unload(self, entry: LoadedModel[T]) -> None:
        before = resident_bytes()
        model, entry.value = entry.value, cast("T", None)
        try:
            self._loader.unload(model)
        except Exception as error:  # the edge of a library's code, which may leak now
            text = f"{display_name(self._source, entry.model)} of version {entry.version.number} could not be unloaded"
            self._events.failed(entry.model, entry.version, f"model {text}: {error!r}", "")
        del model
        trim_heap()
        if before - resident_bytes() > (entry.size_bytes or entry.version.size_bytes) / 2:
            return  # the model had no reference cycles, which only a garbage collection frees
        is_frozen = gc.get_freeze_count() > entry.frozen_before
        collect_and_trim(is_frozen)
        if is_frozen:
            with self._loaded.changed:
                for each in self._loaded.all:
                    each.frozen_before = 0  # the collection froze them too
