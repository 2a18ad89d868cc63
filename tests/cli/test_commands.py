"""Commands against a real operator: output, exit codes and running processes."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.installations.command_line import CORTEX, cortex, environ, interrupted
from harness.installations.installation import Installation, installation, write_project
from harness.ports import free_port
from harness.wait import has_ended, wait_until

pytestmark = pytest.mark.processes

SOURCE = """
class Handler:
    def __init__(self, config):
        print("starting", config)

    def handle_post(self, payload):
        print("asked for", payload)
        return {"answer": payload["question"]}
"""
BATCH_SOURCE = """
class Handler:
    def __init__(self, config):
        pass

    def handle_batch(self, payload):
        return payload
"""
CONFIG = """
- name: NAME
  kind: RealtimeAPI
  handler:
    type: python
    path: handler.py
"""


@pytest.fixture(scope="module")
def running() -> Iterator[Installation]:
    with installation() as made:
        yield made


def project(folder: Path, name: str, source: str = SOURCE) -> Path:
    write_project(folder, source, CONFIG.replace("NAME", name))
    (folder / "sample.json").write_text('{"question": 42}')
    return folder


def test_deploy_waits_until_live_and_shows_how_to_call_it(running: Installation, tmp_path: Path) -> None:
    done = cortex(running.home, "deploy", project(tmp_path / "p", "first"), cwd=tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "creating first (RealtimeAPI)"
    assert lines[1].startswith("first is live (")
    assert lines[2] == f"  endpoint: {running.url('/first')}"
    assert lines[3] == f"  docs: {running.url('/first')}/docs"
    answer = subprocess.run(["sh", "-c", lines[4] + " -s"], capture_output=True, text=True, timeout=30)
    assert json.loads(answer.stdout) == {"answer": 42}


def test_the_times_of_several_apis_count_from_the_same_moment(running: Installation, tmp_path: Path) -> None:
    slow = SOURCE.replace('print("starting", config)', "import time; time.sleep(0.3)")
    write_project(tmp_path, slow, CONFIG.replace("NAME", "one") + CONFIG.replace("NAME", "two"))

    output = cortex(running.home, "deploy", tmp_path).stdout

    one, two = (float(seconds) for seconds in re.findall(r"is live \((.*) s\)", output))
    assert 0 < one <= two


def test_deploy_as_json_prints_only_json(running: Installation, tmp_path: Path) -> None:
    done = cortex(running.home, "deploy", project(tmp_path, "as-json"), "-o", "json")

    assert json.loads(done.stdout) == [
        {"api": "as-json", "message": "creating as-json (RealtimeAPI)", "error": "", "changes": [], "installs": []}
    ]
    assert (done.returncode, done.stderr) == (0, "")


def test_deploy_reports_mistakes_with_relative_paths(running: Installation, tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "mistaken")
    (folder / "cortex.yaml").write_text(CONFIG.replace("NAME", "mistaken").replace("handler.py", "hander.py"))
    (folder / "requirements.txt").write_text("numpy = = 1\n")

    done = cortex(running.home, "deploy", "p", cwd=tmp_path)
    as_json = cortex(running.home, "deploy", "p", "-o", "json", cwd=tmp_path)
    checked = cortex(running.home, "check", "p", cwd=tmp_path)

    assert done.returncode == as_json.returncode == checked.returncode == 2
    first, second, last = done.stderr.splitlines()
    assert first.startswith("p/cortex.yaml:6:11: mistaken.handler.path: ")
    assert second.startswith("p/requirements.txt:1:")
    assert last == "error: 2 mistakes found"
    assert checked.stderr == done.stderr
    assert [item["error"] for item in json.loads(as_json.stdout)] == [first, second]
    assert json.loads(as_json.stdout)[0]["api"] == "mistaken"


def test_a_deploy_with_mistakes_starts_no_operator(tmp_path: Path) -> None:
    write_project(tmp_path / "p", SOURCE, CONFIG.replace("handler.py", "missing.py"))
    done = cortex(tmp_path / "home", "deploy", tmp_path / "p")
    assert (done.returncode, done.stdout) == (2, "")
    assert "missing.py" in done.stderr
    assert "started the operator" not in done.stderr
    assert cortex(tmp_path / "home", "down").stdout == "nothing was running\n"


def test_deploy_of_code_that_cannot_start_shows_the_users_traceback(running: Installation, tmp_path: Path) -> None:
    folder = project(tmp_path, "broken")
    assert cortex(running.home, "deploy", folder).returncode == 0
    (folder / "handler.py").write_text(SOURCE.replace('print("starting", config)', 'raise ValueError("bad weights")'))

    done = cortex(running.home, "deploy", folder)
    as_json = cortex(running.home, "deploy", folder, "-o", "json")
    got = cortex(running.home, "get", "broken")

    assert done.returncode == as_json.returncode == 1
    assert 'raise ValueError("bad weights")' in done.stderr
    assert "broken failed to become live: ValueError: bad weights" in done.stderr
    assert "still serves" in done.stderr
    assert "cortex/" not in done.stderr.replace("`cortex logs", "")
    assert json.loads(as_json.stdout)[0]["error"] == "ValueError: bad weights"
    assert "ValueError: bad weights" in got.stdout
    assert f"the previous version still serves requests, at {running.url('/broken')}\n" in got.stdout
    assert running.post("/broken", {"question": 1}).json == {"answer": 1}


def test_every_report_of_a_failure_contains_its_fix_once(running: Installation, tmp_path: Path) -> None:
    hint = "add nosuchpackage to requirements.txt, or nosuchpackage.py to the project"
    error = "ModuleNotFoundError: No module named 'nosuchpackage'"

    done = cortex(running.home, "deploy", project(tmp_path / "a", "lacks-package", "import nosuchpackage\n" + SOURCE))
    raising = SOURCE.replace('print("starting", config)', 'raise ValueError("bad weights")')
    cortex(running.home, "deploy", project(tmp_path / "b", "bad-weights", raising))

    assert hint in done.stderr
    got = cortex(running.home, "get", "lacks-package").stdout
    assert got.endswith(f"{error}\n{error}; {hint}\n")
    assert hint in cortex(running.home, "logs", "lacks-package").stdout
    assert cortex(running.home, "get", "bad-weights").stdout.count("ValueError: bad weights") == 1
    first_start, _, _ = cortex(running.home, "logs", "bad-weights").stdout.partition("exited with code 1")
    assert first_start.count("ValueError: bad weights") == 1


def test_the_same_code_can_be_deployed_again_after_a_failed_start(running: Installation, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    source = SOURCE.replace('print("starting", config)', f"open({str(weights)!r})")
    folder = project(tmp_path / "lacking", "lacking", source)
    assert cortex(running.home, "deploy", folder).returncode == 1
    weights.touch()

    done = cortex(running.home, "deploy", folder)

    assert (done.returncode, done.stderr) == (0, "")
    assert running.post("/lacking", {"question": 1}).json == {"answer": 1}


def test_an_interrupted_deploy_reports_that_the_deployment_continues(running: Installation, tmp_path: Path) -> None:
    folder = project(tmp_path, "long", SOURCE.replace('print("starting", config)', "import time; time.sleep(3600)"))
    command = [*CORTEX, "deploy", str(folder)]
    with subprocess.Popen(
        command, env=environ(running.home), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"creating long (RealtimeAPI)\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)

    assert (process.returncode, err) == (130, b"the deployment continues; `cortex get` shows its status\n")
    assert cortex(running.home, "delete", "long").returncode == 0


def test_deploy_without_waiting_returns_at_once(running: Installation, tmp_path: Path) -> None:
    slow = SOURCE.replace('print("starting", config)', "import time; time.sleep(3600)")

    done = cortex(running.home, "deploy", project(tmp_path, "slow", slow), "--no-wait")

    assert (done.returncode, done.stdout) == (0, "creating slow (RealtimeAPI)\n")
    assert running.get("slow")["status"]["status_code"] == "updating"
    assert cortex(running.home, "refresh", "slow").returncode == 1
    assert cortex(running.home, "delete", "slow").stdout == "deleting slow\n"


def test_a_large_project_is_uploaded_only_with_yes(running: Installation, tmp_path: Path) -> None:
    folder = project(tmp_path, "big")
    (folder / "weights.bin").write_bytes(bytes(11 * 1024 * 1024))

    refused = cortex(running.home, "deploy", folder)

    assert refused.returncode == 2
    assert "weights.bin is 11 MiB" in refused.stderr
    assert "--yes" in refused.stderr
    assert cortex(running.home, "deploy", folder, "--yes").returncode == 0


def test_get_logs_predict_refresh_patch_and_delete(running: Installation, tmp_path: Path) -> None:
    folder = project(tmp_path, "whole")
    sample = folder / "sample.json"
    assert cortex(running.home, "deploy", folder).returncode == 0

    answer = cortex(running.home, "predict", "whole", sample)
    assert (answer.returncode, json.loads(answer.stdout)) == (0, {"answer": 42})
    debugged = cortex(running.home, "predict", "whole", "-", "--debug", stdin='{"question": 1}')
    assert json.loads(debugged.stdout) == {"answer": 1}
    assert "x-cortex-request-id: " in debugged.stderr
    below = cortex(running.home, "predict", "whole", "--path", "/a b?c=1", "--method", "put")
    assert json.loads(below.stdout)["error"] == "no API has the path /whole/a%20b"
    no_slash = cortex(running.home, "predict", "whole", "--path", "below")
    assert (no_slash.returncode, "begin with a slash" in no_slash.stderr) == (2, True)
    failed = cortex(running.home, "predict", "whole", "-", stdin="{}")
    assert failed.returncode == 1
    assert "status 500" in failed.stderr

    row = cortex(running.home, "get", "whole").stdout.splitlines()[:2]
    assert row[0].split()[:4] == ["env", "realtime", "api", "status"]
    assert row[1].split()[:5] == ["local", "whole", "live", "1", "1"]
    assert "whole" in cortex(running.home, "get").stdout
    assert "whole" in [api["spec"]["name"] for api in json.loads(cortex(running.home, "get", "-o", "json").stdout)]

    logs = wait_until(lambda: "asked for" in (text := cortex(running.home, "logs", "whole").stdout) and text)
    assert "starting" in logs
    assert len(cortex(running.home, "logs", "whole", "--tail", "1").stdout.splitlines()) == 1

    before = running.pids("whole")
    assert cortex(running.home, "refresh", "whole").stdout == "updating whole (RealtimeAPI)\n"
    wait_until(lambda: (now := running.pids("whole")) and not now & before, timeout_s=30)

    config = folder / "cortex.yaml"
    config.write_text(config.read_text() + "  autoscaling: {min_replicas: 2}\n")
    assert cortex(running.home, "patch", config).returncode == 0
    wait_until(lambda: len(running.pids("whole")) == 2, timeout_s=30)
    config.write_text(config.read_text().replace("min_replicas", "min_replica"))
    bad = cortex(running.home, "patch", config)
    assert bad.returncode == 2
    assert bad.stderr.startswith(f"{config}:7:17: whole.autoscaling.min_replica: ")

    assert cortex(running.home, "delete", "whole").stdout == "deleting whole\n"
    gone = cortex(running.home, "get", "whole")
    assert (gone.returncode, gone.stderr) == (1, "error: whole is not deployed\n")


def test_history_and_rollback(running: Installation, tmp_path: Path) -> None:
    cortex(running.home, "deploy", project(tmp_path, "returned"))
    worse = project(tmp_path, "returned", SOURCE.replace("return {", "return {'worse': True, "))
    deployed = cortex(running.home, "deploy", worse)
    assert deployed.stdout.splitlines()[:2] == ["updating returned (RealtimeAPI)", "  files changed: handler.py"]
    broken = project(tmp_path, "returned", SOURCE.replace("print(", "raise ValueError(", 1))
    assert cortex(running.home, "deploy", broken).returncode == 1
    shown = cortex(running.home, "get", "returned").stdout
    assert "revision: 3 (revision 2 is live)" in shown
    assert "the previous version still serves requests" in shown

    cancelled = cortex(running.home, "rollback", "returned")
    assert (cancelled.returncode, cancelled.stderr) == (0, "")
    assert cancelled.stdout.startswith("rolling back returned (RealtimeAPI) from revision 3 to 2\nreturned is live (")
    done = cortex(running.home, "rollback", "returned", "1", "-o", "json")
    assert json.loads(done.stdout)["changes"] == ["files changed: handler.py"]
    answer = cortex(running.home, "predict", "returned", str(tmp_path / "sample.json"))
    assert json.loads(answer.stdout) == {"answer": 42}

    lines = cortex(running.home, "history", "returned").stdout.splitlines()
    assert lines[0].split() == ["revision", "status", "deployed", "by", "action", "files"]
    assert [line.split("  ")[0] for line in lines[1:6]] == ["5", "4", "3", "2", "1"]
    assert "rollback to 1" in lines[1]
    assert lines[6:9] == ["", "changes of revision 5:", "  files changed: handler.py"]
    history = json.loads(cortex(running.home, "history", "returned", "-o", "json").stdout)
    assert [entry["is_live"] for entry in history] == [True, False, False, False, False]
    refused = cortex(running.home, "rollback", "returned", "9")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "returned has no revision 9 in its history, which has 1, 2, 3, 4, 5" in refused.stderr
    invalid = cortex(running.home, "rollback", "returned", "abc")
    assert invalid.returncode == 2
    assert "'abc' is not the number of a revision, such as 3; `cortex history API` lists them" in invalid.stderr


def test_a_new_project_of_each_kind_is_deployed_as_it_is(running: Installation, tmp_path: Path) -> None:
    for kind in ("RealtimeAPI", "AsyncAPI", "BatchAPI", "TaskAPI"):
        name = f"new-{kind.removesuffix('API').lower()}"
        written = cortex(running.home, "init", name, "--kind", kind.removesuffix("API").lower(), cwd=tmp_path)
        assert written.returncode == 0, written.stderr
        first, dev, deploy, use = [line.strip() for line in written.stdout.splitlines() if line.startswith("  ")]
        assert (first, dev.partition("#")[0].rstrip(), deploy) == (f"cd {name}", "cortex dev", "cortex deploy")
        for command in (deploy, use):
            done = cortex(running.home, *command.split()[1:], cwd=tmp_path / name)
            assert done.returncode == 0, (command, done.stderr)
            if command == deploy and kind == "BatchAPI":
                assert f"  {use}\n" in done.stdout
        if kind == "RealtimeAPI":
            assert json.loads(done.stdout) == {"predictions": [2, 4, 6]}


def test_logs_follow_until_interrupted(running: Installation, tmp_path: Path) -> None:
    assert cortex(running.home, "deploy", project(tmp_path, "followed")).returncode == 0
    process = subprocess.Popen(
        [*CORTEX, "logs", "followed", "-f"], env=environ(running.home), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout and process.stderr
    try:
        assert b"starting" in process.stdout.readline()
        running.post("/followed", {"question": "new"})
        assert b"asked for {'question': 'new'}" in process.stdout.readline()
    finally:
        _, err = interrupted(process)
    assert (process.returncode, err) == (130, b"")


def test_deleting_many_ready_replicas_needs_force(running: Installation, tmp_path: Path) -> None:
    folder = project(tmp_path, "many")
    config = folder / "cortex.yaml"
    config.write_text(config.read_text() + "  autoscaling: {min_replicas: 3}\n")
    assert cortex(running.home, "deploy", folder).returncode == 0

    refused = cortex(running.home, "delete", "many")

    assert refused.returncode == 2
    assert "3 ready replicas" in refused.stderr
    assert cortex(running.home, "delete", "many", "-f").returncode == 0


def test_check_calls_the_handler_with_a_sample_without_an_operator(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "tried")

    good = cortex(tmp_path / "home", "check", folder, "--sample", folder / "sample.json")
    bad = cortex(tmp_path / "home", "check", folder, "--sample", "-", stdin="{}")

    assert (good.returncode, good.stdout) == (0, 'tried responds with status 200: {"answer":42}\n')
    assert bad.returncode == 1
    assert "request sample failed:" in bad.stderr
    assert "KeyError: 'question'" in bad.stderr
    assert "cortex logs" not in bad.stdout, "nothing is deployed, so there are no logs"
    assert not (tmp_path / "home" / "run").exists()


def test_check_reports_annotations_that_replicas_cannot_resolve(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "typed")
    (file,) = folder.glob("*.py")
    file.write_text(
        "class Handler:\n    def __init__(self, config): ...\n    def handle_post(self, payload: 'Iris'): ...\n"
    )

    checked = cortex(tmp_path / "home", "check", folder)

    assert checked.returncode == 2
    assert f'{file}:3:36: handle_post(): "Iris" in the annotation of payload is not defined' in checked.stderr


def test_check_with_a_sample_names_threads_that_do_not_survive_the_fork_of_preload(tmp_path: Path) -> None:
    source = (
        "import threading, time\nclass Handler:\n def __init__(self, config):\n"
        "  threading.Thread(target=time.sleep, args=(600,), name='refresh', daemon=True).start()\n"
        " def handle_post(self, payload): return 42\n"
    )
    folder = project(tmp_path / "p", "forked", source)
    config = folder / "cortex.yaml"
    config.write_text(config.read_text() + "    preload: true\n")

    done = cortex(tmp_path / "home", "check", folder, "--sample", folder / "sample.json")

    assert (done.returncode, done.stdout) == (0, "forked responds with status 200: 42\n")
    assert 'forked: warning: preload: the thread "refresh"' in done.stderr


def test_check_with_a_sample_shows_the_output_of_a_class_that_ends_its_process(tmp_path: Path) -> None:
    source = (
        "import os\nclass Handler:\n def __init__(self, config):\n  print('no licence', flush=True)\n  os._exit(3)\n"
    )
    folder = project(tmp_path / "p", "ends", f"{source} def handle_post(self): ...\n")

    done = cortex(tmp_path / "home", "check", folder, "--sample", folder / "sample.json")

    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        "no licence",
        "error: ends failed to start: the process ended while it started: exited with code 3",
    ]


def test_check_sends_a_sample_only_to_apis_that_serve_requests(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", "tried")
    (folder / "cortex.yaml").write_text("- {name: jobs, kind: BatchAPI, handler: {type: python, path: batch.py}}\n")
    (folder / "batch.py").write_text(BATCH_SOURCE)
    nothing = cortex(tmp_path / "home", "check", folder, "--sample", folder / "sample.json")
    with (folder / "cortex.yaml").open("a") as config:
        config.write(CONFIG.replace("NAME", "tried"))
    some = cortex(tmp_path / "home", "check", folder, "--sample", folder / "sample.json")

    assert nothing.returncode == 2
    assert "use `cortex submit` for an API that runs jobs" in nothing.stderr
    assert (some.returncode, some.stdout) == (0, 'tried responds with status 200: {"answer":42}\n')
    assert some.stderr == "jobs runs jobs and serves no requests; the sample is not sent to it\n"


def test_another_environment_is_reached_by_address_and_token(running: Installation, tmp_path: Path) -> None:
    operator = running.status()["operator"]
    token = (running.home / "token").read_text().strip()
    here = ["env", "configure", "there", "--operator-endpoint", operator["url"], "--token"]

    cortex(tmp_path, *here, "wrong")
    refused = cortex(tmp_path, "get", "-e", "there")
    cortex(tmp_path, *here, token)
    allowed = cortex(tmp_path, "get", "-e", "there")

    assert refused.returncode == 1
    assert "token is missing or wrong" in refused.stderr
    assert allowed.returncode == 0


def test_up_is_repeatable_and_two_at_once_start_one_operator(tmp_path: Path) -> None:
    home = tmp_path / "home"
    ports = ["--gateway-port", str(free_port()), "--operator-port", str(free_port())]
    try:
        with ThreadPoolExecutor() as pool:
            both = list(pool.map(lambda _: cortex(home, "up", *ports), range(2)))
        assert [done.returncode for done in both] == [0, 0], both
        assert sum("is running\n" in done.stdout for done in both) == 1
        assert stat.S_IMODE((home / "token").stat().st_mode) == 0o600
        assert cortex(home, "up").returncode == 0
        moved = cortex(home, "up", "--gateway-port", "1")
        assert moved.returncode == 1
        assert "cortex down" in moved.stderr
    finally:
        assert cortex(home, "down").stdout == "stopped\n"


@pytest.mark.long
def test_processes_of_a_killed_operator_are_shown_adopted_and_stopped(tmp_path: Path) -> None:
    with installation() as made:
        assert cortex(made.home, "deploy", project(tmp_path, "left")).returncode == 0
        before = made.status()
        pids = [before["gateway"]["pid"], *(replica["pid"] for replica in before["replicas"])]
        os.kill(before["operator"]["pid"], signal.SIGKILL)
        wait_until(lambda: has_ended(before["operator"]["pid"]))

        left = made.status()
        assert left["operator"] is None
        assert left["gateway"]["pid"] == before["gateway"]["pid"]
        assert left["replicas"] == before["replicas"]
        assert "not running" in cortex(made.home, "status").stdout
        assert made.post("/left", {"question": 1}).json == {"answer": 1}

        assert cortex(made.home, "up").returncode == 0
        again = made.status()
        assert again["gateway"] == before["gateway"]
        assert [replica["pid"] for replica in again["replicas"]] == pids[1:]

        os.kill(again["operator"]["pid"], signal.SIGKILL)
        wait_until(lambda: has_ended(again["operator"]["pid"]))
        assert cortex(made.home, "down").stdout == "stopped\n"
        wait_until(lambda: all(map(has_ended, pids)))
        assert json.loads(cortex(made.home, "status", "-o", "json").stdout)["gateway"] is None


@pytest.mark.parametrize("mode", [(), ("--stop-all",)])
def test_a_command_beside_a_start_in_the_foreground_uses_its_operator(tmp_path: Path, mode: tuple[str, ...]) -> None:
    home = tmp_path / "home"
    port = free_port()
    ports = ["--gateway-port", str(port), "--operator-port", str(free_port())]
    process = subprocess.Popen([*CORTEX, "up", "--foreground", *mode, *ports], env=environ(home))
    try:
        wait_until((home / "run" / "start.lock").exists)
        beside = cortex(home, "up")
        assert (beside.returncode, f":{port}" in beside.stdout) == (0, True), beside.stderr
        assert "is already running" in beside.stdout
        assert process.poll() is None
        assert cortex(home, "down").returncode == 0
        assert process.wait(30) == 0
    finally:
        process.kill()
