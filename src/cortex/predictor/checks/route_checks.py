"""Routes in the user's source file, found and checked without running it. `routes` has the rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cortex.payloads.path_template import RouteError
from cortex.predictor.routes import READY_PATH, Route, parse_route

if TYPE_CHECKING:
    from cortex.predictor.checks.source_checks import FunctionNode, Scope

_ARGUMENTS = ("verb", "path")
_PROPERTIES = frozenset({"property", "cached_property", "functools.cached_property"})
_UNKNOWN = object()


@dataclass(frozen=True)
class RouteDecorator:
    """`@cortex.route(…)` of a function."""

    function: FunctionNode
    node: ast.expr  #: the decorator, or the argument that is not valid
    route: Route | None = None  #: None: it is not valid, or known only when it runs
    error: RouteError | None = None


class RouteNames:
    """The names by which a module calls the decorator."""

    def __init__(self, module: Scope) -> None:
        self._names = names_of(module, "cortex", "route")

    def is_route(self, decorator: ast.expr) -> bool:
        """Return whether a decorator is `cortex.route`, called or not."""
        return name_of(decorator) in self._names

    def decorators(self, scope: Scope) -> list[RouteDecorator]:
        """Return the decorators of the functions of a class or module, in the order of the file."""
        functions = sorted(scope.functions().values(), key=lambda function: function.lineno)
        return [
            _decorator(function, decorator)
            for function in functions
            for decorator in function.decorator_list
            if self.is_route(decorator)
        ]


def name_of(decorator: ast.expr) -> str:
    """Return the name of a decorator, called or not; empty for other expressions."""
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(function) if isinstance(function, ast.Name | ast.Attribute) else ""


def names_of(module: Scope, package: str, function: str) -> set[str]:
    """Return the names by which a module calls a function of a package."""
    return {
        found
        for name, bindings in module.bindings.items()
        for binding in bindings
        for found in _names(name, binding.node, package, function)
    }


def _names(name: str, statement: ast.stmt, package: str, function: str) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            if alias.asname == name and alias.name == package:
                yield f"{name}.{function}"
            elif alias.asname is None and alias.name.partition(".")[0] == name == package:
                yield f"{package}.{function}"
    elif isinstance(statement, ast.ImportFrom) and statement.module == package and not statement.level:
        for alias in statement.names:
            if alias.name == function and (alias.asname or alias.name) == name:
                yield name


def _decorator(function: FunctionNode, node: ast.expr) -> RouteDecorator:
    """Return a decorator with its route, if its arguments are literals."""
    for other in function.decorator_list:
        if (name := name_of(other)) in _PROPERTIES:
            error = RouteError("a property can't be a route, because it is not called", f"remove @{name}")
            return RouteDecorator(function, other, error=error)
    if not isinstance(node, ast.Call):
        fix = 'write @cortex.route("GET", "/path")'
        return RouteDecorator(function, node, error=RouteError("@cortex.route has no verb and path", fix))
    arguments = dict(zip(_ARGUMENTS, node.args, strict=False))
    arguments |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg in _ARGUMENTS}
    verb, path = (arguments.get(name) for name in _ARGUMENTS)
    verb_value, path_value = _literal(verb), _literal(path)
    is_whole = not any(keyword.arg is None for keyword in node.keywords)
    if verb is not None and path is None and verb_value is not _UNKNOWN and is_whole:
        shown = verb_value if isinstance(verb_value, str) and verb_value.startswith("/") else "/path"
        missing = "verb" if shown is verb_value else "path"
        fix = f'write @cortex.route("GET", "{shown}")'
        return RouteDecorator(function, verb, error=RouteError(f"@cortex.route has no {missing}", fix))
    if verb is None or path is None or verb_value is _UNKNOWN or path_value is _UNKNOWN:
        return RouteDecorator(function, node)
    try:
        route = parse_route(verb_value, path_value)
        if route.template.text.rstrip("/") == READY_PATH:
            raise RouteError(f'the path "{READY_PATH}" is reserved for the readiness of the API', "choose another path")
        return RouteDecorator(function, node, route)
    except RouteError as error:
        return RouteDecorator(function, path if _is_verb(verb_value) else verb, error=error)


def _literal(node: ast.expr | None) -> object:
    """Return the value of a literal, also of a list or a tuple; `_UNKNOWN` for what is known only when it runs."""
    try:
        return _UNKNOWN if node is None else ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return _UNKNOWN


def _is_verb(value: object) -> bool:
    try:
        parse_route(value, "/path")
    except RouteError:
        return False
    return True
