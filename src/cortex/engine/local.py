"""Runs replicas as processes of this machine and adopts those of an earlier operator.

Each replica is a supervisor in a session of its own, found again by the files in its run folder. Knows nothing of
APIs, routes or the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import subprocess
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cortex.engine.devices import DEVICE_DIR, Inventory, assign, find_devices
from cortex.engine.log_writer import LogWriter
from cortex.errors import EngineError
from cortex.home import Home, write_private
from cortex.lifecycle import ProcessState
from cortex.processes.daemon import has_workers, kill_session
from cortex.processes.identity import Identity
from cortex.replica.devices import gpu_environ
from cortex.replica.spec import (
    ORPHAN_UNTENDED_S,
    Limits,
    ProcessStatus,
    ReplicaSpec,
    ReplicaStatus,
    orphan_limit_s,
)
from cortex.telemetry import Logger

SPEC_FILE = "spec.json"
IDENTITY_FILE = "supervisor.json"
_OUTPUT_FILE = "output"

#: How long after its drain time a replica may take to end before it is killed.
KILL_AFTER_S = 5.0
_STATUS_MAX_BYTES = 4 * 1024 * 1024
_FIRST_RETRY_S = 0.005
#: A supervisor that dies closes its socket a moment before its process is seen to be gone.
_EXIT_POLL_S = 0.001
_MAX_RETRY_S = 0.1
#: How often it is looked whether workers have ended that outlive their supervisor.
_ORPHANS_POLL_S = 0.1
#: … and how much longer than their own limit they are given.
_ORPHANS_GRACE_S = 1.0
_ADOPT_TIMEOUT_S = 2.0
#: One that lives is given longer: what has not said how it is gets no requests, and a busy machine is slow to say so.
_SILENCE_S = 6.0
#: Of what a supervisor that could not start wrote, this much goes to the replica's log.
_LAST_WORDS_BYTES = 8192


@dataclass
class _Running:
    """One replica and what is known of it."""

    spec: ReplicaSpec
    status: ReplicaStatus
    identity: Identity | None  #: None for one that was adopted before it had written its own
    process: subprocess.Popen[bytes] | None = None  #: where we started it ourselves, to reap it
    writer: StreamWriter | None = None
    watcher: asyncio.Task[None] | None = None
    killer: asyncio.TimerHandle | None = None
    stop_drain_s: float | None = None  #: set once a stop is wanted
    ends_at: float = math.inf  #: once its supervisor is dead: when what is left of it is killed (monotonic)

    def is_alive(self) -> bool:
        """Tell whether the supervisor's process exists; reaps it if it is our child."""
        if self.process is not None:
            return self.process.poll() is None
        return self.identity is not None and self.identity.is_alive()


