"""`cortex dev`, `check`, `init`, `cortex.testing` and the client need nothing that only Linux has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from harness.dev_terminal import DevTerminal
from harness.jobs.job_data import JOB_ID
from harness.jobs.job_operator import DONE, Operator

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent.parent
IMITATION = ROOT / "tests" / "harness" / "other_systems"
ENVIRON = {**os.environ, "PYTHONPATH": str(IMITATION)}


def run(arguments: list[str], folder: Path) -> str:
    environ = {**ENVIRON, "CORTEX_HOME": str(folder / "home")}
    result = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_imitation_lacks_what_linux_has(tmp_path: Path) -> None:
    code = (
        "import os, select, socket, sys\n"
        "print(sys.platform, hasattr(select, 'epoll'), hasattr(socket, 'SO_PEERCRED'), os.path.exists('/proc/self'))\n"
        "try: open('/proc/self/stat')\nexcept FileNotFoundError: print('no /proc')\n"
        "try: import uvloop\nexcept ModuleNotFoundError: print('no uvloop')"
    )
    assert run(["-c", code], tmp_path).splitlines()[-2:] == ["no /proc", "no uvloop"]
    assert run(["-c", code], tmp_path).startswith("darwin False False")


def test_a_project_is_written_checked_and_tested(tmp_path: Path) -> None:
    run(["-m", "cortex.cli.main", "init", "shop"], tmp_path)
    assert "no mistakes found" in run(["-m", "cortex.cli.main", "check", "shop"], tmp_path)
    example = ROOT / "examples" / "iris-classifier"
    code = (
        "import json, cortex.testing\n"
        f"folder = {str(example)!r}\n"
        "with cortex.testing.load(folder) as api:\n"
        "    print(api.post(json.load(open(folder + '/sample.json'))).text)"
    )
    assert json.loads(run(["-c", code], tmp_path))["label"] == "setosa"


@pytest.mark.long
def test_applications_jobs_and_models_are_tested(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "cortex.yaml").write_text(
        "- name: shop\n  kind: RealtimeAPI\n  handler: {type: asgi, path: shop.py, app: app}\n"
        "- name: sums\n  kind: BatchAPI\n  handler: {type: python, path: sums.py}\n"
        "- name: line\n  kind: RealtimeAPI\n  handler: {type: model, models: {path: model.joblib}}\n"
    )
    (tmp_path / "shop.py").write_text(
        "from fastapi import FastAPI\napp = FastAPI()\n@app.get('/x')\ndef x(): return 1\n"
    )
    (tmp_path / "sums.py").write_text(
        "class Handler:\n    def __init__(self, config): pass\n"
        "    def handle_batch(self, payload): return sum(payload)\n"
    )
    code = (
        "import joblib, cortex.testing\nfrom sklearn.linear_model import LinearRegression\n"
        "joblib.dump(LinearRegression().fit([[0.0], [1.0]], [0.0, 2.0]), 'model.joblib')\n"
        "with cortex.testing.load('.', 'shop') as api: print(api.get('/x').text)\n"
        "with cortex.testing.load('.', 'sums') as api: print(api.run_batch([1, 2]).result)\n"
        "with cortex.testing.load('.', 'line') as api:\n"
        "    print(round(api.post({'instances': [[2.0]]}).json()['predictions'][0]))"
    )
    assert run(["-c", code], tmp_path).split() == ["1", "3", "4"]


def edit(file: Path, old: str, new: str) -> None:
    """Change a file at once: a watcher must not find it empty in between."""
    changed = file.with_name("changed")
    changed.write_text(file.read_text().replace(old, new))
    changed.replace(file)


def test_a_project_is_served_and_reloaded(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "cortex.yaml").write_text("- name: one\n  kind: RealtimeAPI\n  handler: {type: python, path: one.py}\n")
    (folder / "one.py").write_text(
        "class Handler:\n    def __init__(self, config):\n        self.x = 1\n"
        "    def handle_get(self):\n        return {'x': self.x}\n"
    )
    with DevTerminal(folder, environ={"PYTHONPATH": str(IMITATION)}) as terminal:
        url = f"{terminal.url}/one"
        assert json.load(urllib.request.urlopen(url)) == {"x": 1}
        edit(folder / "one.py", "{'x'", "{'y'")
        terminal.expect("swapped Handler.handle_get()")
        assert json.load(urllib.request.urlopen(url)) == {"y": 1}
        edit(folder / "one.py", "= 1", "= 2")
        terminal.expect("new process (")
        assert json.load(urllib.request.urlopen(url)) == {"y": 2}
        assert terminal.interrupt() == 0


def test_commands_reach_an_operator_on_another_machine(tmp_path: Path) -> None:
    operator = Operator()
    operator.respond(f"GET /v1/apis/sum/jobs/{JOB_ID}", DONE)
    try:
        cortex = ["-m", "cortex.cli.main"]
        run([*cortex, "env", "configure", "far", "--operator-endpoint", operator.url, "--token", "t"], tmp_path)
        assert JOB_ID in run([*cortex, "get", "sum", JOB_ID, "-e", "far"], tmp_path)
    finally:
        operator.close()


def test_the_client_and_the_commands_import_nothing_of_linux(tmp_path: Path) -> None:
    code = (
        "import cortex\ncortex.client\nimport cortex.client.client\n"
        "from cortex.cli.main import COMMANDS, load_command\n"
        "for name in COMMANDS: load_command(name)\n"
        "print(len(COMMANDS))"
    )
    assert int(run(["-c", code], tmp_path)) > 20
