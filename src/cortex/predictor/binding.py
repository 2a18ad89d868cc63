"""Bind the user's methods: pass only the arguments that a signature declares, and classify results.

This module has no notion of HTTP, nor of how the object was constructed.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any, Literal

from cortex.errors import UserError
from cortex.models.loaded_models import with_call_scope
from cortex.payloads.annotations import AnnotationProblem, element, payload_type, resolve, result_signature
from cortex.payloads.payload_type import PayloadType
from cortex.payloads.signature import BodySignature, MethodSignature
from cortex.predictor.interface import Generation
from cortex.predictor.interface_rules import declared_arguments, declared_names

Kind = Literal["sync", "async", "generator", "async_generator"]
Call = Callable[[Any, Any, Any], Any]
AfterCall = Callable[[Any, Any, Any, Any], Any]


class Bodies(Enum):
    """Rules by which a payload is parsed from a body whose content type is not JSON."""

    BY_TYPE = auto()  #: by the content type
    JSON_OVER_FORMS = auto()  #: likewise, but a form whose body is JSON is parsed as JSON
    JSON_ONLY = auto()  #: not at all: the payload is None


@dataclass(frozen=True, slots=True)
class BoundMethod:
    """One serving method: called with all parts of a request, it passes those that the user declared."""

    name: str
    arguments: tuple[str, ...]
    needs_payload: bool
    needs_query_params: bool
    needs_headers: bool
    kind: Kind
    call: Call  #: (payload, query_params, headers) → result of the user's method
    bodies: Bodies = Bodies.BY_TYPE
    payload_type: PayloadType | None = None  #: None: the payload is not annotated, and is what `bodies` says
    after: AfterCall | None = None  #: (response, payload, query_params, headers), after the response is sent
    #: Like `call`, but reports the value of each step to a function (name, value).
    traced: Callable[[Any, Callable[[str, Any], None]], Any] | None = None
    signature: MethodSignature = field(kw_only=True)

    def in_scope(self) -> BoundMethod:
        """Return a copy whose calls keep the models that they use loaded until they return."""
        return replace(self, call=with_call_scope(self.call), after=with_call_scope(self.after) if self.after else None)


def split_callback(result: Any, generation: Generation) -> tuple[Any, Callable[[], Any] | None]:
    """Split `(result, callback)` if the generation supports callbacks; any other value is the result."""
    if type(result) is tuple and len(result) == 2 and callable(result[1]) and generation.returns_callback:
        return result
    return result, None


def result_kind(result: Any) -> Kind:
    """Classify the result of a method that looked synchronous: a value, an awaitable or an iterator.

    Decorators can hide the kind of a function, and a plain method may return a generator.
    """
    if inspect.isgenerator(result):
        return "generator"
    if inspect.isasyncgen(result):
        return "async_generator"
    return "async" if inspect.isawaitable(result) else "sync"


def bind_function(function: Any, name: str, verb: str, metadata: dict[str, Any]) -> BoundMethod:
    """Bind a function of a module that answers requests with `verb`; each call passes `metadata`."""
    return BoundMethod(
        name=name,
        arguments=("sample", "metadata"),
        needs_payload=True,
        needs_query_params=False,
        needs_headers=False,
        kind=call_kind(function),
        call=lambda payload, query_params, headers: function(payload, metadata),
        bodies=Bodies.JSON_ONLY,
        signature=method_signature(function, name, verb, ("payload",)),
    )


def bind_method(
    instance: object, name: str, verb: str, generation: Generation, is_batched: bool = False
) -> BoundMethod:
    """Bind a method of the user's object that answers requests with `verb`, and the hook that runs after it.

    With `is_batched`, it is called with a list of payloads, and returns a list of results.
    """
    method = getattr(instance, name)
    names = declared_names(method, generation.method_signature)
    after = getattr(instance, generation.after_hook, None) if generation.after_hook else None
    after_names: tuple[str, ...] = ()
    if after is not None and generation.after_hook is not None:
        after_names = declared_names(after, generation.hooks[generation.after_hook])
    # Parts of the request that only the hook declares must be parsed as well.
    needed = {*names, *after_names}
    bodies = bodies_of(method, generation)
    of_one = element if is_batched else None
    types = bind_types(method, name, generation, of_one, of_one)
    return BoundMethod(
        name=name,
        arguments=names,
        needs_payload="payload" in needed,
        needs_query_params="query_params" in needed,
        needs_headers="headers" in needed,
        kind=call_kind(method),
        call=_bind_arguments(method, names),
        bodies=bodies,
        payload_type=types.payload,
        after=_bind_after(after, after_names) if after is not None else None,
        signature=method_signature(method, name, verb, names, types),
    )


@dataclass(frozen=True, slots=True)
class MethodTypes:
    """The types in the annotations of a method."""

    payload: PayloadType | None = None  #: None: its payload is not validated
    result: BodySignature = field(default_factory=BodySignature)


def bind_types(
    method: Any,
    name: str,
    generation: Generation,
    payload_of: Callable[[Any], Any] | None = None,
    result_of: Callable[[Any], Any] | None = None,
) -> MethodTypes:
    """Return the types that a method annotates.

    `payload_of` and `result_of` convert its annotations to those of one payload and one result.
    Raises: UserError for an annotation that nothing can be read as.
    """
    if not generation.is_typed:
        return MethodTypes()
    payload = None
    try:
        annotation = resolve(method, "payload")
        if annotation is not inspect.Parameter.empty:
            payload = payload_type(payload_of(annotation) if payload_of else annotation)
            arguments = declared_arguments(method) or ()
            if payload is not None and any(each.name == "payload" and each.has_default for each in arguments):
                payload.set_default(inspect.signature(method).parameters["payload"].default)
    except AnnotationProblem as problem:
        message = f"the annotation of payload can't be used: {problem}; annotate another type, Any, or nothing"
        raise UserError(f"{where_defined(method)}{name}(): {message}") from problem
    return MethodTypes(payload, result=_result_of(method, result_of))


def _result_of(method: Any, result_of: Callable[[Any], Any] | None) -> BodySignature:
    try:
        annotation = resolve(method, "return")
    except AnnotationProblem:
        return BodySignature()
    return result_signature(result_of(annotation) if result_of else annotation)


def where_defined(function: Any) -> str:
    """Return the beginning of a message about a function: its file and line, if they are known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    path = code.co_filename
    return f"{os.path.relpath(path) if path.startswith(str(Path.cwd())) else path}:{code.co_firstlineno}: "