class LocalEngine:
    """Replicas on this machine; see `engine/base.py` for what each method promises."""

    def __init__(self, home: Home, environ: Mapping[str, str], logger: Logger, device_dir: Path = DEVICE_DIR) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.on_end: Callable[[ReplicaSpec], None] = remove_metrics
        self._home = home
        self._environ = replica_environ(environ)
        self._logger = logger
        self._device_dir = device_dir
        self._devices: Inventory | None = None
        self._running: dict[str, _Running] = {}
        self._orphaned: dict[str, _Running] = {}  #: those whose workers outlive their supervisors; they hold devices

    async def startup(self) -> None:
        """Adopt every replica that already runs and clean up after those that died meanwhile."""
        folders = sorted(self._home.replicas_dir.iterdir()) if self._home.replicas_dir.is_dir() else []
        await asyncio.gather(self.find_devices(), *map(self._adopt, folders))

    async def shutdown(self) -> None:
        """Let go of all replicas without stopping one."""
        every = [*self._running.values(), *self._orphaned.values()]
        for running in every:
            if running.killer:
                running.killer.cancel()
            if running.watcher:
                running.watcher.cancel()
        await asyncio.gather(*(running.watcher for running in every if running.watcher), return_exceptions=True)
        self._running.clear()
        self._orphaned.clear()
        with contextlib.suppress(OSError):  # something is in it still; outside the home, nobody else would remove it
            self._home.metrics_dir.rmdir()

    async def find_devices(self) -> Inventory:
        """Look again which devices there are for replicas."""
        self._devices = await find_devices(self._environ, self._device_dir)
        return self._devices

    def devices(self) -> Inventory:
        """Return the devices that were found last; those that replicas hold included."""
        return self._devices or Inventory()

    async def start(self, spec: ReplicaSpec) -> None:
        """Start a replica with devices of its own; returns before it is ready. They are free again once it is gone.

        Raises: ComputeUnavailableError if too few are free; EngineError if its supervisor can't be started.
        """
        devices = self._devices or await self.find_devices()
        # Nothing is awaited from here until it is kept: no other start can take the same devices.
        holders = [*self._running.values(), *self._orphaned.values()]
        spec = assign(spec, devices, [running.spec for running in holders])
        run_dir = Path(spec.run_dir)
        try:
            self._home.create()  # somebody may have cleaned up
            run_dir.mkdir(mode=0o700, parents=True)
            write_private(run_dir / SPEC_FILE, spec.to_json())
            process = self._spawn(spec, run_dir)
            identity = Identity.of(process.pid)
            write_private(run_dir / IDENTITY_FILE, identity.to_json())
        except OSError as error:
            _clean(spec)
            raise EngineError(f"can't start a replica of {spec.api} with {spec.python}: {error}") from error
        running = _Running(spec, first_status(spec, process.pid), identity, process)
        self._keep(running)

    async def stop(self, replica_id: str, drain_s: float) -> None:
        """Ask a replica to finish the requests inside it and end; after `drain_s` it is killed."""
        running = self._running.get(replica_id)
        if running is None:
            return
        running.stop_drain_s = drain_s
        if running.killer:
            running.killer.cancel()
        loop = asyncio.get_running_loop()
        running.killer = loop.call_later(drain_s + KILL_AFTER_S, self._kill, running)
        self._send_stop(running)

    async def end_orphans(self, drain_s: float) -> None:
        """Wait until workers have ended whose supervisors died; those that take longer than `drain_s` are killed."""
        for running in self._orphaned.values():
            running.ends_at = min(running.ends_at, time.monotonic() + drain_s)
        watchers = [running.watcher for running in self._orphaned.values() if running.watcher]
        await asyncio.gather(*watchers, return_exceptions=True)

    async def configure(self, replica_id: str, limits: Limits) -> None:
        """Change the limits of a running replica, from its next request on."""
        running = self._running.get(replica_id)
        if running is None:
            return
        running.spec = running.spec.with_limits(limits)
        write_private(Path(running.spec.run_dir) / SPEC_FILE, running.spec.to_json())
        self._send_limits(running)

    def replicas(self) -> dict[str, tuple[ReplicaSpec, ReplicaStatus]]:
        """Return every replica that runs, by id, with its newest status; those being stopped included."""
        return {name: (running.spec, running.status) for name, running in self._running.items()}

    def _spawn(self, spec: ReplicaSpec, run_dir: Path) -> subprocess.Popen[bytes]:
        with (run_dir / _OUTPUT_FILE).open("wb") as output:
            return subprocess.Popen(
                [spec.python, "-P", "-m", "cortex.supervisor.supervisor", str(run_dir / SPEC_FILE)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=spec.project_dir,
                env={**self._environ, **spec.env, **gpu_environ(spec, has_gpus=bool(self.devices().gpus))},
                start_new_session=True,
            )

    def _keep(self, running: _Running) -> None:
        self._running[running.spec.id] = running
        running.watcher = asyncio.create_task(self._watch(running), name=f"watch {running.spec.id}")

    async def _adopt(self, run_dir: Path) -> None:
        try:
            spec = ReplicaSpec.read(run_dir / SPEC_FILE)
        except (OSError, ValueError, KeyError, TypeError):
            shutil.rmtree(run_dir, ignore_errors=True)  # its start was cut off before anything ran
            return
        identity = Identity.read(run_dir / IDENTITY_FILE)
        status = await self._ask_status(spec, identity)
        if status is None and (identity is None or not identity.is_alive()):
            self._logger.warning("replica died while no operator ran", api=spec.api, replica=spec.id)
            ended = _Running(spec, first_status(spec, identity.pid if identity else 0), identity)
            if self._may_have_orphans(ended) and identity is not None and has_workers(identity):
                ended.watcher = asyncio.create_task(self._see_off(ended), name=f"see off {spec.id}")
            else:
                await self._see_off(ended)
            return
        if status is not None and identity is None:
            identity = Identity.of(status.supervisor_pid)
        if identity is not None:
            with contextlib.suppress(OSError):  # an older version wrote less, or it was cut off before it wrote
                write_private(run_dir / IDENTITY_FILE, identity.to_json())
        pid = identity.pid if identity else 0
        self._keep(_Running(spec, status or first_status(spec, pid), identity))
        self._logger.info("replica adopted", api=spec.api, replica=spec.id, supervisor_pid=pid)

    async def _ask_status(self, spec: ReplicaSpec, identity: Identity | None) -> ReplicaStatus | None:
        """Return what the supervisor says. One without an identity file may have been started a moment ago."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + (_SILENCE_S if identity is not None else _ADOPT_TIMEOUT_S)
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
            await asyncio.sleep(_MAX_RETRY_S)

    async def _watch(self, running: _Running) -> None:
        """Follow one supervisor until its process is gone."""
        retry_s = _FIRST_RETRY_S
        was_connected = False
        while running.is_alive():
            try:
                reader, running.writer = await _connect(running.spec)
            except OSError:
                await asyncio.sleep(retry_s)
                retry_s = min(retry_s * 1.5, _MAX_RETRY_S)
                continue
            was_connected, retry_s = True, _FIRST_RETRY_S
            try:
                self._send_limits(running)
                self._send_stop(running)
                await self._follow(running, reader)
            except (OSError, ValueError):
                self._logger.warning("lost a supervisor's status", replica=running.spec.id)
            finally:
                running.writer.close()
                running.writer = None
            await asyncio.sleep(_EXIT_POLL_S)
        await self._on_gone(running, was_connected)

    async def _follow(self, running: _Running, reader: StreamReader) -> None:
        while line := await reader.readline():
            status = ReplicaStatus.from_json(line.decode())
            if status != running.status:
                running.status = status
                self.on_change()

    async def _on_gone(self, running: _Running, was_connected: bool) -> None:
        spec = running.spec
        self._running.pop(spec.id, None)
        self.on_change()  # first: the gateway still sends requests there
        if running.killer:
            running.killer.cancel()
        if not was_connected:
            self._tell_last_words(spec)
        if running.stop_drain_s is None:
            self._logger.warning("replica vanished", api=spec.api, replica=spec.id)
        await self._see_off(running)
        if running.stop_drain_s is not None:
            self._logger.info("replica stopped", api=spec.api, replica=spec.id)

    async def _see_off(self, running: _Running) -> None:
        """Clean up after a supervisor that has ended. Workers that outlive it first finish, and what they count."""
        spec = running.spec
        if running.identity is not None:
            if self._may_have_orphans(running):
                await self._wait_for_orphans(running, running.identity)
            await asyncio.to_thread(kill_session, running.identity)  # what the user's code left behind
        self.on_end(spec)
        _clean(spec)

    def _may_have_orphans(self, running: _Running) -> bool:
        """Tell whether a supervisor ended that leaves its workers: one that ends by itself leaves no socket."""
        return running.spec.jobs_socket is None and Path(running.spec.control_socket).exists()

    async def _wait_for_orphans(self, running: _Running, identity: Identity) -> None:
        longest_s = max(orphan_limit_s(running.spec.timeout_s), ORPHAN_UNTENDED_S) + _ORPHANS_GRACE_S
        running.ends_at = min(running.ends_at, time.monotonic() + longest_s)
        self._orphaned[running.spec.id] = running
        try:
            while time.monotonic() < running.ends_at and await asyncio.to_thread(has_workers, identity):
                await asyncio.sleep(_ORPHANS_POLL_S)
        finally:
            del self._orphaned[running.spec.id]
        self.on_change()  # their devices are free

    def _tell_last_words(self, spec: ReplicaSpec) -> None:
        with contextlib.suppress(OSError):
            text = (Path(spec.run_dir) / _OUTPUT_FILE).read_bytes()[-_LAST_WORDS_BYTES:].decode(errors="replace")
            writer = LogWriter(Path(spec.log_path))
            for line in text.splitlines():
                writer.line(0, "s", line)
            writer.close()
            self._logger.error("supervisor could not start", api=spec.api, replica=spec.id, output=text[-2000:])

    def _send_stop(self, running: _Running) -> None:
        if running.stop_drain_s is None or running.writer is None:
            return
        command = {"command": "stop", "drain_s": running.stop_drain_s}
        running.writer.write(json.dumps(command).encode() + b"\n")

    def _send_limits(self, running: _Running) -> None:
        if running.writer is not None:
            command = {"command": "configure", **asdict(running.spec.limits)}
            running.writer.write(json.dumps(command).encode() + b"\n")

    def _kill(self, running: _Running) -> None:
        if running.identity is not None:
            self._logger.warning("replica killed: it did not stop in time", replica=running.spec.id)
            kill_session(running.identity)


def replica_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what replicas inherit of the operator's environment: all but our secrets.

    Without PYTHONDONTWRITEBYTECODE, which would have each start compile every module anew.
    """
    left_out = {"PYTHONDONTWRITEBYTECODE"}
    return {
        key: value
        for key, value in environ.items()
        if key not in left_out and not (key.startswith("CORTEX_") and "TOKEN" in key)
    }


async def _connect(spec: ReplicaSpec) -> tuple[StreamReader, StreamWriter]:
    return await asyncio.open_unix_connection(spec.control_socket, limit=_STATUS_MAX_BYTES)


def first_status(spec: ReplicaSpec, pid: int) -> ReplicaStatus:
    """Return how a replica is of which nothing was heard yet."""
    sockets = [""] * len(spec.sockets) if spec.listen_host else spec.sockets
    processes = tuple(ProcessStatus(index, socket, ProcessState.STARTING) for index, socket in enumerate(sockets))
    return ReplicaStatus(spec.id, spec.api, spec.revision, pid, time.time(), processes)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _clean(spec: ReplicaSpec) -> None:
    for socket in (spec.control_socket, *spec.sockets):
        with contextlib.suppress(OSError):
            Path(socket).unlink()
    shutil.rmtree(spec.run_dir, ignore_errors=True)


def remove_metrics(spec: ReplicaSpec) -> None:
    """Remove what a replica counted: for whom nobody adds it up."""
    if spec.metrics_dir:
        shutil.rmtree(spec.metrics_dir, ignore_errors=True)
