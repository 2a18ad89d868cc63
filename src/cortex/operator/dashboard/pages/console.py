"""Console of an API: a form made from its OpenAPI document, and the response to the request that it sends.

The operator sends the request to its own gateway, as any client would: the browser may not, because the gateway is
another origin. So the request has no more rights than one from elsewhere, and an API with keys needs one.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from fastapi import APIRouter, Request, Response

from cortex.errors import GatewayError, InputError, NotFoundError
from cortex.operator.dashboard.pages.apis import api_row
from cortex.operator.dashboard.rendering import Pages
from cortex.operator.dashboard.security import form_of
from cortex.operator.http.services import Services
from cortex.payloads.openapi.schemas import example_of
from cortex.tls import fingerprint_of

Json = dict[str, Any]

#: Requests of all consoles at once; each has a thread.
_MAX_REQUESTS = 4
_TIMEOUT_S = 60.0
#: More of a response is not shown.
_MAX_RESPONSE_BYTES = 512 * 1024
_VERBS = ("post", "get", "put", "patch", "delete")
_IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
#: Characters of a path and a query that need no escape.
_SAFE = "/?&=%:@!$'()*+,;~-._"


@dataclass(frozen=True)
class ConsoleOperation:
    """A request that an API supports."""

    verb: str
    path: str
    summary: str
    media_type: str  #: of the body; "" without one
    example: str  #: text of the body
    schema: Json | None

    @property
    def key(self) -> str:
        """Return what identifies it in the list."""
        return f"{self.verb} {self.path}"


@dataclass(frozen=True)
class ConsoleAnswer:
    """Response to a request of the console."""

    status: int
    reason: str
    milliseconds: float
    media_type: str
    request_id: str
    size_bytes: int
    text: str  #: "" if the body is no text
    image: str  #: as `data:` URL, or ""
    is_cut: bool


def console_pages(services: Services, pages: Pages) -> APIRouter:
    """Return the page."""
    router = APIRouter(prefix="/apis/{api}")
    limit = asyncio.Semaphore(_MAX_REQUESTS)

    async def show(request: Request, api: str, chosen: str, form: Mapping[str, str], answer: object = None) -> Response:
        row = await api_row(services, api)
        spec = services.api(api).spec
        is_application = spec.is_application or spec.runs_command
        operations = operations_of(_document(services, api), spec.networking.endpoint, is_application)
        operation = next((each for each in operations if each.key == chosen), operations[0])
        return pages.page(
            request,
            "api_console.html",
            row=row,
            tab="console",
            operations=operations,
            operation=operation,
            form=form,
            answer=answer,
            needs_key=services.documentation.needs_key(services.api(api)),
        )

    @router.get("/console")
    async def show_console(request: Request, api: str, operation: str = "") -> Response:
        """Show the form."""
        services.api(api)
        return await show(request, api, operation, {})

    @router.post("/console")
    async def send(request: Request, api: str) -> Response:
        """Send the request of the form, and show the response."""
        form, endpoint = form_of(request), services.api(api).spec.networking.endpoint
        path, verb = form.get("path", ""), form.get("verb", "POST")
        if not is_below(path, endpoint):
            raise InputError(f"the path must begin with {endpoint}, the endpoint of {api}")
        if verb.lower() not in _VERBS:
            raise InputError(f"{verb[:20]!r} is not one of {', '.join(_VERBS).upper()}")
        headers = {"content-type": form.get("media_type", "")} if form.get("body") else {}
        headers |= {"x-api-key": form["key"]} if form.get("key") else {}
        async with limit:
            answer = await asyncio.to_thread(_send, services, verb.upper(), path, form.get("body", ""), headers)
        return await show(request, api, form.get("operation", ""), form, answer)

    return router


def _document(services: Services, api: str) -> Json:
    try:
        return services.documentation.document(api)
    except NotFoundError:  # `networking.docs: false`
        return {}


# The form. Pure.


def operations_of(document: Json, endpoint: str, is_application: bool = False) -> list[ConsoleOperation]:
    """Return the operations of an OpenAPI document, those with a body first.

    If it has none: a GET of the root of an application, which decides for itself which paths it answers, or a plain
    POST.
    """
    found = [
        _operation(document, verb, path, methods[verb])
        for path, methods in document.get("paths", {}).items()
        for verb in _VERBS
        if verb in methods
    ]
    found.sort(key=lambda operation: (operation.path != endpoint, not operation.media_type))
    if not found and is_application:
        return [ConsoleOperation("GET", f"{endpoint.rstrip('/')}/", "", "", "", None)]
    return found or [ConsoleOperation("POST", endpoint, "", "application/json", "{}", None)]


def _operation(document: Json, verb: str, path: str, operation: Json) -> ConsoleOperation:
    content = operation.get("requestBody", {}).get("content", {})
    media_type = "application/json" if "application/json" in content else next(iter(content), "")
    body = content.get(media_type, {})
    schema = body.get("schema") or None
    examples = [each["value"] for each in body.get("examples", {}).values() if "value" in each]
    definitions = document.get("components", {}).get("schemas", {})
    text = ""
    if media_type == "application/json":
        value = examples[0] if examples else example_of(schema, definitions)
        text = json.dumps({} if value is None else value, indent=2, ensure_ascii=False)
    summary = str(operation.get("summary", ""))
    return ConsoleOperation(verb.upper(), path, summary, media_type, text, resolve(schema, document))


def resolve(schema: Any, document: Json) -> Any:
    """Return the schema that `$ref` refers to in the document; other schemas unchanged."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found: Any = document
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(found, dict) else {}
    return found


