"""The routes of the user's object: their methods, and the parameters of paths and queries."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cortex.models.loaded_models import with_call_scope
from cortex.payloads.annotations import AnnotationProblem, resolve, takes_repeated
from cortex.payloads.path_template import decode_value
from cortex.payloads.signature import Json, ParameterSignature, RouteSignature
from cortex.payloads.validation import PayloadError, from_pydantic
from cortex.predictor.binding import BoundMethod, bind_method, where_defined
from cortex.predictor.interface import Generation, Signature
from cortex.predictor.interface_rules import ArgumentKind, declared_arguments
from cortex.predictor.routes import ARGUMENTS, NO_PARAMETERS, Route, declared_routes

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from starlette.datastructures import QueryParams

_TEXTS = (inspect.Parameter.empty, str, Any, object)


class PathParameter:
    """A parameter of a path: from the text in the path to the type that the user's argument annotates."""

    def __init__(self, name: str, annotation: Any) -> None:
        """Prepare the conversion. Raises: what pydantic raises for annotations that it can't read."""
        self.name = name
        self._adapter = _adapter(annotation)
        self.signature = ParameterSignature(name, _schema(self._adapter))

    def convert(self, value: str) -> Any:
        """Return the argument for a value as it was sent. Raises: PayloadError."""
        try:
            text = decode_value(value)
        except UnicodeDecodeError:
            message = "Input should be a text in UTF-8"
            detail = {"type": "string_unicode", "loc": ["path", self.name], "msg": message}
            raise PayloadError(f"{self.name}: {message}", [detail]) from None
        return _convert(self._adapter, text, self.name, "path")


class QueryParameter:
    """An argument with a default: a request may give it a value in its query string."""

    def __init__(self, name: str, annotation: Any, default: Any) -> None:
        """Prepare the conversion. Raises: AnnotationProblem, and what pydantic raises, for what no query can have."""
        self.name = name
        self._adapter = _adapter(annotation)
        self._is_list = takes_repeated(annotation)
        schema = _schema(self._adapter)
        if _has_object(schema):
            raise AnnotationProblem("a value in a query string is a text, a number and the like, or a list of these")
        if isinstance(default, str | int | float):
            schema = {**schema, "default": default}
        self.signature = ParameterSignature(name, schema, "query")

    def convert(self, query_params: QueryParams) -> Any:
        """Return the argument for a request that has the parameter. Raises: PayloadError."""
        value = query_params.getlist(self.name) if self._is_list else query_params[self.name]
        return _convert(self._adapter, value, self.name, "query")


def _adapter(annotation: Any) -> TypeAdapter[Any] | None:
    """Return what reads values of a type; None if they are texts."""
    if any(annotation is each for each in _TEXTS):
        return None
    from pydantic import TypeAdapter  # noqa: PLC0415 - only for parameters with other types

    return TypeAdapter(annotation)


def _schema(adapter: TypeAdapter[Any] | None) -> Json:
    return {"type": "string"} if adapter is None else adapter.json_schema()


def _has_object(schema: Any) -> bool:
    """Return whether a JSON Schema has objects, also in its definitions."""
    if isinstance(schema, dict):
        return schema.get("type") == "object" or any(map(_has_object, schema.values()))
    return isinstance(schema, list) and any(map(_has_object, schema))


def _convert(adapter: TypeAdapter[Any] | None, value: str | list[str], name: str, location: str) -> Any:
    if adapter is None:
        return value
    from pydantic import ValidationError  # noqa: PLC0415 - imported already

    try:
        return adapter.validate_strings(value) if isinstance(value, str) else adapter.validate_python(value)
    except ValidationError as error:
        raise from_pydantic(error, value, name, (location, name)) from None


