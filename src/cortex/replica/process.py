"""What every process of a replica does first and last, whatever it does between."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import traceback
from pathlib import Path

from cortex.errors import UserError
from cortex.replica.channel import Channel
from cortex.replica.devices import process_environ
from cortex.replica.errors import write_log
from cortex.replica.metric_file import MetricFile
from cortex.replica.metric_folder import process_file
from cortex.replica.spec import ReplicaSpec


def enter_project(spec: ReplicaSpec, index: int) -> None:
    """Make the project the working directory of process `index`, and set what the user's code finds around it."""
    faulthandler.enable()
    os.chdir(spec.project_dir)
    paths = [spec.project_dir]
    if spec.python_path:
        paths.append(str(Path(spec.project_dir) / spec.python_path))
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["CORTEX_API_NAME"] = spec.api
    os.environ["CORTEX_REPLICA_ID"] = spec.id
    os.environ["CORTEX_PROCESS_INDEX"] = str(index)
    os.environ["CORTEX_LOG_LEVEL"] = spec.log_level
    os.environ |= process_environ(spec, index)


def open_metrics(spec: ReplicaSpec, index: int) -> MetricFile | None:
    """Open the file in which this process counts; None where the spec names no folder for it, or it can't be made."""
    if not spec.metrics_dir:
        return None
    try:
        return MetricFile(process_file(spec.metrics_dir, index, os.getpid()))
    except OSError as error:  # requests are served nevertheless
        write_log(f"what this process does is not counted: {spec.metrics_dir}: {error.strerror or error}\n")
        return None


def tell_failure(channel: Channel, error: BaseException) -> None:
    """Log why the user's code could not be started, and tell the supervisor."""
    if isinstance(error, UserError):
        sys.stderr.write(f"{error.in_full()}\n")
        channel.send_failure(str(error), error.traceback)
        return
    text = "".join(traceback.format_exception(error))
    sys.stderr.write(text)
    channel.send_failure(f"{type(error).__name__}: {error}", text)


def run_exit_hooks() -> None:
    """Do what Python does at exit; the process itself ends by `os._exit`, as a fork must."""
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
