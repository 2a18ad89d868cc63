"""Rules about paths that belong to the gateway or to another API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cortex.config.rules.cross_api_rules import is_split
from cortex.config.rules.violations import Violation
from cortex.config.schema import Api
from cortex.config.values import quote

_HEALTH, _GRPC = "the gateway's health check", "the gRPC services that each API has"
_GATEWAY_PATHS = {
    "/livez": _HEALTH,
    "/readyz": _HEALTH,
    "/healthz": _HEALTH,
    "/v2": "the Open Inference Protocol of all APIs",
    # Browsers send the cookies of a path to each port of a host: also the dashboard's to the gateway.
    "/dashboard": "the dashboard",
}
_GRPC_SERVICES = ("/grpc.health.v1.", "/grpc.reflection.v1")


def gateway_path_owner(endpoint: str) -> str:
    """Return what a path of the gateway is for; empty if an API may have this endpoint."""
    if endpoint.startswith(_GRPC_SERVICES):
        return _GRPC
    return next((owner for path, owner in _GATEWAY_PATHS.items() if endpoint == path or _is_below(endpoint, path)), "")


def endpoint_violations(api: Api) -> Iterator[Violation]:
    """Check that clients can call an endpoint, and that it does not belong to the gateway."""
    endpoint, fields = api.networking.endpoint, ("networking.endpoint", "name")
    if not {".", ".."}.isdisjoint(endpoint.split("/")):
        message = f'{quote(endpoint)} cannot be called: clients remove "." and ".." from a path'
        yield Violation(fields, message, "remove these parts")
    elif owner := gateway_path_owner(endpoint):
        fix = "change the package in the definition" if api.is_grpc else "choose another endpoint"
        yield Violation(fields, f"{quote(endpoint)} belongs to {owner}", fix)


def describe_foreign_path(api: Api, deployed: Sequence[Api]) -> str:
    """Return how an endpoint reaches into the paths of another API; empty if it does not.

    An API may keep the endpoint that it has, which somebody without the limit has permitted.
    """
    endpoint = api.networking.endpoint
    others = [other for other in deployed if other.name != api.name]
    if any(other.name == api.name and other.networking.endpoint == endpoint for other in deployed):
        return ""
    for other in others:
        path = other.networking.endpoint
        if _is_below(endpoint, path):
            return f"{endpoint} is below the endpoint of {other.name}"
        if _is_below(path, endpoint):
            return f"{endpoint} is above the endpoint of {other.name}"
        if path == endpoint and not is_split(others, endpoint, (api, other)):
            return f"{endpoint} is the endpoint of {other.name}"
    return ""


def _is_below(path: str, other: str) -> bool:
    return path.startswith(f"{other.rstrip('/')}/")
