"""Bind the user's methods: calls that pass just what each signature names, and of what kind their results are.

It must not know HTTP, nor where the object came from.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from cortex.models.loaded_models import with_call_scope
from cortex.predictor.interface import Generation
from cortex.predictor.source_checks import declared_names

Kind = Literal["sync", "async", "generator", "async_generator"]
Call = Callable[[Any, Any, Any], Any]
AfterCall = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class BoundMethod:
    """One serving method, ready to be called with everything a request has; it passes on what the user named."""

    name: str
    arguments: tuple[str, ...]
    needs_payload: bool
    needs_query_params: bool
    needs_headers: bool
    kind: Kind
    call: Call  #: (payload, query_params, headers) → what the user's method returned
    after: AfterCall | None = None  #: (response, payload, query_params, headers), once the answer is on its way
    after_is_async: bool = False

    def in_scope(self) -> BoundMethod:
        """Return the same with calls in which models that they got stay loaded until they end."""
        return replace(self, call=with_call_scope(self.call), after=with_call_scope(self.after) if self.after else None)


def split_callback(result: Any, generation: Generation) -> tuple[Any, Callable[[], Any] | None]:
    """Split `(result, callback)` where the generation answers that way; any other value is a result."""
    if type(result) is tuple and len(result) == 2 and callable(result[1]) and generation.returns_callback:
        return result
    return result, None


def result_kind(result: Any) -> Kind:
    """Tell what a method that looked synchronous returned: a value, or something to await or iterate.

    Decorators hide the nature of a function, and a plain method may return a generator that it made.
    """
    if inspect.isgenerator(result):
        return "generator"
    if inspect.isasyncgen(result):
        return "async_generator"
    return "async" if inspect.isawaitable(result) else "sync"


def bind_function(function: Any, name: str, metadata: dict[str, Any]) -> BoundMethod:
    """Bind the function of a module; it gets `metadata` at each call."""
    return BoundMethod(
        name=name,
        arguments=("sample", "metadata"),
        needs_payload=True,
        needs_query_params=False,
        needs_headers=False,
        kind=call_kind(function),
        call=lambda payload, query_params, headers: function(payload, metadata),
    )


def bind_method(instance: object, name: str, generation: Generation) -> BoundMethod:
    """Bind a method of the user's object, and the hook that runs after it."""
    method = getattr(instance, name)
    names = declared_names(method, generation.method_signature)
    after = getattr(instance, generation.after_hook, None) if generation.after_hook else None
    after_names: tuple[str, ...] = ()
    if after is not None and generation.after_hook is not None:
        after_names = declared_names(after, generation.hooks[generation.after_hook])
    # The hook sees the request too, so what only the hook names must be parsed as well.
    needed = {*names, *after_names}
    return BoundMethod(
        name=name,
        arguments=names,
        needs_payload="payload" in needed,
        needs_query_params="query_params" in needed,
        needs_headers="headers" in needed,
        kind=call_kind(method),
        call=_bind_arguments(method, names),
        after=_bind_after(after, after_names) if after is not None else None,
        after_is_async=after is not None and call_kind(after) == "async",
    )


def _bind_arguments(f: Any, names: tuple[str, ...]) -> Call:
    """Build the cheapest call that passes just `names`: chosen once, nothing is looked at per call."""
    if "batch_id" in names:  # belongs to jobs; a realtime request has none
        f = functools.partial(f, batch_id=None)
    calls: dict[tuple[bool, bool, bool], Call] = {
        (False, False, False): lambda p, q, h: f(),
        (True, False, False): lambda p, q, h: f(payload=p),
        (False, True, False): lambda p, q, h: f(query_params=q),
        (False, False, True): lambda p, q, h: f(headers=h),
        (True, True, False): lambda p, q, h: f(payload=p, query_params=q),
        (True, False, True): lambda p, q, h: f(payload=p, headers=h),
        (False, True, True): lambda p, q, h: f(query_params=q, headers=h),
        (True, True, True): lambda p, q, h: f(payload=p, query_params=q, headers=h),
    }
    return calls["payload" in names, "query_params" in names, "headers" in names]


def _bind_after(hook: Any, names: tuple[str, ...]) -> AfterCall:
    def after(response: Any, payload: Any, query_params: Any, headers: Any) -> Any:
        values = {"response": response, "payload": payload, "query_params": query_params, "headers": headers}
        return hook(**{name: values[name] for name in names})

    return after


def call_kind(function: Any) -> Kind:
    """Tell what calls of a function give, by how it is declared."""
    if not (inspect.isroutine(function) or isinstance(function, functools.partial)):
        function = type(function).__call__.__get__(function)  # an object with `__call__`
    if inspect.isasyncgenfunction(function):
        return "async_generator"
    if inspect.isgeneratorfunction(function):
        return "generator"
    return "async" if inspect.iscoroutinefunction(function) else "sync"
