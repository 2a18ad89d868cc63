"""The processes that run jobs: construct the user's class for a job and run its batches.

Each job has a process of its own (`fork_server`); a replica of an AsyncAPI has one process. The main thread runs user
code; a second thread communicates with the operator (`operator_client`). The supervisor's side is
`supervisor.job_worker_slot`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from cortex.jobs.spec import Assignment
from cortex.lifecycle import ApiKind
from cortex.predictor.batch import BatchCode, load_batch_code
from cortex.processes.priority import enter_background
from cortex.replica.channel import Channel
from cortex.replica.jobs.fork_server import run_fork_server
from cortex.replica.jobs.job_run import JobRun, WorkloadRun
from cortex.replica.jobs.operator_client import LeaseClient
from cortex.replica.jobs.shared_state import SharedJobState
from cortex.replica.monitoring.trace_export import open_tracing
from cortex.replica.monitoring.user_metrics import MetricsClient, metrics_client
from cortex.replica.spec import ReplicaSpec
from cortex.replica.worker_process import (
    ModelEvents,
    ModelStart,
    enter_project,
    open_metrics,
    report_failure,
    run_exit_hooks,
    signature_text,
)

if TYPE_CHECKING:
    from cortex.replica.monitoring.spans import Tracing

_LOG_S = 2.0


def run_job_worker(
    spec: ReplicaSpec, index: int, channel: Channel, shared_state: SharedJobState, models: ModelStart | None
) -> int:
    """Run jobs until stopped, each in a process of its own; return the exit code."""

    def run_job(spec: ReplicaSpec, is_first: bool) -> int:
        return _run_jobs(spec, index, channel, shared_state, models, loads_early=is_first or models is not None)

    if spec.kind != ApiKind.ASYNC:
        return run_fork_server(spec, index, channel, shared_state, run_job)
    try:
        spec = enter_project(spec, index)
    except BaseException as error:  # the edge of the process
        report_failure(channel, error)
        return 1
    return run_job(spec, is_first=True)


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
        self._enter(job)
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

    def _enter(self, job: Assignment) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # user code may have replaced the streams
                stream.flush()
        self.has_log.clear()
        if self._channel.send("log", path=job.log_path):
            self.has_log.wait(_LOG_S)  # lines printed from here on belong to the job
        self._channel.send("constructing")
