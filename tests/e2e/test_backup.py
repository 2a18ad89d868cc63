"""`cortex backup` under load, and `cortex restore` into another home with other ports."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import stat
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cortex.home import Home
from harness.installations.batch_api import BatchApi
from harness.installations.installation import ECHO_SOURCE, Installation, installation, write_project
from harness.ports import free_port
from harness.wait import PATIENCE_S, wait_until

KEYED = """
    - name: echo
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
      networking: {auth: api_key}
      compute: {cpu: 50m}
"""
LATER = """
    - name: later
      kind: AsyncAPI
      handler: {type: python, path: handler.py}
      compute: {cpu: 50m}
"""
PASSING = """
    - name: {name}
      kind: BatchAPI
      handler: {{type: python, path: handler.py}}
"""
ASYNC_SOURCE = ECHO_SOURCE.replace("handle_post", "handle_async")
BATCH_SOURCE = ECHO_SOURCE.replace("handle_post", "handle_batch")


@pytest.fixture(scope="module")
def cortex() -> Iterator[Installation]:
    with installation() as made:
        yield made


@pytest.fixture
def other() -> Iterator[Installation]:
    """An installation that does not exist yet."""
    home = Path(tempfile.mkdtemp(prefix="cx-"))
    made = Installation(home / "restored", free_port(), free_port())
    try:
        yield made
    finally:
        made.down()
        shutil.rmtree(Home(made.home).metrics_dir, ignore_errors=True)
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def repeated(*actions: Callable[[int], None]) -> Iterator[None]:
    """Repeat each action in a thread of its own, with ascending numbers, until the block ends."""
    is_over = threading.Event()

    def repeat(action: Callable[[int], None]) -> None:
        for number in itertools.count():
            action(number)
            if is_over.wait(0.05):  # only paces the load
                return

    with ThreadPoolExecutor(len(actions)) as pool:
        running = [pool.submit(repeat, action) for action in actions]
        try:
            yield
        finally:
            is_over.set()
    for each in running:
        each.result()


def status_of(url: str, token: str) -> int:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return int(answer.status)


def test_all_that_was_accepted_before_a_backup_under_load_is_restored(
    cortex: Installation, other: Installation, tmp_path: Path
) -> None:
    cortex.cortex("deploy", write_project(tmp_path / "echo", ECHO_SOURCE, KEYED))
    cortex.cortex("deploy", write_project(tmp_path / "later", ASYNC_SOURCE, LATER))
    batch = BatchApi.deployed(cortex, tmp_path / "sums", "sums")
    token = cortex.cortex("tokens", "create", "ci", "--scope", "metrics").stdout.strip()
    job = batch.submit([1, 2, {"do": "wait", "gate": str(batch.notes / "gate")}])
    wait_until(lambda: batch.status(job)["batch_metrics"]["succeeded"] == 2, PATIENCE_S)

    keys: list[str] = []
    workloads: dict[str, int] = {}
    file = tmp_path / "backup.zip"

    def send(number: int) -> None:
        workloads[cortex.post("/later", {"number": number}).json["id"]] = number

    def deploy_and_delete(number: int) -> None:
        name = f"passing-{number}"
        cortex.cortex("deploy", write_project(tmp_path / name, BATCH_SOURCE, PASSING.format(name=name)))
        cortex.client.delete(name)

    with repeated(
        lambda number: keys.append(cortex.cortex("keys", "create", f"key-{number}").stdout.strip()),
        send,
        deploy_and_delete,
    ):
        wait_until(lambda: keys and len(workloads) > 3, PATIENCE_S)
        created, accepted = list(keys), dict(list(workloads.items())[-20:])
        said = cortex.cortex("backup", file).stdout
    assert said.splitlines()[-1].startswith(f"wrote {file} (")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    assert "`cortex up` starts it" in other.cortex("restore", file).stdout
    again = other.cortex("restore", file, check=False)
    assert (again.returncode, "already has" in again.stderr) == (1, True)
    other.up()
    for key in created:
        reply = wait_until(lambda key=key: (sent := other.post("/echo", 5, x_api_key=key)).status != 503 and sent)
        assert (reply.status, reply.json) == (200, 5)
    assert other.post("/echo", 5).status == 401
    assert status_of(f"http://127.0.0.1:{other.operator_port}/metrics", token) == 200
    restored = BatchApi(other, "sums", batch.folder)
    assert restored.status(job)["status"] == "running"
    (batch.notes / "gate").touch()
    wait_until(lambda: restored.status(job)["status"] == "succeeded", PATIENCE_S)
    for workload, number in accepted.items():
        reply = wait_until(
            lambda workload=workload: (
                (sent := other.post(f"/later/{workload}", method="GET")).json["status"] == "completed" and sent
            ),
            PATIENCE_S,
        )
        assert reply.json["result"] == {"number": number}
    assert "Traceback" not in other.log()
