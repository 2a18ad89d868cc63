"""A cortex installation driven by the command line, with its own CORTEX_HOME and ports."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.tools.endpoint import NotServingError, free_ports
from benchmarks.tools.paths import PEERS, USER_CODE
from benchmarks.tools.processes import descendants, end

_COMMAND_LIMIT_S = 180.0


@dataclass(frozen=True)
class Cortex:
    """One installation that lives in `folder`."""

    folder: Path
    gateway_port: int
    operator_port: int

    @classmethod
    def in_folder(cls, folder: Path, ports: tuple[int, int] | None = None) -> Cortex:
        """Copy the project to the folder; `ports` are those of gateway and operator, by default free ones."""
        gateway_port, operator_port = ports or free_ports(2)
        cortex = cls(folder, gateway_port, operator_port)
        shutil.copytree(PEERS / "cortex", cortex.project, ignore=shutil.ignore_patterns("__pycache__"))
        for source in ("predictors.py", "mlp_model.py", "batch_total.py", "iris.onnx"):
            shutil.copy(USER_CODE / source, cortex.project)
        return cortex

    @property
    def project(self) -> Path:
        """The folder with one `<workload>.yaml` per API."""
        return self.folder / "project"

    @property
    def home(self) -> Path:
        """The CORTEX_HOME."""
        return self.folder / "home"

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of one `cortex` command."""
        return [str(Path(sys.executable).with_name("cortex")), *arguments]

    def environ(self) -> dict[str, str]:
        """Return the environment of its commands."""
        environ = {**os.environ, "CORTEX_HOME": str(self.home)}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        return environ

    def run(self, *arguments: str) -> str:
        """Run one command and return what it printed. Raises: NotServingError with its output if it fails."""
        with (self.folder / "cli.err").open("a+") as errors:
            done = subprocess.run(
                self.command(*arguments),
                env=self.environ(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=_COMMAND_LIMIT_S,
                check=False,
            )
            if done.returncode != 0:
                errors.seek(0)
                said = (errors.read() + done.stdout)[-3000:]
                raise NotServingError(f"cortex {' '.join(arguments)} ended with {done.returncode}:\n{said}")
        return done.stdout

    def start(self) -> None:
        """Start operator and gateway on the chosen ports."""
        self.run("up", "--gateway-port", str(self.gateway_port), "--operator-port", str(self.operator_port))

    def stop(self) -> None:
        """Stop everything; kill by pid what `cortex down` leaves."""
        with contextlib.suppress(NotServingError, subprocess.TimeoutExpired):
            self.run("down")
        end([], grace_s=0.0)

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """Run the installation for the block."""
        try:
            self.start()
            yield
        finally:
            self.stop()

    def deploy(self, workload: str) -> None:
        """Deploy one API and wait until it is live."""
        self.run("deploy", str(self.project / f"{workload}.yaml"), "-o", "json")

    def status(self) -> dict[str, Any]:
        """Return the status of the installation."""
        found: dict[str, Any] = json.loads(self.run("status", "-o", "json"))
        return found

    def serving(self) -> list[psutil.Process]:
        """Return the processes on the path of requests: gateway and replicas."""
        found = groups(self.status())
        return [*found["gateway"], *found["replicas"]]


def groups(status: dict[str, Any]) -> dict[str, list[psutil.Process]]:
    """Divide the running processes into operator, zygote, gateway, replicas and others."""
    running = descendants()
    # A replica is more than the process with the user's code: its supervisor counts too.
    owner = {process.pid: "replicas" for process in running if _runs(process, "cortex.supervisor.supervisor")}
    owner |= {process.pid: "zygote" for process in running if _runs(process, "cortex.supervisor.zygote")}
    owner |= {replica["pid"]: "replicas" for replica in status["replicas"]}
    owner |= {status["operator"]["pid"]: "operator", status["gateway"]["pid"]: "gateway"}
    members: dict[str, list[psutil.Process]] = {
        "operator": [],
        "zygote": [],
        "gateway": [],
        "replicas": [],
        "other": [],
    }
    for process in running:
        members[_group_of(process, owner)].append(process)
    return members


def _runs(process: psutil.Process, module: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return module in process.cmdline()
    return False


def _group_of(process: psutil.Process, owner: dict[int, str]) -> str:
    """Return the group of the nearest ancestor that has one; gateway and replicas may be children of the operator."""
    with contextlib.suppress(psutil.Error):
        for candidate in (process, *process.parents()):
            if candidate.pid in owner:
                return owner[candidate.pid]
    return "other"
