"""Errors in the form of OpenAI's API, whose clients raise typed exceptions for them.

APIs with routes, and commands, answer with it at paths below `<endpoint>/v1`: the gateway, workers and supervisors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

#: Path below the endpoint.
OPENAI_PATH = "/v1"
_PATH = OPENAI_PATH.encode()

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_FIELDS = ("message", "type", "param", "code")


def is_openai_path(path_below: bytes) -> bool:
    """Return whether errors have this form at a path below the endpoint."""
    return path_below == _PATH or path_below.startswith(_PATH + b"/")


def openai_error_body(status: int, message: str, request_id: str, fields: Mapping[str, Any]) -> bytes:
    """Return the JSON body `{"error": {"message", "type", "param", "code"}, "request_id"}`.

    `fields` are those of Cortex's own form. A `detail` with the keys of this form replaces what it has.
    """
    error: dict[str, Any] = {"message": message, "type": openai_error_type(status), "param": None, "code": None}
    detail = fields.get("detail")
    if isinstance(detail, dict):
        detail = detail.get("error", detail)
        if isinstance(detail, dict):
            error |= {name: detail[name] for name in _FIELDS if name in detail}
    return json.dumps({"error": error, "request_id": request_id}).encode()


def openai_error_type(status: int) -> str:
    """Return the `type` of an error with this HTTP status."""
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
