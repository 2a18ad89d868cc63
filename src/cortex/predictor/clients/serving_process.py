"""The backend that runs models in a `tensorflow_model_server` of this process.

The server starts with the first model, restarts when it dies, and is killed when this process ends, even by SIGKILL.
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
from cortex.payloads.arrays import Array
from cortex.predictor.clients.tensorflow import SignatureInfo, clean_message
from cortex.predictor.clients.tensorflow_serving import (
    AVAILABLE,
    CALL_TIMEOUT_S,
    END,
    MESSAGES,
    ServedModel,
    ServingChannel,
    UnreachableError,
    config_request,
    metadata_request,
    model_spec,
)
from cortex.processes.backoff import Backoff

_PREFIX = "cortex-serving-"
_START_TIMEOUT_S = 60.0
_POLL_S = 0.02
_STATUS_TIMEOUT_S = 5.0
#: A server that ran for so long restarts immediately; otherwise the backoff doubles with each exit.
_STABLE_S = 30.0
_BACKOFF = Backoff(0.1, 30.0)
_TERMINATE_S = 5.0
#: Code of an intermediate process, as no Python code may run between fork and exec in a process with threads. It sets
#: PR_SET_PDEATHSIG (prctl(2)), checks that its parent is still alive, and executes the server.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]): sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class LocalServer:
    """A `TensorFlowBackend` with its own server. Thread-safe; loads and unloads are serialized."""

    def __init__(self, executable: str) -> None:
        self._executable = executable
        self._folder: Path | None = None
        self._channel: ServingChannel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folders: dict[str, str] = {}  # the server's name of each model → its folder with one version
        self._names = itertools.count(1)
        self._lock = threading.Lock()
        self._is_up = threading.Event()  # the server responds and serves all models but the one being loaded
        self._is_closing = threading.Event()
        self._last_exit = ""

    def load(self, request: LoadRequest) -> LocalModel:
        """Load a model on the server. Raises: ModelError with the message of the server."""
        with self._lock:
            channel = self._start()
            # Each load has a unique name, as the same files may be loaded twice for a moment.
            name = f"{request.digest[:32] or 'model'}-{next(self._names)}"
            assert self._folder is not None
            versions = self._folder / name  # the folder of versions that the server expects, with a link to the model
            versions.mkdir()
            (versions / "1").symlink_to(Path(request.path).absolute(), target_is_directory=True)
            folder = str(versions)
            self._folders[name] = folder
            try:
                self._configure(channel)
                self._wait_available(channel, name)
                metadata = channel.call("GetModelMetadata", metadata_request(name, None))
                return LocalModel(self, ServedModel(channel, name, None, request, metadata), request)
            except BaseException as error:
                self._remove(channel, name)
                if isinstance(error, grpc.RpcError):
                    raise ModelError(self._load_error(error)) from None
                raise

    def unload(self, model: LocalModel) -> None:
        """Unload a model from the server."""
        with self._lock:
            if self._channel is not None:
                self._remove(self._channel, model.served.name)

    def close(self) -> None:
        """Stop the server."""
        self._is_closing.set()
        with self._lock:
            if self._channel is not None:
                self._channel.close()
            if self._process is not None:
                self._process.terminate()
                try:
                    self._process.wait(_TERMINATE_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def wait_up(self) -> None:
        """Wait for a server that restarts. Raises: ModelError if it takes too long."""
        if not self._is_up.is_set() and not self._is_up.wait(_START_TIMEOUT_S):
            raise ModelError(f"{self._name} {self._last_exit} and has not restarted within {_START_TIMEOUT_S:.0f} s")

    def exit_reason(self) -> str | None:
        """Return how the server exited; None if it is running."""
        process = self._process
        if process is None:
            return None
        # A call fails shortly before the exit status is available.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
            return self._last_exit or _describe_exit(process.returncode)
        return None

    @property
    def _name(self) -> str:
        return Path(self._executable).name

    def _start(self) -> ServingChannel:
        """Start the server, once, and wait until it responds. Raises: ModelError."""
        if self._channel is not None:
            self.wait_up()
            return self._channel
        if self._is_closing.is_set():
            raise ModelError(self._not_started())
        _remove_orphaned_folders()
        folder = self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_short_folder()))
        self._write_config()
        channel = ServingChannel(f"unix:{folder / 'socket'}")
        # PR_SET_PDEATHSIG refers to the thread that started the process, so that thread must live on.
        threading.Thread(target=self._supervise, args=(channel,), name="model-server", daemon=True).start()
        if not self._is_up.wait(_START_TIMEOUT_S) or self._is_closing.is_set():
            self._is_closing.set()
            raise ModelError(self._not_started())
        self._channel = channel
        return channel

    def _not_started(self) -> str:
        return f"{self._name} can't be started: it {self._last_exit or 'does not respond'}; see the log"

    def _supervise(self, channel: ServingChannel) -> None:
        exits = 0  #: in a row
        is_first = True
        while not self._is_closing.is_set():
            started = time.monotonic()
            try:
                process = self._process = self._spawn()
            except OSError as error:
                self._last_exit = f"can't be run: {error}"
                break
            if self._wait_ready(channel, process):
                self._is_up.set()
                is_first = False
            code = process.wait()
            self._is_up.clear()
            self._last_exit = _describe_exit(code)
            if self._is_closing.is_set():
                return
            if is_first:  # the first start failed
                break
            exits = 0 if time.monotonic() - started > _STABLE_S else exits + 1
            print(f"{self._name} {self._last_exit}; restarting it", file=sys.stderr, flush=True)
            self._is_closing.wait(_BACKOFF.delay_s(exits) if exits else 0)
        self._is_closing.set()
        self._is_up.set()  # release the waiting threads

    def _spawn(self) -> subprocess.Popen[bytes]:
        folder = self._folder
        arguments = [
            "--port=0",
            f"--grpc_socket_path={folder}/socket",
            "--rest_api_port=0",
            f"--model_config_file={folder}/models.conf",
            # The registry retries failed loads.
            "--max_num_load_retries=0",
        ]
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
        environment = {"TF_CPP_MIN_LOG_LEVEL": "1", "TF_FORCE_GPU_ALLOW_GROWTH": "true", **os.environ}
        return subprocess.Popen(
            [*launcher, self._executable, *arguments], stdin=subprocess.DEVNULL, env=environment, close_fds=True
        )

    def _wait_ready(self, channel: ServingChannel, process: subprocess.Popen[bytes]) -> bool:
        """Wait until a new server serves all configured models; return False if it exits before."""
        waiting = set(self._folders)
        while process.poll() is None and not self._is_closing.is_set():
            try:
                if not waiting:
                    self._state(channel, "")
                waiting &= set(self._folders)  # a model that made it exit may have been removed
                waiting = {name for name in waiting if self._state(channel, name)[0] < AVAILABLE}
                if not waiting:
                    return True
            except grpc.RpcError:
                pass
            self._is_closing.wait(_POLL_S)
        return False

    def _state(self, channel: ServingChannel, name: str) -> tuple[int, str]:
        """Return the state of a model and the error of a failed one; state 0 if the server does not have it."""
        request = MESSAGES["GetModelStatusRequest"](model_spec=model_spec(name, None))
        try:
            response = channel.call("GetModelStatus", request, _STATUS_TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
                return 0, ""
            raise
        for status in response.model_version_status:
            return status.state, status.status.error_message
        return 0, ""

    def _wait_available(self, channel: ServingChannel, name: str) -> None:
        """Wait until the server serves a model. Raises: ModelError, grpc.RpcError."""
        while True:
            state, error = self._state(channel, name)
            if state == AVAILABLE:
                return
            if state == END:
                raise ModelError(f"{self._name} can't load the model: {clean_message(error)}")
            self._is_closing.wait(_POLL_S)

    def _remove(self, channel: ServingChannel, name: str) -> None:
        """Remove a model from the configuration, also if the server is not running."""
        folder = self._folders.pop(name, None)
        with contextlib.suppress(grpc.RpcError, ModelError):
            self._configure(channel)
            deadline = time.monotonic() + _START_TIMEOUT_S
            while self._state(channel, name)[0] not in (0, END) and time.monotonic() < deadline:
                self._is_closing.wait(_POLL_S)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _configure(self, channel: ServingChannel) -> None:
        """Send the configuration to the server. Raises: grpc.RpcError.

        The server responds when all new models are loaded or one has failed; the state of a model tells which.
        """
        self._write_config()
        channel.call("HandleReloadConfigRequest", config_request(self._folders), CALL_TIMEOUT_S)

    def _write_config(self) -> None:
        assert self._folder is not None
        text = text_format.MessageToString(config_request(self._folders).config)
        temporary = self._folder / "models.conf.new"
        temporary.write_text(text or "model_config_list {}")
        temporary.replace(self._folder / "models.conf")

    def _load_error(self, error: Any) -> str:
        reason = self.exit_reason() if error.code() is grpc.StatusCode.UNAVAILABLE else None
        if reason:
            return f"{self._name} {reason} while it loaded the model"
        return f"{self._name} can't load the model: {clean_message(error.details())}"


class LocalModel:
    """A model on the local server."""

    def __init__(self, server: LocalServer, served: ServedModel, request: LoadRequest) -> None:
        self.served = served
        self.signatures: Mapping[str, SignatureInfo] = served.signatures
        self._server = server
        self._request = request

    def run(self, signature_key: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run a signature; a call during which the server exits is not retried: it may be the cause.

        Raises: ModelError.
        """
        self._server.wait_up()
        try:
            return self.served.run(signature_key, inputs)
        except UnreachableError as error:
            reason = self._server.exit_reason()
            if reason is None:
                raise
            message = f"tensorflow_model_server {reason} during a call of {self._request.label}; it is being restarted"
            raise ModelError(message) from error


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    return f"was killed ({signal.Signals(-code).name})"


def _short_folder() -> str:
    """Return a temporary folder whose path is short enough for a UNIX socket (at most 107 bytes, unix(7))."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 60 else "/tmp"


def _remove_orphaned_folders() -> None:
    """Remove the folders of processes that were killed."""
    for folder in Path(_short_folder()).glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and folder.stat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
