"""The example of a server of the user's own behind the gateway: deploy, request, update under load."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from e2e.test_killed_supervisors import check_answers
from harness.installations.example_cases import EXAMPLES_DIR
from harness.installations.installation import Installation
from harness.wait import has_ended, wait_until


def test_a_server_of_the_users_own_is_updated_without_a_lost_request(cortex: Installation, tmp_path: Path) -> None:
    project = tmp_path / "own server"
    shutil.copytree(EXAMPLES_DIR / "own-server", project)
    cortex.cortex("deploy", project)
    sample = (project / "sample.txt").read_bytes()
    answer = cortex.post("/own-server/count", body=sample)
    assert answer.json == {"the": 3, "boats": 1, "of": 1}
    assert answer.headers["x-cortex-request-id"]
    assert cortex.post("/own-server/ticks", method="GET").body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert cortex.post("/own-server/none", method="GET").json == {"error": "no page has the path /none"}
    log = wait_until(lambda: "listening" in (text := cortex.cortex("logs", "own-server").stdout) and text)
    assert '"GET / ' not in log  # a deploy sends no request that the user did not ask for

    first = cortex.pids("own-server")
    config = project / "cortex.yaml"
    with cortex.load("/own-server/count", rate=50, connections=4) as summary:
        config.write_text(config.read_text().replace("    command:", "    env: {A: b}\n    command:"))
        cortex.cortex("deploy", project)
        wait_until(lambda: not first & cortex.pids("own-server"))
    assert set(summary["statuses"]) == {"200"}, summary


@pytest.mark.long
def test_a_replica_without_its_supervisor_is_replaced_and_leaves_no_process(cortex: Installation) -> None:
    cortex.cortex("deploy", EXAMPLES_DIR / "own-server")

    def only_replica() -> dict[str, Any] | None:
        found = [each for each in cortex.status()["replicas"] if each["api"] == "own-server"]
        return found[0] if len(found) == 1 and found[0]["pid"] else None

    replica = wait_until(only_replica)  # the test before it has updated the API
    assert replica is not None
    with cortex.load("/own-server/count", rate=50, connections=4) as summary:
        os.kill(replica["supervisor_pid"], signal.SIGKILL)
        wait_until(lambda: has_ended(replica["pid"]))
        wait_until(lambda: (now := cortex.pids("own-server")) and replica["pid"] not in now)
        wait_until(lambda: cortex.post("/own-server/count", body=b"a").status == 200)
    check_answers(summary)
