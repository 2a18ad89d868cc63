"""Documentation page: an OpenAPI document in a browser, with the files that it needs; nothing is from other servers.

All URLs are relative to the page, `…/docs`, so that it works behind proxies that add a prefix to the path.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from cortex.errors import NotFoundError

#: Files of the page by their name below `docs/`: the package that has each one, its path there, and its content type.
#: `gateway.maps` routes them.
_FILES = {
    "docs.css": ("cortex.operator.http", "documentation.css", "text/css"),
    "docs.js": ("cortex.operator.http", "documentation.js", "text/javascript"),
    "swagger-ui-bundle.js": ("fastapi_offline", "static/swagger-ui-bundle.js", "text/javascript"),
    "swagger-ui.css": ("fastapi_offline", "static/swagger-ui.css", "text/css"),
}
_CACHED = {"cache-control": "public, max-age=3600"}


@dataclass(frozen=True)
class _Asset:
    content: bytes
    compressed: bytes
    media_type: str
    etag: str


def page_response(title: str, calls: str = "") -> Response:
    """Return the page of the document `openapi.json` beside it; `calls` is the server that its requests go to."""
    name = escape(title)
    html = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        '<link rel="stylesheet" href="docs/swagger-ui.css"><link rel="stylesheet" href="docs/docs.css"></head>'
        '<body data-document="openapi.json"><p id="note"></p>'
        '<form id="token-form" hidden><label>Operator token <input id="token" type="password" autocomplete="off">'
        '</label> <button>Show</button></form><div id="swagger-ui"></div>'
        '<noscript><p>This page requires JavaScript: <a href="openapi.json">openapi.json</a> has the same content.</p>'
        '</noscript><script src="docs/swagger-ui-bundle.js"></script><script src="docs/docs.js"></script></body></html>'
    )
    return HTMLResponse(html, headers={**security_headers(calls), "cache-control": "no-cache"})


def asset_response(name: str, request: Request) -> Response:
    """Return a file of the page. Raises: NotFoundError."""
    if name not in _FILES:
        raise NotFoundError(f"the documentation has no file {name[:100]!r}")
    asset = _load(name)
    headers = {**security_headers(), **_CACHED, "etag": asset.etag, "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        return Response(asset.compressed, media_type=asset.media_type, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)


def asset_names() -> frozenset[str]:
    """Return the names of the page's files."""
    return frozenset(_FILES)


def security_headers(calls: str = "") -> dict[str, str]:
    """Return the headers that restrict the page to its own files, and to requests to its server and to `calls`."""
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self' data:; "
        f"connect-src 'self'{f' {calls}' if calls else ''}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy,
        "x-frame-options": "DENY",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }


@cache
def _load(name: str) -> _Asset:
    package, path, media_type = _FILES[name]
    content = resources.files(package).joinpath(path).read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return _Asset(content, gzip.compress(content, mtime=0), media_type, etag)
