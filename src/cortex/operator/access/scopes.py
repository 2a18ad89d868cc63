"""Scopes of the operator's routes, and which of them a token limited to one API permits.

This table is the only place. A route that is missing here is open to admin tokens only, and a test fails.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.routing import compile_path

from cortex.errors import ForbiddenError, NotFoundError
from cortex.gateway.maps import DOCS_ASSETS
from cortex.lifecycle import TokenScope
from cortex.operator.access.tokens import Principal


@dataclass(frozen=True)
class Access:
    """Requirements of a route, and its action in the audit log."""

    scope: TokenScope
    change: str = ""  #: action in the audit log; "": the route changes nothing
    #: True: a token limited to one API may use this route although no API is in its path; the route itself shows or
    #: changes only that API.
    limits_itself: bool = False
    #: True: the route reads the body itself, with a limit of its own; otherwise that of `auth.MAX_BODY_BYTES` applies.
    reads_body: bool = False


_READ = Access(TokenScope.READ)
_ADMIN = Access(TokenScope.ADMIN)


def _deploy(change: str, limits_itself: bool = False, reads_body: bool = False) -> Access:
    return Access(TokenScope.DEPLOY, change, limits_itself, reads_body)


#: Prefix of the paths of the dashboard, whose requests have a cookie instead of a token.
DASHBOARD = "/dashboard/"

#: Paths that need no token, so that a browser opens the documentation. They disclose nothing about this installation.
OPEN_PATHS = frozenset(
    {"/livez", "/docs", "/openapi.json", "/apis/docs", *(f"/apis/docs/{name}" for name in DOCS_ASSETS)}
)

ROUTES: Mapping[str, Access] = {
    "GET /metrics": Access(TokenScope.METRICS),
    "GET /v1/status": _READ,
    "POST /v1/shutdown": Access(TokenScope.ADMIN, "shut down"),
    "POST /v1/deploy": _deploy("deploy", limits_itself=True, reads_body=True),
    "POST /v1/patch": _deploy("patch", limits_itself=True, reads_body=True),
    "GET /apis/openapi.json": Access(TokenScope.READ, limits_itself=True),
    "GET /v1/apis": Access(TokenScope.READ, limits_itself=True),
    "GET /v1/apis/{api}": _READ,
    "DELETE /v1/apis/{api}": _deploy("delete"),
    "POST /v1/apis/{api}/refresh": _deploy("refresh"),
    "POST /v1/apis/{api}/rollback": _deploy("rollback"),
    "POST /v1/apis/{api}/promote": _deploy("promote"),
    "GET /v1/apis/{api}/history": _READ,
    "GET /v1/apis/{api}/wait": _READ,
    "GET /v1/apis/{api}/logs": _READ,
    "GET /v1/apis/{api}/scaling": _READ,
    "POST /v1/apis/{api}/feedback": _deploy("feedback", reads_body=True),
    "POST /v1/apis/{api}/jobs": _deploy("submit job", reads_body=True),
    "GET /v1/apis/{api}/jobs": _READ,
    "GET /v1/apis/{api}/jobs/{job}": _READ,
    "DELETE /v1/apis/{api}/jobs/{job}": _deploy("stop job"),
    "POST /v1/apis/{api}/jobs/{job}/retry": _deploy("retry job"),
    "GET /v1/apis/{api}/jobs/{job}/results": _READ,
    "GET /v1/apis/{api}/jobs/{job}/dead-letters": _READ,
    "GET /v1/apis/{api}/jobs/{job}/logs": _READ,
    "GET /v1/keys": _ADMIN,
    "POST /v1/keys": Access(TokenScope.ADMIN, "create key"),
    "DELETE /v1/keys/{key_id}": Access(TokenScope.ADMIN, "revoke key"),
    "GET /v1/tokens": _ADMIN,
    "POST /v1/tokens": Access(TokenScope.ADMIN, "create token"),
    "DELETE /v1/tokens/{token_id}": Access(TokenScope.ADMIN, "revoke token"),
    "GET /v1/audit": _ADMIN,
    "POST /v1/dashboard/codes": Access(TokenScope.READ, limits_itself=True),
}

#: Pages and buttons of the dashboard: what a session's token must permit. A page shows only links that these permit.
DASHBOARD_ROUTES: Mapping[str, Access] = {
    "GET /dashboard/": Access(TokenScope.READ, limits_itself=True),
    "POST /dashboard/sign-out": Access(TokenScope.READ, limits_itself=True),
    "GET /dashboard/apis/{api}": _READ,
    "GET /dashboard/apis/{api}/logs": _READ,
    "GET /dashboard/apis/{api}/configuration": _READ,
    "GET /dashboard/apis/{api}/history": _READ,
    "POST /dashboard/apis/{api}/rollback": _deploy("rollback"),
    "POST /dashboard/apis/{api}/promote": _deploy("promote"),
    "POST /dashboard/apis/{api}/refresh": _deploy("refresh"),
    "GET /dashboard/jobs": Access(TokenScope.READ, limits_itself=True),
    "GET /dashboard/jobs/{api}/{job}": _READ,
    "GET /dashboard/jobs/{api}/{job}/logs": _READ,
    "GET /dashboard/jobs/{api}/{job}/submission": _READ,
    "GET /dashboard/jobs/{api}/{job}/dead-letters": _READ,
    "POST /dashboard/jobs/{api}/{job}/stop": _deploy("stop job"),
    "POST /dashboard/jobs/{api}/{job}/retry": _deploy("retry job"),
    "GET /dashboard/workloads": Access(TokenScope.READ, limits_itself=True),
    "GET /dashboard/workloads/{api}": _READ,
    "GET /dashboard/workloads/{api}/{workload}": _READ,
    "GET /dashboard/schedules": Access(TokenScope.READ, limits_itself=True),
    "POST /dashboard/schedules/{api}/run": _deploy("run schedule"),
    "GET /dashboard/cluster": _READ,
    "GET /dashboard/keys": _ADMIN,
    "POST /dashboard/keys": Access(TokenScope.ADMIN, "create key"),
    "POST /dashboard/keys/{key_id}/revoke": Access(TokenScope.ADMIN, "revoke key"),
    "GET /dashboard/tokens": _ADMIN,
    "POST /dashboard/tokens": Access(TokenScope.ADMIN, "create token"),
    "POST /dashboard/tokens/{token_id}/revoke": Access(TokenScope.ADMIN, "revoke token"),
    "GET /dashboard/audit": _ADMIN,
}

#: All actions in the audit log.
CHANGES = sorted({access.change for access in {**ROUTES, **DASHBOARD_ROUTES}.values() if access.change})


@dataclass(frozen=True)
class RequestedRoute:
    """A row of `ROUTES`, with the values in the path of one request."""

    access: Access
    api: str | None  #: None: no API is in the path
    subject: str  #: the other values, such as the id of a job


_COMPILED: list[tuple[str, re.Pattern[str], Access]] = [
    (route.split()[0], compile_path(route.split()[1])[0], access)
    for route, access in {**ROUTES, **DASHBOARD_ROUTES}.items()
]


def find_route(method: str, path: str) -> RequestedRoute | None:
    """Return the row of a request; None if there is none."""
    for known, pattern, access in _COMPILED:
        if known == method and (match := pattern.match(path)):
            values = match.groupdict()
            return RequestedRoute(access, values.pop("api", None), " ".join(values.values()))
    return None


def authorize(principal: Principal, method: str, path: str) -> None:
    """Check that a token permits a request.

    Raises: ForbiddenError, with what the token lacks; NotFoundError if the table has no such route. An admin's token
    permits everything.
    """
    if principal.scope is TokenScope.ADMIN:
        return
    route = find_route(method, path)
    if route is None:
        raise NotFoundError(f"there is no route {method} {path}")
    if not principal.scope.includes(route.access.scope):
        raise ForbiddenError(
            f"the token {principal.name!r} has the scope {principal.scope}; {method} {path} requires the scope "
            f"{route.access.scope}"
        )
    if principal.api is None or route.api == principal.api or route.access.limits_itself:
        return
    concerned = f"concerns {route.api}" if route.api else "concerns all APIs"
    raise ForbiddenError(
        f"the token {principal.name!r} is limited to the API {principal.api}; {method} {path} {concerned}"
    )
