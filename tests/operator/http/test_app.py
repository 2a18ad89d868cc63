"""The operator's routes over HTTP, with a real operator behind them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.client import HTTPConnection
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

import pytest

from cortex.operator.access.scopes import ROUTES
from harness.homes import temporary_home
from harness.installations.running import RunningOperator, config, project, running_operator

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def operator() -> Iterator[RunningOperator]:
    with temporary_home() as home, running_operator(home) as running:
        yield running


def request(
    operator: RunningOperator, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", operator.port, timeout=30)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def create_token(operator: RunningOperator, **options: str) -> dict[str, Any]:
    headers = {"content-type": "application/json"}
    status, token = operator.call("POST", "/v1/tokens", json.dumps(options).encode(), **headers)
    assert status == 200, token
    return token


def test_the_log_has_the_start_of_the_operator_once(operator: RunningOperator) -> None:
    log = (operator.home.logs_dir / "operator.log").read_text()
    assert log.count("operator started") == 1
    assert "server process" not in log


def test_every_route_limits_the_size_of_a_body(operator: RunningOperator) -> None:
    for route, access in ROUTES.items():
        method, path = re.sub(r"\{.*?\}", "none", route).split()
        if not access.reads_body:
            headers = {"authorization": f"Bearer {operator.token}", "content-length": str(2**20 + 1)}
            status, answer = request(operator, method, path, **headers)
            assert (status, json.loads(answer)["code"]) == (413, "too_large"), (method, path)
    whole = json.dumps({"name": "a", "apis": ["x" * 2**20]}).encode()
    for body in (whole, iter([whole])):  # with its length, and in chunks
        assert operator.call("POST", "/v1/keys", body, **{"content-type": "application/json"})[0] == 413
    assert operator.call("GET", "/v1/keys")[1] == []


@pytest.mark.parametrize(
    "path", ["/v1/keys", "/v1/tokens", "/v1/patch", "/v1/apis/deep/feedback", "/v1/apis/deep/jobs"]
)
def test_bodies_that_are_nested_too_deeply_are_bad_input(operator: RunningOperator, path: str) -> None:
    operator.deploy(config("deep"))
    lists, maps = (lambda depth: "[" * depth + "]" * depth), (lambda depth: '{"a":' * depth + "1" + "}" * depth)
    for body in (lists(100_000), maps(5000), f'{{"name": {maps(5000)}}}', f'{{"name": {lists(900)}}}', lists(1000)):
        status, answer = operator.call("POST", path, body.encode(), **{"content-type": "application/json"})
        assert status == 400, answer
    operator.call("DELETE", "/v1/apis/deep")


def test_a_token_limited_to_an_api_shows_and_changes_no_other(operator: RunningOperator) -> None:
    operator.deploy(config() + config("other"))
    bearer = {"authorization": f"Bearer {create_token(operator, scope='deploy', api='iris')['token']}"}
    listed = json.loads(request(operator, "GET", "/v1/apis", **bearer)[1])
    assert [api["spec"]["name"] for api in listed] == ["iris"]

    both = config(answer="two") + config("other", answer="two")
    for route, body in (("/v1/deploy", project(both)), ("/v1/patch", both.encode())):
        status, answer = request(operator, "POST", f"{route}?force=true", body, **bearer)
        assert (status, "would also change other, so nothing was changed" in answer) == (403, True)
    assert operator.api()["spec"]["handler"]["config"] == {"answer": "one"}

    nested = config(extra="  networking: {endpoint: /other/login}")
    operator.deploy(nested)  # with a token for all APIs
    number = operator.call("GET", "/v1/apis/iris/history")[1][0]["number"]
    operator.call("POST", "/v1/apis/iris/rollback?force=true")
    refusals = [
        request(operator, "POST", "/v1/deploy?force=true", project(nested), **bearer),
        request(operator, "POST", "/v1/patch?force=true", nested.encode(), **bearer),
        request(operator, "POST", f"/v1/apis/iris/rollback?force=true&revision={number}", **bearer),
    ]
    assert {status for status, _ in refusals} == {403}
    assert all("/other/login is below the endpoint of other" in answer for _, answer in refusals)

    status, answer = request(operator, "POST", "/v1/deploy?force=true", project(config(answer="two")), **bearer)
    assert (status, json.loads(answer)[0]["message"]) == (200, "updating iris (RealtimeAPI)")
    assert request(operator, "POST", "/v1/apis/other/refresh", **bearer)[0] == 403
    assert request(operator, "DELETE", "/v1/apis/iris", **bearer)[0] == 200
    operator.call("DELETE", "/v1/apis/other")


def test_the_audit_log_has_each_change_with_its_token(operator: RunningOperator) -> None:
    token = create_token(operator, scope="deploy", name="pipeline", api="audited")
    bearer = {"authorization": f"Bearer {token['token']}"}
    request(operator, "POST", "/v1/deploy", project(config("audited")), **bearer)
    request(operator, "POST", "/v1/apis/audited/feedback", b"[]", **bearer)
    request(operator, "DELETE", "/v1/apis/audited")
    request(operator, "DELETE", "/v1/apis/audited", **bearer)
    entries = operator.call("GET", "/v1/audit?api=audited&limit=50")[1]
    assert [(entry["token"], entry["action"], entry["result"], entry["address"]) for entry in entries] == [
        ("pipeline", "delete", "succeeded", "127.0.0.1"),
        (None, "delete", "refused", "127.0.0.1"),
        ("pipeline", "feedback", "failed", "127.0.0.1"),
        ("pipeline", "deploy", "succeeded", "127.0.0.1"),
        ("admin", "create token", "succeeded", "127.0.0.1"),
    ]
    since = quote(entries[1]["at"])
    assert operator.call("GET", f"/v1/audit?api=audited&since={since}")[1] == entries[:2]
    assert operator.call("GET", "/v1/audit?limit=1")[1] == entries[:1]


@pytest.mark.parametrize("path", ["/livez/", "//livez", "/livez/../v1/status", "/LIVEZ", "/v1/status?x=/livez"])
def test_paths_similar_to_liveness_require_the_token(operator: RunningOperator, path: str) -> None:
    assert request(operator, "GET", path)[0] == 401


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"host": "localhost:8889"}, 200),
        ({"host": "[::1]:8889"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": ""}, 403),
        ({"host": "localhost", "origin": "http://evil.example"}, 403),
        ({"host": "localhost", "origin": "null"}, 403),
        ({"host": "localhost", "origin": "http://["}, 403),
        ({"host": "localhost:8889", "origin": "http://localhost:8889"}, 200),
        ({"host": "localhost:8889", "origin": "http://localhost:1234"}, 403),
    ],
)
def test_rejects_requests_of_foreign_web_pages(
    operator: RunningOperator, headers: dict[str, str], expected: int
) -> None:
    authorization = {"authorization": f"Bearer {operator.token}"}
    assert request(operator, "GET", "/v1/status", **authorization, **headers)[0] == expected


def test_the_documentation_of_its_routes_opens_without_a_token_and_omits_the_version(operator: RunningOperator) -> None:
    for path in ("/openapi.json", "/docs"):
        status, body = request(operator, "GET", path)
        assert (status, "/v1/deploy" in body, version("cortex-serving") in body) == (200, True, False)


def test_returns_mistakes_as_diagnostics(operator: RunningOperator) -> None:
    yaml = config().replace("handler.py", "missing.py")
    status, answer = operator.call("POST", "/v1/deploy?config=cortex.yaml", project(yaml))
    assert (status, answer["code"]) == (400, "bad_config")
    (found,) = answer["diagnostics"]
    assert (found["file"], found["line"]) == ("cortex.yaml", 6)
    assert "missing.py" in found["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/apis/none", None, 404, "not_found"),
        ("GET", "/v1/apis/none/wait", None, 404, "not_found"),
        ("GET", "/v1/apis/none/logs", None, 404, "not_found"),
        ("GET", "/v1/apis/..%2f..%2fetc/logs", None, 404, "not_found"),
        ("DELETE", "/v1/apis/none", None, 404, "not_found"),
        ("POST", "/v1/apis/none/refresh", None, 404, "not_found"),
        ("GET", "/v1/nothing", None, 404, "not_found"),
        ("PUT", "/v1/deploy", None, 405, "method_not_allowed"),
        ("POST", "/v1/deploy", b"hello", 400, "bad_input"),
        ("POST", "/v1/deploy?force=perhaps", b"", 400, "bad_input"),
        ("POST", "/v1/patch", b"x" * (1024 * 1024 + 1), 413, "too_large"),
    ],
)
def test_errors_have_a_code_and_a_message(
    operator: RunningOperator, method: str, path: str, body: bytes | None, status: int, code: str
) -> None:
    answer = operator.call(method, path, body)
    assert (answer[0], answer[1]["code"]) == (status, code)
    assert answer[1]["error"]


def test_rejects_an_upload_with_a_too_large_content_length_unread(operator: RunningOperator) -> None:
    connection = HTTPConnection("127.0.0.1", operator.port, timeout=30)
    connection.putrequest("POST", "/v1/deploy")
    connection.putheader("authorization", f"Bearer {operator.token}")
    connection.putheader("content-length", str(10 * 1024**3))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_the_memory_of_replicas_is_measured_for_one_api_and_not_while_a_client_waits(operator: RunningOperator) -> None:
    operator.deploy(config("measured"))
    operator.wait("measured")
    waited = operator.call("GET", "/v1/apis/measured/wait?timeout=0")[1]
    assert "memory" not in waited
    described = operator.call("GET", "/v1/apis/measured")[1]
    assert isinstance(described["memory"], list)
    assert described.keys() - waited.keys() == {"memory"}
    operator.call("DELETE", "/v1/apis/measured")


def test_masks_the_values_of_environment_variables(operator: RunningOperator) -> None:
    yaml = config("secretive").replace("path: handler.py", "path: handler.py\n    env: {KEY: swordfish}")
    operator.deploy(yaml)
    answer = operator.wait("secretive")
    assert answer["spec"]["handler"]["env"] == {"KEY": "********"}
    assert answer["api_versions"][0]["api_id"] == answer["api_id"]
    assert set(answer["metrics"]) == {"requests", "aborted", "in_flight", "queued", "average_ms"}
    assert [item["spec"]["name"] for item in operator.call("GET", "/v1/apis")[1]] == ["secretive"]
    assert "swordfish" not in (operator.home.logs_dir / "operator.log").read_text()
    (replica,) = [item for item in operator.replicas() if item["api"] == "secretive"]
    assert replica["state"] == "ready"


def test_describes_a_splitter_without_the_sections_of_code(operator: RunningOperator) -> None:
    shares = "- {name: split, kind: TrafficSplitter, apis: [{name: iris, weight: 100}]}\n"
    operator.deploy(config() + shares)
    assert operator.wait("split")["spec"].keys().isdisjoint({"handler", "compute", "autoscaling"})
    assert operator.api("split")["spec"]["apis"][0]["name"] == "iris"
    assert operator.wait("iris")["spec"].keys() >= {"handler", "compute", "autoscaling"}
    for name in ("split", "iris"):
        operator.call("DELETE", f"/v1/apis/{name}")


def test_reports_a_deploy_without_its_configuration_file(operator: RunningOperator) -> None:
    status, answer = operator.call("POST", "/v1/deploy?config=other.yaml", project(config()))
    assert (status, answer["diagnostics"][0]["message"]) == (400, "file does not exist")
