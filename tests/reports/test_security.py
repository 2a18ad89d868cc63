"""Reports about secrets: what user code receives of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.installations.installation import Installation
from harness.installations.reports import Report, ReportedApi, deployed_report

KEY = "ck_0123456789_" + "k" * 43

SPLIT = """
    - name: t
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
    - name: keyed
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
      networking: {auth: api_key}
    - name: both
      kind: TrafficSplitter
      apis: [{name: t, weight: 50}, {name: keyed, weight: 50}]
"""


def keys_received(api: ReportedApi) -> dict[str, object]:
    """Return the headers of an API without keys, and which APIs the commands send a key to."""
    (api.folder / "sample.json").write_text("{}")
    predicted = api.cortex.cortex("predict", "t", api.folder / "sample.json", "--api-key", "a key").stdout
    headers = api.post({}, **{"x-api-key": KEY, "authorization": "Bearer of-the-api"}).json
    return {
        "predict": json.loads(predicted).get("x-api-key"),
        "variables": set(json.loads(predicted)["variables"]),
        "caller": (headers.get("x-api-key"), headers["authorization"]),
        "needs": [name for name in ("t", "keyed", "both") if api.cortex.get(name)["needs_key"]],
    }


REPORTS = [
    Report(
        name="an API receives neither keys of callers nor variables of the operator",
        reference="X5, X8",
        source="""
            import os

            class Handler:
                def __init__(self, config): pass
                def handle_post(self, payload, headers):
                    return {**headers, "variables": [name for name in os.environ if name.startswith("CORTEX_")]}
        """,
        config=SPLIT,
        observe=keys_received,
        right={
            "predict": None,
            "variables": {
                "CORTEX_HOME",
                "CORTEX_API_NAME",
                "CORTEX_LOG_LEVEL",
                "CORTEX_PROCESS_INDEX",
                "CORTEX_REPLICA_ID",
            },
            "caller": (None, "Bearer of-the-api"),
            "needs": ["keyed", "both"],
        },
    ),
]


@pytest.mark.parametrize("report", REPORTS, ids=str)
def test_report(report: Report, cortex: Installation, tmp_path: Path) -> None:
    with deployed_report(report, cortex, tmp_path / "project") as api:
        assert report.observe(api) == report.right
