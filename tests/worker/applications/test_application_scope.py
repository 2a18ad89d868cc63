"""The scope of a request, and the route template that it is counted under."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cortex.worker.applications.application_scope import http_scope, route_template, websocket_scope


def test_a_scope_has_the_decoded_path_with_its_prefix() -> None:
    headers = [
        (b"host", b"[2001:db8::1]:8443"),
        (b"x-cortex-endpoint", b"/app"),
        (b"x-forwarded-proto", b"https"),
        (b"x-forwarded-for", b"192.0.2.7"),
    ]
    scope = http_scope("GET", b"/app/caf%C3%A9?q=%20", headers, {"n": 1})
    assert scope["path"] == "/app/café"
    assert scope["raw_path"] == b"/app/caf%C3%A9"
    assert scope["query_string"] == b"q=%20"
    assert (scope["root_path"], scope["scheme"]) == ("/app", "https")
    assert (scope["server"], scope["client"]) == (("2001:db8::1", 8443), ("192.0.2.7", 0))
    assert b"x-cortex-endpoint" not in dict(scope["headers"])
    assert scope["state"] == {"n": 1}


def test_a_request_to_the_endpoint_itself_has_the_endpoint_as_root_path() -> None:
    for path in (b"/my/app", b"/my/app/"):
        assert http_scope("GET", path, [], {})["root_path"] == "/my/app"
    assert http_scope("GET", b"/app", [(b"host", b"example.com")], {})["server"] == ("example.com", 80)


def test_the_scope_of_a_websocket_has_its_subprotocols() -> None:
    headers = [(b"x-forwarded-proto", b"https"), (b"sec-websocket-protocol", b"a, b")]
    scope = websocket_scope(b"/app/ws", headers, {})
    assert (scope["type"], scope["scheme"], scope["subprotocols"]) == ("websocket", "wss", ["a", "b"])


@pytest.mark.parametrize(
    ("changes", "template"),
    [
        ({"route": SimpleNamespace(path="/items/{id}", methods={"GET"})}, "/items/{id}"),
        ({"route": SimpleNamespace(path="/deep", methods={"GET"}), "root_path": "/app/sub"}, "/sub/deep"),
        ({"route": SimpleNamespace(path="/ws", endpoint=None)}, "/ws"),
        ({"route": SimpleNamespace(path="/static"), "root_path": "/app/static"}, "/static/*"),
        ({"route": SimpleNamespace()}, "other"),
        ({}, "other"),
    ],
)
def test_the_template_of_a_route(changes: dict[str, Any], template: str) -> None:
    assert route_template({"root_path": "/app", **changes}, "/app") == template
