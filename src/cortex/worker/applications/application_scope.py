"""The ASGI scope of a request (https://asgi.readthedocs.io). Pure.

The path keeps the prefix of the API, which is also `root_path`: the rule of ASGI, by which frameworks find their routes
and build the addresses of redirects, documents and static files. Scheme, host and client are those that the client of
the gateway used; the gateway sets `X-Forwarded-…` and deletes what the client sent.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from cortex.worker.http.responses import Header
from cortex.worker.monitoring.route_metrics import OTHER

Scope = dict[str, Any]

#: The endpoint through which the request came, from the gateway; absent if the path is the endpoint itself.
ENDPOINT_HEADER = b"x-cortex-endpoint"

#: Before version 2.4, frameworks wait for `http.disconnect` while they stream a response, and lose the request's body.
_ASGI = {"version": "3.0", "spec_version": "2.4"}
_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


def http_scope(method: str, target: bytes, headers: list[Header], state: dict[str, Any]) -> Scope:
    """Return the scope of an HTTP request; `target` is the path and the query of its first line."""
    scope = _scope("http", target, headers, state)
    scope["method"] = method
    return scope


def websocket_scope(target: bytes, headers: list[Header], state: dict[str, Any]) -> Scope:
    """Return the scope of a request for a WebSocket."""
    scope = _scope("websocket", target, headers, state)
    scope["scheme"] = "wss" if scope["scheme"] == "https" else "ws"
    offered = b",".join(value for name, value in headers if name == b"sec-websocket-protocol").decode("latin-1")
    scope["subprotocols"] = [name.strip() for name in offered.split(",") if name.strip()]
    scope["extensions"] = {"websocket.http.response": {}}
    return scope


def route_template(scope: Scope, endpoint: str) -> str:
    """Return the template of the route that handled a request, below `endpoint`; OTHER if it is unknown.

    Starlette, FastAPI and frameworks based on them put the route that matched into the scope.
    """
    route = scope.get("route")
    path = getattr(route, "path_format", None) or getattr(route, "path", None)
    if not isinstance(path, str):
        return OTHER
    # A mounted application extends the root path of the request; its own routes are below.
    mounted = scope["root_path"].removeprefix(endpoint)
    if getattr(route, "methods", None) is None and not hasattr(route, "endpoint"):  # the mount itself
        return f"{mounted or path}/*"
    return f"{mounted}{path}" or "/"


def _scope(kind: str, target: bytes, headers: list[Header], state: dict[str, Any]) -> Scope:
    raw_path, _, query = target.partition(b"?")
    path = raw_path.decode("latin-1")
    if "%" in path:
        path = unquote(path)
    found = dict(headers)
    endpoint = found.get(ENDPOINT_HEADER)
    scheme = "https" if found.get(b"x-forwarded-proto") == b"https" else "http"
    client = found.get(b"x-forwarded-for")
    return {
        "type": kind,
        "asgi": _ASGI,
        "http_version": "1.1",
        "scheme": scheme,
        "path": path,
        "raw_path": raw_path,
        "query_string": query,
        "root_path": (path if endpoint is None else endpoint.decode("latin-1")).rstrip("/"),
        "headers": [header for header in headers if header[0] != ENDPOINT_HEADER],
        "client": (client.decode("latin-1"), 0) if client else None,
        "server": _server(found.get(b"host", b""), _PORTS[scheme]),
        "state": state.copy(),
    }


@lru_cache(maxsize=64)
def _server(value: bytes, default_port: int) -> tuple[str, int]:
    """Return host and port of the header `Host`. Cached, because nearly all requests have one of a few."""
    host = value.decode("latin-1")
    name, colon, port = host.rpartition(":")
    if colon and port.isdigit() and not name.endswith(":"):
        return name.strip("[]"), int(port)
    return host.strip("[]") or "localhost", default_port