@dataclass(frozen=True, slots=True)
class BoundRoute:
    """A route of the user's object."""

    route: Route
    method: BoundMethod  #: `with_values` returns one whose call has the parameters of the path
    parameters: tuple[PathParameter, ...]
    query: tuple[QueryParameter, ...]
    function: Callable[..., Any]

    @property
    def signature(self) -> RouteSignature:
        """Return what requests have to be."""
        parameters = (*(each.signature for each in self.parameters), *(each.signature for each in self.query))
        return RouteSignature(self.route.template.plain, parameters, self.method.signature)

    def with_values(self, values: tuple[str, ...]) -> BoundMethod:
        """Return the method for a request whose path has these values; its call converts them."""
        return replace(self.method, call=partial(self._call, values)) if values else self.method

    def with_query(self) -> BoundRoute:
        """Return a route whose method fills the arguments of the query string, where the path has no parameters."""
        method = replace(self.method, call=partial(self._call, ()), needs_query_params=True)
        return replace(self, method=method)

    def _call(self, values: tuple[str, ...], payload: Any, query_params: Any, headers: Any) -> Any:
        arguments = {each.name: each.convert(value) for each, value in zip(self.parameters, values, strict=True)}
        arguments |= {each.name: each.convert(query_params) for each in self.query if each.name in query_params}
        if "payload" in self.method.arguments:
            arguments["payload"] = payload
        if "query_params" in self.method.arguments:
            arguments["query_params"] = query_params
        if "headers" in self.method.arguments:
            arguments["headers"] = headers
        return self.function(**arguments)


def bind_routes(instance: object, generation: Generation, in_scope: bool) -> tuple[BoundRoute, ...]:
    """Bind the routes of the user's object. With `in_scope`, calls keep the models that they use loaded."""
    if not generation.takes_routes:
        return ()
    plain = replace(generation, after_hook=None, method_signature=Signature(optional=ARGUMENTS))
    return tuple(_bind(instance, name, each, plain, in_scope) for name, each in declared_routes(type(instance)))


def _bind(instance: object, name: str, each: Route, generation: Generation, in_scope: bool) -> BoundRoute:
    function = getattr(instance, name)
    method = bind_method(instance, name, each.verb, generation)
    parameters = tuple(_path_parameter(function, name, parameter) for parameter in each.template.parameters)
    query = tuple(_query_parameters(function, name, {*each.template.parameters, *NO_PARAMETERS}))
    if in_scope:
        method, function = method.in_scope(), with_call_scope(function)
    bound = BoundRoute(each, method, parameters, query, function)
    return bound.with_query() if query else bound


def _path_parameter(function: Any, method: str, name: str) -> PathParameter:
    """Return a parameter; its text is not converted if its annotation can't be used."""
    try:
        return PathParameter(name, resolve(function, name))
    except Exception as problem:  # pydantic runs code of the user's types
        _warn(function, method, name, "it is not validated", problem)
        return PathParameter(name, inspect.Parameter.empty)


def _query_parameters(function: Any, method: str, others: Container[str]) -> Iterator[QueryParameter]:
    """Yield a parameter for each argument with a default, except `others` and private ones.

    An argument whose annotation can't be used keeps its default.
    """
    for argument in declared_arguments(function) or ():
        name = argument.name
        is_private = argument.kind is ArgumentKind.POSITIONAL_ONLY or name.startswith("_")
        if not argument.has_default or is_private or name in others:
            continue
        try:
            yield QueryParameter(name, resolve(function, name), inspect.signature(function).parameters[name].default)
        except Exception as problem:  # pydantic runs code of the user's types
            _warn(function, method, name, "it keeps its default", problem)


def _warn(function: Any, method: str, name: str, consequence: str, problem: Exception) -> None:
    reason = str(problem) if isinstance(problem, AnnotationProblem) else f"{type(problem).__name__}: {problem}"
    sys.stderr.write(
        f"warning: {where_defined(function)}{method}(): the annotation of {name} can't be used, so {consequence}:"
        f" {reason.splitlines()[0]}\n"
    )
