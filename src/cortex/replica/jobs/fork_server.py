"""The fork server of a job worker: it forks a fresh process for each job, from one that has imported the libraries.

    supervisor ── fork ──> fork server ── fork ──> process of job 1, with the user's code and a working copy of its own
                           (libraries)  ── fork ──> process of job 2
                                        …

So no job sees module globals, threads or files of an earlier one, and none waits for `import torch`. The fork server
runs no code of the project: `predictor.preloading` selects the imports. It has a working copy, too, since libraries may
read files of the working directory when they are imported.

If a process ends other than after its job, the fork server ends in the same way, so that the supervisor finds the
cause; the next one is started by the supervisor.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from cortex.predictor.preloading import find_leading_imports, run_imports
from cortex.replica.channel import Channel
from cortex.replica.forks.process_fork import fork_child, freeze_memory, seed_numpy
from cortex.replica.jobs.shared_state import SharedJobState
from cortex.replica.monitoring.metrics import compact_ended
from cortex.replica.spec import ReplicaSpec
from cortex.replica.worker_process import report_failure, set_environment, set_python_path
from cortex.replica.working_copy import WorkingCopy, copies_folder, remove_tree, with_paths, working_copy

#: Runs a job in this process: (spec with the paths of its working copy, is the first of its worker) → exit code.
RunJob = Callable[[ReplicaSpec, bool], int]


def run_fork_server(
    spec: ReplicaSpec, index: int, channel: Channel, shared_state: SharedJobState, run_job: RunJob
) -> int:
    """Fork a process for each job until one of them ends in another way than after its job; return the exit code."""
    faulthandler.enable()
    copy = working_copy(spec)
    imports = find_leading_imports(Path(spec.project_dir), spec.path, spec.python_path) if spec.path else ()
    set_environment(spec, index)
    if imports:
        try:
            copy.enter()
        except BaseException as error:  # the edge of the process
            report_failure(channel, error)
            return 1
        run_imports(imports)
    freeze_memory()
    folder, ended = copies_folder(spec.run_dir, os.getpid()), None
    number = 0
    while True:
        number += 1
        pid = _fork(spec, channel, copy, folder / f"job-{number}", shared_state, run_job, is_first=number == 1)
        if ended is not None:
            _clean_up(spec, ended)
        ended = folder / f"job-{number}"
        _, wait_status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)  # processes of the user's code must not outlive the job
        if wait_status != 0 or not shared_state.is_job_over:
            _end_as(wait_status)


def _fork(
    spec: ReplicaSpec,
    channel: Channel,
    copy: WorkingCopy,
    folder: Path,
    shared_state: SharedJobState,
    run_job: RunJob,
    is_first: bool,
) -> int:
    def run() -> int:
        shared_state.enter_process(os.getpid())
        return _run(spec, channel, copy, folder, run_job, is_first)

    return fork_child(run)


def _run(spec: ReplicaSpec, channel: Channel, copy: WorkingCopy, folder: Path, run_job: RunJob, is_first: bool) -> int:
    try:
        spec = with_paths(spec, copy.enter_another(folder))
        copy.drop_privileges()
        set_python_path(spec)
        seed_numpy()
    except BaseException as error:  # the edge of the process
        report_failure(channel, error)
        return 1
    channel.send("forked")  # wakes the supervisor, which finds the new pid in the shared state
    return run_job(spec, is_first)


def _clean_up(spec: ReplicaSpec, folder: Path) -> None:
    remove_tree(folder)
    if spec.metrics_dir:
        with contextlib.suppress(OSError, ValueError):  # repeated after the next job
            compact_ended(Path(spec.metrics_dir))


def _end_as(wait_status: int) -> NoReturn:
    """End this process as the one with `wait_status` ended."""
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(wait_status) if os.WIFEXITED(wait_status) else 1)
