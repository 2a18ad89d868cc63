"""A server of the process's own: started, configured, killed, started again."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cortex.errors import ModelError
from cortex.predictor.clients import serving_process
from cortex.predictor.clients.serving_process import LocalServer
from cortex.predictor.clients.tensorflow import TensorFlowLoader
from cortex.predictor.clients.tensorflow_backend import LOCAL, choose_backend
from harness.models.serving_conformance import check_outputs_are_those_of_tensorflow, request
from harness.models.tensorflow_models import make
from harness.wait import SLACK, has_ended, wait_until

pytestmark = pytest.mark.processes

ROW = [5.1, 3.5, 1.4, 0.2]
SCRIPT = Path(__file__).parents[2] / "harness" / "models" / "tensorflow_model_server.py"


@pytest.fixture(autouse=True)
def patience_with_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow computes for seconds at its start, and much longer on a loaded machine."""
    timeout_s = serving_process._START_TIMEOUT_S * SLACK
    monkeypatch.setattr(serving_process, "_START_TIMEOUT_S", timeout_s)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models that are served."""
    return make(tmp_path_factory)


@pytest.fixture(scope="module")
def executable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `tensorflow_model_server`."""
    return write_executable(
        tmp_path_factory.mktemp("bin"), f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )


def write_executable(folder: Path, code: str) -> Path:
    file = folder / "tensorflow_model_server"
    file.write_text(f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} \"$0\" \"$@\"\n' '''\n{code}\n")
    file.chmod(0o755)
    return file


@pytest.fixture(scope="module")
def server(executable: Path) -> Iterator[LocalServer]:
    server = LocalServer(str(executable))
    yield server
    server.close()


def server_process() -> psutil.Process:
    """Find the server among this process's children."""
    return next(c for c in psutil.Process().children() if any("grpc_socket_path" in word for word in c.cmdline()))


@pytest.mark.long
def test_outputs_equal_those_of_calling_tensorflow_to_the_bit(server: LocalServer, folder: Path) -> None:
    check_outputs_are_those_of_tensorflow(server, folder)


@pytest.mark.long
def test_one_content_can_be_loaded_twice_and_unloaded_by_itself(server: LocalServer, folder: Path) -> None:
    loader = TensorFlowLoader(server)
    first, second = (loader.load(request(folder, "iris")) for _ in range(2))
    expected = first.predict({"x": ROW})
    loader.unload(first)
    with pytest.raises(ModelError):
        first.predict({"x": ROW})
    assert second.predict({"x": ROW}) == expected
    loader.unload(second)


@pytest.mark.long
def test_a_failed_load_is_reported_and_leaves_other_models_loaded(
    server: LocalServer, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "saved_model.pb").write_bytes(b"\1\2\3")
    iris = TensorFlowLoader(server).load(request(folder, "iris"))
    with pytest.raises(ModelError, match="tensorflow_model_server can't load the model: .*saved_model.pb"):
        server.load(request(tmp_path, "broken"))
    assert len(iris.predict({"x": ROW})["scores"]) == 3


@pytest.mark.long
def test_a_server_that_is_killed_is_started_again_with_its_models(server: LocalServer, folder: Path) -> None:
    iris = TensorFlowLoader(server).load(request(folder, "iris"))
    expected = iris.predict({"x": ROW})
    process = server_process()
    process.suspend()
    process.kill()
    with pytest.raises(ModelError, match=r"was killed \(SIGKILL\) during a call of model 'iris'"):
        for _ in range(1000):  # until the kernel has ended it
            iris.predict({"x": ROW})
    wait_until(lambda: _answers(iris) == expected, timeout_s=60)
    assert server_process().pid != process.pid


def _answers(model: object) -> object:
    try:
        return model.predict({"x": ROW})  # type: ignore[attr-defined]
    except ModelError:
        return None


def test_reports_a_server_that_does_not_start(tmp_path: Path, folder: Path) -> None:
    server = LocalServer(str(write_executable(tmp_path, "raise SystemExit(3)")))
    for _ in range(2):
        with pytest.raises(ModelError, match="tensorflow_model_server can't be started: it exited with code 3"):
            server.load(request(folder, "iris"))
    server.close()


@pytest.mark.long
def test_the_server_ends_with_the_process_that_started_it(executable: Path, folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _LOAD_AND_WAIT, str(executable), str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert not has_ended(pid)
    process.kill()
    process.wait()
    wait_until(lambda: has_ended(pid))
    process.stdout.close()


_LOAD_AND_WAIT = """
import signal, sys, threading
from cortex.models.loader import LoadRequest
from cortex.predictor.clients import serving_process
from cortex.predictor.clients.serving_process import LocalServer
server = LocalServer(sys.argv[1])
request = LoadRequest("iris", "1", sys.argv[2] + "/iris", "digest", 1, None)
# The thread that loads first may end; the server must not.
thread = threading.Thread(target=server.load, args=(request,)); thread.start(); thread.join()
print(server._process.pid, flush=True)
signal.pause()
"""


def test_folders_of_killed_processes_are_removed_by_the_next(folder: Path, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    temporary = Path(tempfile.gettempdir())
    left, ours = (temporary / f"cortex-serving-{pid}-x" for pid in (ended.pid, os.getpid()))
    left.mkdir()
    ours.mkdir()
    server = LocalServer(str(write_executable(tmp_path, "raise SystemExit(3)")))
    with pytest.raises(ModelError):
        server.load(request(folder, "iris"))
    server.close()
    assert not left.exists()
    ours.rmdir()


def test_the_server_on_path_is_chosen_when_asked_for(executable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(executable.parent))
    assert isinstance(choose_backend(LOCAL), LocalServer)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ModelError, match="put tensorflow_model_server on PATH"):
        choose_backend(LOCAL)
