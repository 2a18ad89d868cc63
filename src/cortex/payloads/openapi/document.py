"""OpenAPI documents (https://spec.openapis.org/oas/v3.1.0) of deployed APIs. Pure.

A document describes what the gateway answers at the endpoints of its APIs, with the errors that a client may receive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cortex.lifecycle import ApiKind
from cortex.payloads.json_object import Json
from cortex.payloads.openai_errors import is_openai_path
from cortex.payloads.openapi import errors, inference, jobs
from cortex.payloads.openapi.api import DocumentedApi
from cortex.payloads.openapi.schemas import SchemaComponents
from cortex.payloads.signature import (
    ApiSignature,
    BodySignature,
    MethodSignature,
    ModelSignature,
    ParameterSignature,
    RouteSignature,
)

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

_APPLICATION = (
    "Its application decides which paths it answers, so this document has none of them. It may have one of its own."
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
    # Only the schemas of cortex that the document may need: the names of others are free for models of users.
    has_jobs = any(api.kind in (ApiKind.ASYNC, ApiKind.BATCH, ApiKind.TASK) for api in apis)
    has_models = any(each.models for each in _signatures(apis))
    schemas = SchemaComponents(
        {**errors.SCHEMAS, **(jobs.SCHEMAS if has_jobs else {}), **(inference.SCHEMAS if has_models else {})}
    )
    for each in _signatures(apis):
        methods = [*each.methods, *(route.method for route in each.routes)]
        payloads = [method.payload.schema for method in methods if method.payload is not None]
        schemas.distinguish(payloads, [method.result.schema for method in methods])
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


def _signatures(apis: Iterable[DocumentedApi]) -> Iterator[ApiSignature]:
    """Yield the known signatures of APIs; of a TrafficSplitter, those of the APIs that answer its requests."""
    for api in apis:
        yield from (each.signature for each in api.targets or (api,) if each.signature is not None)


def _about(api: DocumentedApi) -> str:
    lines = [f"{api.kind} `{api.name}`, revision {api.revision}."]
    if api.is_application:
        lines.append(_APPLICATION)
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
    if api.is_application:
        return {}
    if api.is_grpc:
        return _route_paths(api, schemas)
    if api.kind is ApiKind.REALTIME or api.kind is ApiKind.SPLITTER:
        operations = {verb.lower(): _operation(api, each, schemas) for verb, each in _methods(api).items()}
        paths = {api.endpoint: operations} if operations else {}  # a class may have routes only
        paths |= {f"{api.endpoint.rstrip('/')}/info": {"get": _info(api)}}
        for model in _models(api):
            paths |= inference.model_paths(api, model, schemas)
        return paths | _route_paths(api, schemas)
    method = next(iter(_known_methods(api)))
    find_paths = jobs.workload_paths if api.kind is ApiKind.ASYNC else jobs.job_paths
    return find_paths(api, method, schemas)


def _models(api: DocumentedApi) -> Iterator[ModelSignature]:
    """Yield the models of an API; of a TrafficSplitter, those of all its APIs, whose only model has its name."""
    by_name = [
        {api.name if api.targets and len(each.models) == 1 else model.name: model for model in each.models}
        for each in _signatures([api])
    ]
    for name, first in by_name[0].items() if by_name else ():
        models = [models[name] for models in by_name if name in models]
        if len(models) == len(by_name):
            is_same = all((each.inputs, each.outputs) == (first.inputs, first.outputs) for each in models)
            yield replace(first, name=name) if is_same else ModelSignature(name, first.platform, (), ())


def _route_paths(api: DocumentedApi, schemas: SchemaComponents) -> dict[str, Json]:
    """Return the operations of the routes of an API's class; of a TrafficSplitter, of all its APIs."""
    found: dict[tuple[str, str], list[RouteSignature]] = {}
    for signature in _signatures([api]):
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
        for method in () if each.is_application else _known_methods(each):
            known = by_verb.setdefault(method.verb, [])
            if method not in known:
                known.append(method)
    return by_verb


def _known_methods(api: DocumentedApi) -> tuple[MethodSignature, ...]:
    """Return the methods of an API; while they are not known, one that takes and returns anything."""
    if api.signature is not None and (api.signature.methods or api.kind is ApiKind.REALTIME):
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
    described = [
        {
            "name": each.name,
            "in": each.location,
            "required": each.location == "path" or each.is_required,
            "schema": schemas.add(each.schema),
        }
        for each in parameters
    ]
    described += [_QUERY_PARAMS] if any(method.query_params for method in methods) else []
    if described:
        made["parameters"] = described
    if bodies:
        examples = api.examples if first.verb == "POST" and not route else {}
        is_any = any(body.is_any for body in bodies)
        made["requestBody"] = {
            "content": _content(bodies, [_JSON], schemas, examples),
            "required": not is_any and all(body.is_required for body in bodies),
        }
        if is_any:
            made["requestBody"]["description"] = "Any body; its content type decides how it is parsed."
    streams = any(method.streams for method in methods)
    untyped = _UNTYPED_STREAMS if streams else _UNTYPED_RESULTS
    content = _content([method.result for method in methods], untyped, schemas)
    made["responses"] = {
        "200": errors.response("The result, in chunks" if streams else "The result", content),
        **errors.of_requests(
            api,
            has_body=bool(bodies),
            # Calls of gRPC have no status that belongs to 422.
            is_typed=not api.is_grpc and (any(body.is_typed for body in bodies) or bool(parameters)),
            in_openai_form=is_openai_path(route.encode()),
        ),
    }
    return made


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
        if body.is_any:
            parts = [(media_type, body.schema) for media_type in untyped]
        else:
            parts = [(each.media_type, each.schema) for each in (body, *body.alternatives)]
        for media_type, each in parts:
            schema = schemas.add(each)
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