def method_signature(
    method: Any, name: str, verb: str, arguments: Container[str], types: MethodTypes | None = None
) -> MethodSignature:
    """Return what a method takes, `arguments` of a request, and what it returns."""
    documentation = inspect.getdoc(method) if inspect.isroutine(method) else None  # not that of functools.partial
    summary, _, description = (documentation or "").partition("\n")
    types = types or MethodTypes()
    payload = BodySignature() if types.payload is None else types.payload.signature
    return MethodSignature(
        verb,
        name,
        payload=payload if "payload" in arguments else None,
        result=types.result,
        summary=summary.strip(),
        description=description.strip(),
        query_params="query_params" in arguments,
        headers="headers" in arguments,
        streams=call_kind(method) in ("generator", "async_generator"),
    )


def bodies_of(method: Any, generation: Generation) -> Bodies:
    """Return the rule by which the payload of a method without a payload type is parsed."""
    # With `FormData | Item`, say, a form is a form, also if its body is JSON.
    has_form = "FormData" in str(getattr(method, "__annotations__", {}).get("payload"))
    return Bodies.JSON_OVER_FORMS if generation.json_over_forms and not has_form else Bodies.BY_TYPE


def _bind_arguments(f: Any, names: tuple[str, ...]) -> Call:
    """Return the fastest call that passes exactly `names`: chosen once, so that calls inspect nothing."""
    if "batch_id" in names:  # requests have no batch
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
    """Classify a function by its declaration."""
    if not (inspect.isroutine(function) or isinstance(function, functools.partial)):
        function = type(function).__call__.__get__(function)  # an object with `__call__`
    if inspect.isasyncgenfunction(function):
        return "async_generator"
    if inspect.isgeneratorfunction(function):
        return "generator"
    return "async" if inspect.iscoroutinefunction(function) else "sync"
