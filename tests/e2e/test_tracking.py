"""Predictions remain recorded after the API's processes, its replicas and the operator have ended."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from harness.installations.installation import Installation, write_project
from harness.wait import has_ended, wait_until

SOURCE = """
    class PythonPredictor:
        def __init__(self, config):
            self.version = config["version"]
        def predict(self, payload):
            return {"label": payload["label"], "version": self.version}
"""
CONFIG = """
    - name: spam
      kind: RealtimeAPI
      predictor:
        type: python
        path: handler.py
        config: {{version: {version}}}
      monitoring: {{key: label, model_type: classification, window: 100, baseline: baseline.json}}
"""


def predict(cortex: Installation, *labels: Any) -> list[str]:
    """Return the ids of the requests."""
    replies = [cortex.post("/spam", {"label": label}) for label in labels]
    assert {reply.status for reply in replies} == {200}
    return [reply.headers["x-cortex-request-id"] for reply in replies]


def tracker(cortex: Installation) -> Any:
    return cortex.get("spam")["tracker"]


def test_predictions_drift_and_feedback_outlive_the_processes(cortex: Installation, tmp_path: Path) -> None:
    project = write_project(tmp_path, SOURCE, CONFIG.format(version=1))
    (project / "baseline.json").write_text(json.dumps({"spam": 500, "ham": 500}))
    cortex.cortex("deploy", project)
    ids = predict(cortex, *["spam"] * 30, "ham", True)
    [process] = cortex.pids("spam")
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: has_ended(process) and cortex.post("/spam", {"label": "spam"}).status == 200)
    write_project(tmp_path, SOURCE, CONFIG.format(version=2))
    cortex.cortex("deploy", project)
    operator = cortex.status()["operator"]["pid"]
    os.kill(operator, signal.SIGKILL)
    wait_until(lambda: has_ended(operator))
    cortex.up()

    told = [{"request_id": request_id, "truth": "spam"} for request_id in ids]
    (tmp_path / "truth.ndjson").write_text("\n".join(map(json.dumps, told)))
    done = cortex.cortex("feedback", "spam", tmp_path / "truth.ndjson", check=False)

    assert done.returncode == 1
    assert "feedback recorded for 31 predictions" in done.stdout
    assert f"1 request id is unknown or expired: {ids[-1]}" in done.stderr
    seen = tracker(cortex)
    assert (seen["classes"]["ham"], seen["untracked"]) == (1, 1)
    assert seen["predictions"] == sum(seen["classes"].values()) >= 32
    assert seen["truth"]["accuracy"] == 30 / 31

    predict(cortex, *["ham"] * 100)
    drift = wait_until(lambda: (found := tracker(cortex)["drift"])["psi"] and found)
    assert drift["is_drift"]
    shown = cortex.cortex("get", "spam").stdout
    assert "class   count   share" in shown
    assert "drift: yes, " in shown
    assert "accuracy" in shown


def test_debug_shows_the_log_of_the_replica(cortex: Installation, tmp_path: Path) -> None:
    project = write_project(tmp_path / "project", SOURCE, CONFIG.format(version=2).replace("spam", "shown"))
    (project / "baseline.json").write_text(json.dumps({"spam": 500, "ham": 500}))
    cortex.cortex("deploy", project)
    (tmp_path / "sample.json").write_text('{"label": "spam"}')

    done = cortex.cortex("predict", "shown", tmp_path / "sample.json", "--debug")

    assert json.loads(done.stdout) == {"label": "spam", "version": 2}
    assert "sample: {'label': 'spam'}\nprediction: {'label': 'spam', 'version': 2}\n" in done.stderr
