"""The ASGI or WSGI application of the user's file: an attribute of the module or class, or the result of a factory.

The arguments distinguish applications from factories: ASGI applications are called with `scope`, `receive` and `send`,
WSGI applications with `environ` and `start_response`, and factories with `config`, if they declare it.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Awaitable, Callable, MutableMapping
from types import ModuleType
from typing import Any

from cortex.errors import UserError, with_article
from cortex.predictor.tracebacks import user_code
from cortex.spelling import nearest

ASGI, WSGI = "asgi", "wsgi"
#: Values of `type` for applications.
APPLICATION_TYPES = frozenset({ASGI, WSGI})
#: The attribute of the user's class that has the application.
ATTRIBUTE = "app"

AsgiApp = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Any]

_ARGUMENTS = {ASGI: 3, WSGI: 2}
_VERBS = frozenset({"get", "post", "put", "patch", "delete"})
_NAMES = {ASGI: "an ASGI application", WSGI: "a WSGI application"}


def module_application(module: ModuleType, name: str, type_: str, file: str, config: dict[str, Any]) -> Any:
    """Return the application `name` of a module, or what the factory of this name returns. Raises: UserError."""
    missing = object()
    found = getattr(module, name, missing)
    if found is missing:
        guess = nearest(name, [key for key in vars(module) if not key.startswith("_")])
        fix = f'did you mean "{guess}"?' if guess else "define it at the top level of the file"
        raise UserError(f"{file}: {name} is not defined; {fix}")
    return _application(found, name, type_, file, config)


def class_application(instance: object, type_: str, file: str) -> Any:
    """Return the application of the user's object: its attribute `app`, or what its method `app` returns.

    Raises: UserError.
    """
    owner = f"class {type(instance).__name__}: {ATTRIBUTE}"
    with user_code(f"by {type(instance).__name__}.{ATTRIBUTE}"):
        found = getattr(instance, ATTRIBUTE, None)
    if found is None:
        fix = "set self.app in __init__, or define a method app(self) that returns the application"
        raise UserError(f"{file}: {owner} is not defined; {fix}")
    return _application(found, owner, type_, file, {})


def imports_gradio(text: str) -> bool:
    """Return whether a file imports Gradio, whose applications keep each session in the memory of one process."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # reported elsewhere
        return False
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        if any(name.partition(".")[0] == "gradio" for name in names):
            return True
    return False


def example_request(text: str) -> tuple[str, str]:
    """Return a verb and a path that the application of a file probably answers: of FastAPI, Flask and the like.

    Of the paths in its decorators, a GET comes first, and one without parameters. ("GET", "/") if there is none.
    Paths of routers and mounted applications count with their prefix, unless that is computed, or set in another file.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # reported elsewhere
        return "GET", "/"
    prefixes = _Prefixes(tree)
    found = [
        (verb, prefix + path)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for decorator in node.decorator_list
        if (route := _decorated_route(decorator)) is not None
        for owner, verb, path in [route]
        if (prefix := prefixes.of(owner)) is not None
    ]
    plain = [(verb, path) for verb, path in found if not set("{<") & set(path)]
    return min(plain, key=lambda route: route[0] != "GET", default=("GET", "/"))


class _Prefixes:
    """Prefixes of the paths of a file's routers, blueprints and mounted applications."""

    def __init__(self, tree: ast.AST) -> None:
        self._own: dict[str, str | None] = {}  #: by name: the prefix that a router was created with; None: computed
        self._outer: dict[str, tuple[str, str | None]] = {}  #: by name: what includes it, and with which prefix
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_router(node.value):
                own = _prefix(node.value)
                self._own |= {target.id: own for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                self._include(node, node.func)

    def of(self, name: str, depth: int = 5) -> str | None:
        """Return the prefix of the paths of an application or router; None if it is not known."""
        own = self._own.get(name, "")
        if name not in self._outer:
            return None if name in self._own else ""
        parent, prefix = self._outer[name]
        outer = self.of(parent, depth - 1) if depth else None
        return None if outer is None or prefix is None or own is None else outer + prefix + own

    def _include(self, call: ast.Call, function: ast.Attribute) -> None:
        owner = function.value.id if isinstance(function.value, ast.Name) else ""
        inner = call.args[1:2] if function.attr == "mount" else call.args[:1]
        if not inner or not isinstance(inner[0], ast.Name):
            return
        if function.attr == "mount":
            self._outer[inner[0].id] = owner, _text(call.args[0])
        elif function.attr in ("include_router", "register_blueprint"):
            self._outer[inner[0].id] = owner, _prefix(call)


def _is_router(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name.endswith(("Router", "Blueprint"))


def _prefix(call: ast.Call) -> str | None:
    """Return the prefix that a call sets; "" if it sets none, None if it is computed."""
    given = [keyword.value for keyword in call.keywords if keyword.arg in ("prefix", "url_prefix")]
    return _text(given[0]) if given else ""


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _decorated_route(decorator: ast.expr) -> tuple[str, str, str] | None:
    """Return name, verb and path of `@app.get("/path")`, and of `@app.route("/path", methods=["POST"])`."""
    if not isinstance(decorator, ast.Call) or not isinstance(decorator.func, ast.Attribute):
        return None
    first = decorator.args[0] if decorator.args else None
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str) or first.value[:1] != "/":
        return None
    name, owner = decorator.func.attr, getattr(decorator.func.value, "id", "")
    if name in _VERBS:
        return owner, name.upper(), first.value
    if name != "route":
        return None
    methods = next((keyword.value for keyword in decorator.keywords if keyword.arg == "methods"), None)
    verbs = [each.value for each in getattr(methods, "elts", ()) if isinstance(each, ast.Constant)] or ["GET"]
    return owner, "GET" if "GET" in verbs else str(verbs[0]).upper(), first.value


def as_asgi(app: Any, type_: str, threads: int) -> AsgiApp:
    """Return an application as an ASGI application; WSGI applications run on `threads` threads."""
    if type_ == ASGI:
        return app  # type: ignore[no-any-return]
    from cortex.predictor.wsgi import wsgi_as_asgi  # noqa: PLC0415 - only for WSGI applications

    return wsgi_as_asgi(app, threads)


def _application(found: Any, name: str, type_: str, file: str, config: dict[str, Any]) -> Any:
    if _is_application(found, name, type_, file):
        return found
    with user_code(f"by {name}()"):
        made = found(**({"config": config} if _required(found) else {}))
    if inspect.isawaitable(made) or not _is_application(made, f"the result of {name}()", type_, file):
        raise UserError(
            f"{file}: the result of {name}() is not {_NAMES[type_]}, but {with_article(type(made).__name__)}"
        )
    return made


def _is_application(found: Any, name: str, type_: str, file: str) -> bool:
    """Return whether an object is an application; False if it is a factory. Raises: UserError if it is neither."""
    if not callable(found):
        raise UserError(f"{file}: {name} must be {_NAMES[type_]}, but is {with_article(type(found).__name__)}")
    required = _required(found)
    if required is None or len(required) == _ARGUMENTS[type_]:
        return True
    if not set(required) - {"config"}:
        return False
    other = ASGI if type_ == WSGI else WSGI
    hint = f"; it looks like {_NAMES[other]}: write `type: {other}`" if len(required) == _ARGUMENTS[other] else ""
    shown = f"{name}({', '.join(required)})"
    raise UserError(f"{file}: {shown} is neither {_NAMES[type_]} nor a function that returns one{hint}")


def _required(function: Any) -> list[str] | None:
    """Return the names of the arguments that a call must pass; None if they are not known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    required = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    return [parameter.name for parameter in required]
