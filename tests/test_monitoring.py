"""The files for Prometheus and Grafana name only metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
MONITORING = ROOT / "deploy" / "monitoring"
_NAME = re.compile(r"\bcortex_[a-z0-9_]+")


def metric_names() -> set[str]:
    """Return the names of the reference, and those that a histogram has besides."""
    text = (ROOT / "docs/reference/metrics.md").read_text()
    rows = re.findall(r"^\| (`cortex_.*?) \| ?(\w*) ?\|", text, re.MULTILINE)
    names = {name: kind for listed, kind in rows for name in _NAME.findall(listed)}
    parts = ("_bucket", "_sum", "_count")
    return {*names, *(name + part for name, kind in names.items() if kind == "histogram" for part in parts)}


def panels() -> list[dict[str, object]]:
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize(
    "path", ["deploy/monitoring/alerts.yml", "deploy/monitoring/grafana-dashboard.json", "docs/howto/monitor.md"]
)
def test_every_metric_that_a_file_names_exists(path: str) -> None:
    named = set(_NAME.findall((ROOT / path).read_text())) - {"cortex_"}
    assert len(named) > 5
    assert named <= metric_names()


def test_the_dashboard_shows_every_metric_of_the_reference() -> None:
    shown = set(_NAME.findall(json.dumps(panels())))
    unshown = {"cortex_build_info", "cortex_prediction_value_min", "cortex_prediction_value_max"}
    histograms = {name.removesuffix("_count") for name in metric_names() if name.endswith("_count")}
    missing = {
        name
        for name in metric_names() - unshown
        if name not in shown
        and name.removesuffix("_bucket") not in histograms
        and not name.endswith(("_sum", "_count"))
    }
    assert {name for name in missing if f"{name}_bucket" not in shown and f"{name}_sum" not in shown} == set()


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert isinstance(place, dict)
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_every_alert_has_a_severity_a_summary_and_a_description() -> None:
    rules = [
        rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for rule in group["rules"]
    ]
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
