"""The supervisor of one replica: a small process that outlives the operator and owns the replica's sockets.

Run as `python -P -m cortex.supervisor.supervisor SPEC_FILE`. It is single-threaded, so that forking is safe, and it has
imported all of our code that a worker needs, so that a worker starts in milliseconds. It knows nothing of the
operator: whoever connects to the control socket is told the status and may ask for a stop.
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

from cortex.engine.log_writer import LogWriter
from cortex.lifecycle import ProcessState
from cortex.processes.sockets import allow_descriptors
from cortex.replica.channel import Channel
from cortex.replica.shared_state import MAX_CONNECTIONS
from cortex.replica.spec import Limits, ProcessStatus, ReplicaSpec, ReplicaStatus
from cortex.supervisor.forking import fork
from cortex.supervisor.listeners import Doors, UnixDoor
from cortex.supervisor.metrics import SupervisorMetrics
from cortex.supervisor.process_slot import Slot
from cortex.supervisor.worker import Worker

if TYPE_CHECKING:
    from cortex.supervisor.model_agent_client import AgentLink
    from cortex.supervisor.model_rollout import Reloading

#: How often deadlines and limits are looked at while requests are inside, and while none is.
BUSY_TICK_S = 0.05
IDLE_TICK_S = 0.25
#: Descriptors beside those of connections, the user's own included.
_OTHER_DESCRIPTORS = 1024
_OUTPUT_READ_BYTES = 64 * 1024


class Supervisor:
    """Runs one replica until it is told to stop."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._log = LogWriter(Path(spec.log_path))
        self._metrics = SupervisorMetrics(spec.metrics_dir)
        self._selector = selectors.DefaultSelector()
        self._control: UnixDoor | None = None
        self._clients: dict[socket.socket, bytes] = {}
        self._doors = Doors(spec, lambda index, sock: self._serving(index).hold(sock), self._watch, self._unwatch)
        self._workers: list[Slot] = []
        self._others: list[Worker] = []  # standbys, and those that retire
        self._reloading: Reloading | None = None
        self._link: AgentLink | None = None
        self._watched: dict[int, Callable[[], object]] = {}
        self._started_at = time.time()
        self._last_status: ReplicaStatus | None = None
        self._is_stopping = False
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
        self._signals_read.setblocking(False)
        self._signals_write.setblocking(False)
        signal.set_wakeup_fd(self._signals_write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, _remember)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._watch(self._signals_read.fileno(), self._on_signal)
        self._control = UnixDoor(self._spec.control_socket, self._on_control, self._watch, self._unwatch)
        try:
            self._spec = self._doors.open()
        except OSError as error:
            self._refuse_start(f"can't listen on {error.filename or self._spec.listen_host}: {error.strerror or error}")
            return
        self._workers += [self._create_worker(index) for index in range(len(self._spec.sockets))]
        gc.collect()
        gc.freeze()  # keeps these pages shared with the workers
        if self._spec.models is not None and self._spec.model_agent_socket is not None:
            # Others start sooner without.
            from cortex.supervisor.model_agent_client import AgentLink  # noqa: PLC0415
            from cortex.supervisor.model_rollout import Reloading  # noqa: PLC0415

            self._reloading = Reloading(self._spec.models, Path(self._spec.run_dir), self._workers, self)
            self._link = AgentLink(
                self._spec.model_agent_socket,
                self._spec.api,
                self._spec.models,
                self._watch,
                self._unwatch,
                self._reloading.on_catalogue,
            )
            self._tend_models(time.monotonic())
        else:
            for worker in self._workers:
                self.start(worker)

    def _refuse_start(self, reason: str) -> None:
        self._log.line(0, "s", reason)
        for index in range(len(self._spec.sockets)):
            worker = Worker(self._spec, index, self._doors, fork)
            worker.refuse_start(reason)
            self._workers.append(worker)

    def _create_worker(self, index: int) -> Slot:
        if self._spec.jobs_socket is not None:
            from cortex.supervisor.job_worker import JobWorker  # noqa: PLC0415 - others start sooner without

            return JobWorker(self._spec, index, fork)
        return Worker(self._spec, index, self._doors, fork, on_answer=self._metrics.answered)

    def shutdown(self) -> None:
        """Tell the last status, and leave no socket behind."""
        self._tell_status()
        self._doors.remove()
        if self._control is not None:
            self._control.remove()
        self._log.close()

    # The loop.

    def _run_once(self) -> None:
        busy = any(worker.is_busy for worker in self._everyone()) or self._doors.is_busy
        for key, _ in self._selector.select(BUSY_TICK_S if busy else IDLE_TICK_S):
            callback = self._watched.get(key.fd)
            if callback is not None and callback is key.data:  # an earlier one may have closed or replaced it
                callback()
        now = time.monotonic()
        self._doors.tick(now)
        if self._control is not None:
            self._control.tick(now)
        for worker in self._everyone():
            pid = worker.pid
            worker.tick(now)
            if worker.pid != pid:
                self._watch_worker(worker)
        self._others = [worker for worker in self._others if worker.state is not ProcessState.STOPPED]
        self._tend_models(now)
        self._tell_status()

    def _everyone(self) -> list[Slot]:
        return [*self._workers, *self._others]

    def _tend_models(self, now: float) -> None:
        if self._reloading is None or self._link is None or self._is_stopping:
            return
        self._link.tick(now)
        self._reloading.tick(now, self._link.lost_since)
        self._link.using(self._reloading.using)

    def _watch(self, fd: int, callback: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)
        self._watched[fd] = callback

    def _unwatch(self, fd: int) -> None:
        if self._watched.pop(fd, None) is not None:
            self._selector.unregister(fd)

    # Workers.

    def start(self, worker: Slot) -> None:
        """Fork its process."""
        worker.start()
        self._watch_worker(worker)

    def create_standby(self, index: int) -> Slot:
        """Make a worker without connections for a slot, and do not start it yet."""
        worker = Worker(self._spec, index, self._doors, fork, is_standby=True, on_answer=self._metrics.answered)
        self._others.append(worker)
        return worker

    def swap(self, old: Slot, new: Slot) -> None:
        """Let `new` take connections instead of `old`, which retires."""
        assert isinstance(old, Worker)
        assert isinstance(new, Worker)
        new.take_over(old, heir=partial(self._serving, new.index))
        self._others = [worker for worker in self._others if worker is not new] + [old]
        self._metrics.reloaded()
        self._log.line(new.index, "s", f"process {new.pid} takes over from process {old.pid}: it has newer models")

    def _serving(self, index: int) -> Worker:
        worker = self._workers[index]
        assert isinstance(worker, Worker)
        return worker

    def _watch_worker(self, worker: Slot) -> None:
        if worker.channel is not None:
            channel = worker.channel
            channel.sock.setblocking(False)
            self._watch(channel.fileno(), lambda: self._on_message(worker, channel))
        for fd in worker.outputs:
            if fd not in self._watched:
                self._watch(fd, lambda fd=fd: self._on_output(worker, fd))  # type: ignore[misc]

    def _on_message(self, worker: Slot, channel: Channel) -> None:
        while True:
            try:
                received = channel.receive()
            except BlockingIOError:
                return
            except (ValueError, RecursionError):
                continue  # the user's code wrote into a descriptor that is not its own
            if received is None:
                self._unwatch(channel.fileno())
                worker.on_channel_lost()
                return
            with contextlib.suppress(KeyError, TypeError, ValueError):  # as above
                if received[0]["kind"] == "log" and self._spec.jobs_socket is not None:
                    self._change_log(worker, Path(received[0]["path"]))
                worker.on_message(received[0])

    def _change_log(self, worker: Slot, path: Path) -> None:
        """Write to another file from now on: the worker was given another job."""
        if path != self._log.path:
            for fd in list(worker.outputs):
                while self._on_output(worker, fd):
                    pass
            self._log.close()
            self._log = LogWriter(path)
        if worker.channel is not None:
            worker.channel.send("log")

    def _on_output(self, worker: Slot, fd: int) -> bool:
        try:
            data = os.read(fd, _OUTPUT_READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._log.feed(worker.index, worker.outputs[fd], data)
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

    def _reap(self, worker: Slot) -> None:
        if worker.pid is None:
            return
        pid, wait_status = os.waitpid(worker.pid, os.WNOHANG)
        if pid == 0:
            return
        # What it said before it died comes first.
        if worker.channel is not None:
            channel = worker.channel
            self._on_message(worker, channel)
            self._unwatch(channel.fileno())
        for fd in list(worker.outputs):
            while self._on_output(worker, fd):
                pass
            if fd in worker.outputs:  # a process it started still holds the other end
                self._unwatch(fd)
                os.close(fd)
        worker.outputs = {}
        stopping = worker.state is ProcessState.STOPPING
        starting = worker.state is ProcessState.STARTING
        death = worker.on_death(wait_status)
        if not stopping:
            self._metrics.died(death.cause)
        self._metrics.gather()
        inside = worker.take_inside()
        words = f"{'stopped' if stopping else death.message}{', inside: ' if inside else ''}{inside}"
        self._log.line(worker.index, "s", f"process {pid} {words}")
        if self._reloading is not None and not stopping:
            self._reloading.on_death(worker, starting)
        self._watch_worker(worker)

    def _stop(self, drain_s: float) -> None:
        now = time.monotonic()
        self._is_stopping = True
        self._doors.close()
        for worker in self._everyone():
            worker.stop(now, drain_s)

    def _configure(self, limits: Limits) -> None:
        self._spec = self._spec.with_limits(limits)
        for worker in self._everyone():
            worker.configure(self._spec)

    # Control.

    def _on_control(self, client: socket.socket) -> None:
        self._clients[client] = b""
        self._watch(client.fileno(), lambda: self._on_client(client))
        self._tell(client, self._status().to_json())

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
        *lines, self._clients[client] = (self._clients[client] + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # not ours to answer: ignored
                command = json.loads(line)
                if command["command"] == "stop":
                    self._stop(float(command["drain_s"]))
                elif command["command"] == "configure":
                    self._configure(Limits(float(command["timeout_s"]), int(command["max_body_bytes"])))

    def _status(self) -> ReplicaStatus:
        return ReplicaStatus(
            id=self._spec.id,
            api=self._spec.api,
            revision=self._spec.revision,
            supervisor_pid=os.getpid(),
            started_at=self._started_at,
            processes=tuple(self._process_status(worker) for worker in self._workers),
            slots=min(worker.slots for worker in self._workers),
            models=self._reloading.status if self._reloading else None,
        )

    def _process_status(self, worker: Slot) -> ProcessStatus:
        """Count what is still inside processes that retire as lent: it takes no slot of the process that took over."""
        retiring = [other for other in self._others if other.index == worker.index and not other.is_standby]
        lent = sum(other.busy_connections for other in retiring)
        return replace(worker.status, lent=worker.status.lent + lent) if lent else worker.status

    def _tell_status(self) -> None:
        status = self._status()
        if status != self._last_status:
            self._last_status = status
            text = status.to_json()
            for client in list(self._clients):
                self._tell(client, text)

    def _tell(self, client: socket.socket, text: str) -> None:
        data = text.encode() + b"\n"
        try:
            if client.send(data) == len(data):
                return
        except OSError:
            pass
        self._drop(client)  # it does not read: it may connect again and is told all anew

    def _drop(self, client: socket.socket) -> None:
        self._unwatch(client.fileno())
        self._clients.pop(client, None)
        client.close()


def _remember(number: int, frame: object) -> None:
    """Exist, so that the signal reaches the wake-up descriptor."""


def main() -> None:
    """Run the supervisor of the spec file named on the command line."""
    Supervisor(ReplicaSpec.read(Path(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