def is_below(path: str, endpoint: str) -> bool:
    """Return True if a path, which may have a query, belongs to an endpoint: the console sends nothing elsewhere."""
    if any(part in (".", "..") for part in path.partition("?")[0].replace("%2e", ".").replace("%2E", ".").split("/")):
        return False
    base = endpoint.rstrip("/")
    return path.isprintable() and (path == base or path.startswith((f"{base}/", f"{base}?"))) and path.startswith("/")


# The request.


def _send(services: Services, verb: str, path: str, body: str, headers: Mapping[str, str]) -> ConsoleAnswer:
    """Send a request to this machine's gateway. Blocks. Raises: GatewayError."""
    started = time.perf_counter()
    try:
        connection = _connect(services)
        try:
            connection.request(verb, quote(path, safe=_SAFE), body.encode() or None, dict(headers))
            response = connection.getresponse()
            content = response.read(_MAX_RESPONSE_BYTES + 1)
        finally:
            connection.close()
    except TimeoutError:
        raise GatewayError(f"the API did not respond within {_TIMEOUT_S:g} seconds") from None
    except (OSError, HTTPException, ValueError) as error:
        raise GatewayError(f"the request can't be sent to the gateway: {error}") from error
    elapsed = (time.perf_counter() - started) * 1000
    media_type = (response.getheader("content-type") or "").partition(";")[0].strip().lower()
    shown = content[:_MAX_RESPONSE_BYTES]
    return ConsoleAnswer(
        status=response.status,
        reason=response.reason,
        milliseconds=elapsed,
        media_type=media_type,
        request_id=response.getheader("x-cortex-request-id") or "",
        size_bytes=len(content),
        text="" if media_type in _IMAGES else readable(shown, media_type),
        image=f"data:{media_type};base64,{base64.b64encode(shown).decode()}" if media_type in _IMAGES else "",
        is_cut=len(content) > _MAX_RESPONSE_BYTES,
    )


def readable(content: bytes, media_type: str) -> str:
    """Return a body as text, JSON with indentation; "" if it is no text."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return ""
    if not media_type.endswith("json"):
        return text
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _connect(services: Services) -> HTTPConnection:
    identity = services.identity
    url = urlsplit(identity.gateway_url)
    if url.scheme != "https":
        connection = HTTPConnection(identity.address, url.port, timeout=_TIMEOUT_S)
        connection.connect()
        return connection
    # The certificate is known by its fingerprint: its names need not include the address of this machine.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    secure = HTTPSConnection(identity.address, url.port, timeout=_TIMEOUT_S, context=context)
    secure.connect()
    if fingerprint_of(_certificate(secure)) not in _fingerprints(services.home.fingerprints_file):
        secure.close()
        raise GatewayError("the certificate of the gateway is not the one of this installation")
    return secure


def _certificate(connection: HTTPSConnection) -> bytes:
    assert isinstance(connection.sock, ssl.SSLSocket)
    return connection.sock.getpeercert(binary_form=True) or b""


def _fingerprints(file: Path) -> list[str]:
    return file.read_text().split()
