"""The supervisor of one replica: a small process that outlives the operator and owns the replica's sockets.

Run as `python -P -m cortex.engine.supervisor SPEC_FILE`. It is single-threaded, so that forking is safe, and it has
imported all of our code that a worker needs, so that a worker starts in milliseconds. It knows nothing of the
operator: whoever connects to the control socket is told the status and may ask for a stop.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from cortex.engine.logs import LogWriter
from cortex.engine.sockets import accept_one, allow_descriptors, listen
from cortex.engine.worker import Worker
from cortex.lifecycle import ProcessState
from cortex.replica.cells import MAX_CONNECTIONS
from cortex.replica.channel import Channel
from cortex.replica.main import run_worker
from cortex.replica.spec import Limits, ReplicaSpec, ReplicaStatus

#: How often deadlines and limits are looked at while requests are inside, and while none is.
BUSY_TICK_S = 0.05
IDLE_TICK_S = 0.25
#: Descriptors beside those of connections, the user's own included.
_OTHER_DESCRIPTORS = 1024
_PR_SET_PDEATHSIG = 1
_OUTPUT_READ_BYTES = 64 * 1024
#: Raised so that, when memory runs out, the kernel ends the user's code and not what supervises it.
_WORKER_OOM_SCORE = 500

_libc = ctypes.CDLL(None)


class Supervisor:
    """Runs one replica until it is told to stop."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._log = LogWriter(Path(spec.log_path))
        self._selector = selectors.DefaultSelector()
        self._control: socket.socket | None = None
        self._clients: dict[socket.socket, bytes] = {}
        self._workers: list[Worker] = []
        self._watched: dict[int, Callable[[], object]] = {}
        self._started_at = time.time()
        self._last_status: ReplicaStatus | None = None
        self._signals_read, self._signals_write = socket.socketpair()

    def run(self) -> None:
        """Serve until every worker has stopped."""
        self.startup()
        try:
            while any(worker.state is not ProcessState.STOPPED for worker in self._workers):
                self._run_once()
        finally:
            self.shutdown()

    def startup(self) -> None:
        """Open the sockets and start the workers."""
        allow_descriptors(len(self._spec.sockets) * MAX_CONNECTIONS + _OTHER_DESCRIPTORS)
        self._signals_read.setblocking(False)
        self._signals_write.setblocking(False)
        signal.set_wakeup_fd(self._signals_write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, _remember)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._watch(self._signals_read.fileno(), self._on_signal)
        self._control = listen(self._spec.control_socket)
        self._watch(self._control.fileno(), self._on_control)
        for index, path in enumerate(self._spec.sockets):
            listener = listen(path)
            worker = Worker(self._spec, index, listener, self._fork)
            self._watch(listener.fileno(), worker.accept)
            self._workers.append(worker)
        gc.collect()
        gc.freeze()  # keeps these pages shared with the workers
        for worker in self._workers:
            self._start(worker)

    def shutdown(self) -> None:
        """Tell the last status, and leave no socket behind."""
        self._tell_status()
        for path in (self._spec.control_socket, *self._spec.sockets):
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
        self._log.close()

    # The loop.

    def _run_once(self) -> None:
        busy = any(worker.is_busy for worker in self._workers)
        for key, _ in self._selector.select(BUSY_TICK_S if busy else IDLE_TICK_S):
            callback = self._watched.get(key.fd)
            if callback is not None and callback is key.data:  # an earlier one may have closed or replaced it
                callback()
        now = time.monotonic()
        for worker in self._workers:
            pid = worker.pid
            worker.tick(now)
            if worker.pid != pid:
                self._watch_worker(worker)
        self._tell_status()

    def _watch(self, fd: int, callback: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)
        self._watched[fd] = callback

    def _unwatch(self, fd: int) -> None:
        if self._watched.pop(fd, None) is not None:
            self._selector.unregister(fd)

    # Workers.

    def _start(self, worker: Worker) -> None:
        worker.start()
        self._watch_worker(worker)

    def _watch_worker(self, worker: Worker) -> None:
        if worker.channel is not None:
            channel = worker.channel
            channel.sock.setblocking(False)
            self._watch(channel.fileno(), lambda: self._on_message(worker, channel))
        for fd in worker.outputs:
            if fd not in self._watched:
                self._watch(fd, lambda fd=fd: self._on_output(worker, fd))  # type: ignore[misc]

    def _on_message(self, worker: Worker, channel: Channel) -> None:
        while True:
            try:
                received = channel.receive()
            except BlockingIOError:
                return
            except ValueError:
                continue  # the user's code wrote into a descriptor that is not its own
            if received is None:
                self._unwatch(channel.fileno())
                worker.on_channel_lost()
                return
            with contextlib.suppress(KeyError, TypeError, ValueError):  # as above
                worker.on_message(received[0])

    def _on_output(self, worker: Worker, fd: int) -> bool:
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
        for worker in self._workers:
            self._reap(worker)

    def _reap(self, worker: Worker) -> None:
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
        death = worker.on_death(wait_status)
        failed = worker.take_failed_requests()
        inside = f", inside: request {', '.join(failed)}" if failed else ""
        self._log.line(worker.index, "s", f"process {pid} {'stopped' if stopping else death.message}{inside}")
        self._watch_worker(worker)

    def _stop(self, drain_s: float) -> None:
        now = time.monotonic()
        for worker in self._workers:
            worker.stop(now, drain_s)
            if worker.listener is not None:
                self._unwatch(worker.listener.fileno())
                worker.accept()
                worker.listener.close()
                worker.listener = None

    def _configure(self, limits: Limits) -> None:
        self._spec = self._spec.with_limits(limits)
        for worker in self._workers:
            worker.configure(self._spec)

    # Control.

    def _on_control(self) -> None:
        assert self._control is not None
        client = accept_one(self._control)
        if client is None:
            return
        client.setblocking(False)
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
            with contextlib.suppress(ValueError, KeyError, TypeError):  # not ours to answer: ignored
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
            processes=tuple(worker.status for worker in self._workers),
            slots=min(worker.slots for worker in self._workers),
        )

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

    # Forking.

    def _fork(self, worker: Worker, channel: Channel) -> tuple[int, int, int]:
        pipes: list[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
            parent = os.getpid()
            pid = os.fork()
        except OSError:
            for fd in pipes:
                os.close(fd)
            raise
        stdout_read, stdout_write, stderr_read, stderr_write = pipes
        if pid == 0:
            os.dup2(stdout_write, 1)
            os.dup2(stderr_write, 2)
            _become_worker(self._spec, worker, channel, parent)
        for fd in (stdout_write, stderr_write):
            os.close(fd)
        for fd in (stdout_read, stderr_read):
            os.set_blocking(fd, False)
        return pid, stdout_read, stderr_read


def _become_worker(spec: ReplicaSpec, worker: Worker, channel: Channel, parent: int) -> NoReturn:
    """Turn a fresh fork into a worker. Never returns, so that no inherited object is ever finalised here."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(_WORKER_OOM_SCORE))
        keep = channel.fileno()
        os.closerange(3, keep)
        os.closerange(keep + 1, _highest_fd() + 1)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        code = run_worker(spec, worker.index, channel, worker.cells)
    finally:
        os._exit(code)


def _highest_fd() -> int:
    try:
        return max(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208 - names only, no Path objects in a fresh fork
    except OSError:
        return int(os.sysconf("SC_OPEN_MAX"))


def _remember(number: int, frame: object) -> None:
    """Exist, so that the signal reaches the wake-up descriptor."""


def main() -> None:
    """Run the supervisor of the spec file named on the command line."""
    Supervisor(ReplicaSpec.read(Path(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
