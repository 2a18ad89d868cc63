"""OpenAPI documents (https://spec.openapis.org/oas/v3.1.0) of deployed APIs. Pure.

A document describes what the gateway answers at the endpoints of its APIs, with the errors that a client may receive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cortex.lifecycle import ApiKind
from cortex.payloads.openai_errors import is_openai_path
from cortex.payloads.openapi import errors, inference, jobs
from cortex.payloads.openapi.api import DocumentedApi
from cortex.payloads.openapi.schemas import SchemaComponents
from cortex.payloads.signature import (
    ApiSignature,
    BodySignature,
    MethodSignature,
    ParameterSignature,
    RouteSignature,
)

Json = dict[str, Any]

_VERSION = "3.1.0"
_JSON = "application/json"
_BYTES = "application/octet-stream"
#: What a method without annotations may return or stream; the result decides which.
_UNTYPED_RESULTS = (_JSON, "text/plain", _BYTES)
_UNTYPED_STREAMS = ("application/x-ndjson", "text/plain", _BYTES)
_NOT_KNOWN = (
    "The methods and schemas of this revision are not known: no process has loaded its code yet, or its schemas can't "
    "be sent. Any body is described instead."
)


def api_document(api: DocumentedApi) -> Json:
    """Return the document of one API, for its `openapi.json`."""
    # Relative to the document's path, so that it is right behind proxies that add a prefix.
    server = "/".join([".."] * api.endpoint.rstrip("/").count("/")) or "."
    return _document([api], server, api.name, api.revision, _about(api))


def common_document(apis: Sequence[DocumentedApi], gateway_url: str, version: str) -> Json:
    """Return the document of all APIs; `version` is that of cortex."""
    about = "All APIs of this installation that have documentation."
    return _document(apis, gateway_url, "APIs", version, about)


def _document(apis: Sequence[DocumentedApi], server: str, title: str, version: str, description: str) -> Json:
    schemas = SchemaComponents({**errors.SCHEMAS, **jobs.SCHEMAS, **inference.SCHEMAS})
    found = [(api, path, operations) for api in apis for path, operations in _paths(api, schemas).items()]
    paths: Json = {}
    for api, path, operations in sorted(found, key=lambda each: each[1] != each[0].endpoint):  # own endpoints first
        paths.setdefault(path, _complete(api, operations))
    components: Json = {"schemas": schemas.schemas, "headers": errors.HEADERS}
    if any(api.needs_key for api in apis):
        components["securitySchemes"] = errors.SECURITY_SCHEMES
    return {
        "openapi": _VERSION,
        "info": {"title": title, "version": version, "description": description},
        "servers": [{"url": server}],
        "tags": [{"name": api.name, "description": _about(api)} for api in apis] if len(apis) != 1 else [],
        "paths": {path: paths[path] for path in sorted(paths)},
        "components": _used(components, paths),
    }


def _about(api: DocumentedApi) -> str:
    lines = [f"{api.kind} `{api.name}`, revision {api.revision}."]
    if not api.is_known:
        lines.append(_NOT_KNOWN)
    if api.targets:
        names = ", ".join(f"`{each.name}`" for each in api.targets)
        lines.append(f"Each request goes to one of these APIs: {names}. The schemas are those of all of them.")
    return "\n\n".join(lines)


def _complete(api: DocumentedApi, operations: Json) -> Json:
    """Add what all operations of an API have; their ids become unique among all APIs."""
    prefix = api.name.replace("-", "_")
    common: Json = {"tags": [api.name], **({"security": errors.SECURITY} if api.needs_key else {})}
    return {
        verb: {**operation, "operationId": f"{prefix}_{operation['operationId']}", **common}
        for verb, operation in operations.items()
    }


def _used(components: Mapping[str, Json], paths: Json) -> Json:
    """Return the components that are referred to, also by others."""
    kept: dict[str, Json] = {section: {} for section in components}
    kept |= {"securitySchemes": components["securitySchemes"]} if "securitySchemes" in components else {}
    texts = [json.dumps(paths)]
    while texts:
        text = texts.pop()
        for section, named in components.items():
            for name, component in named.items():
                if name not in kept[section] and f'"#/components/{section}/{name}"' in text:
                    kept[section][name] = component
                    texts.append(json.dumps(component))
    return {section: dict(sorted(named.items())) for section, named in kept.items()}


def _paths(api: DocumentedApi, schemas: SchemaComponents) -> dict[str, Json]:
    if api.kind is ApiKind.REALTIME or api.kind is ApiKind.SPLITTER:
        operations = {verb.lower(): _operation(api, each, schemas) for verb, each in _methods(api).items()}
        paths = {api.endpoint: operations} if operations else {}  # a class may have routes only
        paths |= {f"{api.endpoint.rstrip('/')}/info": {"get": _info(api)}}
        signatures = [each.signature for each in api.targets or (api,) if each.signature is not None]
        models = {model.name: model for signature in signatures for model in signature.models}
        for model in models.values():
            paths |= inference.model_paths(api, model, schemas)
        return paths | _route_paths(api, signatures, schemas)
    method = next(iter(_known_methods(api)))
    find_paths = jobs.workload_paths if api.kind is ApiKind.ASYNC else jobs.job_paths
    return find_paths(api, method, schemas)


def _route_paths(api: DocumentedApi, signatures: Iterable[ApiSignature], schemas: SchemaComponents) -> dict[str, Json]:
    """Return the operations of the routes of an API's class; of a TrafficSplitter, of all its APIs."""
    found: dict[tuple[str, str], list[RouteSignature]] = {}
    for signature in signatures:
        for route in signature.routes:
            known = found.setdefault((route.path, route.method.verb), [])
            if route not in known:
                known.append(route)
    paths: dict[str, Json] = {}
    for (path, verb), routes in found.items():
        operation = _operation(api, [route.method for route in routes], schemas, path, routes[0].parameters)
        paths.setdefault(api.endpoint.rstrip("/") + path, {})[verb.lower()] = operation
    return paths


