"""An API in this process: its class is constructed as by a worker, and requests arrive over sockets of the caller.

`cortex dev` runs one per process, and `cortex.testing` one per test. Both use the request path of replicas
(`MethodServer`, `ApplicationServer`); what they lack is the supervisor, which enforces deadlines and replaces processes
that die.
"""

from __future__ import annotations

import asyncio
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from cortex.payloads.signature import ApiSignature
from cortex.predictor.loader import BoundPredictor, load, rebind
from cortex.worker.channel import Channel
from cortex.worker.http.connection import Connection
from cortex.worker.monitoring.user_metrics import MetricsClient
from cortex.worker.request_server import RequestServer, WorkerContext
from cortex.worker.requests.method_server import MethodServer
from cortex.worker.requests.readiness import check_readiness
from cortex.worker.requests.runner import CallDurations, Runner
from cortex.worker.shared_state import MAX_CONNECTIONS, SharedConnectionState
from cortex.worker.spec import ReplicaSpec
from cortex.worker.worker_process import set_environment, set_python_path

if TYPE_CHECKING:
    from cortex.dev.local.models import LocalFetcher
    from cortex.models.spec import Catalogue
    from cortex.predictor.batch import BatchCode


class LocalModels:
    """The models of an API, if it has any: what `load` needs instead of a model agent."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.catalogue: Catalogue | None = None
        self.fetcher: LocalFetcher | None = None
        self._source = spec.models if spec.tensorflow_serving in (None, "local") else None

    def list(self) -> None:
        """List the models. Blocks. Raises: StorageError."""
        if self._source is None:
            return
        from cortex.dev.local.models import LocalFetcher, list_catalogue  # noqa: PLC0415 - few APIs have models

        self.catalogue = list_catalogue(self._source, os.environ)
        self.fetcher = LocalFetcher(os.environ)

    def close(self) -> None:
        """Delete what was downloaded."""
        if self.fetcher is not None:
            self.fetcher.close()


def enter_environment(spec: ReplicaSpec) -> None:
    """Set the environment variables of user code in this process."""
    os.environ |= spec.env
    set_environment(spec, 0)
    set_python_path(spec)


def load_jobs_class(spec: ReplicaSpec, models: LocalModels) -> BatchCode:
    """Import the class of an API that runs jobs. Raises: UserError, StorageError."""
    from cortex.predictor.batch import load_batch_code  # noqa: PLC0415 - other APIs start faster

    models.list()
    return load_batch_code(spec, models.catalogue, models.fetcher, metrics=MetricsClient(None))


class LocalApi(ABC):
    """An API in this process, whose requests arrive over sockets of the caller."""

    _server: RequestServer

    def __init__(self, spec: ReplicaSpec, loop: asyncio.AbstractEventLoop) -> None:
        self._context = WorkerContext(spec, loop, SharedConnectionState())
        self._connections = 0

    @property
    def signature(self) -> ApiSignature | None:
        """Return what its methods take and return; None if that is not known."""
        return None

    @property
    def class_name(self) -> str | None:
        """Return the name of the user's class; None if its API consists of functions, or has no code."""
        return None

    @abstractmethod
    def load(self) -> None:
        """Load and start the user's code. Raises: UserError, StorageError."""

    def add(self, connection: socket.socket, on_close: Callable[[Connection], None]) -> None:
        """Serve a connection. Event-loop thread only, or before the loop runs."""
        self._connections += 1
        self._server.connections.add(connection, self._connections % MAX_CONNECTIONS, on_close)

    def run(self) -> None:
        """Serve until `stop`, on the main thread."""
        self._context.loop.run_forever()

    def stop(self) -> None:
        """End all calls, then make `run` return. On any thread."""
        self._context.loop.call_soon_threadsafe(self._server.stop)

    def rebind(self) -> bool:
        """Bind the methods again after a signature changed; running requests keep the old ones. Event-loop thread only.

        Return False if that needs a new process. Raises: UserError if the class is invalid now; then nothing has
        changed.
        """
        return False


class RequestApi(LocalApi):
    """An API whose methods answer requests. Its user code runs on the thread that calls `run`, or `runner.run`."""

    def __init__(self, spec: ReplicaSpec, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(spec, loop)
        self._models = LocalModels(spec)
        self.predictor: BoundPredictor
        self.runner: Runner
        self._server: MethodServer

    @property
    def signature(self) -> ApiSignature:
        """Return what its methods take and return."""
        return self.predictor.signature

    @property
    def class_name(self) -> str | None:
        """Return the name of the user's class; None if its API consists of functions, or has no code."""
        return self.predictor.generation.class_name

    def load(self) -> None:
        """Construct the user's class, and send it the readiness sample of the API. Raises: UserError, StorageError."""
        self._models.list()
        metrics = MetricsClient(None)
        spec = self._context.spec
        self.predictor = load(spec, self._models.catalogue, self._models.fetcher, metrics=metrics)
        self.predictor.after_fork()
        if spec.readiness is not None:
            ours, theirs = socket.socketpair()
            with ours, theirs:  # its only message precedes the end of the process
                check_readiness(spec, self.predictor, self._context.loop, Channel(ours))
        self.open()

    def open(self) -> None:
        """Begin to accept requests; call it again after `runner.run` has returned."""
        context = self._context
        durations = CallDurations(context.shared_state)
        self.runner = Runner(context.loop, context.spec.threads, durations, always_threads=True)
        self._server = MethodServer(context, self.predictor, self.runner)

    def run(self) -> None:
        """Serve until `stop`, then unload the models."""
        self.runner.run()
        self.close()

    def rebind(self) -> bool:
        """Bind the methods again, unless the API consists of functions. Raises: UserError if the class is invalid."""
        if self.predictor.instance is None:
            return False
        self.predictor = rebind(self._context.spec, self.predictor)
        self._server = MethodServer(self._context, self.predictor, self.runner)
        return True

    def finish(self) -> None:
        """Wait for the tasks that run after responses. The event loop must run; call it on another thread."""
        self._server.shutdown()

    def close(self) -> None:
        """Unload the models."""
        self.predictor.close()
        self._models.close()


class ApplicationApi(LocalApi):
    """An API with an ASGI or WSGI application."""

    @property
    def class_name(self) -> str | None:
        """Return the name of the class that has the application."""
        return None if self._context.spec.app is not None else "Handler"

    def load(self) -> None:
        """Import and start the application. Raises: UserError."""
        from cortex.worker.applications.application_server import ApplicationServer  # noqa: PLC0415 - likewise
        from cortex.worker.applications.lifespan import Lifespan  # noqa: PLC0415 - other APIs start faster

        predictor = load(self._context.spec, metrics=MetricsClient(None))
        predictor.after_fork()
        lifespan = Lifespan(predictor.application)
        self._context.loop.run_until_complete(lifespan.startup())
        self._server = ApplicationServer(self._context, lifespan)
