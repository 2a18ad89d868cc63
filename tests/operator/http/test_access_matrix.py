"""Every route of the operator and of its dashboard with every kind of credential, by the routes themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from typing import Any, cast

import pytest
from fastapi import FastAPI

from cortex.lifecycle import TokenScope
from cortex.operator.access.scopes import DASHBOARD_ROUTES, OPEN_PATHS, ROUTES, Access
from cortex.operator.dashboard.app import create_dashboard
from cortex.operator.dashboard.security import PREFIX, DashboardSecurity
from harness.homes import temporary_home
from harness.installations.running import RunningOperator, running_operator
from harness.wait import wait_until

pytestmark = pytest.mark.processes

#: Pages that need no session.
OPEN_PAGES = {"GET /dashboard/sign-in", "POST /dashboard/sign-in", "GET /dashboard/static/{name}"}
#: They would end the operator, or the session that the next route needs.
ENDS = {"POST /v1/shutdown", "POST /dashboard/sign-out"}


class _Anything:
    """Services that no request reaches: only the list of routes is wanted."""

    url = "http://127.0.0.1:8889"

    def __getattr__(self, name: str) -> _Anything:
        return self


@dataclass(frozen=True)
class Credential:
    """What a client sends, and the token that it stands for, if that is valid there."""

    name: str
    headers: dict[str, str]
    scope: TokenScope | None = None
    api: str | None = None
    form: str = ""  #: of changes in the dashboard

    def expected(self, route: str, access: Access) -> int | None:
        """Return 401 or 403; None: any other status."""
        if self.scope is None:
            return 401
        concerned = "own" if "{api}" in route else None
        is_limited = self.api not in (None, concerned) and not access.limits_itself
        return None if self.scope.includes(access.scope) and not is_limited else 403


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str


def send(connection: HTTPConnection, route: str, headers: dict[str, str], body: str = "") -> Answer:
    method, path = re.sub(r"\{\w+\}", "none", route.replace("{api}", "own")).split()
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    return Answer(response.status, dict(response.getheaders()), response.read().decode())


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def create(operator: RunningOperator, path: str = "/v1/tokens", **options: Any) -> dict[str, Any]:
    status, made = operator.call("POST", path, json.dumps(options).encode(), **{"content-type": "application/json"})
    assert status == 200, made
    return cast("dict[str, Any]", made)


def signed_in(operator: RunningOperator, connection: HTTPConnection, token: Credential) -> Credential:
    """Sign a browser in with a token."""
    path = operator.call("POST", "/v1/dashboard/codes", **token.headers)[1]["path"]
    origin = {"origin": f"http://127.0.0.1:{operator.port}"}
    cookie = send(connection, f"POST {path}", origin).headers["set-cookie"].partition(";")[0]
    headers = {"cookie": cookie, **origin}
    found = re.search(r'name="csrf" value="([^"]+)"', send(connection, "GET /dashboard/", headers).text)
    assert found
    return replace(token, headers=headers, form=f"csrf={found[1]}")


@pytest.fixture(scope="module")
def operator() -> Iterator[RunningOperator]:
    with temporary_home() as home, running_operator(home) as running:
        yield running


@dataclass(frozen=True)
class Credentials:
    of_operator: list[Credential]
    of_dashboard: list[Credential]


@pytest.fixture(scope="module")
def connection(operator: RunningOperator) -> Iterator[HTTPConnection]:
    with closing(HTTPConnection("127.0.0.1", operator.port, timeout=30)) as opened:
        yield opened


@pytest.fixture(scope="module")
def credentials(operator: RunningOperator, connection: HTTPConnection) -> Credentials:
    """Make one of each kind. A cookie is no token, and a token opens no page."""
    limits = [(scope, None) for scope in TokenScope]
    limits += [(scope, api) for scope in (TokenScope.READ, TokenScope.DEPLOY) for api in ("own", "other")]
    tokens = [
        Credential(f"{scope} of {api}", bearer(create(operator, scope=scope, api=api)["token"]), scope, api)
        for scope, api in limits
    ]
    tokens.append(Credential("the token of the home", bearer(operator.token), TokenScope.ADMIN))
    browsers = [signed_in(operator, connection, token) for token in tokens if token.scope is not TokenScope.METRICS]
    revoked = Credential("a revoked token", bearer(create(operator, scope="admin", name="leaving")["token"]))
    browser_of_revoked = signed_in(operator, connection, revoked)
    operator.call("DELETE", "/v1/tokens/leaving")
    expired = Credential("an expired token", bearer(create(operator, scope="admin", expires_in_s=1)["token"]))
    wait_until(lambda: send(connection, "GET /v1/status", expired.headers).status == 401, message="the token expires")
    key = create(operator, "/v1/keys", name="a caller")["key"]
    anywhere = [
        Credential("nothing", {}),
        Credential("an API key", {**bearer(key), "x-api-key": key}),
        Credential("the token as a password", {"authorization": f"Basic {operator.token}"}),
    ]
    wrong = [
        Credential("a wrong token", bearer("wrong")),
        revoked,
        expired,
        Credential("a cookie", browsers[0].headers),
    ]
    return Credentials(
        [*anywhere, *wrong, *tokens], [*anywhere, browser_of_revoked, replace(tokens[-1], scope=None), *browsers]
    )


def paths_of(schema: dict[str, Any], prefix: str = "") -> set[str]:
    return {f"{method.upper()} {prefix}{path}" for path, item in schema["paths"].items() for method in item}


def test_each_route_of_the_operator_permits_exactly_the_credentials_of_its_row(
    operator: RunningOperator, connection: HTTPConnection, credentials: Credentials
) -> None:
    routes = paths_of(operator.call("GET", "/openapi.json")[1])
    needs_token = {route for route in routes if route.split()[1] not in OPEN_PATHS}
    assert needs_token == set(ROUTES), "write the scope of each route into operator/access/scopes.py"
    for path in OPEN_PATHS:
        assert send(connection, f"GET {path}", {}).status == 200
    check(connection, credentials.of_operator, ROUTES)


def test_each_page_and_button_permits_exactly_the_credentials_of_its_row(
    connection: HTTPConnection, credentials: Credentials
) -> None:
    anything = cast("Any", _Anything())
    app = cast("FastAPI", cast("DashboardSecurity", create_dashboard(anything, anything, anything))._app)
    routes = paths_of(app.openapi(), PREFIX)
    assert routes - OPEN_PAGES == set(DASHBOARD_ROUTES), "write its scope into operator/access/scopes.py"
    check(connection, credentials.of_dashboard, DASHBOARD_ROUTES)


def check(connection: HTTPConnection, credentials: list[Credential], rows: Mapping[str, Access]) -> None:
    wrong = []
    for credential in credentials:
        for route, access in rows.items():
            expected = credential.expected(route, access)
            if route in ENDS and expected is None:
                continue
            status = send(connection, route, credential.headers, credential.form).status
            if status != expected if expected else status in (401, 403):
                wrong.append(f"{credential.name}: {route}: {status}, expected {expected or 'neither 401 nor 403'}")
    assert not wrong, "\n".join(wrong)
