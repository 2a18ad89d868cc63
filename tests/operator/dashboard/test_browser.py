"""The dashboard in a real browser: live values, buttons, refusals, frames, the keyboard, small screens, contrast."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from harness.homes import temporary_home
from harness.installations.running import BROKEN_HANDLER, HANDLER, RunningOperator, config, running_operator
from harness.requirements import require_programs
from harness.servers.browser import TAB, Browser, browser
from harness.wait import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.long]

HOSTILE = HANDLER.replace(
    "        self.answer",
    "        print('\\x1b[31mred\\x1b[0m <script>document.title = 1</script>')\n        self.answer",
)
PATHS = ["", "apis/iris", "apis/broken", "apis/iris/logs", "apis/iris/configuration", "apis/iris/history"]
PATHS += ["jobs", "workloads", "schedules", "cluster", "keys", "tokens", "audit"]
#: Collects what the policy of the page has blocked, and errors of its script.
_VIOLATIONS = """
window.problems = [];
document.addEventListener("securitypolicyviolation", (event) => problems.push(event.violatedDirective));
window.addEventListener("error", (event) => problems.push(event.message));
"""


@pytest.fixture(scope="module")
def operator() -> Iterator[RunningOperator]:
    require_programs("Chromium", "chromium", "chromedriver")
    with temporary_home() as home, running_operator(home) as running:
        tracker = "  tracker: {key: answer, model_type: classification}"
        running.deploy(config(answer='"<script>document.title = 2</script>"', extra=tracker), HOSTILE)
        running.wait()
        running.deploy(config(answer="two", extra=tracker), HOSTILE)
        running.wait()
        running.deploy(config("broken"), BROKEN_HANDLER)
        running.wait("broken")
        yield running


@pytest.fixture(scope="module")
def window(operator: RunningOperator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        opened.open(address(operator))
        opened.click(".message button")
        wait_until(lambda: opened.url.endswith("/dashboard/"), message="signed in")
        yield opened


def address(operator: RunningOperator) -> str:
    return f"{base(operator)}{operator.call('POST', '/v1/dashboard/codes')[1]['path']}"


def base(operator: RunningOperator) -> str:
    return f"http://127.0.0.1:{operator.port}"


def show(window: Browser, operator: RunningOperator, path: str) -> None:
    window.open(f"{base(operator)}/dashboard/{path}")
    window.run(_VIOLATIONS)


def test_the_address_signs_in_once_and_stays_out_of_the_page(operator: RunningOperator, window: Browser) -> None:
    used = address(operator)
    window.open(used)
    window.click(".message button")
    wait_until(lambda: window.url == f"{base(operator)}/dashboard/", message="the list of APIs")
    assert operator.token not in window.html
    assert window.run("return document.cookie") == ""
    window.open(used)
    assert "used before" in window.text("main")


def test_values_change_without_a_reload(operator: RunningOperator, window: Browser) -> None:
    show(window, operator, "")
    window.run("window.mark = 1")
    before = window.text("#apis tbody")

    def has_changed() -> bool:
        operator.predict({})
        return window.text("#apis tbody") != before

    wait_until(has_changed, message="a live value")
    assert window.run("return [window.mark, window.problems]") == [1, []]


@pytest.mark.parametrize("path", PATHS)
def test_texts_of_users_are_no_markup(operator: RunningOperator, window: Browser, path: str) -> None:
    operator.predict({})
    show(window, operator, path)
    assert window.run("return document.title").endswith("· cortex")
    assert window.run("return [...document.scripts].filter((script) => !script.src).length") == 0
    assert window.run("return window.problems") == []
    assert "\x1b" not in window.html


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1440])
def test_pages_fit_and_their_text_is_readable(
    operator: RunningOperator, window: Browser, path: str, scheme: str, width: int
) -> None:
    window.resize(width, 800)
    window.prefer(scheme)
    show(window, operator, path)
    assert window.run("return document.documentElement.scrollWidth") <= width
    assert window.faint_texts() == []


def test_every_control_has_a_name_and_can_be_reached_by_the_keyboard(
    operator: RunningOperator, window: Browser
) -> None:
    for path in PATHS:
        show(window, operator, path)
        unnamed = window.run("""
            return [...document.querySelectorAll("a, button, input:not([type=hidden]), select, textarea")]
              .filter((each) => !(each.textContent.trim() || each.labels?.length || each.getAttribute("aria-label"))
                || each.tabIndex < 0).map((each) => each.outerHTML);
        """)
        assert unnamed == []
        landmarks = window.run(
            "return ['header', 'nav', 'main', 'footer', 'h1'].map((n) => document.querySelectorAll(n).length)"
        )
        assert landmarks[0] == landmarks[2] == landmarks[3] == landmarks[4] == 1
        assert landmarks[1] >= 1
    window.press(TAB)
    assert window.run("return document.activeElement.className") == "skip"


def test_a_rollback_asks_first_and_deploys_the_earlier_revision(operator: RunningOperator, window: Browser) -> None:
    show(window, operator, "apis/iris/history")
    button = "form[action$='/rollback'] button"
    window.click(button)
    assert window.accept_dialog() == "Deploy revision 1 of iris again?"
    wait_until(lambda: "rolling back iris" in window.text("main"), message="the notice")
    assert operator.wait()["spec"]["handler"]["config"]["answer"].startswith("<script>")
    show(window, operator, "apis/iris/history")
    wait_until(lambda: "handler.config.answer" in window.text("main"), message="the new revision")
    assert window.run("return window.problems") == []


def test_a_key_works_from_its_creation_until_it_is_revoked(operator: RunningOperator, window: Browser) -> None:
    operator.deploy(config("keyed", extra="  networking: {auth: api_key}"))
    operator.wait("keyed")

    def status(key: str) -> int:
        connection = HTTPConnection("127.0.0.1", operator.gateway_port, timeout=60)
        try:
            connection.request("POST", "/keyed", "{}", {"content-type": "application/json", "x-api-key": key})
            return connection.getresponse().status
        finally:
            connection.close()

    assert status("") == 401
    show(window, operator, "keys")
    window.run("document.querySelector('[name=name]').value = '<b>shop</b>'")
    window.run("document.querySelector('[name=apis]').value = 'keyed'")
    window.click("button.primary")
    wait_until(lambda: "shown only once" in window.text("main"), message="the key")
    key = window.text(".secret-text")
    assert status(key) == 200
    show(window, operator, "keys")
    assert key not in window.html
    assert "<b>shop</b>" in window.text("#keys tbody")
    window.click("form[action$='/revoke'] button")
    assert window.accept_dialog().startswith("Revoke the key <b>shop</b> (")
    wait_until(lambda: "revoked the key" in window.text("main"), message="the notice")
    assert status(key) == 401
    assert window.run("return window.problems ?? []") == []
    operator.call("DELETE", "/v1/apis/keyed?force=true")


def test_a_form_without_the_token_of_the_session_is_refused(operator: RunningOperator, window: Browser) -> None:
    show(window, operator, "apis/iris/history")
    status = window.run("""
        const body = new URLSearchParams({ revision: "1", csrf: "invented" });
        return fetch("/dashboard/apis/iris/rollback", { method: "POST", body }).then((answer) => answer.status);
    """)
    assert status == 403


@contextmanager
def foreign_page(html: str) -> Iterator[str]:
    """Serve a page of another origin; yield its URL."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_a_page_of_another_origin_can_neither_change_nor_frame_anything(
    operator: RunningOperator, window: Browser
) -> None:
    show(window, operator, "apis/iris/history")
    csrf = window.run("return document.querySelector('[name=csrf]').value")
    revisions = operator.call("GET", "/v1/apis/iris/history")[1]
    target = f"{base(operator)}/dashboard/apis/iris"
    form = (
        f'<form method="post" action="{target}/rollback"><input name="csrf" value={json.dumps(csrf)}>'
        '<input name="revision" value="2"><button>Win</button></form>'
        f'<iframe src="{target}"></iframe>'
    )
    with foreign_page(form) as url:
        window.open(url)
        blocked = "return document.querySelector('iframe').contentDocument === null"
        assert window.run(blocked)  # Chromium replaced it by its own page, which has another origin
        assert window.run("return window.frames.length") == 1
        window.click("button")
    wait_until(lambda: "are rejected" in window.html, message="the refusal")
    assert operator.call("GET", "/v1/apis/iris/history")[1] == revisions
