"""Which object of the user's file is the application."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cortex.errors import UserError
from cortex.operator.deploy.diagnose import diagnose
from cortex.predictor.applications import class_application, example_request, imports_gradio, module_application


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


@pytest.mark.parametrize(
    ("code", "request_"),
    [
        ("@app.post('/predict')\ndef f(): ...\n@app.get('/models')\nasync def g(): ...", ("GET", "/models")),
        ("@app.get('/items/{id}')\ndef f(): ...\n@app.post('/predict')\ndef g(): ...", ("POST", "/predict")),
        ("@app.route('/x')\ndef f(): ...", ("GET", "/x")),
        ("@app.route('/<x>')\n@app.route('/y', methods=['POST', 'PUT'])\ndef f(): ...", ("POST", "/y")),
        ("def make():\n @app.get('/inner')\n def f(): ...\n return app", ("GET", "/inner")),
        ("app = Starlette(routes)", ("GET", "/")),
        ("r = APIRouter(prefix='/api')\n@r.get('/h')\ndef f(): ...\napp.include_router(r)", ("GET", "/api/h")),
        ("r = APIRouter()\n@r.get('/h')\ndef f(): ...\napp.include_router(r, prefix='/v1')", ("GET", "/v1/h")),
        ("b = Blueprint('b', __name__)\n@b.route('/h')\ndef f(): ...\napp.register_blueprint(b)", ("GET", "/h")),
        ("app.mount('/sub', sub)\n@sub.get('/h')\ndef f(): ...", ("GET", "/sub/h")),
        ("a.mount('/a', b)\nb.mount('/b', a)\n@a.get('/h')\ndef f(): ...", ("GET", "/")),
        ("r = APIRouter(prefix=P)\n@r.get('/h')\ndef f(): ...\napp.include_router(r)", ("GET", "/")),
        ("r = APIRouter()  # included elsewhere\n@r.get('/h')\ndef f(): ...", ("GET", "/")),
        ("@cache.get(key)\ndef f(): ...\n@app.get(path)\n@app.get()\ndef g(): ...", ("GET", "/")),
        ("def broken(", ("GET", "/")),
    ],
)
def test_a_request_that_an_application_answers_is_found_in_its_decorators(code: str, request_: tuple[str, str]) -> None:
    assert example_request(code) == request_


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


@pytest.mark.parametrize(
    ("source", "is_sticky"),
    [
        ("import gradio as gr", True),
        ("from gradio.routes import mount_gradio_app", True),
        ("def app():\n    import gradio", True),
        ("import gradio_client", False),
        ("from .gradio import page", False),
        ("import fastapi  # not gradio", False),
        ("import gradio\ndef", False),
    ],
)
def test_an_application_made_with_gradio_is_recognized_by_its_imports(source: str, is_sticky: bool) -> None:
    assert imports_gradio(source) is is_sticky


@pytest.mark.parametrize(
    ("type_", "line", "is_sticky"), [("asgi", "", True), ("asgi", "sticky: false", False), ("python", "", False)]
)
def test_sessions_of_gradio_are_sticky_unless_the_configuration_says_otherwise(
    type_: str, line: str, is_sticky: bool, tmp_path: Path
) -> None:
    app = ", app: app" if type_ == "asgi" else ""
    config = (
        f"- {{name: page, kind: RealtimeAPI, handler: {{type: {type_}, path: app.py{app}}}, networking: {{{line}}}}}"
    )
    (tmp_path / "cortex.yaml").write_text(config)
    (tmp_path / "app.py").write_text(
        "import gradio\napp = 1\nclass Handler:\n    def __init__(self, config): ...\n    def handle_post(self): ...\n"
    )
    (api,) = diagnose(tmp_path / "cortex.yaml", "cortex.yaml").apis
    assert api.networking.sticky is is_sticky
