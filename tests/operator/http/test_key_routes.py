"""API keys with a real operator: valid at once, after restarts, and while no operator runs."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest

from harness.installations.running import RunningOperator, config

pytestmark = pytest.mark.processes

KEYED = "  networking: {auth: api_key}\n"


@pytest.fixture
def operator(running: RunningOperator) -> Iterator[RunningOperator]:
    """An operator without keys, which other tests use too."""
    yield running
    running.clear()
    for key in running.call("GET", "/v1/keys")[1]:
        running.call("DELETE", f"/v1/keys/{key['id']}")


def create(operator: RunningOperator, *apis: str) -> dict[str, Any]:
    status, made = post(operator, {"name": "a shop", "apis": apis})
    assert status == 200, made
    return made


def post(operator: RunningOperator, body: dict[str, Any]) -> tuple[int, Any]:
    return operator.call("POST", "/v1/keys", json.dumps(body).encode(), **{"content-type": "application/json"})


def ask(operator: RunningOperator, key: str, path: str = "/iris") -> int:
    connection = HTTPConnection("127.0.0.1", operator.gateway_port, timeout=60)
    try:
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        connection.request("POST", path, "{}", headers)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def test_keys_are_valid_for_their_apis_until_revoked(operator: RunningOperator) -> None:
    operator.deploy(config(extra=KEYED))
    operator.wait()
    assert operator.predict({})[0] == 401
    iris, every, other = create(operator, "iris"), create(operator), create(operator, "sum", "sum")
    assert [ask(operator, made["key"]) for made in (iris, every, other)] == [200, 200, 403]
    listed = operator.call("GET", "/v1/keys")[1]
    assert [(made["id"], made["apis"]) for made in listed] == [
        (iris["id"], ["iris"]), (every["id"], []), (other["id"], ["sum"]),
    ]  # fmt: skip
    stored = b"".join(path.read_bytes() for path in operator.home.path.glob("state.db*"))
    assert hashlib.sha256(iris["key"].encode()).hexdigest().encode() in stored
    assert iris["key"].encode() not in stored and "key" not in listed[0]
    operator.end(signal.SIGKILL)
    assert [ask(operator, made["key"]) for made in (iris, every, other)] == [200, 200, 403]
    operator.start()
    assert [ask(operator, made["key"]) for made in (iris, every, other)] == [200, 200, 403]
    assert operator.call("DELETE", f"/v1/keys/{iris['id']}")[1]["id"] == iris["id"]
    assert [ask(operator, made["key"]) for made in (iris, every)] == [401, 200]
    assert operator.call("DELETE", f"/v1/keys/{iris['id']}")[0] == 404
    assert operator.api()["metrics"]["requests"]["4xx"] >= 4
    operator.deploy(config())
    operator.wait()
    assert operator.predict({})[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        {"name": ""}, {"name": "a\nb"}, {"name": "x" * 101},
        {"name": "a", "apis": ["No"]}, {"name": "a", "apis": ["*"]}, {},
    ],
    ids=["empty", "two lines", "long", "no name of an API", "star", "nothing"],
)  # fmt: skip
def test_rejects_an_invalid_key_request(operator: RunningOperator, body: dict[str, Any]) -> None:
    status, answer = post(operator, body)
    assert status == 400 and answer["error"]
    assert operator.call("GET", "/v1/keys")[1] == []
