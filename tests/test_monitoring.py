"""The files for Prometheus and Grafana name only metrics that exist."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

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
    unshown |= {"cortex_certificate_expiry_timestamp_seconds", "cortex_schedule_failed"}  # alerts show them
    unshown |= {"cortex_canary_age_ratio", "cortex_request_timeout_seconds"}
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


def test_the_dashboard_follows_the_schema_of_grafana() -> None:
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    assert list(schema_mistakes(dashboard)) == []


def schema_mistakes(dashboard: dict[str, Any]) -> Iterator[str]:
    """Yield the fields of a dashboard that Grafana's schema lacks, and values of other types.

    Grafana generates the classes from its schema. They ignore fields that they don't know, and check no types.
    """
    name = "grafana_foundation_sdk"
    pytest.importorskip(name, reason="it is one of the development requirements")
    importlib.import_module(f"{name}.cog.plugins").register_default_plugins()
    encoder = importlib.import_module(f"{name}.cog.encoder").JSONEncoder
    read = importlib.import_module(f"{name}.models.dashboard").Dashboard.from_json(dashboard)
    yield from _lost(dashboard, json.loads(json.dumps(read, cls=encoder)), "dashboard")
    yield from _mistyped(read, type(read), "dashboard")


def _lost(value: Any, kept: Any, place: str) -> Iterator[str]:
    if isinstance(value, dict) and isinstance(kept, dict):
        for key, inner in value.items():
            if key in kept:
                yield from _lost(inner, kept[key], f"{place}.{key}")
            else:
                yield f"{place}.{key} is unknown"
    elif isinstance(value, list) and isinstance(kept, list):
        for number, (inner, kept_inner) in enumerate(zip(value, kept, strict=True)):
            yield from _lost(inner, kept_inner, f"{place}[{number}]")
    elif value != kept:
        yield f"{place} is read as {kept!r}"


def _mistyped(value: Any, hint: Any, place: str) -> Iterator[str]:
    if type(value).__module__.startswith("grafana_foundation_sdk."):
        hints = get_type_hints(type(value).__init__)
        for name, inner in vars(value).items():
            yield from _mistyped(inner, hints.get(name, object), f"{place}.{name}")
    elif get_origin(hint) in (Union, UnionType):
        kinds = [each for each in get_args(hint) if (each is NoneType) == (value is None)]
        yield from min(
            (list(_mistyped(value, each, place)) for each in kinds), key=len, default=[f"{place}: {value!r}"]
        )
    elif get_origin(hint) is list and isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _mistyped(inner, get_args(hint)[0], f"{place}[{number}]")
    elif get_origin(hint) is dict and isinstance(value, dict):
        for key, inner in value.items():
            yield from _mistyped(inner, get_args(hint)[1], f"{place}.{key}")
    elif not _fits(value, hint):
        yield f"{place}: {value!r}"


def _fits(value: Any, hint: Any) -> bool:
    if hint in (Any, object):
        return True
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return value in {each.value for each in hint}
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(hint, type) and type(value) is hint
