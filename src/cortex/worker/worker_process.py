"""Code that request workers and job workers share: environment, metrics, model events, startup errors, exit hooks."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortex.errors import UserError, type_name
from cortex.models.spec import Catalogue, Version
from cortex.payloads.signature import ApiSignature
from cortex.predictor.tracebacks import describe, format_user_traceback
from cortex.predictor.user_forks import ending_forks
from cortex.processes.limits import NoProcessorsError, processors_of, thread_share
from cortex.worker.channel import Channel, replace_surrogates
from cortex.worker.devices import process_environ
from cortex.worker.monitoring.metrics import MetricFile, process_file
from cortex.worker.monitoring.request_log import write_log
from cortex.worker.spec import ReplicaSpec
from cortex.worker.working_copy import with_paths, working_copy

#: Versions per message to the supervisor.
_VERSIONS_PER_MESSAGE = 200
#: Maximum size of a signature in a message: each change of a replica's status repeats it.
MAX_SIGNATURE_BYTES = 64 * 1024
_MAX_DETAIL_CHARS = 8 * 1024
_RETRY_S = 0.1


def enter_project(spec: ReplicaSpec, index: int | None) -> ReplicaSpec:
    """Enter the working copy of process `index`, and set the environment variables of user code.

    The fork server has no index. What it forks shares its working copy.

    Return the spec with the paths of the copy. Raises: UserError.
    """
    faulthandler.enable()
    copy = working_copy(spec)
    spec = with_paths(spec, copy.enter())
    copy.drop_privileges()
    set_environment(spec, index)
    set_python_path(spec)
    return spec


def set_environment(spec: ReplicaSpec, index: int | None) -> None:
    """Set the environment variables of user code in process `index`; the fork server has none."""
    os.environ["CORTEX_API_NAME"] = spec.api
    os.environ["CORTEX_REPLICA_ID"] = spec.id
    os.environ["CORTEX_LOG_LEVEL"] = spec.log_level
    if len(spec.sockets) > 1:  # each process would compute with as many threads as there are processors
        os.environ.setdefault("OMP_NUM_THREADS", str(thread_share(len(spec.sockets))))
        if index is not None and spec.pin_processes:
            _pin(index, len(spec.sockets))
    if index is not None:
        os.environ["CORTEX_PROCESS_INDEX"] = str(index)
        os.environ |= process_environ(spec, index)


def _pin(index: int, processes: int) -> None:
    """Restrict this process, and what it starts from now on, to processors of its own. Raises: UserError."""
    try:
        os.sched_setaffinity(0, processors_of(index, processes))
    except NoProcessorsError as error:
        raise UserError(f"handler.pin_processes: {error}") from None
    except (AttributeError, OSError) as error:
        raise UserError(f"handler.pin_processes: this system cannot pin processes: {error}; remove the key") from None


def set_python_path(spec: ReplicaSpec) -> None:
    """Set PYTHONPATH, so that Python processes that user code starts can import the project's modules."""
    paths = [spec.project_dir]
    if spec.python_path:
        paths.append(str(Path(spec.project_dir) / spec.python_path))
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def open_metrics(spec: ReplicaSpec, index: int) -> MetricFile | None:
    """Open the metric file of this process; None if the spec names no folder, or if the file cannot be created."""
    if not spec.metrics_dir:
        return None
    try:
        return MetricFile(process_file(spec.metrics_dir, index, os.getpid()))
    except OSError as error:  # requests are served nevertheless
        write_log(f"cannot record metrics of this process: {spec.metrics_dir}: {error.strerror or error}\n")
        return None


def report_failure(channel: Channel, error: BaseException) -> None:
    """Log why user code could not be started, and report it to the supervisor."""
    if isinstance(error, UserError):
        write_log(f"{error.in_full()}\n")
        cause = error.__cause__ if error.traceback else None  # without the user's frames, it is an exception of ours
        channel.send_failure(str(error), error.traceback, type_name(cause) if cause else "")
        return
    text = format_user_traceback(error)
    if not text.startswith("Traceback"):  # an exception of ours
        text = "".join(traceback.format_exception(error))
    write_log(text)
    channel.send_failure(describe(error), text, type_name(error))


def signature_text(describe: Callable[[], ApiSignature | None]) -> str:
    """Return the JSON form of a signature for the message `ready`.

    It is "" if there is none, if it is too long, or if determining it fails.
    """
    try:
        signature = describe()
        text = "" if signature is None else signature.to_json().decode()
    except Exception as error:  # user code can put anything into a schema; the process serves nevertheless
        write_log(f"the schemas of this API can't be documented: {type_name(error)}: {error}\n")
        return ""
    if len(json.dumps(text)) > MAX_SIGNATURE_BYTES:
        write_log(f"the schemas of this API are longer than {MAX_SIGNATURE_BYTES} bytes, and are not documented\n")
        return ""
    return text


def run_exit_hooks() -> None:
    """Run Python's exit hooks and flush its streams: a forked process ends by `os._exit`, which does neither."""
    with contextlib.suppress(Exception):
        ending_forks(atexit._run_exitfuncs)()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # user code may have replaced or closed it
            stream.flush()


@dataclass(frozen=True)
class ModelStart:
    """The models with which a process starts."""

    catalogue: Catalogue
    extra_versions: tuple[tuple[str, str], ...]  #: (model, version) to load in addition to the latest versions
    is_standby: bool  #: another process serves meanwhile, and must not be slowed down


class ModelEvents:
    """Reports loaded models to the supervisor. Thread-safe.

    Messages for which the channel has no space are sent again by a timer.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._reported: frozenset[tuple[str, str, str]] = frozenset()
        self._loaded: frozenset[tuple[str, str, str]] = frozenset()
        self._timer: threading.Timer | None = None

    def loading(self, model: str, version: Version) -> None:
        """Report the version about to be loaded, which is the cause if the process dies."""
        self._channel.send("loading", model=model, version=version.number, digest=version.digest)

    def requested(self, model: str, version: Version) -> None:
        """Report that calls use this version: the successor of this process should load it too."""
        self._channel.send("asked", model=model, version=version.number)

    def loaded(self, versions: Sequence[tuple[str, Version]]) -> None:
        """Report the complete set of loaded versions."""
        with self._lock:
            self._loaded = frozenset((model, version.number, version.digest) for model, version in versions)
            self._report()

    def failed(self, model: str, version: Version, message: str, detail: str) -> None:
        """Report that a version could not be loaded while the process serves."""
        fields: dict[str, Any] = {"model": model, "version": version.number, "digest": version.digest}
        self._channel.send(
            "problem",
            **fields,
            message=replace_surrogates(message[-4096:]),
            detail=replace_surrogates(detail[-_MAX_DETAIL_CHARS:]),
        )

    def _report(self) -> None:
        added, removed = sorted(self._loaded - self._reported), sorted(self._reported - self._loaded)
        while added or removed:
            first, gone = added[:_VERSIONS_PER_MESSAGE], removed[:_VERSIONS_PER_MESSAGE]
            if not self._channel.send("loaded", added=first, removed=gone):
                if self._timer is None or not self._timer.is_alive():
                    self._timer = threading.Timer(_RETRY_S, self._retry)
                    self._timer.daemon = True
                    self._timer.start()
                return
            self._reported = (self._reported | frozenset(first)) - frozenset(gone)
            added, removed = added[_VERSIONS_PER_MESSAGE:], removed[_VERSIONS_PER_MESSAGE:]

    def _retry(self) -> None:
        with self._lock:
            self._timer = None
            self._report()
