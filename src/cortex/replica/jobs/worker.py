"""The job loop of a worker process: the user's class is made for a job and gets its batches, one after the other.

The main thread runs the user's code and nothing else; another (`job_link`) speaks with the operator.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading

from cortex.jobs.spec import Assignment
from cortex.lifecycle import ApiKind
from cortex.predictor.batch import BatchCode, load_batch_code
from cortex.processes.priority import enter_background
from cortex.replica.channel import Channel
from cortex.replica.jobs.job_run import JobRun
from cortex.replica.jobs.lease_client import JobLink
from cortex.replica.jobs.shared_state import JobCells
from cortex.replica.jobs.workload_run import WorkloadRun
from cortex.replica.spec import ReplicaSpec
from cortex.replica.user_metrics import MetricsClient, metrics_client
from cortex.replica.worker_process import (
    ModelEvents,
    ModelStart,
    enter_project,
    open_metrics,
    report_failure,
    run_exit_hooks,
)

_LOG_S = 2.0


def run_job_worker(spec: ReplicaSpec, index: int, channel: Channel, cells: JobCells, models: ModelStart | None) -> int:
    """Work through jobs until told to stop; returns the exit code."""
    try:
        enter_project(spec, index)
        code = _load(spec, channel, models, metrics_client(spec, index, open_metrics(spec, index)))
    except BaseException as error:  # the edge of the process: ours, or the user's beyond Exception
        report_failure(channel, error)
        return 1
    gc.freeze()  # models stay: no collection has to walk them
    link = JobLink(spec, cells)
    loop = _JobLoop(channel, cells, link, code, WorkloadRun if spec.kind == ApiKind.ASYNC else JobRun)
    threading.Thread(target=_listen, args=(channel, link, loop.has_log), name="cortex-channel", daemon=True).start()
    link.start()
    exit_code = loop.run()
    link.finish()
    if link.has_been_dismissed and exit_code == 0:
        channel.send("leaving")
    run_exit_hooks()
    enter_background()  # giving back the memory of big models takes a while
    return exit_code


def _load(spec: ReplicaSpec, channel: Channel, start: ModelStart | None, metrics: MetricsClient) -> BatchCode:
    if start is None or spec.models is None:
        return load_batch_code(spec, metrics=metrics)
    from cortex.models.fetcher import AgentFetcher  # noqa: PLC0415 - others start sooner without
    from cortex.models.memory_budget import configure_allocator  # noqa: PLC0415

    configure_allocator()
    fetcher = AgentFetcher(spec.model_agent_socket or "", spec.api, spec.models)
    return load_batch_code(spec, start.catalogue, fetcher, ModelEvents(channel), metrics)


def _listen(channel: Channel, link: JobLink, has_log: threading.Event) -> None:
    """Take the supervisor's messages, on a thread of its own."""
    while True:
        try:
            received = channel.receive()
        except (ValueError, RecursionError):
            continue  # the user's code wrote into a descriptor that is not its own
        if received is None:
            os._exit(1)  # the supervisor is gone, and with it whoever could name our death
        if received[0].get("kind") == "stop":
            link.stop()
        elif received[0].get("kind") == "log":
            has_log.set()


class _JobLoop:
    """One job after the other."""

    def __init__(self, channel: Channel, cells: JobCells, link: JobLink, code: BatchCode, run: type[JobRun]) -> None:
        self._channel = channel
        self._cells = cells
        self._link = link
        self._code = code
        self._run = run
        self.has_log = threading.Event()  #: the supervisor has changed over to the log of the job

    def run(self) -> int:
        """Work until there is nothing to do for this process any more; returns the exit code."""
        while (job := self._link.next_job()) is not None:
            self._enter(job)
            try:
                bound = self._code.construct(job.config, job.job_spec, job.api_spec)
            except BaseException as error:  # the edge of the user's code; another process will try again
                report_failure(self._channel, error)
                return 1
            self._channel.send("ready", slots=1, shares_loop=False)
            self._link.open()
            self._run(job, bound, self._cells, self._link).run()
            del bound  # what it holds should be gone before the next one is made
            gc.collect()
        return 0

    def _enter(self, job: Assignment) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the user's code may have put anything there
                stream.flush()
        self.has_log.clear()
        if self._channel.send("log", path=job.log_path):
            self.has_log.wait(_LOG_S)  # what is printed from here on belongs there
        self._channel.send("constructing")
