"""Pages of API keys, operator tokens and the audit log, in this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fastapi import APIRouter

from cortex.lifecycle import AuditResult, TokenScope
from cortex.operator.access.keys import ActiveKeys, Keys
from cortex.operator.dashboard.pages.access import ENTRIES, audit_pages, key_pages, token_pages
from cortex.state.queries.apis import ApiStore
from cortex.state.queries.audit import AuditEntry, AuditStore
from cortex.state.queries.keys import KeyStore
from harness.servers.dashboard import Parts, ServedDashboard, assert_readable, served_dashboard

pytestmark = pytest.mark.processes

HOSTILE = '<script>alert("1")</script>'
KEY = re.compile(r"ck_[0-9a-f]{10}_[A-Za-z0-9_-]{43}")
TOKEN = re.compile(r"ct_[0-9a-f]{10}_[A-Za-z0-9_-]{43}")
PAGES = ("/keys", "/tokens", "/audit")


class Publisher:
    """Stands where the gateway does: counts how often keys were applied."""

    def __init__(self) -> None:
        self.times = 0

    async def __call__(self) -> None:
        self.times += 1


@pytest.fixture
def publisher() -> Publisher:
    return Publisher()


@pytest.fixture
def dashboard(tmp_path: Path, publisher: Publisher) -> Iterator[ServedDashboard]:
    def routers(parts: Parts) -> list[APIRouter]:
        apis = ApiStore(parts.engine)
        keys = Keys(ActiveKeys(KeyStore(parts.engine)), publisher)
        return [
            key_pages(keys, apis, parts.pages),
            token_pages(parts.tokens, apis, parts.pages),
            audit_pages(parts.audit_log, parts.pages),
        ]

    with served_dashboard(tmp_path, routers) as made:
        yield made


def revoke_path(text: str) -> str:
    found = re.search(r'action="/dashboard(/(?:keys|tokens)/[0-9a-f]+/revoke)"', text)
    assert found
    return found[1]


def test_a_new_key_is_shown_once(dashboard: ServedDashboard, publisher: Publisher) -> None:
    admin = dashboard.sign_in()
    page = admin.post("/keys", name="a shop", apis="iris, sum")
    assert page.status_code == 200
    assert_readable(page)
    (secret,) = KEY.findall(page.text)
    assert publisher.times == 1
    for path in PAGES:
        assert secret not in admin.get(path).text
    listed = admin.get("/keys").text
    assert "a shop" in listed
    assert "not deployed: iris, sum" in listed
    (entry,) = dashboard.audit()
    assert (entry.action, entry.token, entry.result) == ("create key", "admin", AuditResult.SUCCEEDED)
    assert secret not in entry.detail


def test_a_revoked_key_is_gone(dashboard: ServedDashboard, publisher: Publisher) -> None:
    admin = dashboard.sign_in()
    admin.post("/keys", name="a shop")
    path = revoke_path(admin.get("/keys").text)
    answer = admin.post(path)
    assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard/keys")
    assert publisher.times == 2
    page = admin.get("/keys").text
    assert "revoked the key" in page
    assert "No keys" in page
    assert admin.post(path).status_code == 404
    assert [(entry.action, entry.result) for entry in dashboard.audit()][:2] == [
        ("revoke key", AuditResult.FAILED),
        ("revoke key", AuditResult.SUCCEEDED),
    ]


@pytest.mark.parametrize(
    ("path", "fields", "problem"),
    [
        ("/keys", {"name": " "}, "the name of a key must be"),
        ("/keys", {"name": "a\x1bb"}, "the name of a key must be"),
        ("/keys", {"name": "a", "apis": HOSTILE}, "be the name of an API"),
        ("/tokens", {"scope": HOSTILE, "expiry": "1 day"}, "is not one of the scopes"),
        ("/tokens", {"scope": "read"}, "is not one of 1 day"),
        ("/tokens", {"scope": "read", "expiry": "1 day", "name": HOSTILE}, "is not a valid name of a token"),
        ("/tokens", {"scope": "admin", "expiry": "1 day", "api": "iris"}, "limited to an API"),
    ],
)
def test_a_mistake_in_the_form_is_shown_and_recorded(
    dashboard: ServedDashboard, path: str, fields: dict[str, str], problem: str
) -> None:
    page = dashboard.sign_in().post(path, **fields)
    assert page.status_code == 400
    assert problem in page.text
    assert HOSTILE not in page.text
    assert_readable(page)
    (entry,) = dashboard.audit()
    assert entry.result is AuditResult.FAILED
    assert problem in entry.detail


def test_a_new_token_is_shown_once_and_signs_in(dashboard: ServedDashboard) -> None:
    admin = dashboard.sign_in()
    page = admin.post("/tokens", scope="read", name="reader", expiry="30 days")
    assert_readable(page)
    (secret,) = TOKEN.findall(page.text)
    principal = dashboard.parts.tokens.identify(f"Bearer {secret}")
    assert (principal.name, principal.scope) == ("reader", TokenScope.READ)
    assert principal.expires_at is not None
    assert timedelta(days=29) < principal.expires_at - datetime.now(UTC) < timedelta(days=31)
    for path in PAGES:
        assert secret not in admin.get(path).text
    session = dashboard.sign_in(principal)
    assert session.post("/sign-out").status_code == 200
    assert admin.post(revoke_path(admin.get("/tokens").text)).status_code == 303
    assert [entry.action for entry in dashboard.audit()] == ["revoke token", "create token"]


def entry(second: int, action: str = "deploy", token: str | None = "ci", detail: str = "creating iris") -> AuditEntry:
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=second)
    return AuditEntry(at, token, "10.0.0.7", action, "iris", AuditResult.SUCCEEDED, detail)


def test_the_audit_log_is_divided_into_pages(dashboard: ServedDashboard) -> None:
    details = [f"change {number:03d}" for number in range(2 * ENTRIES + 1)]
    AuditStore(dashboard.parts.engine).add([entry(second, detail=text) for second, text in enumerate(details)])
    admin, query, seen = dashboard.sign_in(), "", []
    for rows in (ENTRIES, ENTRIES, 1):
        page = admin.get(f"/audit{query}")
        assert_readable(page)
        found = re.findall(r"change \d{3}", page.text)
        assert len(found) == rows
        seen += found
        assert ("data-live" in page.text) == (query == "")
        link = re.search(r'href="/dashboard/audit(\?[^"]*before=\d+)"', page.text)
        query = link[1].replace("&amp;", "&") if link else ""
    assert seen == details[::-1]
    assert query == ""


def test_the_audit_log_is_filtered(dashboard: ServedDashboard) -> None:
    AuditStore(dashboard.parts.engine).add(
        [entry(1, detail="one"), entry(2, "delete", detail="two"), entry(3, token=None, detail="three")]
    )
    admin = dashboard.sign_in()

    def shown(**query: str) -> set[str]:
        text = admin.get("/audit", **query).text
        return {detail for detail in ("one", "two", "three") if f'class="detail">{detail}<' in text}

    assert shown() == {"one", "two", "three"}
    assert shown(token="ci") == {"one", "two"}
    assert shown(token="ci", action="delete") == {"two"}
    assert shown(api="iris", action="deploy") == {"one", "three"}
    assert shown(api="sum") == set()
    assert "No stored change matches" in admin.get("/audit", api="sum").text
    for query in ({"before": "0"}, {"before": "x"}, {"before": str(2**64)}, {"token": "a\0b"}):
        assert admin.get("/audit", **query).status_code in (400, 422)


def test_texts_of_others_are_escaped(dashboard: ServedDashboard) -> None:
    admin = dashboard.sign_in()
    admin.post("/keys", name=HOSTILE)
    hostile = AuditEntry(
        datetime.now(UTC), HOSTILE, HOSTILE, HOSTILE, HOSTILE, AuditResult.FAILED, f"{HOSTILE}\x1b[31m\u202e"
    )
    AuditStore(dashboard.parts.engine).add([hostile])
    pages = [admin.get("/keys"), admin.get("/audit")]
    pages += [admin.get("/audit", **{name: HOSTILE}) for name in ("token", "api", "action")]
    for page in pages:
        assert page.status_code == 200
        assert HOSTILE not in page.text
        assert "&lt;script&gt;" in page.text
        assert "\x1b" not in page.text
        assert "\u202e" not in page.text
        assert_readable(page)


def test_over_tls_only_tls_may_set_the_cookie_or_open_the_pages(tmp_path: Path) -> None:
    def routers(parts: Parts) -> list[APIRouter]:
        return [token_pages(parts.tokens, ApiStore(parts.engine), parts.pages)]

    with served_dashboard(tmp_path, routers, "https://127.0.0.1:8889") as secure:
        answer = secure.send("POST", "/sign-in", "", params={"code": secure.new_code()})
        assert answer.headers["set-cookie"].startswith("__Secure-cortex_8889=")
        assert "secure" in answer.headers["set-cookie"].lower().split("; ")
        assert answer.headers["strict-transport-security"] == "max-age=86400"
        assert secure.sign_in().get("/tokens").status_code == 200


def test_a_cookie_of_another_server_of_the_host_is_ignored(dashboard: ServedDashboard) -> None:
    admin = dashboard.sign_in()
    assert "strict-transport-security" not in admin.get("/tokens").headers
    for cookie in (f"tossed; cortex_8889={admin.cookie}", f"{admin.cookie}; cortex_8889=tossed"):
        assert dashboard.send("GET", "/tokens", cookie).status_code == 200
    assert (
        dashboard.send("GET", "/tokens", f"{admin.cookie}; cortex_8889={dashboard.sign_in().cookie}").status_code == 401
    )
