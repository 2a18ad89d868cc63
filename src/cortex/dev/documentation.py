"""The page `<endpoint>/docs` and the document `<endpoint>/openapi.json` of an API that is not deployed."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from cortex.config.schema import Api
from cortex.errors import NotFoundError
from cortex.operator.http.documentation_page import asset_response, page_response, security_headers
from cortex.payloads.openapi.api import DocumentedApi
from cortex.payloads.openapi.document import api_document
from cortex.payloads.signature import parse_signature


def documentation_response(api: Api, signature: str, path: str, accepted_encodings: bytes) -> Response:
    """Return the response to a request for documentation; `path` is below the endpoint."""
    if path == "/openapi.json":
        document = api_document(_describe(api, signature))
        return Response(orjson.dumps(document), headers=security_headers(), media_type="application/json")
    if path == "/docs":
        return page_response(api.name)
    if path == "/docs/":
        return RedirectResponse("../docs", headers=security_headers())
    headers = [(b"accept-encoding", accepted_encodings)]
    try:
        return asset_response(
            path.removeprefix("/docs/"), Request({"type": "http", "method": "GET", "headers": headers})
        )
    except NotFoundError as error:
        return Response(orjson.dumps({"error": str(error)}), 404, media_type="application/json")


def _describe(api: Api, signature: str) -> DocumentedApi:
    networking = api.networking
    return DocumentedApi(
        name=api.name,
        kind=api.kind,
        endpoint=networking.endpoint,
        revision="dev",
        signature=parse_signature(signature) if signature else None,
        timeout_s=networking.timeout_s,
        max_body_bytes=networking.max_body_size,
    )
