"""The models loaded in a process, as an LRU cache, and the handles with which calls pin models.

A call that gets a model pins it with its `CallHandle`: the model is not evicted before the call, or the coroutine or
generator that it returned, ends. `LoadedModels` neither loads nor unloads. The condition `LoadedModels.changed` guards
its state and the sets of handles; it is notified when a waiting thread may be able to go on.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from queue import Empty, SimpleQueue
from threading import Condition
from typing import Any, Generic, ParamSpec, TypeVar

from cortex.models.spec import Version

P = ParamSpec("P")
T = TypeVar("T")
VersionKey = tuple[str, str]  #: a model's name and a version's number


class CallHandle:
    """One call, which pins the models that it got until it ends."""

    __slots__ = ("context", "has_ended", "pinned_in", "waiting")

    def __init__(self) -> None:
        self.has_ended = False
        self.context = execution_context()  #: the event loop or thread that runs the call
        self.waiting = 0  #: threads of the call that wait for a model; guarded by `LoadedModels.changed`
        self.pinned_in: list[LoadedModels[Any]] = []


@dataclass(eq=False, slots=True)
class LoadedModel(Generic[T]):
    """One loaded version of a model."""

    model: str
    version: Version
    value: T
    size_bytes: int = 0  #: its estimated memory
    frozen_before: int = 0  #: `gc.get_freeze_count()` when it was loaded
    handles: set[CallHandle] = field(default_factory=set)  #: the calls that use it

    @property
    def key(self) -> VersionKey:
        """Return the model's name and the version's number."""
        return self.model, self.version.number


L = TypeVar("L", bound=LoadedModel[Any])


class LoadedModels(Generic[T]):
    """The LRU cache. The caller of each method except `release` and `release_later` holds `changed`."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.entries: OrderedDict[VersionKey, LoadedModel[T]] = OrderedDict()  #: least recently used first
        self.retired: list[LoadedModel[T]] = []  #: no longer served, not unloaded yet
        self._pinned: dict[CallHandle, set[LoadedModel[T]]] = {}
        self._abandoned: SimpleQueue[CallHandle] = SimpleQueue()

    @property
    def all(self) -> list[LoadedModel[T]]:
        """Return all loaded versions in the order of eviction."""
        return [*self.retired, *self.entries.values()]

    def find(self, key: VersionKey, handle: CallHandle | None) -> LoadedModel[T] | None:
        """Return a loaded version, mark it as most recently used, and pin it for `handle`."""
        entry = self.entries.get(key)
        if entry is not None:
            self.entries.move_to_end(key)
            self.pin(entry, handle)
        return entry

    def pin(self, entry: LoadedModel[T], handle: CallHandle | None) -> None:
        """Keep a version loaded until the call ends."""
        if handle is None or handle in entry.handles:
            return
        if handle not in self._pinned:
            self._pinned[handle] = set()
            handle.pinned_in.append(self)
        entry.handles.add(handle)
        self._pinned[handle].add(entry)
        if handle.has_ended:  # on another thread, which may have read `pinned_in` before the append above
            self._unpin(handle)

    def put(self, entry: LoadedModel[T]) -> None:
        """Add a version and retire the one that it replaces."""
        self.retire(entry.key)
        self.entries[entry.key] = entry
        self.changed.notify_all()

    def retire(self, key: VersionKey) -> None:
        """Stop serving a version; it is unloaded once no call uses it."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.retired.append(entry)
            self.changed.notify_all()

    def remove(self, entry: LoadedModel[T]) -> None:
        """Remove a version, which the caller unloads."""
        if self.entries.get(entry.key) is entry:
            del self.entries[entry.key]
        else:
            self.retired.remove(entry)
        for handle in entry.handles:
            self._pinned[handle].discard(entry)

    def release(self, handle: CallHandle) -> None:
        """Unpin all models of a call; on any thread."""
        with self.changed:
            self._unpin(handle)

    def release_later(self, handle: CallHandle) -> None:
        """Queue a call for `release_abandoned`. Finalizers use this: they run anywhere and must not take a lock."""
        self._abandoned.put(handle)

    def release_abandoned(self) -> None:
        """Unpin the models of the calls queued by `release_later`."""
        while True:
            try:
                self._unpin(self._abandoned.get_nowait())
            except Empty:
                return

    def _unpin(self, handle: CallHandle) -> None:
        for entry in self._pinned.pop(handle, ()):
            entry.handles.discard(handle)
        self.changed.notify_all()


def choose_eviction(
    entries: Iterable[L], handle: CallHandle | None, context: object, evict_last: L | None = None
) -> tuple[L | None, bool]:
    """Return the version to evict, if any, and whether to wait for a running call instead.

    `entries` are in the order of eviction; the caller blocks `context` while it waits. Preference: versions that no
    call uses, versions that only `handle` uses, then waiting for running calls. If no running call is left, versions
    are evicted whose calls all wait for a model or can't proceed while `context` is blocked: otherwise all would
    deadlock. `evict_last` is considered after everything else.
    """
    own = stalled = None
    must_wait = False
    for entry in entries:
        if entry is evict_last:
            continue
        if not entry.handles:
            return entry, False
        if entry.handles == {handle}:
            own = own or entry
        elif _is_stalled(entry, context):
            stalled = stalled or entry
        else:
            must_wait = True
    if own is not None or must_wait:
        return own, own is None
    if stalled is None and evict_last is not None:
        return choose_eviction([evict_last], handle, context)
    return stalled, False


def _is_stalled(entry: LoadedModel[Any], context: object) -> bool:
    return all(handle.waiting or handle.context == context for handle in entry.handles)


# The scope of a call.


class _CallScope:
    """Ends its handle, at the latest when it is garbage-collected: the result of a call may be dropped unused."""

    __slots__ = ("handle",)

    def __init__(self) -> None:
        self.handle = CallHandle()

    def end(self) -> None:
        handle = self.handle
        handle.has_ended = True
        while handle.pinned_in:
            handle.pinned_in.pop().release(handle)

    def __del__(self) -> None:
        handle = self.handle
        handle.has_ended = True
        while handle.pinned_in:
            handle.pinned_in.pop().release_later(handle)


_current: ContextVar[_CallScope | None] = ContextVar("cortex_call", default=None)
_NO_SCOPE = nullcontext()


def current_call() -> CallHandle | None:
    """Return the handle of the running call; None outside of calls and after the call has ended."""
    scope = _current.get()
    return None if scope is None or scope.handle.has_ended else scope.handle


#: The event loops of threads whose plain calls block them without seeing a running loop, by the id of the thread.
_blocking_loops: dict[int, asyncio.AbstractEventLoop] = {}


@contextmanager
def blocking_loop(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Make `loop` the execution context of this thread's calls that see no running loop."""
    thread = threading.get_ident()
    _blocking_loops[thread] = loop
    try:
        yield
    finally:
        del _blocking_loops[thread]


