"""The supervisor of one replica: a small process that outlives the operator and owns the replica's sockets.

Run as `python -P -m cortex.supervisor.supervisor SPEC_FILE`, or forked by the zygote. It is single-threaded, so that
forking is safe. It has imported all code that a worker needs except the user's, so that a worker starts in
milliseconds. Clients of the control socket receive the status after each change, as JSON lines, and may send the
commands `stop` and `configure`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cortex.engine.log_writer import SUPERVISOR, LogWriter
from cortex.lifecycle import DeathCause, ProcessState
from cortex.predictor.applications import WSGI
from cortex.processes.jsonl import LineBuffer
from cortex.processes.orphans import adopt_orphans
from cortex.processes.sockets import allow_descriptors
from cortex.supervisor.housekeeping import Housekeeping
from cortex.supervisor.listeners import ReplicaListeners, UnixListener
from cortex.supervisor.process_slot import ProcessSlot, fork
from cortex.supervisor.request_worker_slot import RequestWorkerSlot
from cortex.worker.channel import Channel
from cortex.worker.monitoring.metrics import (
    ABORTED,
    COPIES_FOLDER,
    DEATHS,
    RELOADS,
    REQUESTS,
    MetricFile,
    SeriesKind,
    compact_ended,
    series_key,
)
from cortex.worker.monitoring.metrics import SUPERVISOR as METRICS_FILE
from cortex.worker.shared_state import MAX_CONNECTIONS
from cortex.worker.spec import ProcessStatus, ReplicaSpec, ReplicaStatus, RequestLimits
from cortex.worker.working_copy import StrategyTest, copies_folder, ignored_strategy

if TYPE_CHECKING:
    from cortex.supervisor.fork_server_slot import ForkServerSlot
    from cortex.supervisor.models.model_agent_client import ModelAgentClient
    from cortex.supervisor.models.model_rollout import ModelRollout

#: Intervals of checks of deadlines and limits, with and without requests.
BUSY_TICK_S = 0.05
IDLE_TICK_S = 0.25
#: Descriptors besides those of connections, including the user's own.
_OTHER_DESCRIPTORS = 1024
_OUTPUT_READ_BYTES = 64 * 1024


class Supervisor:
    """Runs one replica until it receives a stop."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._log = LogWriter(Path(spec.log_path))
        self._metrics = SupervisorMetrics(spec.metrics_dir)
        self._selector = selectors.DefaultSelector()
        self._control: UnixListener | None = None
        self._clients: dict[socket.socket, LineBuffer] = {}
        self._listeners = ReplicaListeners(
            spec,
            admit=lambda index, sock: self._serving(index).add_connection(sock),
            watch=self._watch,
            unwatch=self._unwatch,
        )
        self._workers: list[ProcessSlot] = []
        self._others: list[RequestWorkerSlot] = []  # standbys, and retiring workers
        self._fork_server: ForkServerSlot | None = None
        self._rollout: ModelRollout | None = None
        self._model_agent: ModelAgentClient | None = None
        self._watched: dict[int, Callable[[], object]] = {}
        self._started_at = time.time()
        self._last_status: ReplicaStatus | None = None
        self._is_stopping = False
        self._reaps_adopted = False  #: a process has ended that may be one of no slot
        self._housekeeping = Housekeeping()
        self._signals_read, self._signals_write = socket.socketpair()

    def run(self) -> None:
        """Serve until every worker has stopped."""
        self.startup()
        try:
            while any(worker.state is not ProcessState.STOPPED for worker in self._everyone()):
                self._run_once()
        finally:
            self.shutdown()

    def startup(self) -> None:
        """Open the sockets and start the workers."""
        allow_descriptors(len(self._spec.sockets) * MAX_CONNECTIONS + _OTHER_DESCRIPTORS)
        self._metrics.startup()
        if self._spec.command or self._spec.preload:
            adopt_orphans()  # of proxies that are killed; workers, from the processes between them and a fork server
        self._signals_read.setblocking(False)
        self._signals_write.setblocking(False)
        signal.set_wakeup_fd(self._signals_write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, _ignore)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._watch(self._signals_read.fileno(), self._on_signal)
        test = StrategyTest(Path(self._spec.project_dir), Path(self._spec.run_dir) / "copies")
        test.start()
        if (reason := ignored_strategy()) is not None:
            self._log.line(0, SUPERVISOR, reason)
        self._housekeeping.adopt(test.pid)
        self._control = UnixListener(self._spec.control_socket, self._on_control, self._watch, self._unwatch)
        try:
            self._spec = self._listeners.open()
        except OSError as error:
            reason = f"can't listen on {error.filename or self._spec.listen_host}: {error.strerror or error}"
            self._log.line(0, SUPERVISOR, reason)
            for index in range(len(self._spec.sockets)):
                worker = RequestWorkerSlot(self._spec, index, self._listeners, fork)
                worker.refuse_start(reason)
                self._workers.append(worker)
            return
        gc.collect()
        self._spec = replace(self._spec, working_copies=test.finish().value)
        if self._spec.preload:
            from cortex.supervisor.fork_server_slot import ForkServerSlot  # noqa: PLC0415 - as above

            self._fork_server = ForkServerSlot(self._spec, self._workers, fork)
        if self._spec.type == WSGI:
            # Workers share it, and one that is forked after an upgrade has the version of its supervisor.
            import cortex.predictor.wsgi  # noqa: F401, PLC0415 - other replicas start sooner
        self._workers += [self._create_worker(index) for index in range(len(self._spec.sockets))]
        gc.freeze()  # keeps these pages shared with the workers
        if self._spec.models is not None and self._spec.model_agent_socket is not None:
            # Lazy imports: replicas without models start sooner.
            from cortex.supervisor.models.model_agent_client import ModelAgentClient  # noqa: PLC0415
            from cortex.supervisor.models.model_rollout import ModelRollout  # noqa: PLC0415

            self._rollout = ModelRollout(self._spec.models, Path(self._spec.run_dir), self._workers, self)
            self._model_agent = ModelAgentClient(
                self._spec.model_agent_socket,
                self._spec.api,
                self._spec.models,
                self._watch,
                self._unwatch,
                self._rollout.on_catalogue,
            )
            self._tick_models(time.monotonic())
        else:
            for slot in self._everyone():
                self.start(slot)

    def _create_worker(self, index: int) -> ProcessSlot:
        if self._spec.jobs_socket is not None:
            from cortex.supervisor.job_worker_slot import JobWorkerSlot  # noqa: PLC0415 - other replicas start sooner

            return JobWorkerSlot(self._spec, index, fork)
        if self._spec.command:
            from cortex.supervisor.command_worker_slot import CommandWorkerSlot  # noqa: PLC0415 - as above

            return CommandWorkerSlot(
                self._spec, index, self._listeners, fork, False, self._metrics.ended, self._other_slots
            )
        if self._fork_server is not None:
            from cortex.supervisor.fork_server_slot import PreloadedWorkerSlot  # noqa: PLC0415 - as above

            return PreloadedWorkerSlot(
                self._spec, index, self._listeners, self._fork_server, self._metrics.ended, self._other_slots
            )
        return self._create_request_worker(index)

    def _create_request_worker(self, index: int, is_standby: bool = False) -> RequestWorkerSlot:
        return RequestWorkerSlot(
            self._spec, index, self._listeners, fork, is_standby, self._metrics.ended, self._other_slots
        )

    def _other_slots(self, index: int) -> list[RequestWorkerSlot]:
        return [slot for slot in self._workers if isinstance(slot, RequestWorkerSlot) and slot.index != index]

    def shutdown(self) -> None:
        """Publish the last status, and remove the sockets."""
        self._publish_status()
        self._listeners.remove()
        if self._control is not None:
            self._control.remove()
        self._log.close()

    # The loop.

    def _run_once(self) -> None:
        busy = any(worker.is_busy for worker in self._everyone()) or self._listeners.is_busy
        for key, _ in self._selector.select(BUSY_TICK_S if busy else IDLE_TICK_S):
            callback = self._watched.get(key.fd)
            if callback is not None and callback is key.data:  # an earlier callback may have closed or replaced it
                callback()
        now = time.monotonic()
        self._listeners.tick(now)
        if self._control is not None:
            self._control.tick(now)
        for worker in self._everyone():
            channel = worker.channel
            worker.tick(now)
            if worker.channel is not channel:
                self._watch_worker(worker)
        self._others = [worker for worker in self._others if worker.state is not ProcessState.STOPPED]
        self._reap_adopted()
        self._tick_models(now)
        self._publish_status()

    def _everyone(self) -> list[ProcessSlot]:
        fork_servers = [self._fork_server] if self._fork_server is not None else []
        return [*self._workers, *self._others, *fork_servers]

    def _tick_models(self, now: float) -> None:
        if self._rollout is None or self._model_agent is None or self._is_stopping:
            return
        self._model_agent.tick(now)
        self._rollout.tick(now, self._model_agent.lost_since)
        self._model_agent.set_using(self._rollout.using)

    def _watch(self, fd: int, callback: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)
        self._watched[fd] = callback

    def _unwatch(self, fd: int) -> None:
        if self._watched.pop(fd, None) is not None:
            self._selector.unregister(fd)

    # Workers.

    def start(self, worker: ProcessSlot) -> None:
        """Start the process of a slot."""
        worker.start()
        self._watch_worker(worker)

    def create_standby(self, index: int) -> ProcessSlot:
        """Create a worker without connections, without starting it."""
        worker = self._create_request_worker(index, is_standby=True)
        self._others.append(worker)
        return worker

    def swap(self, old: ProcessSlot, new: ProcessSlot) -> None:
        """Let `new` serve instead of `old`, which retires."""
        assert isinstance(old, RequestWorkerSlot)
        assert isinstance(new, RequestWorkerSlot)
        new.take_over(old, successor=partial(self._serving, new.index))
        self._others = [worker for worker in self._others if worker is not new] + [old]
        self._metrics.reloaded()
        self._log.line(
            new.index, SUPERVISOR, f"process {new.pid} takes over from process {old.pid}: it has newer models"
        )

    def _serving(self, index: int) -> RequestWorkerSlot:
        worker = self._workers[index]
        assert isinstance(worker, RequestWorkerSlot)
        return worker

    def _watch_worker(self, worker: ProcessSlot) -> None:
        if worker.channel is not None:
            channel = worker.channel
            channel.sock.setblocking(False)
            self._watch(channel.fileno(), lambda: self._on_message(worker, channel))
        for fd in worker.outputs:
            if fd not in self._watched:
                self._watch(fd, lambda fd=fd: self._on_output(worker, fd))  # type: ignore[misc]

    def _on_message(self, worker: ProcessSlot, channel: Channel) -> None:
        while True:
            try:
                received = channel.receive()
            except BlockingIOError:
                return
            except (ValueError, RecursionError):
                continue  # the user's code wrote to the supervisor's descriptor
            if received is None:
                self._unwatch(channel.fileno())
                worker.on_channel_lost()
                if worker.channel is None:  # no process was forked for it
                    self._close_outputs(worker)
                return
            with contextlib.suppress(KeyError, TypeError, ValueError):  # as above
                if received[0]["kind"] == "log" and self._spec.jobs_socket is not None:
                    self._change_log(worker, Path(received[0]["path"]))
                worker.on_message(received[0])
                if received[0]["kind"] == "forked":
                    self._reap(worker)  # it may have ended before its pid was known
                    if worker.channel is not channel:
                        return
                if received[0]["kind"] == "ready":
                    if self._spec.path:
                        self._housekeeping.compile(Path(self._spec.project_dir), self._spec.path)
                    self._housekeeping.compile_environment(Path(sys.prefix))

    def _change_log(self, worker: ProcessSlot, path: Path) -> None:
        """Switch to another log file: the worker got another job."""
        if path != self._log.path:
            for fd in list(worker.outputs):
                while self._on_output(worker, fd):
                    pass
            self._log.close()
            self._log = LogWriter(path)
        if worker.channel is not None:
            worker.channel.send("log")

    def _on_output(self, worker: ProcessSlot, fd: int) -> bool:
        try:
            data = os.read(fd, _OUTPUT_READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._log.feed(worker.index, worker.outputs[fd], data)
            worker.on_output(data)
            return True
        self._unwatch(fd)
        os.close(fd)
        del worker.outputs[fd]
        return False

    def _on_signal(self) -> None:
        for number in self._signals_read.recv(4096):
            if number == signal.SIGTERM:
                self._stop(self._spec.timeout_s)
        for worker in self._everyone():
            self._reap(worker)
        if self._spec.command:
            self._housekeeping.end_adopted({worker.pid for worker in self._everyone()})
        self._housekeeping.reap()
        self._reaps_adopted = self._fork_server is not None

    def _reap_adopted(self) -> None:
        """Reap processes that user code has left behind: those of a subreaper become its children."""
        if not self._reaps_adopted or self._fork_server is None or self._fork_server.is_forking:
            return  # while it forks, an unknown process may be a worker
        self._reaps_adopted = False
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if self._housekeeping.has(ended.si_pid) or ended.si_pid in [each.pid for each in self._everyone()]:
                    return  # it has just ended, so the next signal is about it
                os.waitpid(ended.si_pid, 0)

    def _reap(self, worker: ProcessSlot) -> None:
        if worker.pid is None:
            return
        copy_pid = worker.copy_pid
        pid, wait_status = os.waitpid(worker.pid, os.WNOHANG)
        if pid == 0:
            return
        # First its last messages and output.
        if worker.channel is not None:
            channel = worker.channel
            self._on_message(worker, channel)
            self._unwatch(channel.fileno())
        self._close_outputs(worker)
        stopping = worker.state is ProcessState.STOPPING
        starting = worker.state is ProcessState.STARTING
        death = worker.on_death(wait_status)
        if not stopping:
            self._metrics.died(death.cause)
        self._metrics.gather()
        if copy_pid is not None and copy_pid not in [other.copy_pid for other in self._everyone()]:
            self._housekeeping.remove(copies_folder(self._spec.run_dir, copy_pid))
        inside = worker.take_interrupted()
        reason = f"{'stopped' if stopping else death.message}{', inside: ' if inside else ''}{inside}"
        self._log.line(worker.index, SUPERVISOR, f"process {death.pid} {reason}")
        if self._rollout is not None and not stopping:
            self._rollout.on_death(worker, starting)
        self._watch_worker(worker)

    def _close_outputs(self, worker: ProcessSlot) -> None:
        """Log the rest of the output of a process that has ended."""
        for fd in list(worker.outputs):
            while self._on_output(worker, fd):
                pass
            if fd in worker.outputs:  # a process that it started still has the other end open
                self._unwatch(fd)
                os.close(fd)
        worker.outputs = {}

    def _stop(self, drain_s: float) -> None:
        now = time.monotonic()
        self._is_stopping = True
        self._listeners.close()
        for worker in self._everyone():
            worker.stop(now, drain_s)

    # Control.

    def _on_control(self, client: socket.socket) -> None:
        self._clients[client] = LineBuffer()
        self._watch(client.fileno(), lambda: self._on_client(client))
        self._send(client, self._status().to_json())

    def _on_client(self, client: socket.socket) -> None:
        try:
            data = client.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        for line in self._clients[client].feed(data):
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # ignore malformed commands
                command = json.loads(line)
                if command["command"] == "stop":
                    self._stop(float(command["drain_s"]))
                elif command["command"] == "configure":
                    self._spec = self._spec.with_limits(RequestLimits.parse(command))
                    for worker in self._everyone():
                        worker.configure(self._spec)

    def _status(self) -> ReplicaStatus:
        return ReplicaStatus(
            id=self._spec.id,
            api=self._spec.api,
            revision=self._spec.revision,
            supervisor_pid=os.getpid(),
            started_at=self._started_at,
            processes=tuple(self._process_status(worker) for worker in self._workers),
            slots=min(worker.call_slots for worker in self._workers),
            models=self._rollout.status if self._rollout else None,
            signature=next((worker.signature for worker in self._workers if worker.signature), ""),
            version=self._spec.version,
            environment=self._spec.environment,
        )

    def _process_status(self, worker: ProcessSlot) -> ProcessStatus:
        """Return the status of a worker, with the requests that retiring processes of its slot still run.

        They count as lent, like those of slow clients: the gateway opens as many connections more, because they occupy
        none of the worker's own call slots.
        """
        retiring = [other for other in self._others if other.index == worker.index and not other.is_standby]
        lent = sum(other.busy_connections for other in retiring)
        return replace(worker.status, lent=worker.status.lent + lent) if lent else worker.status

    def _publish_status(self) -> None:
        status = self._status()
        if status != self._last_status:
            self._last_status = status
            text = status.to_json()
            for client in list(self._clients):
                self._send(client, text)

    def _send(self, client: socket.socket, text: str) -> None:
        data = text.encode() + b"\n"
        try:
            if client.send(data) == len(data):
                return
        except BlockingIOError:
            pass
        except OSError:
            return  # closed: its last command may still be unread, and the end of its data drops it
        self._drop(client)  # it does not read; it may reconnect and receives the newest status then

    def _drop(self, client: socket.socket) -> None:
        self._unwatch(client.fileno())
        self._clients.pop(client, None)
        client.close()


def _ignore(number: int, frame: object) -> None:
    """Do nothing: a handler is required for a signal to reach the wake-up descriptor."""


class SupervisorMetrics:
    """Counters in the supervisor's own file in `folder`. If the file can't be written, nothing is counted."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file: MetricFile | None = None

    def startup(self) -> None:
        """Open the file."""
        if self._folder:
            with contextlib.suppress(OSError):  # requests are served without metrics
                self._file = MetricFile(Path(self._folder) / METRICS_FILE)

    def died(self, cause: DeathCause) -> None:
        """Count a process that ended without being stopped."""
        self._count(DEATHS, cause=cause.value)

    def ended(self, status: int | None) -> None:
        """Count a response sent on behalf of a process that died or does not exist; None: one that is cut off."""
        if status is None:
            self._count(ABORTED)
        else:
            self._count(REQUESTS, code=str(status))

    def reloaded(self) -> None:
        """Count a process that took over with newer models."""
        self._count(RELOADS)

    def gather(self) -> None:
        """Merge the files of ended processes, so that their number stays bounded."""
        if self._folder:
            with contextlib.suppress(OSError, ValueError):  # repeated after the next death
                compact_ended(Path(self._folder))
                compact_ended(Path(self._folder) / COPIES_FOLDER)

    def _count(self, name: str, **labels: str) -> None:
        if self._file is not None:
            index = self._file.index_of(series_key(SeriesKind.COUNTER, name, labels))
            if index is not None:
                self._file.cells[index] += 1


def main() -> None:
    """Run the supervisor of the spec file given on the command line."""
    Supervisor(ReplicaSpec.read(Path(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
