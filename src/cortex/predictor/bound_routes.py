"""The routes of the user's object: their methods, and the parameters of paths and queries."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from cortex.errors import UserError
from cortex.models.loaded_models import with_call_scope
from cortex.payloads.annotations import AnnotationProblem, resolve, takes_repeated
from cortex.payloads.json_object import Json
from cortex.payloads.path_template import decode_value
from cortex.payloads.signature import ParameterSignature, RouteSignature
from cortex.payloads.validation import PayloadError, from_pydantic
from cortex.predictor.binding import BoundMethod, bind_method, where_defined
from cortex.predictor.interface import Generation, Signature
from cortex.predictor.interface_rules import ArgumentKind, declared_arguments, fastapi_function, fix_of_default
from cortex.predictor.routes import ARGUMENTS, NO_PARAMETERS, Route, declared_routes

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from starlette.datastructures import QueryParams

_TEXTS = (inspect.Parameter.empty, str, Any, object)


class PathParameter:
    """A parameter of a path: from the text in the path to the type that the user's argument annotates."""

    def __init__(self, name: str, annotation: Any, default: Any = None) -> None:
        """Prepare the conversion; `default` may be a `Field` or FastAPI's `Path` with limits.

        Raises: what pydantic raises for annotations that it can't read.
        """
        self.name = name
        self._adapter = _adapter(_with_field(annotation, default) if _is_field(default) else annotation)
        self.signature = ParameterSignature(name, _schema(self._adapter))

    def convert(self, value: str) -> Any:
        """Return the argument for a value as it was sent. Raises: PayloadError."""
        try:
            text = decode_value(value)
        except UnicodeDecodeError:
            message = "Input should be a text in UTF-8"
            detail = {"type": "string_unicode", "loc": ["path", self.name], "msg": message}
            raise PayloadError(f"{self.name}: {message}", [detail], (self.name,)) from None
        return _convert(self._adapter, text, self.name, "path")


class QueryParameter:
    """An argument with a default: a request may give it a value in its query string.

    The default may be a `Field` of pydantic or a `Query` of FastAPI, with limits, an alias, and a default or none.
    """

    def __init__(self, name: str, annotation: Any, default: Any) -> None:
        """Prepare the conversion. Raises: AnnotationProblem, and what pydantic raises, for what no query can have."""
        self.argument = name
        self._has_field = _is_field(default)
        if self._has_field:
            annotation = _with_field(annotation, default)
        found = _metadata_fields(annotation)
        fields = [each for each in found if _is_field(each)]
        for function in map(fastapi_function, found):
            if fix := fix_of_default(function, name):
                raise AnnotationProblem(f"{function}() of FastAPI is not supported: {fix}")
        self.is_documented = all(getattr(each, "include_in_schema", True) for each in fields)  #: as FastAPI has it
        aliases = [each.validation_alias or each.alias for each in fields]
        self._name = next((alias for alias in aliases if alias is not None), name)  #: in query strings
        if not isinstance(self._name, str):
            raise AnnotationProblem("its alias must be one name")
        self._adapter = _adapter(annotation)
        self._is_list = takes_repeated(annotation)
        schema = _schema(self._adapter)
        if _has_object(schema):
            raise AnnotationProblem("a value in a query string is a text, a number and the like, or a list of these")
        if isinstance(default, str | int | float):
            schema = {**schema, "default": default}
        is_required = self._has_field and default.is_required()
        self.signature = ParameterSignature(self._name, schema, "query", is_required)

    def fill(self, arguments: dict[str, Any], query_params: QueryParams) -> None:
        """Set the argument for a request; one without the parameter gets the default. Raises: PayloadError."""
        if self._name in query_params:
            value = query_params.getlist(self._name) if self._is_list else query_params[self._name]
            arguments[self.argument] = _convert(self._adapter, value, self._name, "query")
        elif self._has_field:
            default = self._adapter.get_default_value() if self._adapter else None
            if default is None:
                detail = {"type": "missing", "loc": ["query", self._name], "msg": "Field required"}
                raise PayloadError(f"{self._name}: Field required", [detail], (self._name,))
            arguments[self.argument] = default.value


def _is_field(default: Any) -> bool:
    """Return whether a default is a `Field` of pydantic, or derived from it, as those of FastAPI are."""
    fields = sys.modules.get("pydantic.fields")  # not imported here: few files use pydantic
    return fields is not None and isinstance(default, fields.FieldInfo)


def _metadata_fields(annotation: Any) -> list[Any]:
    """Return the fields of pydantic, and what only FastAPI fills, in an annotation."""
    metadata = getattr(annotation, "__metadata__", ())
    return [each for each in metadata if _is_field(each) or fastapi_function(each)]


def _with_field(annotation: Any, field: Any) -> Any:
    return Annotated[str if annotation is inspect.Parameter.empty else annotation, field]


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
        query = (each.signature for each in self.query if each.is_documented)
        parameters = (*(each.signature for each in self.parameters), *query)
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
        for each in self.query:
            each.fill(arguments, query_params)
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
    """Return a parameter. Raises: UserError if its annotation can't be used."""
    try:
        return PathParameter(name, resolve(function, name), _default(function, name))
    except Exception as problem:  # pydantic runs code of the user's types
        raise _unusable(function, method, name, problem) from problem


def _query_parameters(function: Any, method: str, others: Container[str]) -> Iterator[QueryParameter]:
    """Yield a parameter for each argument with a default, except `others` and private ones.

    An argument of a type that no query string has keeps its default. Raises: UserError if that is a field, and for an
    annotation that can't be resolved, or asks for what only FastAPI fills.
    """
    for argument in declared_arguments(function) or ():
        name = argument.name
        is_private = argument.kind is ArgumentKind.POSITIONAL_ONLY or name.startswith("_")
        if not argument.has_default or is_private or name in others:
            continue
        try:
            annotation = resolve(function, name)
        except AnnotationProblem as problem:
            raise _unusable(function, method, name, problem) from problem
        try:
            yield QueryParameter(name, annotation, _default(function, name))
        except Exception as problem:  # pydantic runs code of the user's types
            if _is_field(_default(function, name)) or _metadata_fields(annotation):
                raise _unusable(function, method, name, problem) from problem
            _warn(function, method, name, "it keeps its default", problem)


def _default(function: Any, name: str) -> Any:
    parameter = inspect.signature(function).parameters.get(name)  # a `**` argument may take it
    return parameter.default if parameter else inspect.Parameter.empty


def _unusable(function: Any, method: str, name: str, problem: Exception) -> UserError:
    message = f"the annotation of {name} can't be used: {_reason(problem)}"
    return UserError(f"{where_defined(function)}{method}(): {message}")


def _warn(function: Any, method: str, name: str, consequence: str, problem: Exception) -> None:
    sys.stderr.write(
        f"warning: {where_defined(function)}{method}(): the annotation of {name} can't be used, so {consequence}:"
        f" {_reason(problem)}\n"
    )


def _reason(problem: Exception) -> str:
    text = str(problem) if isinstance(problem, AnnotationProblem) else f"{type(problem).__name__}: {problem}"
    return text.splitlines()[0]
