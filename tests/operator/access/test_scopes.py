"""The table of scopes; `test_access_matrix` compares it with the routes of a real operator."""

from __future__ import annotations

import pytest

from cortex.errors import ForbiddenError, NotFoundError
from cortex.lifecycle import TokenScope
from cortex.operator.access.scopes import authorize, find_route
from cortex.operator.access.tokens import Principal

METRICS, READ, DEPLOY, ADMIN = TokenScope


@pytest.mark.parametrize(
    ("method", "path", "least"),
    [
        ("GET", "/metrics", METRICS),
        ("GET", "/v1/apis", READ),
        ("GET", "/v1/apis/iris/logs", READ),
        ("GET", "/v1/apis/iris/jobs/69da5b1f/results", READ),
        ("GET", "/v1/status", READ),
        ("POST", "/v1/deploy", DEPLOY),
        ("DELETE", "/v1/apis/iris", DEPLOY),
        ("POST", "/v1/apis/iris/jobs", DEPLOY),
        ("POST", "/v1/keys", ADMIN),
        ("DELETE", "/v1/tokens/ci", ADMIN),
        ("GET", "/v1/audit", ADMIN),
        ("POST", "/v1/shutdown", ADMIN),
    ],
)
def test_a_route_permits_its_scope_and_those_that_include_it(method: str, path: str, least: TokenScope) -> None:
    scopes = list(TokenScope)
    for scope in scopes:
        principal = Principal("ci", scope)
        if scopes.index(scope) >= scopes.index(least):
            authorize(principal, method, path)
        else:
            message = f"^the token 'ci' has the scope {scope}; {method} {path} requires the scope {least}$"
            with pytest.raises(ForbiddenError, match=message):
                authorize(principal, method, path)


@pytest.mark.parametrize(
    ("method", "path", "is_permitted"),
    [
        ("POST", "/v1/deploy", True),  # which checks the APIs of the file
        ("POST", "/v1/patch", True),
        ("GET", "/v1/apis", True),  # which lists only this one
        ("GET", "/v1/apis/iris", True),
        ("POST", "/v1/apis/iris/jobs/69da5b1f/retry", True),
        ("GET", "/v1/apis/iris2", False),
        ("DELETE", "/v1/apis/sum", False),
        ("GET", "/v1/status", False),
        ("GET", "/metrics", False),
    ],
)
def test_a_token_limited_to_an_api_permits_routes_of_this_api(method: str, path: str, is_permitted: bool) -> None:
    principal = Principal("ci", DEPLOY, "iris")
    if is_permitted:
        authorize(principal, method, path)
    else:
        with pytest.raises(ForbiddenError, match=r"'ci' is limited to the API iris; .* concerns (iris2|sum|all APIs)$"):
            authorize(principal, method, path)


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/new"), ("PUT", "/v1/deploy"), ("GET", "/v1/apis/iris/")])
def test_a_route_that_the_table_lacks_is_open_to_admins_only(method: str, path: str) -> None:
    authorize(Principal("admin", ADMIN), method, path)
    with pytest.raises(NotFoundError, match=f"there is no route {method} {path}"):
        authorize(Principal("ci", DEPLOY), method, path)


def test_the_audit_log_gets_the_api_and_the_other_values_of_a_path() -> None:
    route = find_route("DELETE", "/v1/apis/iris/jobs/69da5b1f")
    assert route is not None
    assert (route.access.change, route.api, route.subject) == ("stop job", "iris", "69da5b1f")


def test_a_caller_limited_to_an_api_can_change_no_other() -> None:
    Principal("ci", DEPLOY, "iris").check_apis({"iris"}, "cortex.yaml")
    Principal("ci", DEPLOY).check_apis({"iris", "sum"}, "cortex.yaml")
    with pytest.raises(ForbiddenError, match=r"limited to the API iris; cortex\.yaml would also change sum, tally, so"):
        Principal("ci", DEPLOY, "iris").check_apis({"iris", "tally", "sum"}, "cortex.yaml")
