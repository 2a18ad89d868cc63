"""Routes: methods of the user's class that answer requests at paths below the endpoint.

    @cortex.route("GET", "/users/{id}")
    def user(self, id: int): …

The decorator marks a function and changes nothing about it. Sources (`route_checks`) and live classes (`loader`) are
checked by the same rules. `bound_routes` binds the functions, and `worker/requests/routes.py` finds the route of a
request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cortex.lifecycle import ApiKind
from cortex.payloads.path_template import PathTemplate, RouteError, parse_template
from cortex.predictor.interface import Generation, Signature

VERBS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_ATTRIBUTE = "__cortex_routes__"
#: Paths that Cortex answers itself, with all below them.
_RESERVED = {
    "/v2": "the Open Inference Protocol",
    "/docs": "the documentation of the API",
    "/openapi.json": "the OpenAPI document of the API",
    "/info": "the description of the API",
}
#: One that is reserved for new code only: older code may have a route there, and must start.
READY_PATH = "/readyz"
#: Parts of a request that a method may declare, besides the parameters of its path.
ARGUMENTS = ("payload", "query_params", "headers")
#: Names that no parameter of a path or query has.
NO_PARAMETERS = frozenset({"self", "batch_id", *ARGUMENTS})

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Route:
    """A verb and a path below the endpoint."""

    verb: str
    template: PathTemplate

    def __str__(self) -> str:
        return f"{self.verb} {self.template.text}"

    @property
    def key(self) -> tuple[str, str]:
        """Return what is equal for routes that answer the same requests."""
        return self.verb, self.template.shape

    def signature(self, generation: Generation) -> Signature:
        """Return the arguments that its method may declare."""
        signature = generation.method_signature
        return replace(signature, required=self.template.parameters, optional=ARGUMENTS, fills_defaults=True)


def route(verb: str, path: str) -> Callable[[F], F]:
    """Route requests with `verb` at `path` below the endpoint to a method of a RealtimeAPI's class.

    `path` may have parameters: `/users/{id}`, `/files/{name:path}`. The method declares them as arguments; those with a
    default are filled from the query string. A method may have several routes. Raises: ValueError for a verb or path
    that is not supported.
    """
    declared = parse_route(verb, path)

    def mark(function: F) -> F:
        target: Any = function.__func__ if isinstance(function, staticmethod | classmethod) else function
        setattr(target, _ATTRIBUTE, (declared, *getattr(target, _ATTRIBUTE, ())))
        return function

    return mark


def parse_route(verb: object, path: object) -> Route:
    """Return the route of a decorator's arguments. Raises: RouteError."""
    if not isinstance(verb, str) or verb.upper() not in VERBS:
        shown = f'"{verb}"' if isinstance(verb, str) else "the first argument"
        of_gateway = {"HEAD": "HEAD is answered like GET", "OPTIONS": "the gateway answers OPTIONS of browsers"}
        fix = of_gateway.get(str(verb).upper(), 'write @cortex.route("GET", "/path")')
        raise RouteError(f"{shown} is not a verb of routes: {', '.join(VERBS)}", fix)
    if not isinstance(path, str):
        raise RouteError("the path is not a text", 'write @cortex.route("GET", "/path")')
    template = parse_template(path)
    first = "/" + template.text.split("/")[1]
    if first in _RESERVED:
        raise RouteError(f'the path "{path}" is reserved for {_RESERVED[first]}', "choose another path")
    if taken := next((name for name in template.parameters if name in NO_PARAMETERS), None):
        raise RouteError(f'the path "{path}" has the parameter {taken}, which has another meaning', "rename it")
    return Route(verb.upper(), template)


def unsupported(generation: Generation) -> tuple[str, str] | None:
    """Return why code of a generation can't have routes, and the fix; None if it can."""
    if generation.takes_routes:
        return None
    if generation.kind != ApiKind.REALTIME:
        return f"@cortex.route is not supported by `kind: {generation.kind}`", "remove it, or use `kind: RealtimeAPI`"
    if generation.is_grpc:
        return "@cortex.route is not supported by APIs with protobuf_path", "remove it: clients call rpcs"
    if generation.has_application:
        return f"@cortex.route is not supported by `type: {generation.type}`", "add the route to the application"
    return "@cortex.route is only for methods of a class", "define class Handler, and configure `handler:`"


def declared_routes(target: Any) -> list[tuple[str, Route]]:
    """Return the routes of a class or module, each with the name of its function."""
    found: list[tuple[str, Route]] = []
    seen: set[int] = set()
    for name in dir(target):
        function = inspect.getattr_static(target, name, None)  # runs no code of the user
        if isinstance(function, staticmethod | classmethod):
            function = function.__func__
        routes = inspect.getattr_static(function, _ATTRIBUTE, ())
        if routes and id(function) not in seen:
            found += [(name, each) for each in routes]
        seen.add(id(function))
    return found


def repeated(routes: Iterable[tuple[str, Route]]) -> Iterator[tuple[int, str]]:
    """Yield the index of each route that answers the same requests as one before it, and the name of that function."""
    first: dict[tuple[str, str], str] = {}
    for index, (name, each) in enumerate(routes):
        if each.key in first:
            yield index, first[each.key]
        first.setdefault(each.key, name)
