"""The Python client against a real operator, as in a user's script."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cortex
from cortex.client import Client
from cortex.client.client import call_api
from cortex.errors import ConfigError, InputError, NotFoundError, UserError
from harness.installations.deployed import BatchPredictor, Once, PythonPredictor, Times, TimesAll
from harness.installations.installation import Installation, installation, write_project
from harness.wait import wait_until

pytestmark = pytest.mark.processes

SPEC: dict[str, Any] = {"name": "sdk", "kind": "RealtimeAPI", "handler": {"type": "python", "path": "handler.py"}}
ECHO = """\
class Handler:
    def __init__(self, config): pass
    def handle_post(self, payload): return payload
"""


@pytest.fixture(scope="module")
def running() -> Iterator[Installation]:
    with installation() as made:
        yield made


@pytest.fixture
def client(running: Installation, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv("CORTEX_HOME", str(running.home))
    return cortex.client()


def test_cortex_client_is_both_a_module_and_a_function() -> None:
    from cortex import client
    from cortex.client import client as function

    assert client is cortex.client
    assert client.Client is cortex.Client
    assert client.client is function


def test_a_folder_is_deployed_inspected_changed_and_deleted(client: Client, tmp_path: Path) -> None:
    write_project(tmp_path, ECHO, "")

    assert client.deploy(SPEC, tmp_path, wait=True) == [
        {"api": "sdk", "message": "creating sdk (RealtimeAPI)", "error": "", "changes": [], "installs": []}
    ]
    assert client.get_api("sdk")["status"]["status_code"] == "live"
    assert [api["spec"]["name"] for api in client.list_apis()] == ["sdk"]
    assert client.predict("sdk", {"a": [1]}) == {"a": [1]}
    assert "post" in client.get_openapi("sdk")["paths"]["/sdk"]
    assert client.predict("sdk", b"raw") == b"raw"
    assert client.predict("sdk", "text", content_type="text/plain") == "text"
    assert client.patch({**SPEC, "networking": {"timeout": "5s"}})[0]["error"] == ""
    assert [entry["action"] for entry in client.history("sdk")] == ["patch", "deploy"]
    assert client.rollback("sdk", 1, force=True, wait=True)["message"].endswith("from revision 2 to 1")
    assert client.refresh("sdk", force=True)["message"] == "updating sdk (RealtimeAPI)"
    assert client.delete("sdk")["message"] == "deleting sdk"
    with pytest.raises(NotFoundError, match="sdk is not deployed"):
        client.get_api("sdk")


def test_a_configuration_file_is_deployed(client: Client, tmp_path: Path) -> None:
    config = "- name: of-file\n  kind: RealtimeAPI\n  handler: {type: python, path: handler.py}\n"
    write_project(tmp_path, ECHO, config)

    client.deploy_file(tmp_path, wait=True)
    assert client.predict("of-file", 5) == 5
    client.delete("of-file")

    client.deploy(tmp_path / "cortex.yaml", wait=True)  # the form of clients of 0.22 to 0.24
    assert client.predict("of-file", 5) == 5
    with pytest.raises(ValueError, match="`project_dir` must be given"):
        client.deploy(SPEC)


def test_an_endpoint_exists_as_soon_as_its_deploy_returns(client: Client) -> None:
    client.create_api({"name": "at-once", "kind": "TaskAPI"}, task=Once)

    endpoint = client.get_api("at-once")["endpoint"]
    assert call_api(endpoint, b"{}", "application/json").status == 200
    client.delete("at-once")


def test_a_class_is_deployed(client: Client) -> None:
    spec = {"name": "times", "kind": "RealtimeAPI", "handler": {"type": "python", "config": {"factor": 3}}}

    result = client.deploy_realtime_api(spec, handler=Times, wait=True)

    assert result["error"] == ""
    assert client.predict("times", {"number": 4}) == {"product": 12}
    assert "path" not in spec["handler"]  # type: ignore[operator]
    with pytest.raises(UserError, match="500"):
        client.predict("times", {})
    with pytest.raises(InputError, match="400"):
        client.predict("times", "{", content_type="application/json")


def test_the_older_names_work(client: Client) -> None:
    spec = {"name": "older", "kind": "RealtimeAPI", "predictor": {"type": "python"}}

    client.create_api(spec, predictor=PythonPredictor, wait=True)

    assert client.predict("older", 1) == "got 1"
    client.delete_api("older")


def test_a_script_deploys_its_own_class(running: Installation, tmp_path: Path) -> None:
    script = """
    import cortex

    GREETING = "hello "

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload):
            return GREETING + payload

    client = cortex.client()
    spec = {"name": "script", "kind": "RealtimeAPI", "handler": {"type": "python"}}
    client.deploy_realtime_api(spec, handler=Handler, wait=True)
    print(client.predict("script", "you"))
    """
    file = tmp_path / "deploy_it.py"
    file.write_text(textwrap.dedent(script))
    environ = {**os.environ, "CORTEX_HOME": str(running.home)}

    for source in (["deploy_it.py"], ["-c", file.read_text()]):  # from a file, and without one
        done = subprocess.run(
            [sys.executable, *source], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout) == (0, "hello you\n"), done.stderr


def test_code_that_cannot_start_raises_with_the_users_traceback(client: Client, tmp_path: Path) -> None:
    write_project(tmp_path, ECHO.replace("pass", "raise ValueError('bad weights')"), "")

    with pytest.raises(UserError, match="broken failed to become live: ValueError: bad weights") as caught:
        client.deploy({**SPEC, "name": "broken"}, tmp_path, wait=True)

    assert 'File "handler.py", line 2, in __init__' in caught.value.traceback


def test_mistakes_are_returned_as_diagnostics(client: Client, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        client.deploy({**SPEC, "name": "a", "handlr": {}}, tmp_path)

    assert any("handlr" in str(item) for item in caught.value.diagnostics)


def test_logs_are_lines(client: Client, tmp_path: Path) -> None:
    write_project(tmp_path, "print('loaded')\n" + ECHO, "")
    client.deploy({**SPEC, "name": "logged"}, tmp_path, wait=True)

    assert "loaded" in next(client.api_logs("logged", follow=True))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "RealtimeAPI", "handler": {"type": "python"}}, "`name`"),
        ({"name": "a", "kind": "BatchAPI", "handler": {"type": "python"}}, "RealtimeAPI"),
        ({"name": "a", "kind": "RealtimeAPI"}, r"`handler\.type`"),
        ({"name": "a", "kind": "RealtimeAPI", "handler": {}}, r"`handler\.type`"),
    ],
)
def test_wrong_specifications_of_a_class_are_value_errors(client: Client, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        client.deploy_realtime_api(spec, handler=Times)


def test_wrong_combinations_of_arguments_are_value_errors(client: Client, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a class"):
        client.deploy_realtime_api(SPEC, handler=Times({"factor": 1}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only one of"):
        client.create_api(SPEC, predictor=PythonPredictor, project_dir=tmp_path)
    with pytest.raises(ValueError, match="one of"):
        client.create_api(SPEC)
    with pytest.raises(ValueError, match="must be lists"):
        client.deploy_realtime_api(SPEC, handler=Times, requirements="numpy")


def test_a_class_for_jobs_is_deployed_as_an_api_that_runs_jobs(client: Client) -> None:
    handler = {"name": "batch-handler", "kind": "BatchAPI", "handler": {"type": "python", "config": {"factor": 3}}}
    predictor = {"name": "batch-predictor", "kind": "BatchAPI", "predictor": {"type": "python"}}

    assert client.deploy_batch_api(handler, handler=TimesAll, wait=True)["error"] == ""
    assert client.create_api(predictor, predictor=BatchPredictor, wait=True)[0]["error"] == ""
    for spec in (handler, predictor):
        job = client.submit_job(spec["name"], {"workers": 1, "batch_size": 2}, items=[1, 2, 3])["job_id"]
        assert client.wait_job(spec["name"], job)["job_status"]["status"] == "succeeded"
        assert [line["result"] for line in client.job_results(spec["name"], job)] == [[3, 6], [9]]
        client.delete(spec["name"])
    with pytest.raises(ValueError, match="`kind` must be BatchAPI"):
        client.deploy_batch_api(SPEC, handler=TimesAll)


def test_classes_of_other_kinds_and_splitters_are_deployed(client: Client) -> None:
    later = {"name": "later", "kind": "AsyncAPI", "handler": {"type": "python", "config": {"factor": 3}}}
    task = {"name": "once", "kind": "TaskAPI"}
    split = {"name": "split", "kind": "TrafficSplitter", "apis": [{"name": "behind", "weight": 100}]}

    assert client.deploy_async_api(later, handler=Times)["message"] == "creating later (AsyncAPI)"
    assert client.deploy_task_api(task, task=Once)["message"] == "creating once (TaskAPI)"
    behind = {"name": "behind", "kind": "RealtimeAPI", "predictor": {"type": "python"}}
    assert client.create_api(behind, predictor=PythonPredictor)[0]["error"] == ""
    assert client.create_api(split)[0]["message"] == "creating split (TrafficSplitter)"
    assert [api["spec"]["kind"] for api in map(client.get_api, ("later", "once", "split"))] == [
        "AsyncAPI",
        "TaskAPI",
        "TrafficSplitter",
    ]
    for name in ("split", "behind", "once", "later"):
        client.delete(name)
    with pytest.raises(ValueError, match="`kind` must be TaskAPI"):
        client.deploy_task_api(SPEC, task=Once)


def test_a_function_of_a_script_is_deployed_as_a_task(running: Installation, tmp_path: Path) -> None:
    script = """
    import time

    import cortex

    STEPS = 3

    def train(config):
        print("trained", STEPS, config["model"])

    client = cortex.client()
    client.create_api({"name": "trainer", "kind": "TaskAPI"}, task=train)
    job = client.submit_job("trainer", {"config": {"model": "iris"}})["job_id"]
    assert client.wait_job("trainer", job)["job_status"]["status"] == "succeeded"
    while not any("trained 3 iris" in line for line in client.job_logs("trainer", job)):
        time.sleep(0.1)  # a line may be written after the job has ended
    print(True)
    client.delete("trainer")
    """
    file = tmp_path / "train_it.py"
    file.write_text(textwrap.dedent(script))
    environ = {**os.environ, "CORTEX_HOME": str(running.home)}

    for source in (["train_it.py"], ["-c", file.read_text()]):  # from a file, and without one
        done = subprocess.run(
            [sys.executable, *source], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_environments_are_created_listed_and_deleted(client: Client, running: Installation) -> None:
    url = running.status()["operator"]["url"]
    token = (running.home / "token").read_text().strip()

    assert cortex.new_client("there", url, token).operator_status()["operator"]["url"] == url
    # What is told of an API may have changed in between, such as the counts of its replicas.
    wait_until(lambda: cortex.client("there").list_apis() == client.list_apis())
    assert [item["name"] for item in cortex.env_list()] == ["local", "there"]
    cortex.env_delete("there")
    with pytest.raises(NotFoundError):
        cortex.client("there")
