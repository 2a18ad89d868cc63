"""A `tensorflow_model_server` of this process's own: started with the first model, started again when it dies.

It ends with this process, however that ends. It must not know messages but those of its configuration, nor values.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import text_format

from cortex.errors import ModelError
from cortex.models.loader import LoadRequest
from cortex.predictor.clients.servable import SignatureInfo, named, plain
from cortex.predictor.clients.serving_messages import (
    AVAILABLE,
    END,
    MESSAGES,
    config_request,
    metadata_request,
    model_spec,
)
from cortex.predictor.clients.tensorflow_serving import CALL_TIMEOUT_S, Connection, ServedModel, UnreachableError
from cortex.predictor.clients.tensors import Array

_PREFIX = "cortex-serving-"
_START_TIMEOUT_S = 60.0
_POLL_S = 0.02
_STATUS_TIMEOUT_S = 5.0
#: A server that lived so long is started again at once; else the pause doubles from death to death.
_LIVED_S = 30.0
_MAX_PAUSE_S = 30.0
_TERMINATE_S = 5.0
#: Runs as a process of its own, for code of ours must not run between fork and exec in a process with threads: asks
#: to be killed with its parent, makes sure that it still has it, and becomes the server.
_BECOME = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]): sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class LocalServer:
    """The backend; any thread may call it. Loading and unloading take turns."""

    def __init__(self, executable: str) -> None:
        """Take the path of the server's executable."""
        self._executable = executable
        self._folder: Path | None = None
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folders: dict[str, str] = {}  # the server's name for each model → its folder with one version
        self._names = itertools.count(1)
        self._turn = threading.Lock()
        self._is_up = threading.Event()  # the server answers, with all models but one being loaded
        self._is_closing = threading.Event()
        self._last_death = ""

    def load(self, request: LoadRequest) -> LocalModel:
        """Have the server load a model. Raises: ModelError with the server's words."""
        with self._turn:
            connection = self._start()
            # Each load has a name of its own, so that one content may be loaded twice for a moment.
            name = f"{request.digest[:32] or 'model'}-{next(self._names)}"
            folder = self._link(name, request.path)
            self._folders[name] = folder
            try:
                self._configure(connection)
                self._wait_available(connection, name)
                metadata = connection.call("GetModelMetadata", metadata_request(name, None))
                return LocalModel(self, ServedModel(connection, name, None, request, metadata), request)
            except BaseException as error:
                self._forget(connection, name)
                if isinstance(error, grpc.RpcError):
                    raise ModelError(self._told(error)) from None
                raise

    def unload(self, model: LocalModel) -> None:
        """Have the server drop a model."""
        with self._turn:
            if self._connection is not None:
                self._forget(self._connection, model.served.name)

    def close(self) -> None:
        """End the server."""
        self._is_closing.set()
        with self._turn:
            if self._connection is not None:
                self._connection.close()
            if self._process is not None:
                _end(self._process)
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def wait_up(self) -> None:
        """Wait for a server that is being started again. Raises: ModelError if it takes too long."""
        if not self._is_up.is_set() and not self._is_up.wait(_START_TIMEOUT_S):
            raise ModelError(f"{self._name} {self._last_death} and has not come back")

    def died(self) -> str | None:
        """Say how the server ended, if it does not run just now."""
        process = self._process
        if process is None:
            return None
        # A call fails some moments before the kernel lets the process be waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
            return self._last_death or _ending(process.returncode)
        return None

    @property
    def _name(self) -> str:
        return Path(self._executable).name

    def _start(self) -> Connection:
        """Start the server, once, and wait until it answers. Raises: ModelError."""
        if self._connection is not None:
            self.wait_up()
            return self._connection
        if self._is_closing.is_set():
            raise ModelError(self._not_started())
        _remove_leftovers()
        folder = self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_short_folder()))
        self._write_config()
        connection = Connection(f"unix:{folder / 'socket'}")
        # The kernel counts the thread that started a process as its parent, so that thread must live on.
        threading.Thread(target=self._keep_running, args=(connection,), name="model-server", daemon=True).start()
        if not self._is_up.wait(_START_TIMEOUT_S) or self._is_closing.is_set():
            self._is_closing.set()
            raise ModelError(self._not_started())
        self._connection = connection
        return connection

    def _not_started(self) -> str:
        return f"{self._name} can't be started: it {self._last_death or 'does not answer'}; see the log"

    def _keep_running(self, connection: Connection) -> None:
        pause_s = 0.0
        is_first = True
        while not self._is_closing.is_set():
            started = time.monotonic()
            try:
                process = self._process = self._spawn()
            except OSError as error:
                self._last_death = f"can't be run: {error}"
                break
            if self._wait_answering(connection, process):
                self._is_up.set()
                is_first = False
            code = process.wait()
            self._is_up.clear()
            self._last_death = _ending(code)
            if self._is_closing.is_set():
                return
            if is_first:  # it does not start at all
                break
            pause_s = 0.0 if time.monotonic() - started > _LIVED_S else min(max(0.1, 2 * pause_s), _MAX_PAUSE_S)
            print(f"{self._name} {self._last_death}; starting it again", file=sys.stderr, flush=True)
            self._is_closing.wait(pause_s)
        self._is_closing.set()
        self._is_up.set()  # nobody need wait any longer

    def _spawn(self) -> subprocess.Popen[bytes]:
        folder = self._folder
        arguments = [
            "--port=0",
            f"--grpc_socket_path={folder}/socket",
            "--rest_api_port=0",
            f"--model_config_file={folder}/models.conf",
            # A model that can't be loaded is our caller's to try again.
            "--max_num_load_retries=0",
        ]
        launcher = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid())]
        environment = {"TF_CPP_MIN_LOG_LEVEL": "1", "TF_FORCE_GPU_ALLOW_GROWTH": "true", **os.environ}
        return subprocess.Popen(
            [*launcher, self._executable, *arguments], stdin=subprocess.DEVNULL, env=environment, close_fds=True
        )

    def _wait_answering(self, connection: Connection, process: subprocess.Popen[bytes]) -> bool:
        """Wait until a fresh server serves all that it was told to, in its own time; False if it died before."""
        waiting = set(self._folders)
        while process.poll() is None and not self._is_closing.is_set():
            try:
                if not waiting:
                    self._state(connection, "")
                waiting &= set(self._folders)  # what it died of may have been dropped since
                waiting = {name for name in waiting if self._state(connection, name)[0] < AVAILABLE}
                if not waiting:
                    return True
            except grpc.RpcError:
                pass
            self._is_closing.wait(_POLL_S)
        return False

    def _state(self, connection: Connection, name: str) -> tuple[int, str]:
        """Return a model's state and, of one that failed, why; 0 if the server knows none of that name."""
        request = MESSAGES["GetModelStatusRequest"](model_spec=model_spec(name, None))
        try:
            response = connection.call("GetModelStatus", request, _STATUS_TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
                return 0, ""
            raise
        for status in response.model_version_status:
            return status.state, status.status.error_message
        return 0, ""

    def _wait_available(self, connection: Connection, name: str) -> None:
        """Wait until a model is served. Raises: ModelError, grpc.RpcError."""
        while True:
            state, why = self._state(connection, name)
            if state == AVAILABLE:
                return
            if state == END:
                raise ModelError(f"{self._name} can't load it: {plain(why)}")
            self._is_closing.wait(_POLL_S)

    def _forget(self, connection: Connection, name: str) -> None:
        """Drop a model from the configuration; a server that does not run will start without it."""
        folder = self._folders.pop(name, None)
        with contextlib.suppress(grpc.RpcError, ModelError):
            self._configure(connection)
            deadline = time.monotonic() + _START_TIMEOUT_S
            while self._state(connection, name)[0] not in (0, END) and time.monotonic() < deadline:
                self._is_closing.wait(_POLL_S)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _configure(self, connection: Connection) -> None:
        """Have the server serve just what we want. Raises: grpc.RpcError.

        It answers when all new models are loaded, or one failed: that is found out by asking for its state.
        """
        self._write_config()
        connection.call("HandleReloadConfigRequest", config_request(self._folders), CALL_TIMEOUT_S)

    def _write_config(self) -> None:
        assert self._folder is not None
        text = text_format.MessageToString(config_request(self._folders).config)
        temporary = self._folder / "models.conf.new"
        temporary.write_text(text or "model_config_list {}")
        temporary.replace(self._folder / "models.conf")

    def _link(self, name: str, path: str) -> str:
        """Put a model where the server looks for it: below a folder of its versions."""
        assert self._folder is not None
        folder = self._folder / name
        folder.mkdir()
        (folder / "1").symlink_to(Path(path).absolute(), target_is_directory=True)
        return str(folder)

    def _told(self, error: Any) -> str:
        ending = self.died() if error.code() is grpc.StatusCode.UNAVAILABLE else None
        if ending:
            return f"{self._name} {ending} while it was being loaded"
        return f"{self._name} can't load it: {plain(error.details())}"


class LocalModel:
    """A model that our server has loaded."""

    def __init__(self, server: LocalServer, served: ServedModel, request: LoadRequest) -> None:
        self.served = served
        self.signatures: Mapping[str, SignatureInfo] = served.signatures
        self._server = server
        self._request = request

    def run(self, signature_key: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run a signature. Raises: ModelError; a call that the server died of is not repeated: it might do so again."""
        self._server.wait_up()
        try:
            return self.served.run(signature_key, inputs)
        except UnreachableError as error:
            ending = self._server.died()
            if ending is None:
                raise
            message = f"tensorflow_model_server {ending} during a call of {named(self._request)}; it is started again"
            raise ModelError(message) from error


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    return f"was killed ({signal.Signals(-code).name})"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_TERMINATE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _short_folder() -> str:
    """Return a folder for temporary files whose path leaves room for a socket's."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 60 else "/tmp"


def _remove_leftovers() -> None:
    """Remove the folders of processes that were killed before they could."""
    for folder in Path(_short_folder()).glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and folder.stat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
