"""The alerting rules and the dashboard of `deploy/monitoring`, in a real Prometheus that reads a real operator."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.installations.installation import ECHO_CONFIG, ECHO_SOURCE, ROOT, Installation, write_project
from harness.requirements import require_programs
from harness.servers.prometheus import prometheus
from harness.wait import wait_until

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
