"""The processes that run jobs: construct the user's class for a job and run its batches.

Each job has a process of its own, which a fork server forks; a replica of an AsyncAPI has one process. The main thread
runs user code; a second thread communicates with the operator (`operator_client`). The supervisor's side is
`supervisor.job_worker_slot`.

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
import functools
import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from cortex.lifecycle import ApiKind
from cortex.predictor.batch import BatchCode, load_batch_code
from cortex.predictor.preloading import find_leading_imports, run_imports
from cortex.processes.priority import enter_background
from cortex.processes.process_tree import end_group
from cortex.worker.channel import Channel
from cortex.worker.forks.process_fork import fork_child, freeze_memory, seed_numpy
from cortex.worker.jobs.job_run import JobRun, WorkloadRun
from cortex.worker.jobs.operator_client import LeaseClient
from cortex.worker.jobs.shared_state import SharedJobState
from cortex.worker.monitoring.metrics import compact_ended
from cortex.worker.monitoring.trace_export import open_tracing
from cortex.worker.monitoring.user_metrics import MetricsClient, metrics_client
from cortex.worker.spec import ReplicaSpec
from cortex.worker.worker_process import (
    ModelEvents,
    ModelStart,
    enter_project,
    open_metrics,
    report_failure,
    run_exit_hooks,
    set_environment,
    set_python_path,
    signature_text,
)
from cortex.worker.working_copy import WorkingCopy, copies_folder, remove_tree, with_paths, working_copy

if TYPE_CHECKING:
    from cortex.worker.monitoring.spans import Tracing

#: Runs a job in this process: (spec with the paths of its working copy, is the first of its worker) → exit code.
RunJob = Callable[[ReplicaSpec, bool], int]

_LOG_S = 2.0


def run_job_worker(
    spec: ReplicaSpec, index: int, channel: Channel, shared_state: SharedJobState, models: ModelStart | None
) -> int:
    """Run jobs until stopped, each in a process of its own; return the exit code."""

    def run_job(spec: ReplicaSpec, is_first: bool) -> int:
        return _run_jobs(spec, index, channel, shared_state, models, loads_early=is_first or models is not None)

    if spec.kind != ApiKind.ASYNC:
        return _run_fork_server(spec, index, channel, shared_state, run_job)
    try:
        spec = enter_project(spec, index)
    except BaseException as error:  # the edge of the process
        report_failure(channel, error)
        return 1
    return run_job(spec, is_first=True)


# The fork server.


def _run_fork_server(
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
        current = folder / f"job-{number}"
        pid = fork_child(partial(_run_fork, spec, channel, copy, current, shared_state, run_job, number == 1))
        if ended is not None:
            remove_tree(ended)
            if spec.metrics_dir:
                with contextlib.suppress(OSError, ValueError):  # repeated after the next job
                    compact_ended(Path(spec.metrics_dir))
        ended = current
        _, wait_status = os.waitpid(pid, 0)
        end_group(pid)  # processes of the user's code must not outlive the job
        if wait_status != 0 or not shared_state.is_job_over:
            _end_as(wait_status)


def _run_fork(
    spec: ReplicaSpec,
    channel: Channel,
    copy: WorkingCopy,
    folder: Path,
    shared_state: SharedJobState,
    run_job: RunJob,
    is_first: bool,
) -> int:
    shared_state.enter_process(os.getpid())
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


# The process of a job.


def _run_jobs(
    spec: ReplicaSpec,
    index: int,
    channel: Channel,
    shared_state: SharedJobState,
    models: ModelStart | None,
    loads_early: bool,
) -> int:
    """Run one job, or the endless one of an AsyncAPI. `loads_early`: import the user's code before there is a job."""
    tracing = open_tracing(spec, index)

    @functools.cache
    def load() -> BatchCode:
        code = _load(spec, channel, models, metrics_client(spec, index, open_metrics(spec, index)))
        if tracing is not None:
            tracing.serve_user_code()
        gc.freeze()  # models stay, so no collection has to traverse them
        return code

    try:
        if loads_early:
            load()
    except BaseException as error:  # the edge of the process: our exceptions, or those of user code beyond Exception
        report_failure(channel, error)
        return 1
    lease_client = LeaseClient(spec, shared_state)
    runner = _JobRunner(channel, shared_state, lease_client, load, tracing, is_endless=spec.kind == ApiKind.ASYNC)
    threading.Thread(
        target=_listen, args=(channel, lease_client, runner.has_log), name="cortex-channel", daemon=True
    ).start()
    lease_client.start()
    exit_code = runner.run()
    lease_client.finish()
    if lease_client.has_been_dismissed and exit_code == 0:
        channel.send("leaving")
    run_exit_hooks()
    if tracing is not None:
        tracing.shutdown()
    if not shared_state.is_job_over:
        enter_background()  # freeing the memory of big models takes a while
    return exit_code


def _load(spec: ReplicaSpec, channel: Channel, start: ModelStart | None, metrics: MetricsClient) -> BatchCode:
    if start is None or spec.models is None:
        return load_batch_code(spec, metrics=metrics)
    from cortex.models.fetcher import AgentFetcher  # noqa: PLC0415 - APIs without models start faster
    from cortex.models.memory_budget import configure_allocator  # noqa: PLC0415

    configure_allocator()
    fetcher = AgentFetcher(spec.model_agent_socket or "", spec.api, spec.models)
    return load_batch_code(spec, start.catalogue, fetcher, ModelEvents(channel), metrics)


def _listen(channel: Channel, lease_client: LeaseClient, has_log: threading.Event) -> None:
    """Receive messages of the supervisor, on a thread of its own."""
    while True:
        try:
            received = channel.receive()
        except (ValueError, RecursionError):
            continue  # user code wrote to the descriptor of the channel
        if received is None:
            os._exit(1)  # without a supervisor nothing reports this process's death
        if received[0].get("kind") == "stop":
            lease_client.stop()
        elif received[0].get("kind") == "log":
            has_log.set()


class _JobRunner:
    """Runs the job of this process; of an AsyncAPI, the endless one."""

    def __init__(
        self,
        channel: Channel,
        shared_state: SharedJobState,
        lease_client: LeaseClient,
        load: Callable[[], BatchCode],
        tracing: Tracing | None,
        is_endless: bool,
    ) -> None:
        self._channel = channel
        self._shared_state = shared_state
        self._lease_client = lease_client
        self._load = load
        self._tracing = tracing
        self._is_endless = is_endless
        self.has_log = threading.Event()  #: the supervisor writes to the log of the job now

    def run(self) -> int:
        """Wait for the job and run it; return the exit code."""
        job = self._lease_client.wait_for_job()
        if job is None:
            return 0
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # user code may have replaced the streams
                stream.flush()
        self.has_log.clear()
        if self._channel.send("log", path=job.log_path):
            self.has_log.wait(_LOG_S)  # lines printed from here on belong to the job
        self._channel.send("constructing")
        try:
            bound = self._load().construct(job.config, job.job_spec, job.api_spec)
        except BaseException as error:  # the edge of the user's code; another process will try again
            report_failure(self._channel, error)
            return 1
        self._channel.send("ready", slots=1, shares_loop=False, signature=signature_text(lambda: bound.signature))
        self._lease_client.open()
        run = WorkloadRun if self._is_endless else JobRun
        run(job, bound, self._shared_state, self._lease_client, self._tracing).run()
        if not self._is_endless and not self._lease_client.is_ending:
            self._shared_state.end_job()
        return 0
