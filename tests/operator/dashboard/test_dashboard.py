"""The dashboard over HTTP, with a real operator behind it: signing in, pages, changes, refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from urllib.parse import urlencode

import pytest

from cortex.operator.access.scopes import DASHBOARD_ROUTES
from harness.homes import temporary_home
from harness.installations.running import BROKEN_HANDLER, HANDLER, RunningOperator, config, running_operator
from harness.wait import wait_until

pytestmark = pytest.mark.processes

HOSTILE = HANDLER.replace(
    "        self.answer", "        print('\\x1b[31mred\\x1b[0m <script>alert(1)</script>')\n        self.answer"
)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Visitor:
    """A browser without JavaScript: cookies and forms."""

    operator: RunningOperator
    cookie: str = ""
    origin: str | None = field(default=None)

    def __post_init__(self) -> None:
        self.origin = f"http://127.0.0.1:{self.operator.port}"

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        return self._send(method, path, None, headers)

    def post(self, path: str, /, *, csrf: str | None = None, method: str = "POST", **fields: str) -> Answer:
        """Send a form, with the token of the session unless another is given."""
        token = self.csrf if csrf is None else csrf
        headers = {"content-type": "application/x-www-form-urlencoded"}
        headers |= {"origin": self.origin} if self.origin is not None else {}
        return self._send(method, path, urlencode({"csrf": token, **fields}).encode(), headers)

    @property
    def csrf(self) -> str:
        found = re.search(r'name="csrf" value="([^"]+)"', self.get("/dashboard/").text)
        assert found
        return found[1]

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        connection = HTTPConnection("127.0.0.1", self.operator.port, timeout=30)
        try:
            connection.request(method, path, body, {"cookie": self.cookie, **headers})
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, names, response.read().decode())
        finally:
            connection.close()


def sign_in(operator: RunningOperator, token: str = "") -> Visitor:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    status, made = operator.call("POST", "/v1/dashboard/codes", **headers)
    assert status == 200, made
    visitor = Visitor(operator)
    answer = visitor.post(made["path"], csrf="")
    assert answer.status == 303
    visitor.cookie = answer.headers["set-cookie"].partition(";")[0]
    return visitor


def token_of(operator: RunningOperator, body: bytes) -> str:
    return str(operator.call("POST", "/v1/tokens", body, **{"content-type": "application/json"})[1]["token"])


@pytest.fixture(scope="module")
def operator() -> Iterator[RunningOperator]:
    with temporary_home() as home, running_operator(home) as running:
        running.deploy(config(), HOSTILE)
        running.wait()
        running.deploy(config(answer="two", extra="  tracker: {key: answer, model_type: classification}"), HOSTILE)
        running.wait()
        yield running


@pytest.fixture(scope="module")
def admin(operator: RunningOperator) -> Visitor:
    return sign_in(operator)


def test_a_code_signs_one_browser_in(operator: RunningOperator) -> None:
    path = operator.call("POST", "/v1/dashboard/codes")[1]["path"]
    asked = Visitor(operator).get(path)
    assert (asked.status, "set-cookie" in asked.headers) == (200, False)  # a link signs nobody in
    assert "<strong>admin</strong>" in asked.text
    for origin in (None, "null", "https://example.org"):
        foreign = Visitor(operator)
        foreign.origin = origin
        assert foreign.post(path, csrf="").status == 403
    first = Visitor(operator).post(path, csrf="")
    assert (first.status, first.headers["location"]) == (303, "/dashboard/")
    attributes = {part.strip().lower() for part in first.headers["set-cookie"].split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/dashboard"} <= attributes
    assert operator.token not in first.text + str(first.headers) + path
    for again in (Visitor(operator).get(path), Visitor(operator).post(path, csrf="")):
        assert (again.status, "set-cookie" in again.headers) == (401, False)
        assert "used before" in again.text


PAGES = [
    "/dashboard/",
    "/dashboard/apis/iris",
    "/dashboard/apis/iris?range=1d",
    "/dashboard/apis/iris/logs",
    "/dashboard/apis/iris/configuration",
    "/dashboard/apis/iris/history",
    "/dashboard/cluster",
    "/dashboard/keys",
    "/dashboard/tokens",
    "/dashboard/audit",
    "/dashboard/jobs",
    "/dashboard/jobs?api=iris&status=failed",
    "/dashboard/workloads",
    "/dashboard/schedules",
]


@pytest.mark.parametrize("path", [*PAGES, "/dashboard/sign-in", "/dashboard/nothing", "/dashboard/static/nothing"])
def test_every_response_has_the_headers_of_a_strict_page(admin: Visitor, path: str) -> None:
    answer = admin.get(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert not re.search(r"<[^>]+\s(style|on\w+)=", answer.text), "the policy forbids inline styles and scripts"
    assert not re.search(r"<(script|style)>", answer.text)


@pytest.mark.parametrize("path", PAGES)
def test_pages_have_landmarks_and_need_a_session(operator: RunningOperator, admin: Visitor, path: str) -> None:
    page = admin.get(path)
    assert page.status == 200, page.text
    for part in ('<html lang="en">', "<main", "<header", "<nav", "<h1>", 'aria-current="page"', "Skip to content"):
        assert part in page.text
    refused = Visitor(operator).get(path)
    assert refused.status == 401
    assert "cortex dashboard" in refused.text
    assert "iris" not in refused.text


def test_pages_show_no_button_that_the_token_does_not_permit(operator: RunningOperator) -> None:
    reader = sign_in(operator, token_of(operator, b'{"scope": "read"}'))
    for path in PAGES:
        assert "/rollback" not in reader.get(path).text
        assert "/refresh" not in reader.get(path).text
        assert "/promote" not in reader.get(path).text


def test_a_token_limited_to_an_api_shows_no_other(operator: RunningOperator) -> None:
    other = sign_in(operator, token_of(operator, b'{"scope": "deploy", "api": "other"}'))
    page = other.get("/dashboard/")
    assert (page.status, "iris" in page.text) == (200, False)
    assert other.get("/dashboard/apis/iris").status == 403


def test_a_revoked_token_ends_its_sessions(operator: RunningOperator) -> None:
    visitor = sign_in(operator, token_of(operator, b'{"scope": "read", "name": "leaving"}'))
    assert visitor.get("/dashboard/").status == 200
    operator.call("DELETE", "/v1/tokens/leaving")
    assert visitor.get("/dashboard/").status == 401


def test_signing_out_ends_the_session(operator: RunningOperator) -> None:
    visitor = sign_in(operator)
    assert visitor.post("/dashboard/sign-out").status == 200
    assert visitor.get("/dashboard/").status == 401


def test_the_cookie_opens_the_dashboard_only(admin: Visitor) -> None:
    assert admin.get("/v1/apis").status == 401
    assert admin.get("/dashboard/../v1/apis").status == 404
    assert admin.get("/dashboardx").status == 401


CHANGES = [re.sub(r"{\w+}", "iris", route.split()[1]) for route in DASHBOARD_ROUTES if route.startswith("POST")]


@pytest.mark.parametrize("path", CHANGES)
def test_a_change_needs_the_token_of_its_session_and_the_origin(
    operator: RunningOperator, admin: Visitor, path: str
) -> None:
    csrf = admin.csrf
    for wrong in ("", "x", sign_in(operator).csrf):
        assert admin.post(path, csrf=wrong, revision="1").status == 403
    for origin in (None, "null", "https://example.org", f"http://127.0.0.1:{operator.gateway_port}"):
        foreign = Visitor(operator, admin.cookie)
        foreign.origin = origin
        assert foreign.post(path, csrf=csrf, revision="1").status == 403, origin
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert admin.post(path, csrf=csrf, method=method).status in (403, 404, 405)
    assert admin.get("/dashboard/").status == 200  # nothing happened: the session is still there


@pytest.mark.parametrize("host", ["example.org", "dashboard.attacker.test:8889", ""])
def test_a_foreign_host_is_refused(admin: Visitor, host: str) -> None:
    assert admin.get("/dashboard/", host=host).status == 403


def test_texts_of_users_are_escaped(operator: RunningOperator, admin: Visitor) -> None:
    operator.predict({}, "/iris")
    wait_until(lambda: "red &lt;script&gt;" in admin.get("/dashboard/apis/iris/logs").text, message="line in the logs")
    page = admin.get("/dashboard/apis/iris/logs?id=%3Cscript%3E&replica=&lines=100").text
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_the_page_of_a_failing_api_says_why(operator: RunningOperator, admin: Visitor) -> None:
    operator.deploy(config("broken"), BROKEN_HANDLER)
    operator.wait("broken")
    for path in ("/dashboard/", "/dashboard/apis/broken"):
        assert "ValueError: bad weights" in admin.get(path).text
    assert "Traceback" in admin.get("/dashboard/apis/broken").text
    operator.call("DELETE", "/v1/apis/broken?force=true")


def test_passwords_are_masked_in_failures_tracebacks_and_logs(operator: RunningOperator, admin: Visitor) -> None:
    address = "redis://scott:swordfish@store"
    handler = BROKEN_HANDLER.replace("'bad weights'", f"'bad weights', '{address}'")
    operator.deploy(config("leaking"), handler)
    operator.wait("leaking")
    masked = "redis://scott:********@store"
    for path in ("", "apis/leaking", "apis/leaking/logs"):
        wait_until(lambda path=path: masked in admin.get(f"/dashboard/{path}").text, message=path)
        assert "swordfish" not in admin.get(f"/dashboard/{path}").text
    operator.call("DELETE", "/v1/apis/leaking?force=true")


def test_load_is_sampled_and_drawn(operator: RunningOperator, admin: Visitor) -> None:
    def is_drawn() -> bool:
        operator.predict({}, "/iris")
        page = admin.get("/dashboard/apis/iris").text
        return re.search(r"Requests: all now 0*[.\d]*[1-9]", page) is not None and "p99 without data" not in page

    wait_until(is_drawn, message="samples in the chart")


def test_a_rollback_deploys_the_earlier_revision_and_is_audited(operator: RunningOperator, admin: Visitor) -> None:
    history = admin.get("/dashboard/apis/iris/history").text
    assert "Roll back to 1" in history
    assert "handler.config.answer: one → two" in history
    refused = admin.post("/dashboard/apis/iris/rollback", revision="99")
    assert (refused.status, "99" in refused.text) == (404, True)
    answer = admin.post("/dashboard/apis/iris/rollback", revision="1")
    assert (answer.status, answer.headers["location"]) == (303, "/dashboard/apis/iris")
    assert "rolling back iris (RealtimeAPI) from revision 2 to 1" in admin.get("/dashboard/apis/iris").text
    assert operator.wait()["spec"]["handler"]["config"] == {"answer": "one"}
    audit = operator.call("GET", "/v1/audit?api=iris&limit=2")[1]
    assert [(entry["action"], entry["result"], entry["token"]) for entry in audit] == [
        ("rollback", "succeeded", "admin"),
        ("rollback", "failed", "admin"),
    ]
    assert "<" not in audit[1]["detail"]


CANARY = "  update_strategy: {canary: {steps: [10%], min_requests: 1000}}"


def test_a_canary_is_promoted_or_rolled_back_by_a_button(operator: RunningOperator, admin: Visitor) -> None:
    operator.deploy(config("tried", extra=CANARY))
    operator.wait("tried")
    assert "Canary" not in admin.get("/dashboard/apis/tried").text
    assert admin.post("/dashboard/apis/tried/promote").status == 409
    operator.deploy(config("tried", answer="two", extra=CANARY))
    page = admin.get("/dashboard/apis/tried").text
    for part in (
        "revision 2 against 1",
        "10% of the requests",
        "Promote 2",
        "Roll back to 1",
        "requests with an error",
    ):
        assert part in page
    assert "canary: 10%" in admin.get("/dashboard/").text
    reader = sign_in(operator, token_of(operator, b'{"scope": "read", "name": "watcher"}'))
    assert "revision 2 against 1" in reader.get("/dashboard/apis/tried").text
    assert "Promote 2" not in reader.get("/dashboard/apis/tried").text
    assert admin.post("/dashboard/apis/tried/rollback", revision="1").status == 303
    assert operator.wait("tried")["spec"]["handler"]["config"] == {"answer": "one"}
    operator.deploy(config("tried", answer="three", extra=CANARY))
    answer = admin.post("/dashboard/apis/tried/promote")
    assert (answer.status, answer.headers["location"]) == (303, "/dashboard/apis/tried")
    assert "promoting revision" in admin.get("/dashboard/apis/tried").text
    wait_until(lambda: operator.api("tried")["canary"] is None, message="the new revision serves alone")
    audit = operator.call("GET", "/v1/audit?api=tried&limit=1")[1]
    assert [(entry["action"], entry["result"]) for entry in audit] == [("promote", "succeeded")]
    operator.call("DELETE", "/v1/apis/tried?force=true")


@pytest.mark.parametrize("body", ["revision=1&" * 2000, "x" * (3 * 1024 * 1024)])
def test_a_form_that_is_too_large_is_refused(operator: RunningOperator, admin: Visitor, body: str) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded", "origin": str(admin.origin)}
    answer = admin._send("POST", "/dashboard/apis/iris/rollback", body.encode(), headers)
    assert answer.status in (400, 413)


def test_a_workload_that_waits_shows_the_age_of_its_queue(operator: RunningOperator, admin: Visitor) -> None:
    asynchronous = config("later").replace("RealtimeAPI", "AsyncAPI")
    operator.deploy(asynchronous, BROKEN_HANDLER.replace("handle_post", "handle_async"))
    operator.wait("later")
    status, sent = operator.predict({}, "/later")
    assert status == 202
    assert re.search(r"oldest <time [^>]+>\d+ \w+ ago</time>", admin.get("/dashboard/").text)
    page = admin.get("/dashboard/workloads/later").text
    assert sent["id"] in page
    assert "in queue" in page
    assert "in queue" in admin.get(f"/dashboard/workloads/later/{sent['id']}").text
    assert "/dashboard/workloads/later" in admin.get("/dashboard/apis/later").text
    operator.call("DELETE", "/v1/apis/later?force=true")
