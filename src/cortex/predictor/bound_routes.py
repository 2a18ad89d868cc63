"""The routes of the user's object: their methods, and the parameters of their paths."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cortex.models.loaded_models import with_call_scope
from cortex.payloads.annotations import AnnotationProblem, resolve
from cortex.payloads.path_template import decode_value
from cortex.payloads.signature import Json, ParameterSignature, RouteSignature
from cortex.payloads.validation import PayloadError, from_pydantic
from cortex.predictor.binding import BoundMethod, bind_method, where_defined
from cortex.predictor.interface import Generation, Signature
from cortex.predictor.routes import ARGUMENTS, Route, declared_routes

_TEXTS = (inspect.Parameter.empty, str, Any, object)


class PathParameter:
    """A parameter of a path: from the text in the path to the type that the user's argument annotates."""

    def __init__(self, name: str, annotation: Any) -> None:
        """Prepare the conversion. Raises: what pydantic raises for annotations that it can't read."""
        self.name = name
        self._adapter: Any = None
        schema: Json = {"type": "string"}
        if not any(annotation is each for each in _TEXTS):
            from pydantic import TypeAdapter  # noqa: PLC0415 - only for parameters with other types

            self._adapter = TypeAdapter(annotation)
            schema = self._adapter.json_schema()
        self.signature = ParameterSignature(name, schema)

    def convert(self, value: str) -> Any:
        """Return the argument for a value as it was sent. Raises: PayloadError."""
        try:
            text = decode_value(value)
        except UnicodeDecodeError:
            message = "Input should be a text in UTF-8"
            detail = {"type": "string_unicode", "loc": ["path", self.name], "msg": message}
            raise PayloadError(f"{self.name}: {message}", [detail]) from None
        if self._adapter is None:
            return text
        from pydantic import ValidationError  # noqa: PLC0415 - imported already

        try:
            return self._adapter.validator.validate_strings(text)
        except ValidationError as error:
            raise from_pydantic(error, text, self.name, ("path", self.name)) from None


@dataclass(frozen=True, slots=True)
class BoundRoute:
    """A route of the user's object."""

    route: Route
    method: BoundMethod  #: its `call` has no values for the parameters of the path; `with_values` returns one that has
    parameters: tuple[PathParameter, ...]
    function: Callable[..., Any]

    @property
    def signature(self) -> RouteSignature:
        """Return what requests have to be."""
        parameters = tuple(each.signature for each in self.parameters)
        return RouteSignature(self.route.template.plain, parameters, self.method.signature)

    def with_values(self, values: tuple[str, ...]) -> BoundMethod:
        """Return the method for a request whose path has these values; its call converts them."""
        return replace(self.method, call=partial(self._call, values)) if values else self.method

    def _call(self, values: tuple[str, ...], payload: Any, query_params: Any, headers: Any) -> Any:
        arguments = {each.name: each.convert(value) for each, value in zip(self.parameters, values, strict=True)}
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
    parameters = tuple(_parameter(function, name, parameter) for parameter in each.template.parameters)
    if in_scope:
        method, function = method.in_scope(), with_call_scope(function)
    return BoundRoute(each, method, parameters, function)


def _parameter(function: Any, method: str, name: str) -> PathParameter:
    """Return a parameter; its text is not converted if its annotation can't be used."""
    try:
        return PathParameter(name, resolve(function, name))
    except Exception as problem:  # pydantic runs code of the user's types
        reason = str(problem) if isinstance(problem, AnnotationProblem) else f"{type(problem).__name__}: {problem}"
        sys.stderr.write(
            f"warning: {where_defined(function)}{method}(): the annotation of {name} can't be used, so it is not"
            f" validated: {reason.splitlines()[0]}\n"
        )
        return PathParameter(name, inspect.Parameter.empty)
