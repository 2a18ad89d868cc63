"""The operator's process: puts together every concrete class, runs until told to stop, leaves replicas running."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import psutil
import uvicorn

from cortex import __version__
from cortex.control.app import create_app
from cortex.control.deployer import Deployer
from cortex.control.diagnose import Surroundings
from cortex.control.operator import Identity, Operator
from cortex.control.preparing import prepare_revision
from cortex.control.projects import ProjectFolders
from cortex.control.reconciler import Reconciler
from cortex.control.serving import create_server
from cortex.control.settings import Settings
from cortex.engine.local import LocalEngine
from cortex.engine.model_agent import ModelAgent
from cortex.engine.sockets import allow_descriptors
from cortex.errors import ConflictError, CortexError, GatewayError
from cortex.gateway.haproxy import Gateway, GatewaySettings
from cortex.home import Home
from cortex.lifecycle import ApiStatus
from cortex.models.source import loads_models
from cortex.state.apis import ApiStore
from cortex.state.database import open_sqlite
from cortex.telemetry import Logger, configure

#: How often it is made sure that the gateway runs.
_GATEWAY_CHECK_S = 1.0
#: What `cortex down` grants the requests that are inside replicas.
_DOWN_DRAIN_S = 10.0
#: Connections of clients, one socket per replica, files of logs that are followed.
_DESCRIPTORS = 16_384
_logger = Logger("cortex.operator")


class _Process:
    """One run of the operator: startup, run, shutdown."""

    def __init__(self, home: Home, settings: Settings) -> None:
        self._home = home
        self._settings = settings
        self._stop = asyncio.Event()
        self._stops_all = False
        self._database = open_sqlite(home.database_file)
        self._store = ApiStore(self._database)
        self._engine = LocalEngine(home, os.environ, _logger)
        self._model_agent = ModelAgent(home, os.environ, _logger)
        self._gateway = Gateway(home, GatewaySettings(host=settings.host, port=settings.gateway_port))
        self._reconciler = Reconciler(
            home,
            self._store,
            self._engine,
            self._gateway,
            lambda target: prepare_revision(home, os.environ, target),
            _logger,
        )
        self._engine.on_change = self._reconciler.wake

    async def run(self, listener: socket.socket) -> None:
        """Serve until a signal or a request ends it. Raises: GatewayError if the gateway can't be started."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        projects = ProjectFolders(self._home)
        projects.clean()
        await self._engine.startup()
        await self._model_agent.startup(self._needs_model_agent)
        await self._gateway.startup(self._reconciler.routes())
        identity = self._identity()
        server = self._server(identity, projects)
        _write_private(self._home.run_dir / "operator.json", json.dumps(identity.to_json()))
        _logger.info("operator started", pid=identity.pid, url=identity.url, gateway=identity.gateway_url)
        tasks = [
            asyncio.create_task(self._reconciler.run(), name="reconcile"),
            asyncio.create_task(self._keep_gateway(), name="keep gateway"),
            asyncio.create_task(self._model_agent.run(), name="keep model agent"),
        ]
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="serve")
        await self._stop.wait()
        server.should_exit = True
        await serving
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._shutdown()

    async def _shutdown(self) -> None:
        if self._stops_all:
            await self._reconciler.stop_all(_DOWN_DRAIN_S)
            await self._model_agent.stop()
            await self._gateway.stop()
            (self._home.run_dir / "operator.json").unlink(missing_ok=True)
        else:
            await self._model_agent.shutdown()
            await self._gateway.shutdown()
        await self._engine.shutdown()
        self._database.dispose()
        _logger.info("operator stopped", stopped_all=self._stops_all)

    def _shut_down(self, stops_all: bool) -> None:
        self._stops_all = stops_all
        self._stop.set()

    def _identity(self) -> Identity:
        settings, pid = self._settings, os.getpid()
        return Identity(
            pid=pid,
            create_time=psutil.Process(pid).create_time(),
            url=settings.url(settings.operator_port),
            gateway_url=settings.url(settings.gateway_port),
            version=__version__,
            started_at=datetime.now(UTC),
        )

    def _server(self, identity: Identity, projects: ProjectFolders) -> uvicorn.Server:
        reconciler = self._reconciler
        deployer = Deployer(
            self._store,
            projects,
            is_updating=lambda record: reconciler.state(record).status is ApiStatus.UPDATING,
            is_failing=lambda record: reconciler.state(record).status in (ApiStatus.ERROR, ApiStatus.OOM),
            on_change=reconciler.wake,
            look_around=self._look_around,
        )
        operator = Operator(
            self._home,
            identity,
            self._store,
            self._engine,
            self._gateway,
            self._model_agent,
            reconciler,
            deployer,
            _logger,
        )
        app = create_app(operator, read_token(self._home), self._settings.host, _logger, self._shut_down, __version__)
        return create_server(app)

    def _needs_model_agent(self) -> bool:
        """Tell whether an API, or a replica that runs still, has models."""
        targets = [target for record in self._store.records() for target in (record.target, record.serving) if target]
        return any(loads_models(target.spec) for target in targets) or any(
            spec.model_agent_socket for spec, _ in self._engine.replicas().values()
        )

    async def _look_around(self) -> Surroundings:
        return Surroundings(os.environ, await self._engine.find_devices())

    async def _keep_gateway(self) -> None:
        while True:
            await asyncio.sleep(_GATEWAY_CHECK_S)
            try:
                await self._gateway.ensure_running()
            except Exception as error:  # whatever it is, it must be tried again
                expected = isinstance(error, GatewayError)
                _logger.error("gateway can't be kept running", None if expected else error, error=error)


def read_token(home: Home) -> str:
    """Return the operator's token; the first call makes it."""
    try:
        descriptor = os.open(home.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if token := home.token_file.read_text().strip():
            return token
        descriptor = os.open(home.token_file, os.O_WRONLY)  # its first writer was killed in between
    token = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return token


def main() -> None:
    """Run the operator of `CORTEX_HOME`."""
    settings = Settings.parse(sys.argv[1:])
    allow_descriptors(_DESCRIPTORS)
    home = Home.from_environ(os.environ)
    home.create()
    configure(home.logs_dir / "operator.log")
    try:
        with _only_one(home):
            listener = _listen(settings)
            asyncio.run(_run(home, settings, listener))
    except CortexError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


async def _run(home: Home, settings: Settings, listener: socket.socket) -> None:
    await _Process(home, settings).run(listener)


@contextlib.contextmanager
def _only_one(home: Home) -> Iterator[IO[str]]:
    """Hold the home's lock: two operators would fight over what runs. The kernel frees it when we end."""
    path = home.run_dir / "operator.lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise ConflictError(f"an operator already runs for {home.path} (pid {file.read().strip()})") from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.operator_port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConflictError(
            f"the operator can't listen on {settings.host}:{settings.operator_port}: "
            f"{(error.strerror or str(error)).lower()}; choose another with --operator-port"
        ) from error
    return listener


def _write_private(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.touch(mode=0o600)
    part.write_text(text)
    part.rename(path)


if __name__ == "__main__":
    main()
