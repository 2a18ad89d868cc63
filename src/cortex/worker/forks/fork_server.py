"""The fork server of a replica with `handler.preload`: it constructs the user's class once, and forks the workers.

    supervisor ── fork ──> fork server: constructs the class, then waits for requests to fork
        │                      │
        │ <── "ready" ─────────┤
        ├──── "fork" ─────────>│  index, limits, and the descriptors of the worker: channel, output
        │                      └── fork ──> (ends at once) ── fork ──> worker
        │ <── "forked", on the worker's own channel ────────────────────┘

The process in the middle ends, so the supervisor, a subreaper, becomes the parent of the worker: it reaps it and finds
the cause of its death, as of every worker, also after the death of the fork server. Workers share the memory that was
written before the fork, the working copy of the fork server, and nothing of the supervisor but what the request had.
The fork server has no event loop and no thread. If it dies, workers continue; the next one is started, and constructs
the class again, when a worker has to be replaced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import uvloop

from cortex.predictor.loader import BoundPredictor, load
from cortex.worker.channel import Channel
from cortex.worker.forks.fork_safety import FINDING, check_fork_safety, end_openmp_pools
from cortex.worker.forks.process_fork import fork_sibling, freeze_memory, seed_numpy, seed_torch
from cortex.worker.monitoring.request_log import follow_stderr, write_log
from cortex.worker.monitoring.trace_export import open_tracing
from cortex.worker.monitoring.user_metrics import MetricsClient, metrics_client
from cortex.worker.request_server import WorkerContext
from cortex.worker.request_worker import serve
from cortex.worker.shared_state import SharedConnectionState
from cortex.worker.spec import ReplicaSpec, RequestLimits
from cortex.worker.worker_process import enter_project, open_metrics, report_failure, set_environment


class WorkerDescriptors(NamedTuple):
    """The descriptors in a request to fork, in this order."""

    channel: int
    stdout_write: int
    stderr_write: int


#: Returns the memory that worker `index` shares with the supervisor.
SharedStates = Callable[[int], SharedConnectionState]


def run_request_fork_server(spec: ReplicaSpec, channel: Channel, shared_states: SharedStates) -> int:
    """Construct the class, and fork workers on request until the supervisor ends; return the exit code."""
    try:
        spec = enter_project(spec, None)
        client = metrics_client(spec, 0, open_metrics(spec, 0))
        predictor = load(spec, metrics=client)
        for finding in check_fork_safety():
            write_log(f"{FINDING}{finding.replace(f'{spec.project_dir}{os.sep}', '')}\n")
    except BaseException as error:  # the edge of the process: our exceptions, or those of user code beyond Exception
        report_failure(channel, error)
        return 1
    freeze_memory()
    channel.send("ready")
    server = _ForkServer(spec, channel, shared_states, predictor, client)
    while (received := channel.receive_fds(len(WorkerDescriptors._fields))) is not None:
        message, fds = received
        server.fork(message, WorkerDescriptors(*fds))
        for fd in fds:
            os.close(fd)
    return 0


@dataclass(frozen=True)
class _ForkServer:
    """The process once the class is constructed."""

    spec: ReplicaSpec
    channel: Channel
    shared_states: SharedStates
    predictor: BoundPredictor
    client: MetricsClient

    def fork(self, message: Mapping[str, object], descriptors: WorkerDescriptors) -> None:
        """Fork a worker. If that fails, the supervisor finds out when the channel of the worker is closed."""
        end_openmp_pools()
        try:
            fork_sibling(partial(self._run_worker, message, descriptors))
        except OSError as error:
            reason = error.strerror or error
            write_log(f"could not fork a process: {reason}\n")
            channel = Channel.of(os.dup(descriptors.channel))
            channel.send_failure(f"the process could not be started: {reason}", "")

    def _run_worker(self, message: Mapping[str, object], descriptors: WorkerDescriptors) -> int:
        self.channel.close()
        index = int(str(message["index"]))
        channel = Channel.of(descriptors.channel)
        # Until here, output is that of the fork server.
        os.dup2(descriptors.stdout_write, 1)
        os.dup2(descriptors.stderr_write, 2)
        follow_stderr()
        os.close(descriptors.stdout_write)
        os.close(descriptors.stderr_write)
        try:
            spec = self.spec.with_limits(RequestLimits.parse(message))
            set_environment(spec, index)
            seed_numpy()
            seed_torch()
            file = open_metrics(spec, index)
            self.client.attach(file, index)
            tracing = open_tracing(spec, index)
            context = WorkerContext(spec, uvloop.new_event_loop(), self.shared_states(index), file, tracing)
        except BaseException as error:  # the edge of the process
            report_failure(channel, error)
            return 1
        if not channel.send("forked", pid=os.getpid()):
            return 1  # the slot has been stopped
        return serve(context, channel, self.predictor)
