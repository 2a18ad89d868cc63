"""Routes in the user's source file, found and checked without running it. `routes` has the rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cortex.payloads.path_template import RouteError
from cortex.predictor.routes import Route, parse_route

if TYPE_CHECKING:
    from cortex.predictor.checks.source_checks import FunctionNode, Scope

_ARGUMENTS = ("verb", "path")


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
        self._names: set[str] = set()
        for name, bindings in module.bindings.items():
            for binding in bindings:
                self._names.update(_route_names(name, binding.node))

    def is_route(self, decorator: ast.expr) -> bool:
        """Return whether a decorator is `cortex.route`, called or not."""
        function = decorator.func if isinstance(decorator, ast.Call) else decorator
        return isinstance(function, ast.Name | ast.Attribute) and ast.unparse(function) in self._names

    def decorators(self, scope: Scope) -> list[RouteDecorator]:
        """Return the decorators of the functions of a class or module, in the order of the file."""
        functions = sorted(scope.functions().values(), key=lambda function: function.lineno)
        return [
            _decorator(function, decorator)
            for function in functions
            for decorator in function.decorator_list
            if self.is_route(decorator)
        ]


def _route_names(name: str, statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            if alias.asname == name and alias.name == "cortex":
                yield f"{name}.route"
            elif alias.asname is None and alias.name.partition(".")[0] == name == "cortex":
                yield "cortex.route"
    elif isinstance(statement, ast.ImportFrom) and statement.module == "cortex" and not statement.level:
        for alias in statement.names:
            if alias.name == "route" and (alias.asname or alias.name) == name:
                yield name


def _decorator(function: FunctionNode, node: ast.expr) -> RouteDecorator:
    """Return a decorator with its route, if its arguments are constants."""
    if not isinstance(node, ast.Call):
        fix = 'write @cortex.route("GET", "/path")'
        return RouteDecorator(function, node, error=RouteError("@cortex.route has no verb and path", fix))
    arguments = dict(zip(_ARGUMENTS, node.args, strict=False))
    arguments |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg in _ARGUMENTS}
    verb, path = (arguments.get(name) for name in _ARGUMENTS)
    if path is None and isinstance(verb, ast.Constant) and not any(keyword.arg is None for keyword in node.keywords):
        shown = verb.value if isinstance(verb.value, str) and verb.value.startswith("/") else "/path"
        missing = "verb" if shown is verb.value else "path"
        fix = f'write @cortex.route("GET", "{shown}")'
        return RouteDecorator(function, verb, error=RouteError(f"@cortex.route has no {missing}", fix))
    if not isinstance(verb, ast.Constant) or not isinstance(path, ast.Constant):
        return RouteDecorator(function, node)
    try:
        return RouteDecorator(function, node, parse_route(verb.value, path.value))
    except RouteError as error:
        return RouteDecorator(function, path if _is_verb(verb.value) else verb, error=error)


def _is_verb(value: object) -> bool:
    try:
        parse_route(value, "/path")
    except RouteError:
        return False
    return True
