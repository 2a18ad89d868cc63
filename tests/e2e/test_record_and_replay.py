"""Record the requests of a deployed API while a worker dies, and replay them: against the API, and against a folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path

from harness.installations.installation import Installation, write_project
from harness.wait import wait_until

SOURCE = """
    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload):
            return {{"items": [{{"id": n, "score": payload["x"] / (n + 1) + {bias}}} for n in range(3)], "label": "a"}}
"""
CONFIG = """
    - name: scores
      kind: RealtimeAPI
      handler: {type: python, path: handler.py, processes_per_replica: 2}
      networking:
        record: {share: 100%, max_cpu: 100%, redact: ["$.password", X-User]}
"""
REQUESTS = 60


def test_a_recording_is_replayed_against_the_api_and_against_a_changed_folder(
    cortex: Installation, tmp_path: Path
) -> None:
    cortex.cortex("deploy", write_project(tmp_path / "old", SOURCE.format(bias=0), CONFIG))
    recorded_from = threading.Semaphore(0)
    statuses: list[int] = []

    def send(first: int) -> None:
        for number in range(first, first + REQUESTS):
            payload = {"x": number / 7, "password": "geheim"}
            answer = cortex.post(f"/scores?n={number}&token=geheim", payload, X_User="geheim", Authorization="geheim")
            statuses.append(answer.status)
            recorded_from.release()

    clients = [threading.Thread(target=send, args=(1000 * client,)) for client in range(4)]
    for client in clients:
        client.start()
    for _ in range(REQUESTS):
        recorded_from.acquire()
    victim = min(cortex.pids("scores"))
    os.kill(victim, signal.SIGKILL)  # in the middle
    # The victim had none of the later ones, but for those that were in flight.
    later = 4 * REQUESTS - len(statuses) - 4
    for client in clients:
        client.join()
    wait_until(lambda: len(cortex.pids("scores") - {victim}) == 2)
    assert len(statuses) == 4 * REQUESTS
    assert statuses.count(200) >= 4 * REQUESTS - 4  # at most the calls of the killed worker failed

    recorded = cortex.home / "recordings" / "scores"
    wait_until(
        lambda: (
            sum(path.read_text().count('"status":200') for path in recorded.glob("*.ndjson")) >= later
            and cortex.get("scores")["recording"]["recorded"] >= later
        )
    )
    recording = tmp_path / "recording"
    shutil.copytree(recorded, recording)  # while the last requests may still be written
    texts = [path.read_text().rpartition("\n")[0] for path in recording.iterdir()]
    assert not any("geheim" in text for text in texts)
    shown = cortex.cortex("get", "scores").stdout
    assert "recorded: " in shown

    report = tmp_path / "report.json"
    same = cortex.cortex("replay", recording, "--against", "scores", "--concurrency", "4", "--report", report)
    data = json.loads(report.read_text())
    assert (same.returncode, data["different"], data["unanswered"]) == (0, 0, 0)
    assert data["compared"] == sum(text.count('"status":') for text in texts)
    assert f"all {data['compared']:,} answers are the same" in same.stdout

    new = write_project(tmp_path / "new", SOURCE.format(bias=0.125), CONFIG)
    page = tmp_path / "report.html"
    changed = cortex.cortex("replay", recording, "--against", f"{new}/", "--report", page, check=False)
    assert changed.returncode == 1, changed.stderr
    assert "answers differ (100 %; limit 0 %)" in changed.stdout
    assert "$.items[*].score   value, at most 0.125 apart" in changed.stdout
    assert "$.label" not in changed.stdout
    assert "$.items[*].score" in page.read_text()
    ignoring = ("--ignore", "$.items[*].score", "--limit", "20")
    assert cortex.cortex("replay", recording, "--against", f"{new}/", *ignoring).returncode == 0
    # Replays are not recorded.
    assert sum(path.read_text().count('"status":') for path in recorded.iterdir()) <= len(statuses)

    with (recording / "z.ndjson").open("w") as file:
        file.write('{"cortex_recording":9,"api":"scores"}\n')
    newer = cortex.cortex("replay", recording, "--against", "scores", check=False)
    assert newer.returncode == 2
    assert "z.ndjson:1: this recording has format 9" in newer.stderr
