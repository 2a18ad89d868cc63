"""The engine of this machine: starts replicas as local processes and adopts those of an earlier operator.

Each replica is a detached supervisor, found again by the files in its run folder.

State of a replica              entered when                            left when
------------------------------- --------------------------------------- ------------------------------------------
running (`_running`)            `start`, or adopted by `startup`        its supervisor has ended
ending (`_ending`)              its supervisor was killed               its workers have ended or were killed
gone                            nothing of its session is left          -

Devices stay assigned until a replica is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cortex import __version__
from cortex.engine.devices import DEVICE_DIR, Inventory, assign, find_devices
from cortex.engine.log_writer import SUPERVISOR, LogWriter
from cortex.engine.zygotes import Zygotes
from cortex.errors import EngineError
from cortex.home import TRUST_VARIABLE, Home, write_private
from cortex.lifecycle import ProcessState
from cortex.processes.backoff import Backoff
from cortex.processes.daemon import Daemon, has_workers, output_tail
from cortex.processes.identity import Identity
from cortex.processes.jsonl import encode
from cortex.projects.dotenv import RESERVED_PREFIX
from cortex.telemetry import Logger
from cortex.worker.devices import gpu_environ
from cortex.worker.spec import (
    ProcessStatus,
    ReplicaSpec,
    ReplicaStatus,
    RequestLimits,
)
from cortex.worker.working_copy import STRATEGY_VARIABLE, remove_tree

SPEC_FILE = "spec.json"
IDENTITY_FILE = "supervisor.json"
#: Variables of cortex that user code inherits: where its client finds the installation, and how projects are copied.
_INHERITED_VARIABLES = frozenset({"CORTEX_HOME", TRUST_VARIABLE, STRATEGY_VARIABLE})
_OUTPUT_FILE = "output"

#: Time that a replica has to end after its drain time, before it is killed.
KILL_AFTER_S = 5.0
_STATUS_MAX_BYTES = 4 * 1024 * 1024
_CONNECT_BACKOFF = Backoff(0.005, 0.1, factor=1.5)
#: A dying supervisor closes its socket a moment before its process ends.
_EXIT_POLL_S = 0.001
_ADOPT_POLL_S = 0.1
#: Time for workers whose supervisor was killed to answer their requests and to end; they are killed after that.
_WORKERS_END_S = 1.0
_WORKERS_POLL_S = 0.02
_ADOPT_TIMEOUT_S = 2.0
#: A living supervisor gets longer: without a status it receives no requests, and a busy machine responds slowly.
_STATUS_TIMEOUT_S = 6.0
#: Maximum output of a failed supervisor that is copied to the replica's log.
_OUTPUT_TAIL_BYTES = 8192


@dataclass
class _Running:
    """One replica of this machine."""

    spec: ReplicaSpec
    status: ReplicaStatus
    supervisor: Daemon
    writer: StreamWriter | None = None
    watcher: asyncio.Task[None] | None = None
    killer: asyncio.TimerHandle | None = None
    stop_drain_s: float | None = None  #: set by `stop`


def remove_metrics(folder: Path) -> None:
    """Delete the metrics of a replica when no aggregator is configured."""
    shutil.rmtree(folder, ignore_errors=True)


class LocalEngine:
    """Runs replicas on this machine; `engine/base.py` documents its methods.

    `startup` starts the zygote of `python`: the first replica of this interpreter need not wait for imports.
    """

    def __init__(
        self,
        home: Home,
        environ: Mapping[str, str],
        logger: Logger,
        device_dir: Path = DEVICE_DIR,
        python: str | None = None,
    ) -> None:
        self._on_change: Callable[[], None] = lambda: None
        self._on_end: Callable[[Path], None] = remove_metrics
        self._home = home
        self._environ = replica_environ(environ)
        self._python = python
        self._zygotes = Zygotes(self._environ)
        self._logger = logger
        self._device_dir = device_dir
        self._devices: Inventory | None = None
        self._running: dict[str, _Running] = {}
        self._ending: dict[str, _Running] = {}

    async def startup(self, on_change: Callable[[], None], on_end: Callable[[Path], None] = remove_metrics) -> None:
        """Adopt every running replica and clean up after those that died while no operator ran."""
        self._on_change, self._on_end = on_change, on_end
        if self._python is not None:
            with contextlib.suppress(OSError):  # supervisors start without it
                self._zygotes.start(self._python)
        folders = sorted(self._home.replicas_dir.iterdir()) if self._home.replicas_dir.is_dir() else []
        await asyncio.gather(self.find_devices(), *map(self._adopt, folders))

    async def shutdown(self) -> None:
        """Stop watching the replicas; they keep running. What a killed supervisor has left behind is ended first."""
        self._zygotes.shutdown()
        for running in self._running.values():
            if running.killer:
                running.killer.cancel()
            if running.watcher:
                running.watcher.cancel()
        every = [*self._running.values(), *self._ending.values()]
        await asyncio.gather(*(running.watcher for running in every if running.watcher), return_exceptions=True)
        self._running.clear()
        with contextlib.suppress(OSError):  # not empty; outside the home, nothing else removes the folder
            self._home.metrics_dir.rmdir()

    async def find_devices(self) -> Inventory:
        """Detect the devices of this machine again."""
        self._devices = await find_devices(self._environ, self._device_dir)
        return self._devices

    def devices(self) -> Inventory:
        """Return the devices found last, including those assigned to replicas."""
        return self._devices or Inventory()

    async def start(self, spec: ReplicaSpec) -> None:
        """Start a replica with devices of its own; return before it is ready. Its devices are free once it is gone.

        Raises: ComputeUnavailableError if too few are free; EngineError if its supervisor can't be started.
        """
        devices = self._devices or await self.find_devices()
        # No await from here until the replica is added: another start must not take the same devices.
        holders = [*self._running.values(), *self._ending.values()]
        spec = assign(spec, devices, [running.spec for running in holders])
        spec = replace(spec, version=__version__, environment=sys.prefix)
        running = _Running(spec, first_status(spec, 0), Daemon(Path(spec.run_dir) / IDENTITY_FILE))
        self._running[spec.id] = running
        try:
            await self._start_supervisor(running, has_gpus=bool(devices.gpus))
        except BaseException as error:
            del self._running[spec.id]
            _clean(spec)
            if isinstance(error, OSError):
                raise EngineError(f"can't start a replica of {spec.api} with {spec.python}: {error}") from error
            raise
        running.status = first_status(spec, running.supervisor.pid or 0)
        self._add(running)

    async def _start_supervisor(self, running: _Running, has_gpus: bool) -> None:
        """Fork the zygote of the interpreter; start a process of its own if that fails. Raises: OSError."""
        spec, run_dir = running.spec, Path(running.spec.run_dir)
        self._home.create()  # the folders may have been removed
        run_dir.mkdir(mode=0o700, parents=True)
        write_private(run_dir / SPEC_FILE, spec.to_json())
        command = [spec.python, "-P", "-m", "cortex.supervisor.supervisor", str(run_dir / SPEC_FILE)]
        env = {**self._environ, **spec.env, **gpu_environ(spec, has_gpus=has_gpus)}
        supervisor = running.supervisor
        with (run_dir / _OUTPUT_FILE).open("wb") as output:
            if not await self._zygotes.fork(command, supervisor.record, output=output, cwd=spec.project_dir, env=env):
                supervisor.start(command, output=output, cwd=spec.project_dir, env=env)

    async def stop(self, replica_id: str, drain_s: float) -> None:
        """Drain and stop a replica; it is killed if it takes longer than `drain_s`."""
        running = self._running.get(replica_id)
        if running is None:
            return
        running.stop_drain_s = drain_s
        if running.killer:
            running.killer.cancel()
        loop = asyncio.get_running_loop()
        running.killer = loop.call_later(drain_s + KILL_AFTER_S, self._kill, running)
        self._send_stop(running)

    async def configure(self, replica_id: str, limits: RequestLimits) -> None:
        """Change the limits of a running replica; they apply from its next request on."""
        running = self._running.get(replica_id)
        if running is None:
            return
        running.spec = running.spec.with_limits(limits)
        write_private(Path(running.spec.run_dir) / SPEC_FILE, running.spec.to_json())
        self._send_limits(running)

    def replicas(self) -> dict[str, tuple[ReplicaSpec, ReplicaStatus]]:
        """Return every running replica by id, with its newest status, including those being stopped."""
        return {name: (running.spec, running.status) for name, running in self._running.items()}

    def _add(self, running: _Running) -> None:
        self._running[running.spec.id] = running
        running.watcher = asyncio.create_task(self._watch(running), name=f"watch {running.spec.id}")

    async def _adopt(self, run_dir: Path) -> None:
        supervisor = Daemon(run_dir / IDENTITY_FILE)
        supervisor.adopt()
        try:
            spec = ReplicaSpec.read(run_dir / SPEC_FILE)
        except (OSError, ValueError) as error:
            if supervisor.is_alive():  # of a version that writes other specs
                self._logger.error("replica can't be adopted", replica=run_dir.name, error=error)
                await asyncio.to_thread(supervisor.kill)
            remove_tree(run_dir)  # otherwise its start was interrupted before anything ran
            return
        status = await self._request_status(spec, supervisor.identity)
        if status is None and not supervisor.is_alive():
            self._logger.warning("replica died while no operator ran", api=spec.api, replica=spec.id)
            await self._clean_up(_Running(spec, first_status(spec, supervisor.pid or 0), supervisor))
            return
        if status is not None and supervisor.identity is None:
            supervisor.adopt(Identity.of(status.supervisor_pid))
        if supervisor.identity is not None:
            with contextlib.suppress(OSError):  # an older version wrote less, or was interrupted before it wrote
                supervisor.record(supervisor.identity)
        pid = supervisor.pid or 0
        self._add(_Running(spec, status or first_status(spec, pid), supervisor))
        self._logger.info("replica adopted", api=spec.api, replica=spec.id, supervisor_pid=pid)

    async def _request_status(self, spec: ReplicaSpec, identity: Identity | None) -> ReplicaStatus | None:
        """Return the status that the supervisor reports. Without an identity file it may have just been started."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + (_STATUS_TIMEOUT_S if identity is not None else _ADOPT_TIMEOUT_S)
        while True:
            with contextlib.suppress(OSError, ValueError, TimeoutError):
                async with asyncio.timeout_at(deadline):
                    reader, writer = await _connect(spec)
                    try:
                        return ReplicaStatus.from_json((await reader.readline()).decode())
                    finally:
                        writer.close()
            if clock() > deadline or (identity is not None and not identity.is_alive()):
                return None
            if identity is None and time.time() - _modified(Path(spec.run_dir) / SPEC_FILE) > _ADOPT_TIMEOUT_S:
                return None
            await asyncio.sleep(_ADOPT_POLL_S)

    async def _watch(self, running: _Running) -> None:
        """Follow one supervisor until its process has ended."""
        failures = 0
        was_connected = False
        while running.supervisor.is_alive():
            try:
                reader, running.writer = await _connect(running.spec)
            except OSError:
                failures += 1
                await asyncio.sleep(_CONNECT_BACKOFF.delay_s(failures))
                continue
            was_connected, failures = True, 0
            try:
                self._send_limits(running)
                self._send_stop(running)
                while line := await reader.readline():
                    status = ReplicaStatus.from_json(line.decode())
                    if status != running.status:
                        running.status = status
                        self._on_change()
            except (OSError, ValueError):
                self._logger.warning("connection to a supervisor broke", replica=running.spec.id)
            finally:
                running.writer.close()
                running.writer = None
            await asyncio.sleep(_EXIT_POLL_S)
        await self._on_gone(running, was_connected)

    async def _on_gone(self, running: _Running, was_connected: bool) -> None:
        spec = running.spec
        self._running.pop(spec.id, None)
        self._on_change()  # first of all: the gateway still sends requests to it
        if running.killer:
            running.killer.cancel()
        if not was_connected:
            text = output_tail(Path(spec.run_dir) / _OUTPUT_FILE, _OUTPUT_TAIL_BYTES)
            _write_log(spec, text.splitlines())
            self._logger.error("supervisor could not start", api=spec.api, replica=spec.id, output=text[-2000:])
        elif running.stop_drain_s is None:
            _write_log(spec, [f"the supervisor, process {running.supervisor.pid}, died: its processes end"])
        if running.stop_drain_s is None:
            self._logger.warning("replica vanished", api=spec.api, replica=spec.id)
        await self._clean_up(running)
        if running.stop_drain_s is not None:
            self._logger.info("replica stopped", api=spec.api, replica=spec.id)

    async def _clean_up(self, running: _Running) -> None:
        """Clean up after a supervisor that has ended, once its workers have, too."""
        spec, identity = running.spec, running.supervisor.identity
        if identity is not None:
            if Path(spec.control_socket).exists():  # else it has ended in order: after its workers
                await self._wait_for_workers(running, identity)
            await asyncio.to_thread(running.supervisor.kill)  # processes that the user's code left behind
        if spec.metrics_dir:
            self._on_end(Path(spec.metrics_dir))
        await asyncio.to_thread(_clean, spec)  # it may contain copies of the project

    async def _wait_for_workers(self, running: _Running, identity: Identity) -> None:
        self._ending[running.spec.id] = running
        ends_at = time.monotonic() + _WORKERS_END_S
        try:
            while time.monotonic() < ends_at and await asyncio.to_thread(has_workers, identity):
                await asyncio.sleep(_WORKERS_POLL_S)
            await asyncio.to_thread(running.supervisor.kill)
        finally:
            del self._ending[running.spec.id]
            self._on_change()  # their devices are free

    def _send_stop(self, running: _Running) -> None:
        if running.stop_drain_s is not None and running.writer is not None:
            running.writer.write(encode({"command": "stop", "drain_s": running.stop_drain_s}))

    def _send_limits(self, running: _Running) -> None:
        if running.writer is not None:
            running.writer.write(encode({"command": "configure", **asdict(running.spec.limits)}))

    def _kill(self, running: _Running) -> None:
        if running.supervisor.identity is not None:
            self._logger.warning("replica killed: it did not stop in time", replica=running.spec.id)
            running.supervisor.kill()


