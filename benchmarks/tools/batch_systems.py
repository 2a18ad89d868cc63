"""The batch systems of the comparison, and their drivers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tools import environments, processes
from benchmarks.tools.cortex_cli import Cortex
from benchmarks.tools.paths import PEERS, REPOSITORY, USER_CODE

WORKERS = 2


class DriverError(Exception):
    """A driver failed; the message contains the end of its output."""


@dataclass(frozen=True)
class Driver:
    """The program that drives one system."""

    process: subprocess.Popen[str]
    log: Path

    def tell(self, order: str) -> Any:
        """Send one line and return the answer. Raises: DriverError."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(order + "\n")
            self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Return the next answer. Raises: DriverError."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise DriverError(f"it ended: {self.log.read_text(errors='replace')[-2000:]}")


Drive = Callable[[Path], contextlib.AbstractContextManager[Driver]]


@dataclass(frozen=True)
class BatchSystem:
    """One system of the comparison."""

    name: str
    role: str  #: "cortex", "peer" or "limit"
    records: str  #: where its results are when a job counts as done
    drive: Drive
    venv: str | None = None  #: the peer whose environment it needs

    @contextlib.contextmanager
    def driven(self) -> Iterator[Driver]:
        """Start the system and its workers; end all its processes at the exit."""
        with (
            # Ray's sockets have long names: the folder's must be short.
            tempfile.TemporaryDirectory(prefix="cb-", ignore_cleanup_errors=True) as folder,
            self.drive(Path(folder)) as driver,
        ):
            yield driver


@contextlib.contextmanager
def _driving(folder: Path, command: list[str], **variables: str) -> Iterator[Driver]:
    environ = {**os.environ, "PYTHONPATH": str(USER_CODE), "BATCH_FOLDER": str(folder), "WORKERS": str(WORKERS)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    log = folder / "driver.log"
    with log.open("ab") as errors:
        process = subprocess.Popen(
            command,
            env={**environ, **variables},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        driver = Driver(process, log)
        driver.answer()
        yield driver
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.stdout.close()  # type: ignore[union-attr]
        processes.end([], grace_s=0.0)
        process.wait()


def _peer(name: str, venv: str | None, *arguments: str, **variables: str) -> Drive:
    def drive(folder: Path) -> contextlib.AbstractContextManager[Driver]:
        interpreter = environments.python_of(venv) if venv else Path(sys.executable)
        command = [str(interpreter), str(PEERS / name / "batch.py"), *arguments]
        return _driving(folder, command, **variables)

    return drive


def _ray_data(where: str) -> Drive:
    return _peer("ray_data", "ray_data", where, **environments.OF_RAY)


@contextlib.contextmanager
def _cortex(folder: Path) -> Iterator[Driver]:
    cortex = Cortex.in_folder(folder)
    with cortex.up():
        cortex.deploy("batch")
        command = [sys.executable, "-m", "benchmarks.tools.batch_driver_cortex"]
        variables = {
            "CORTEX_HOME": str(cortex.home),
            "GATEWAY_PORT": str(cortex.gateway_port),
            "OPERATOR_PORT": str(cortex.operator_port),
            "PYTHONPATH": f"{USER_CODE}{os.pathsep}{REPOSITORY}",
        }
        with _driving(folder, command, **variables) as driver:
            yield driver


#: In the order in which a round visits them.
SYSTEMS = (
    BatchSystem("cortex", "cortex", "SQLite, synced to disk", _cortex),
    BatchSystem(
        "ray-data",
        "peer",
        "object store, in memory",
        _peer("ray_data", "ray_data", "memory", **environments.OF_RAY),
        "ray_data",
    ),
    BatchSystem(
        "ray-data-parquet",
        "peer",
        "Parquet files",
        _peer("ray_data", "ray_data", "parquet", **environments.OF_RAY),
        "ray_data",
    ),
    BatchSystem("celery", "peer", "Redis, snapshots now and then", _peer("celery", "celery"), "celery"),
    BatchSystem("pool", "limit", "a list", _peer("pool", None, "1")),
    BatchSystem("pool-by-64", "limit", "a list", _peer("pool", None, "64")),
)


def named(names: str) -> tuple[BatchSystem, ...]:
    """Return the systems of a comma-separated list; all of them for an empty one. Raises: SystemExit."""
    wanted = [name for name in names.split(",") if name]
    known = [system.name for system in SYSTEMS]
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"no such system: {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(system for system in SYSTEMS if not wanted or system.name in wanted)


def prepare(systems: tuple[BatchSystem, ...]) -> None:
    """Build all environments. Raises: SystemExit if Redis is missing."""
    for venv in sorted({system.venv for system in systems if system.venv}):
        environments.prepare(venv)
