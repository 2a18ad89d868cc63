"""`cortex tokens` and `cortex audit`."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from harness.installations.command_line import cortex
from harness.jobs.job_operator import Operator
from harness.servers.answering import reply

pytestmark = pytest.mark.processes

TOKEN = {
    "id": "8c1f0e5b9a",
    "name": "ci",
    "scope": "deploy",
    "api": "iris",
    "created_at": "2026-11-22T19:48:27.1+00:00",
    "expires_at": "2026-12-22T19:48:27.1+00:00",
    "is_expired": False,
}
ENTRY = {
    "at": "2026-11-22T19:48:27.1+00:00",
    "token": None,
    "address": "10.0.0.7",
    "action": "delete",
    "api": None,
    "result": "refused",
    "detail": "no",
}


def test_a_token_is_created_with_its_limits_and_printed_alone(operator: Operator, home: Path) -> None:
    operator.respond("POST /v1/tokens", TOKEN | {"token": "ct_8c1f0e5b9a_secret"})
    done = cortex(home, "tokens", "create", "ci", "--scope", "deploy", "--api", "iris", "--expires", "30d")
    assert done.stdout == "ct_8c1f0e5b9a_secret\n"
    assert "shown only once; its name is ci, its id 8c1f0e5b9a" in done.stderr
    assert json.loads(operator.bodies()[0]) == {
        "scope": "deploy", "name": "ci", "api": "iris", "expires_in_s": 30 * 86400,
    }  # fmt: skip


def test_tokens_are_listed_and_revoked(operator: Operator, home: Path) -> None:
    others = [TOKEN | {"expires_at": None, "api": None}, TOKEN | {"is_expired": True}]
    operator.respond("GET /v1/tokens", [TOKEN, *others])
    lines = cortex(home, "tokens", "list").stdout.splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["2026-12-22T19:48:27", "never", "expired"]
    assert [line.split()[3] for line in lines[1:]] == ["iris", "all", "iris"]
    operator.respond("DELETE /v1/tokens/ci", TOKEN)
    assert cortex(home, "tokens", "revoke", "ci").stdout == "revoked the token 8c1f0e5b9a (ci)\n"


def test_the_audit_log_is_shown_from_a_time_on(operator: Operator, home: Path) -> None:
    operator.answering = lambda handler: reply(handler, 200, json.dumps([ENTRY]).encode())
    done = cortex(home, "audit", "--api", "iris", "--since", "2h", "--limit", "1")
    assert done.stdout.splitlines()[1].split() == [
        "2026-11-22T19:48:27", "-", "10.0.0.7", "delete", "-", "refused", "no",
    ]  # fmt: skip
    assert "only the last 1 changes are shown" in done.stderr
    query = parse_qs(urlsplit(operator.requests[-1][1]).query)
    age = datetime.now(UTC) - datetime.fromisoformat(query.pop("since")[0])
    assert timedelta(hours=2) <= age < timedelta(hours=2, minutes=5)
    assert query == {"api": ["iris"], "limit": ["1"]}
    cortex(home, "audit", "--since", "2026-11-22T10:00")
    assert parse_qs(urlsplit(operator.requests[-1][1]).query)["since"] == ["2026-11-22T10:00:00+00:00"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tokens", "create", "--scope", "deploy", "--expires", "30"), "--expires 30: must be a duration"),
        (("tokens", "create", "--scope", "deploy", "--expires", "0d"), "--expires 0d: must be a duration"),
        (("tokens", "create", "--scope", "write"), "choose from"),
        (("tokens", "create", "ci"), "--scope"),
        (("audit", "--since", "yesterday"), "--since yesterday: must be"),
        (("audit", "--limit", "many"), "--limit"),
        (("audit", "--limit", "0"), "--limit: must be a number from 1 to 10,000 (got 0)"),
    ],
)
def test_wrong_arguments_are_errors(home: Path, words: tuple[str, ...], message: str) -> None:
    done = cortex(home, *words)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