def _methods(api: DocumentedApi) -> dict[str, list[MethodSignature]]:
    """Return the methods of an API by verb; of a TrafficSplitter, the different methods of its APIs."""
    by_verb: dict[str, list[MethodSignature]] = {}
    for each in api.targets or (api,):
        for method in _known_methods(each):
            known = by_verb.setdefault(method.verb, [])
            if method not in known:
                known.append(method)
    return by_verb


def _known_methods(api: DocumentedApi) -> tuple[MethodSignature, ...]:
    """Return the methods of an API; while they are not known, one that takes and returns anything."""
    if api.signature is not None and (api.signature.methods or api.signature.routes):
        return api.signature.methods
    payload = None if api.likely_verb == "GET" else BodySignature()
    return (MethodSignature(api.likely_verb, "predict", payload, BodySignature(), query_params=True),)


def _operation(
    api: DocumentedApi,
    methods: Sequence[MethodSignature],
    schemas: SchemaComponents,
    route: str = "",
    parameters: Sequence[ParameterSignature] = (),
) -> Json:
    """Return an operation at the endpoint, or at the path of a route with `parameters`."""
    first = methods[0]
    bodies = [method.payload for method in methods if method.payload is not None]
    # A method may have several routes.
    of_route = f"_{first.verb.lower()}{re.sub('[^A-Za-z0-9]+', '_', route).rstrip('_')}" if route else ""
    made: Json = {"operationId": f"{first.name}{of_route}", "summary": first.summary or f"Call {first.name}"}
    if first.description:
        made["description"] = first.description
    described = [_parameter(each, schemas) for each in parameters]
    described += [_QUERY_PARAMS] if any(method.query_params for method in methods) else []
    if described:
        made["parameters"] = described
    if bodies:
        examples = api.examples if first.verb == "POST" and not route else {}
        is_required = all(body.is_typed for body in bodies)
        made["requestBody"] = {"content": _content(bodies, [_JSON], schemas, examples), "required": is_required}
        if not is_required:
            made["requestBody"]["description"] = "Any body; its content type decides how it is parsed."
    streams = any(method.streams for method in methods)
    untyped = _UNTYPED_STREAMS if streams else _UNTYPED_RESULTS
    content = _content([method.result for method in methods], untyped, schemas)
    made["responses"] = {
        "200": errors.response("The result, in chunks" if streams else "The result", content),
        **errors.of_requests(
            api,
            has_body=bool(bodies),
            is_typed=any(body.is_typed for body in bodies) or bool(parameters),
            in_openai_form=is_openai_path(route.encode()),
        ),
    }
    return made


def _parameter(parameter: ParameterSignature, schemas: SchemaComponents) -> Json:
    return {
        "name": parameter.name,
        "in": parameter.location,
        "required": parameter.location == "path",
        "schema": schemas.add(parameter.schema),
    }


_QUERY_PARAMS: Json = {
    "name": "query_params",
    "in": "query",
    "description": "Any parameters: the method receives all of them.",
    "required": False,
    "style": "form",
    "explode": True,
    "schema": {"type": "object", "additionalProperties": {"type": "string"}},
}


def _content(
    bodies: Iterable[BodySignature], untyped: Sequence[str], schemas: SchemaComponents, examples: Json | None = None
) -> Json:
    """Return the media types of bodies with their schemas, and with examples of JSON."""
    by_type: dict[str, list[Any]] = {}
    for body in bodies:
        for media_type in [body.media_type] if body.is_typed else untyped:
            schema = schemas.add(body.schema)
            known = by_type.setdefault(media_type, [])
            if schema not in known:
                known.append(schema)
    return {
        media_type: {
            "schema": found[0] if len(found) == 1 else {"anyOf": found},
            **((examples or {}) if media_type == _JSON else {}),
        }
        for media_type, found in by_type.items()
    }


def _info(api: DocumentedApi) -> Json:
    content = {_JSON: {"schema": {"type": "object", "additionalProperties": True}}}
    return {
        "operationId": "info",
        "summary": "Describe the API: its methods, and the models that it has loaded",
        "responses": {
            "200": errors.response("The description", content),
            **errors.of_requests(api, has_body=False, is_typed=False),
        },
    }
