"""The alerting rules and the dashboard of `deploy/monitoring`, in a real Prometheus that reads a real operator."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from harness.installations.installation import ECHO_CONFIG, ECHO_SOURCE, ROOT, Installation, write_project
from harness.requirements import require_programs
from harness.servers.prometheus import prometheus
from harness.wait import PATIENCE_S, wait_until

MONITORING = ROOT / "deploy" / "monitoring"
pytestmark = pytest.mark.long


def test_each_alert_fires_for_its_failure_and_for_nothing_else(tmp_path: Path) -> None:
    require_programs("Prometheus", "prometheus", "promtool")
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    shutil.copy(ROOT / "tests/fixtures/monitoring/alerts.test.yml", tmp_path)
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts.test.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


FAILING = """
import os

class Handler:
    def __init__(self, config):
        pass

    def handle_post(self, payload):
        if payload == "die":
            os._exit(3)
        raise ValueError("no")
"""
CONFIG = """
- name: failing
  kind: RealtimeAPI
  handler: {type: python, path: failing.py}
  update_strategy: {canary: {steps: ["50%"], give_up_after: 1s, on_no_decision: hold}}
  compute: {cpu: 100m}
- name: nightly
  kind: BatchAPI
  handler: {type: python, path: batch.py}
  schedule:
    cron: "* * * * *"
    submission: {workers: 1, item_list: {items: [1]}, output: /proc/nowhere}
  compute: {cpu: 100m}
"""
BATCH = """
class Handler:
    def __init__(self, config):
        pass

    def handle_batch(self, payload):
        pass
"""


def page(cortex: Installation) -> str:
    token = (cortex.home / "token").read_text().strip()
    url = f"http://127.0.0.1:{cortex.operator_port}/metrics"
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def deaths(cortex: Installation) -> float:
    series = 'cortex_process_deaths_total{api="failing",cause="exited"} '
    return next(float(line.removeprefix(series)) for line in page(cortex).splitlines() if line.startswith(series))


def check_rules(folder: Path, pages: list[str], expected: Sequence[tuple[str, int, float]]) -> str:
    """Let `promtool` evaluate expressions at the end of pages, each served for five minutes; return its complaints."""
    lines = [dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#") for text in pages]
    test = {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": " ".join(f"{each[name]}x4" if name in each else "_x5" for each in lines)}
            for name in dict.fromkeys(name for each in lines for name in each)
        ],
        "promql_expr_test": [
            {"expr": text, "eval_time": f"{5 * number - 1}m", "exp_samples": [{"labels": "{}", "value": value}]}
            for text, number, value in expected
        ],
    }
    (folder / "pages.yml").write_text(json.dumps({"evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", folder / "pages.yml"], capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode else ""


def fires(alert: str, page: int, value: int) -> tuple[str, int, float]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    (expression,) = [rule["expr"] for group in groups for rule in group["rules"] if rule["alert"] == alert]
    return f"sum(({expression}) * 0 + 1) or vector(0)", page, value


def test_pages_of_an_operator_have_what_queries_and_alerts_need(cortex: Installation, tmp_path: Path) -> None:
    require_programs("Prometheus", "promtool")
    project = write_project(tmp_path / "failing", ECHO_SOURCE, CONFIG)
    (project / "failing.py").write_text(FAILING)
    (project / "batch.py").write_text(BATCH)
    cortex.cortex("deploy", project / "cortex.yaml")
    pages = [page(cortex)]
    assert cortex.post("/failing", "raise").status == 500
    assert cortex.post("/failing", "die").status == 500
    wait_until(lambda: deaths(cortex) == 1)
    pages.append(page(cortex))
    (project / "failing.py").write_text(FAILING + "# another revision")
    cortex.cortex("deploy", project / "cortex.yaml")
    for count in (2, 3):
        wait_until(lambda: cortex.post("/failing", "die").status == 500)
        wait_until(lambda count=count: deaths(cortex) == count)
    wait_until(lambda: 'cortex_schedule_failed{api="nightly"} 1.0' in page(cortex), 150)
    pages.append(page(cortex))

    one = "sum(round(increase({}[10m]))) == bool {}"
    new = ("CortexProcessesDie", "CortexScheduleFailing", "CortexCanaryLate")
    expected = [
        (one.format('cortex_requests_total{api="failing", code="5xx"}', 2), 2, 1),
        (one.format('cortex_replica_requests_total{api="failing", code="500"}', 2), 2, 1),
        (one.format('cortex_process_deaths_total{api="failing", cause="exited"}', 1), 2, 1),
        fires("CortexApiErrors", 2, 0),  # two errors are too few
        *(fires(alert, 1, 0) for alert in new),
        *(fires(alert, 3, 1) for alert in new),
    ]
    assert check_rules(tmp_path, pages, expected) == ""


def test_prometheus_loads_the_rules_and_answers_every_query_of_the_dashboard(
    cortex: Installation, tmp_path: Path
) -> None:
    require_programs("Prometheus", "prometheus", "promtool")
    cortex.cortex("deploy", write_project(tmp_path / "echo", ECHO_SOURCE, ECHO_CONFIG) / "cortex.yaml")
    token = cortex.cortex("tokens", "create", "scraper", "--scope", "metrics").stdout.strip()
    target = f"127.0.0.1:{cortex.operator_port}"
    with prometheus(tmp_path / "prometheus", target, token, MONITORING / "alerts.yml") as server:
        for number in range(20):
            assert cortex.post("/echo", {"number": number}).status == 200
        wait_until(lambda: server.query('cortex_requests_total{api="echo", code="2xx"} >= 20'))
        groups = server.get("api/v1/rules")["data"]["groups"]
        assert [group["name"] for group in groups] == ["cortex"]
        assert {rule["health"] for group in groups for rule in group["rules"]} <= {"ok", "unknown"}
        dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
        expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
        assert len(expressions) > 20
        for expression in expressions:
            server.query(expression.replace("$__rate_interval", "1m").replace("$api", ".*"))
        series = server.get("api/v1/series", **{"match[]": '{__name__=~"cortex_.+"}'})["data"]
        assert {"cortex_replicas", "cortex_request_duration_seconds_bucket"} <= {each["__name__"] for each in series}
