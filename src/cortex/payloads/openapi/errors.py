"""Error responses in OpenAPI documents: what the gateway, the replicas and the operator answer, and when."""

from __future__ import annotations

from cortex.payloads.json_object import Json
from cortex.payloads.openapi.api import DocumentedApi

_JSON = "application/json"


def schema(name: str) -> Json:
    """Return a reference to a component schema."""
    return {"$ref": f"#/components/schemas/{name}"}


_REQUEST_ID_HEADER = "X-Cortex-Request-ID"
_RETRY = "Retry-After"
_LOCATION = "Location"
_ALLOW = "Allow"
_CHALLENGE = "WWW-Authenticate"
_CODINGS = "Accept-Encoding"
HEADERS: Json = {
    _REQUEST_ID_HEADER: {
        "description": "The id under which the request is logged",
        "schema": {"type": "string", "examples": ["1763690000000-4711-12"]},
    },
    _LOCATION: {"description": "Path of the workload", "schema": {"type": "string"}},
    _RETRY: {"description": "Seconds after which to try again", "schema": {"type": "integer"}},
    _ALLOW: {"description": "The verbs that the path supports", "schema": {"type": "string"}},
    _CODINGS: {"description": "The content codings of bodies that are supported", "schema": {"type": "string"}},
    _CHALLENGE: {"description": "How to send a key", "schema": {"type": "string", "const": "Bearer"}},
}

_TEXT = {"type": "string"}
_REQUEST_ID = {"type": "string", "description": "As in the header X-Cortex-Request-ID"}
SCHEMAS: Json = {
    "ErrorResponse": {
        "type": "object",
        "required": ["error", "request_id"],
        "properties": {
            "error": {"type": "string", "description": "What went wrong"},
            "detail": {"description": "What an HTTPException of the API's code passed, of any type"},
            "request_id": _REQUEST_ID,
        },
    },
    "ValidationErrorResponse": {
        "type": "object",
        "required": ["error", "detail", "request_id"],
        "properties": {
            "error": {"type": "string", "description": "The first mistake, in a sentence"},
            "detail": {"type": "array", "items": schema("ValidationErrorDetail")},
            "request_id": _REQUEST_ID,
        },
    },
    "ValidationErrorDetail": {
        "type": "object",
        "description": "One mistake in the body",
        "required": ["type", "loc", "msg"],
        "properties": {
            "type": _TEXT,
            "loc": {"type": "array", "items": {"type": ["string", "integer"]}},
            "msg": _TEXT,
            "ctx": {"type": "object", "additionalProperties": True},
        },
    },
    "OpenAIErrorResponse": {
        "type": "object",
        "description": "The form of OpenAI's API, whose clients raise exceptions for it",
        "required": ["error", "request_id"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": _TEXT,
                    "type": {"type": "string", "examples": ["invalid_request_error", "server_error"]},
                    "param": {"type": ["string", "null"], "description": "The field of the body that is wrong"},
                    "code": {"type": ["string", "null"]},
                },
            },
            "request_id": _REQUEST_ID,
        },
    },
    "JobErrorResponse": {
        "type": "object",
        "required": ["kind", "message", "error", "request_id"],
        "properties": {
            "kind": {"type": "string", "description": "The code of the error", "examples": ["bad_submission"]},
            "message": _TEXT,
            "error": {"type": "string", "description": "The same text as `message`"},
            "request_id": _REQUEST_ID,
        },
    },
}

SECURITY_SCHEMES: Json = {
    "ApiKey": {"type": "http", "scheme": "bearer", "description": "An API key of `cortex keys create`"},
    "ApiKeyHeader": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same key"},
}
#: Either of the headers suffices.
SECURITY: list[Json] = [{"ApiKey": []}, {"ApiKeyHeader": []}]

_LARGE_HEAD = "The URL and the headers are too large"


def response(description: str, content: Json, *headers: str) -> Json:
    """Return a response; `headers` are those besides the request id."""
    references = {name: {"$ref": f"#/components/headers/{name}"} for name in (_REQUEST_ID_HEADER, *headers)}
    return {"description": description, "headers": references, "content": content}


def json_content(name: str) -> Json:
    """Return the content of a response with a component schema."""
    return {_JSON: {"schema": schema(name)}}


def of_requests(api: DocumentedApi, *, has_body: bool, is_typed: bool, in_openai_form: bool = False) -> Json:
    """Return the errors of requests to replicas, by status."""
    content = json_content("OpenAIErrorResponse" if in_openai_form else "ErrorResponse")
    found = {
        "400": response("The request, or its body for its content type, is not valid", content),
        **key_errors(api, content),
        "404": response("No API has this path any more", content),
        "408": response("The request was not received in time", content),
    }
    if has_body:
        found |= _body_errors(api, content)
    if is_typed:
        # The API's code may refuse a request with this status itself, and any detail.
        either = {"anyOf": [schema("ValidationErrorResponse"), schema("ErrorResponse")]}
        invalid = content if in_openai_form else {_JSON: {"schema": either}}
        found["422"] = response("The body, or a parameter of the path, does not match its schema", invalid)
    return {
        **found,
        "431": response(_LARGE_HEAD, content),
        "500": response("The code of the API raised an exception, or its process died", content),
        "502": response("The replica closed the connection before it answered", content),
        "503": response("The queue is full, or no replica is ready", content, _RETRY),
        "504": response(f"The request took longer than {api.timeout_s:g} s", content),
        "default": response("Another error: 405 for verbs that are not described here", content, _ALLOW),
    }


def of_operator(api: DocumentedApi, content: Json, *, has_body: bool, not_found: str) -> Json:
    """Return the errors of requests that the operator answers, by status; `content` is that of its own errors."""
    gateway = json_content("JobErrorResponse")
    anyone = {**content, **gateway}
    found = {"400": response("The request is not valid; the message lists every mistake", anyone)}
    if not_found:
        found["404"] = response(not_found, content)
    if has_body:
        found |= _body_errors(api, content)
    return {
        **found,
        **key_errors(api, gateway),
        "408": response("The request was not received in time", json_content("ErrorResponse")),
        "431": response(_LARGE_HEAD, gateway),
        "500": response("Internal error", content),
        "502": response("The operator stopped before it answered", gateway),
        "503": response("The operator is not running, or busy", anyone, _RETRY),
        "504": response("The operator did not answer in time", gateway),
        "default": response("Another error: 405 for verbs that are not described here", content, _ALLOW),
    }


def _body_errors(api: DocumentedApi, content: Json) -> Json:
    coding = "The body has a Content-Encoding that is not supported, or is text in a character set that is not"
    return {
        "413": response(f"The body is larger than {api.max_body_bytes} bytes", content),
        "415": response(coding, content, _CODINGS),
    }


def key_errors(api: DocumentedApi, content: Json) -> Json:
    """Return the responses to requests without a valid key; none for an open API."""
    if not api.needs_key:
        return {}
    missing = "The request has no API key, or one that is unknown or was revoked"
    return {
        "401": response(missing, content, _CHALLENGE),
        "403": response("The API key is only valid for other APIs", content),
    }
