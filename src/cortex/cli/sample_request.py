"""The command that sends a request to a deployed API: one that works when it is pasted, or what to send."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cortex.client.client import needs_key
from cortex.payloads.curl import curl
from cortex.payloads.openapi.schemas import NoExampleError, example_with_keys
from cortex.predictor.applications import APPLICATION_TYPES, example_request
from cortex.predictor.checks.request_arguments import RequestArguments, is_inference_only, request_arguments
from cortex.predictor.checks.source_checks import class_routes
from cortex.predictor.interface import GENERATIONS
from cortex.predictor.routes import Route

_SAMPLE_NAME = "sample.json"
_MAX_ROUTES = 10
#: Assumed if the user's method can't be read.
_DEFAULT = RequestArguments("POST", ())


def sample_request(
    api: dict[str, Any], folder: Path, ca_file: str = "", describe: Callable[[], dict[str, Any]] | None = None
) -> list[str]:
    """Return the lines that say how to call an API whose project is `folder`.

    `ca_file` has the CAs to trust. `describe` fetches the OpenAPI document of the API; it is called if the project has
    no sample.
    """
    spec = api["spec"]
    certificates = f" --cacert {shlex.quote(ca_file)}" if ca_file else ""
    request = partial(curl, options=certificates, key=key_option(api))
    handler = spec.get("handler") or {}
    if handler.get("type") in (*APPLICATION_TYPES, "command"):  # each decides for itself which paths it answers
        text = _source(spec, folder) if handler["type"] in APPLICATION_TYPES else None
        verb, path = example_request(text or "")
        return [request(verb, api["endpoint"].rstrip("/") + path)]
    if handler.get("protobuf_path"):
        return [
            f"cortex predict {spec['name']} FILE.json --method METHOD",
            "  FILE.json is the request message as JSON",
        ]
    text = _source(spec, folder)
    routes, plain = _routes(spec, text), _arguments(spec, text)
    shown = [f"{route.verb} {api['endpoint'].rstrip('/')}{route.template.text}" for route in routes[:_MAX_ROUTES]]
    if len(routes) > _MAX_ROUTES:
        shown.append(f"and {len(routes) - _MAX_ROUTES} more routes")
    if plain is None and text is not None and is_inference_only(text, *_row_key(spec)):
        shown.append(f"POST {api['endpoint'].rstrip('/')}/v2/models/{spec['name']}/infer")
    if shown and plain is None:  # nothing answers at the endpoint
        return shown
    method, sample = plain or _DEFAULT, _sample(spec, folder)
    if sample is None and method.payload_keys is not None and not method.query_keys and describe is not None:
        payload = _example(describe(), urlsplit(api["endpoint"]).path, method)
        if payload is not None:
            return [request(method.verb, api["endpoint"], json.dumps(payload)), *shown]
    if method.payload_keys is None and not method.query_keys:
        return [request(method.verb, api["endpoint"]), *shown]
    if sample is not None and not method.query_keys:
        return [request(method.verb, api["endpoint"], f"@{sample}"), *shown]
    return [*_description(spec, method), *shown]


def _example(document: dict[str, Any], path: str, method: RequestArguments) -> Any:
    """Return an example of the JSON payload of a method; None if its type is not annotated, or none is known."""
    operation = document.get("paths", {}).get(path, {}).get(method.verb.lower(), {})
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    definitions = document.get("components", {}).get("schemas", {})
    try:
        return example_with_keys(schema, definitions, method.payload_keys or ())
    except NoExampleError:
        return None


def _description(spec: dict[str, Any], method: RequestArguments) -> list[str]:
    """Return lines that say what to send."""
    if method.query_keys or method.verb != "POST":
        return [f"send {method.verb} with {' and '.join(_parts(method))}"]
    file, body = ("FILE.json", _parts(method)[0]) if method.payload_keys else ("FILE", "the body, for example JSON")
    return [
        f"cortex predict {spec['name']} {file}",
        f"  {file} is {body}; with it as {_SAMPLE_NAME}, the next deploy shows a command for curl",
    ]


def _parts(method: RequestArguments) -> list[str]:
    """Name the parts of a request."""
    parts = []
    if method.payload_keys is not None:
        parts.append(f"a JSON body{f' with {_names(method.payload_keys)}' if method.payload_keys else ''}")
    if method.query_keys:
        plural = "s" if len(method.query_keys) > 1 else ""
        parts.append(f"the query parameter{plural} {_names(method.query_keys)}")
    return parts


def _names(keys: Sequence[str]) -> str:
    return ", ".join(map(json.dumps, keys))


def _sample(spec: dict[str, Any], folder: Path) -> Path | None:
    """Return the sample that the replicas have answered, or the one of the project."""
    names = (spec.get("readiness"), _SAMPLE_NAME)
    return next(
        (
            folder / name
            for name in names
            if name is not None and not name.startswith("/") and (folder / name).is_file()
        ),
        None,
    )


def _source(spec: dict[str, Any], folder: Path) -> str | None:
    """Return the user's file; None without one: of a TrafficSplitter, say, or a model without code."""
    handler = spec.get("handler")
    if handler is None or handler["path"] is None:
        return None
    try:
        text: str = (folder / handler["path"]).read_text(errors="replace")
    except OSError:
        return None
    return text


def _arguments(spec: dict[str, Any], text: str | None) -> RequestArguments | None:
    if text is None:
        return None
    return request_arguments(text, *_row_key(spec))


def _routes(spec: dict[str, Any], text: str | None) -> list[Route]:
    """Return the routes of the class, as far as its source shows them."""
    if text is None:
        return []
    interface, type_, has_models, kind = _row_key(spec)
    row = GENERATIONS.get((kind, interface, type_, has_models))
    if row is None or not row.takes_routes or row.class_name is None:
        return []
    return [each.route for each in class_routes(text, row.class_name) if each.route is not None]


def _row_key(spec: dict[str, Any]) -> tuple[str, str, bool, str]:
    handler = spec["handler"]
    return handler["interface"], handler["type"], handler.get("models") is not None, spec["kind"]


def key_option(api: dict[str, Any]) -> str:
    """Return the option of curl with the caller's key, if an API requires one."""
    return ' -H "X-API-Key: $CORTEX_API_KEY"' if needs_key(api) else ""
