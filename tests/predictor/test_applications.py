"""Which object of the user's file is the application."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cortex.errors import UserError
from cortex.predictor.applications import class_application, module_application


class Framework:
    """An object like those of FastAPI."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...


class OldFramework:
    """An object like those of Flask."""

    def __call__(self, environ: Any, start_response: Any) -> Any: ...


class Wrapped:
    def __call__(self, *arguments: Any) -> Any: ...


async def function(scope: Any, receive: Any, send: Any) -> None: ...


def with_config(config: dict[str, Any]) -> Any:
    return SimpleNamespace(config=config) if config.get("bad") else Framework()


@pytest.mark.parametrize("found", [Framework(), Wrapped(), function])
def test_an_application_is_served_as_it_is(found: Any) -> None:
    assert _find(found) is found


@pytest.mark.parametrize("found", [Framework, lambda: Framework(), with_config, lambda extra=1: Framework()])
def test_a_factory_is_called(found: Any) -> None:
    assert isinstance(_find(found), Framework)


def test_a_class_has_an_attribute_or_a_method() -> None:
    framework = Framework()
    assert class_application(SimpleNamespace(app=framework), "asgi", "app.py") is framework
    assert class_application(SimpleNamespace(app=lambda: framework), "asgi", "app.py") is framework


_OLD = "app(environ, start_response) is neither an ASGI application nor a function that returns one"
_NEW = "app(scope, receive, send) is neither a WSGI application nor a function that returns one"


@pytest.mark.parametrize(
    ("found", "type_", "message"),
    [
        (OldFramework(), "asgi", f"{_OLD}; it looks like a WSGI application: write `type: wsgi`"),
        (Framework(), "wsgi", f"{_NEW}; it looks like an ASGI application: write `type: asgi`"),
        (7, "asgi", "app must be an ASGI application, but is an int"),
        (lambda: 7, "asgi", "the result of app() must be an ASGI application, but is an int"),
        (lambda name: 0, "asgi", "app(name) is neither an ASGI application nor a function that returns one"),
    ],
)
def test_anything_else_is_refused(found: Any, type_: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        _find(found, type_)
    assert str(raised.value) == f"app.py: {message}"


def test_a_missing_application_is_named_with_its_likely_name() -> None:
    module = ModuleType("app")
    module.application = Framework()  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r'app.py: aplication is not defined; did you mean "application"\?'):
        module_application(module, "aplication", "asgi", "app.py", {})
    with pytest.raises(UserError, match=r"app.py: class SimpleNamespace: app is not defined; set self.app in __init__"):
        class_application(SimpleNamespace(), "asgi", "app.py")


def _find(found: Any, type_: str = "asgi") -> Any:
    module = ModuleType("app")
    module.app = found  # type: ignore[attr-defined]
    return module_application(module, "app", type_, "app.py", {})
