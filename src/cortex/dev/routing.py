"""Which API of `cortex dev` answers a request, by its path: as the gateway decides it (`gateway/maps.py`)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cortex.config.schema import Api
from cortex.lifecycle import ApiKind

if TYPE_CHECKING:
    from cortex.dev.dev_api import DevApi

_SHOWN_PATH = 200
#: Paths below the endpoint of a RealtimeAPI without an application.
_SUBPATHS = ("/v2", "/signature")


@dataclass(frozen=True)
class DevRoute:
    """The API that answers a request."""

    upstream: DevApi
    endpoint: str | None = None  #: set for paths below it
    asks_info: bool = False
    documentation: str = ""  #: the path below the endpoint, if `cortex dev` answers it
    asks_ready: bool = False


def find_route(path: str, upstreams: Sequence[DevApi]) -> DevRoute | None:
    """Return the route of a path without its query; None if no API has it."""
    found = [each for each in upstreams if _below(path, each.api) is not None]
    for upstream in sorted(found, key=lambda each: -len(each.api.networking.endpoint)):
        target = _drawn(upstream, upstreams)
        if target is not None and (route := _route_below(target, upstream, _below(path, upstream.api) or "")):
            return route
    return None


def why_unknown(path: str, upstreams: Sequence[DevApi]) -> str:
    """Return why no API has a path: those that there are, or the paths below the one that was meant."""
    for each in sorted(upstreams, key=lambda each: -len(each.api.networking.endpoint)):
        if below := _below(path, each.api):
            paths = "/docs, /openapi.json, /info and /v2" if each.api.kind is ApiKind.REALTIME else "/docs and /<id>"
            return f"{each.api.name} has no path {below[:_SHOWN_PATH]}; below its endpoint, it has {paths}"
    endpoints = ", ".join(each.api.networking.endpoint for each in upstreams)
    return f"no API has the path {path[:_SHOWN_PATH]}; the endpoints are {endpoints}"


def _below(path: str, api: Api) -> str | None:
    """Return the part of a path below an endpoint; None if it is elsewhere."""
    endpoint = api.networking.endpoint
    below = path.removeprefix(endpoint)
    return below if path.startswith(endpoint) and below[:1] in ("", "/") else None


def _drawn(upstream: DevApi, upstreams: Sequence[DevApi]) -> DevApi | None:
    """Return the API that answers a request to an endpoint: for a TrafficSplitter, one by weight."""
    if upstream.api.kind is not ApiKind.SPLITTER:
        return upstream
    names = {each.api.name: each for each in upstreams}
    shares = [share for share in upstream.api.apis or () if not share.shadow and share.name in names]
    if not any(share.weight for share in shares):
        return None
    return names[random.choices(shares, [share.weight for share in shares])[0].name]  # noqa: S311


def _route_below(target: DevApi, owner: DevApi, below: str) -> DevRoute | None:
    endpoint, api = owner.api.networking.endpoint, target.api
    if api.runs_command:
        return DevRoute(target, endpoint)
    if below in ("", "/"):
        return DevRoute(target)
    if api.is_application:
        return DevRoute(target, endpoint)
    if below == "/readyz":
        return DevRoute(owner, asks_ready=True)
    if owner.api.networking.docs and (below in ("/openapi.json", "/docs") or below.startswith("/docs/")):
        return DevRoute(target, documentation=below)
    if api.kind is not ApiKind.REALTIME:
        return DevRoute(target, endpoint) if below.count("/") == 1 else None
    if below == "/info":
        return DevRoute(target, asks_info=True)
    is_served = any(below == each or below.startswith(f"{each}/") for each in _SUBPATHS)
    # Without a process, `connect` waits for one, which may have routes, or raises why there is none.
    return DevRoute(target, endpoint) if is_served or target.has_routes in (True, None) else None