def execution_context() -> object:
    """Return this thread's event loop, else its id: a blocking wait blocks everything with the same context."""
    thread = threading.get_ident()
    return asyncio._get_running_loop() or _blocking_loops.get(thread, thread)


class call_scope:  # noqa: N801 – used like a function; a generator-based context manager takes twice as long
    """Pin the models obtained inside the block until it ends."""

    __slots__ = ("_scope", "_token")

    def __enter__(self) -> None:
        self._scope = _CallScope()
        self._token = _current.set(self._scope)

    def __exit__(self, *raised: object) -> None:
        _current.reset(self._token)
        self._scope.end()


def ensure_call_scope() -> AbstractContextManager[None]:
    """Return the running call's scope, or a new one: threads that the user's code starts belong to no call."""
    return call_scope() if current_call() is None else _NO_SCOPE


def with_call_scope(call: Callable[P, Any]) -> Callable[P, Any]:
    """Return `call` with a scope around each call, which lasts until its coroutine or generator is exhausted."""

    @wraps(call)
    def scoped(*args: P.args, **kwargs: P.kwargs) -> Any:
        scope = _CallScope()
        token = _current.set(scope)
        wrapped = None
        try:
            result = call(*args, **kwargs)
            wrapped = _wrap(result, scope)
            return result if wrapped is None else wrapped
        finally:
            _current.reset(token)
            if wrapped is None:
                scope.end()

    return scoped


def _wrap(result: Any, scope: _CallScope) -> Any:
    """Wrap a generator or awaitable; return None for any other result."""
    if inspect.isgenerator(result):
        return _iterate(result, scope)
    if inspect.isasyncgen(result):
        return _iterate_async(result, scope)
    return _await(result, scope) if inspect.isawaitable(result) else None


async def _await(result: Awaitable[Any], scope: _CallScope) -> Any:
    wrapped = None
    token = _enter(scope)
    try:
        value = await result
        # A coroutine may return a generator.
        wrapped = _wrap(value, scope)
        return value if wrapped is None else wrapped
    finally:
        _current.reset(token)
        if wrapped is None:
            scope.end()


def _iterate(result: Generator[Any, Any, Any], scope: _CallScope) -> Generator[Any, Any, Any]:
    """Iterate inside the scope; each step may run in another context and on another thread."""
    try:
        while True:
            token = _enter(scope)
            try:
                chunk = next(result)
            except StopIteration as end:
                return end.value
            finally:
                _current.reset(token)
            yield chunk
    finally:
        _close(result, scope)


def _close(result: Generator[Any, Any, Any], scope: _CallScope) -> None:
    token = _enter(scope)
    try:
        result.close()
    finally:
        _current.reset(token)
        scope.end()


async def _iterate_async(result: AsyncGenerator[Any, Any], scope: _CallScope) -> AsyncGenerator[Any, None]:
    try:
        while True:
            token = _enter(scope)
            try:
                chunk = await anext(result)
            except StopAsyncIteration:
                return
            finally:
                _current.reset(token)
            yield chunk
    finally:
        token = _enter(scope)
        try:
            await result.aclose()
        finally:
            _current.reset(token)
            scope.end()


def _enter(scope: _CallScope) -> Any:
    scope.handle.context = execution_context()
    return _current.set(scope)