def user_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that user code inherits: of cortex's own variables, only those without secrets."""
    return {
        key: value
        for key, value in environ.items()
        if not key.startswith(RESERVED_PREFIX) or key in _INHERITED_VARIABLES
    }


def replica_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that replicas, and what is installed for them, inherit from the operator.

    PYTHONDONTWRITEBYTECODE is removed: with it, each start would compile every module again.
    """
    return {key: value for key, value in user_environ(environ).items() if key != "PYTHONDONTWRITEBYTECODE"}


async def _connect(spec: ReplicaSpec) -> tuple[StreamReader, StreamWriter]:
    return await asyncio.open_unix_connection(spec.control_socket, limit=_STATUS_MAX_BYTES)


def first_status(spec: ReplicaSpec, pid: int) -> ReplicaStatus:
    """Return the status of a replica that has not reported one yet."""
    sockets = [""] * len(spec.sockets) if spec.listen_host else spec.sockets
    processes = tuple(ProcessStatus(index, socket, ProcessState.STARTING) for index, socket in enumerate(sockets))
    status = ReplicaStatus(spec.id, spec.api, spec.revision, pid, time.time(), processes)
    return replace(status, version=spec.version, environment=spec.environment)


def _write_log(spec: ReplicaSpec, lines: Iterable[str]) -> None:
    """Write lines to the log of a replica whose supervisor has ended."""
    writer = LogWriter(Path(spec.log_path))
    for line in lines:
        writer.line(0, SUPERVISOR, line)
    writer.close()


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _clean(spec: ReplicaSpec) -> None:
    for socket in (spec.control_socket, *spec.sockets, *spec.command_sockets):
        with contextlib.suppress(OSError):
            Path(socket).unlink()
    remove_tree(Path(spec.run_dir))
