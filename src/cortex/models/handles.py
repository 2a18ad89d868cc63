"""Which call is running: models that a call got stay loaded until it, or the coroutine or generator it returned, ends.

It knows nothing of models: a registry asks for the current `Holder`, and is told when that ends.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, Protocol

P = ParamSpec("P")


class Pinning(Protocol):
    """Keeps what holders have got."""

    def release(self, holder: Holder) -> None:
        """Take it that a holder needs nothing more; on any thread."""
        ...

    def abandon(self, holder: Holder) -> None:
        """Do as `release`, from a finaliser, which may run in the middle of anything: take no lock."""
        ...


class Holder:
    """One call for as long as it may use what it got."""

    __slots__ = ("has_ended", "place", "pinnings", "waiting")

    def __init__(self) -> None:
        self.has_ended = False
        self.place = here()  #: the event loop, or the thread, that its code runs on
        self.waiting = 0  #: threads of it that wait for a model; guarded by the registry's lock
        self.pinnings: list[Pinning] = []


class _Scope:
    """Ends its holder, at the latest when nothing refers to it any more: results may be dropped without being used."""

    __slots__ = ("holder",)

    def __init__(self) -> None:
        self.holder = Holder()

    def end(self) -> None:
        holder = self.holder
        holder.has_ended = True
        while holder.pinnings:
            holder.pinnings.pop().release(holder)

    def __del__(self) -> None:
        holder = self.holder
        holder.has_ended = True
        while holder.pinnings:
            holder.pinnings.pop().abandon(holder)


_current: ContextVar[_Scope | None] = ContextVar("cortex_call", default=None)
_NO_SCOPE = nullcontext()


def current() -> Holder | None:
    """Return the holder of the call that this code belongs to; None outside of calls, and once the call has ended."""
    scope = _current.get()
    return None if scope is None or scope.holder.has_ended else scope.holder


def here() -> object:
    """Return what a blocking wait would keep from running: this thread's event loop, else the thread."""
    return asyncio._get_running_loop() or threading.get_ident()


class call_scope:  # noqa: N801 – a function to those who call it; a generator would take twice as long
    """Let what is got inside stay until the end."""

    __slots__ = ("_scope", "_token")

    def __enter__(self) -> None:
        self._scope = _Scope()
        self._token = _current.set(self._scope)

    def __exit__(self, *raised: object) -> None:
        _current.reset(self._token)
        self._scope.end()


def scope_of_any_thread() -> AbstractContextManager[None]:
    """Return a scope for code that may run on the user's own threads, which belong to no call; none inside of calls."""
    return call_scope() if current() is None else _NO_SCOPE


def in_scope(call: Callable[P, Any]) -> Callable[P, Any]:
    """Return `call` such that each call is a scope, which lasts as long as what it returned is awaited or iterated."""

    @wraps(call)
    def scoped(*args: P.args, **kwargs: P.kwargs) -> Any:
        scope = _Scope()
        token = _current.set(scope)
        lasting = None
        try:
            result = call(*args, **kwargs)
            lasting = _lasting(result, scope)
            return result if lasting is None else lasting
        finally:
            _current.reset(token)
            if lasting is None:
                scope.end()

    return scoped


def _lasting(result: Any, scope: _Scope) -> Any:
    """Wrap what has yet to run; None if there is nothing of the kind."""
    if inspect.isgenerator(result):
        return _iterate(result, scope)
    if inspect.isasyncgen(result):
        return _iterate_async(result, scope)
    return _await(result, scope) if inspect.isawaitable(result) else None


async def _await(result: Awaitable[Any], scope: _Scope) -> Any:
    lasting = None
    token = _enter(scope)
    try:
        value = await result
        # A coroutine may return a generator.
        lasting = _lasting(value, scope)
        return value if lasting is None else lasting
    finally:
        _current.reset(token)
        if lasting is None:
            scope.end()


def _iterate(result: Generator[Any, Any, Any], scope: _Scope) -> Generator[Any, Any, Any]:
    """Pass a generator on; each step may run in another context, and on another thread."""
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


def _close(result: Generator[Any, Any, Any], scope: _Scope) -> None:
    token = _enter(scope)
    try:
        result.close()
    finally:
        _current.reset(token)
        scope.end()


async def _iterate_async(result: AsyncGenerator[Any, Any], scope: _Scope) -> AsyncGenerator[Any, None]:
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


def _enter(scope: _Scope) -> Any:
    scope.holder.place = here()
    return _current.set(scope)
