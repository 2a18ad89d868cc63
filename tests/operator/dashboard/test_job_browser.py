"""Jobs in a real browser: a dead letter is retried until it succeeds, a job is stopped, pages fit small screens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.homes import temporary_home
from harness.installations.running import RunningOperator, running_operator
from harness.requirements import require_programs
from harness.servers.browser import Browser, browser
from harness.wait import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.long]

CONFIG = """
- name: invoices
  kind: BatchAPI
  handler: {{type: python, path: handler.py, config: {{gate: {gate}}}}}
- name: nightly
  kind: BatchAPI
  handler: {{type: python, path: handler.py, config: {{gate: {gate}}}}}
  schedule: {{cron: "0 0 1 1 *", submission: {{workers: 1, item_list: {{items: [1], batch_size: 1}}}}}}
"""
#: Until its gate exists, `fail` fails, and `wait` takes.
HANDLER = """
import pathlib, time

class Handler:
    def __init__(self, config):
        self.gate = pathlib.Path(config["gate"])

    def handle_batch(self, payload):
        for item in payload:
            if item == "wait":
                while not self.gate.exists():
                    time.sleep(0.02)
            elif not self.gate.exists() and isinstance(item, dict):
                raise ValueError("<script>document.title = 1</script> row %d" % item["row"])
"""


class Invoices:
    """The operator, its API, and a browser that is signed in."""

    def __init__(self, operator: RunningOperator, gate: Path, window: Browser) -> None:
        self.operator = operator
        self.gate = gate
        self.window = window
        self.base = f"http://127.0.0.1:{operator.port}"

    def submit(self, *items: Any) -> str:
        """Submit a job with one item per batch, and show its page."""
        body = {"workers": 1, "max_attempts": 1, "item_list": {"items": items, "batch_size": 1}}
        status, job = self.operator.call("POST", "/v1/apis/invoices/jobs", json.dumps(body).encode())
        assert status == 200, job
        self.show(f"jobs/invoices/{job['job_id']}")
        return str(job["job_id"])

    def show(self, path: str) -> None:
        self.window.open(f"{self.base}/dashboard/{path}")

    def wait_for(self, text: str, selector: str = "main") -> None:
        """Wait until the page that is open has changed itself."""
        wait_until(lambda: text in self.window.text(selector), message=f"{text!r} on the page")


@pytest.fixture(scope="module")
def invoices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Invoices]:
    require_programs("Chromium", "chromium", "chromedriver")
    gate = tmp_path_factory.mktemp("gate") / "open"
    with temporary_home() as home, running_operator(home) as operator:
        operator.deploy(CONFIG.format(gate=gate), HANDLER)
        with browser(tmp_path_factory.mktemp("browser")) as window:
            made = Invoices(operator, gate, window)
            window.open(made.base + operator.call("POST", "/v1/dashboard/codes")[1]["path"])
            window.click(".message button")
            wait_until(lambda: window.url.endswith("/dashboard/"), message="signed in")
            yield made


def test_a_dead_letter_is_retried_and_succeeds(invoices: Invoices) -> None:
    window = invoices.window
    job = invoices.submit({"row": 1, "password": "swordfish"}, 2, {"row": 3})
    invoices.wait_for("completed with failures", "#job-title")
    invoices.wait_for("row 1", "#errors")
    window.click(".tabs a[href$='/dead-letters']")
    wait_until(lambda: window.url.endswith("/dead-letters"), message="the dead letters")
    window.click("#letters summary")
    assert '"password": "********"' in window.text("#letters")
    assert "swordfish" not in window.html
    assert window.run("return document.title").endswith("· cortex")
    invoices.gate.touch()
    window.click("#letters form button")
    assert window.accept_dialog() == "Submit batch 0 as a new job?"
    invoices.wait_for(f"submitted as a retry of batch 0 of {job}")
    invoices.wait_for("succeeded", "#job-title")
    invoices.show(f"jobs/invoices/{job}/dead-letters")
    assert window.run("return document.querySelectorAll('.retry').length") == 1
    assert window.text(".retry").startswith("succeeded")
    invoices.gate.unlink()


def test_a_job_is_stopped(invoices: Invoices) -> None:
    job = invoices.submit("wait")
    invoices.wait_for("running", "#job-title")
    invoices.window.click("form[action$='/stop'] button")
    assert invoices.window.accept_dialog() == f"Stop job {job}? Its running batches are abandoned."
    invoices.wait_for(f"stopped job {job}")
    invoices.wait_for("stopped", "#job-title")
    invoices.show("jobs")
    invoices.wait_for("stopped by its user", "#jobs")


def test_a_schedule_is_run_now(invoices: Invoices) -> None:
    invoices.show("schedules")
    invoices.window.click("form[action$='/nightly/run'] button")
    assert invoices.window.accept_dialog() == "Submit the job of the schedule of nightly now?"
    invoices.wait_for("succeeded", "#job-title")
    invoices.show("schedules")
    invoices.wait_for("succeeded", "#schedules")


@pytest.mark.parametrize("width", [320, 1440])
def test_pages_of_jobs_fit_and_their_text_is_readable(invoices: Invoices, width: int) -> None:
    job = invoices.submit({"row": 1})
    invoices.wait_for("completed with failures", "#job-title")
    for scheme in ("light", "dark"):
        invoices.window.resize(width, 800)
        invoices.window.prefer(scheme)
        for page in ("", "/dead-letters", "/logs", "/submission"):
            invoices.show(f"jobs/invoices/{job}{page}")
            assert invoices.window.run("return document.documentElement.scrollWidth") <= width
            assert invoices.window.faint_texts() == []
