"""The operator: constructs its subsystems, runs until it is stopped, leaves replicas and gateway running.

    Infrastructure            engine and gateway, on one machine or a cluster
      └─ Jobs                 jobs, schedules, AsyncAPIs
           └─ Replicas        control loop of replicas, routes, autoscaling
                ├─ Monitoring      metrics, predictions
                │    └─ Deploys    deploys, canaries, new versions of models
                └─ AccessControl   API keys, tokens, audit log

Each one gets those above it. What wakes the two control loops is in `context.Wakes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import time

import uvicorn

from cortex.engine.model_agent import ModelAgent
from cortex.errors import CortexError, DatabaseUnavailableError, GatewayError
from cortex.home import Home
from cortex.installation import Installation, OperatorIdentity, operator_file
from cortex.models.source import loads_models
from cortex.operator.access.access_control import AccessControl
from cortex.operator.bootstrap import identify, save_settings
from cortex.operator.certificates import ServedCertificate
from cortex.operator.context import Loops, OperatorContext
from cortex.operator.deploy.deploys import Deploys
from cortex.operator.http.app import create_app
from cortex.operator.http.async_routes import AsyncRoutes
from cortex.operator.http.documentation_routes import DocumentationRoutes
from cortex.operator.http.gateway_routes import create_jobs_app
from cortex.operator.http.job_routes import JobRoutes
from cortex.operator.http.operator_server import JobsServer, create_server
from cortex.operator.http.services import Services
from cortex.operator.http.worker_routes import WorkerRoutes
from cortex.operator.infrastructure import create_infrastructure
from cortex.operator.jobs.jobs import Jobs
from cortex.operator.jobs.workload_bodies import WorkloadBodies
from cortex.operator.monitoring.monitoring import Monitoring
from cortex.operator.replicas.replicas import Replicas
from cortex.operator.settings import OperatorSettings
from cortex.state.database import open_state
from cortex.telemetry import Logger

#: Interval of the checks that the gateway runs.
_GATEWAY_CHECK_S = 1.0
_IDENTITY_CHECK_S = 1.0
#: Minimum of the drain time that replicas have after the gateway is drained.
_REPLICA_DRAIN_S = 1.0
#: Time that replicas have to end after it, and the gateway to pass on their last answers.
_EXIT_S, _LAST_ANSWERS_S = 6.0, 1.0
_logger = Logger("cortex.operator")


class Operator:
    """One operator: construct it, then `run` it once. `epoch` is that of its leadership; None with SQLite."""

    def __init__(self, home: Home, settings: OperatorSettings, installation: Installation, epoch: int | None) -> None:
        self._home = home
        self._stop = asyncio.Event()
        self._stops_all = False
        self._certificate = ServedCertificate(settings.tls, home.fingerprints_file, _logger)
        self._settings = self._certificate.apply_name(settings)
        database = open_state(installation.database or home.database_file, epoch)
        self._context = context = OperatorContext(home, self._settings, installation, database, epoch, _logger)
        self._infrastructure = infrastructure = create_infrastructure(context, self._certificate.pem)
        self._gateway = infrastructure.gateway
        self._model_agent = ModelAgent(home, os.environ, _logger)
        self._jobs = Jobs(context, infrastructure)
        self._replicas = Replicas(context, infrastructure, self._jobs)
        self._monitoring = Monitoring(context, infrastructure, self._jobs, self._replicas, self._certificate)
        self._deploys = Deploys(context, infrastructure.engine, self._replicas, self._monitoring.totals)
        self._access = AccessControl(context, self._replicas.active_keys, self._replicas.reconciler.publish_now)

    @property
    def is_stopping(self) -> bool:
        """Return True once the operator is shutting down."""
        return self._stop.is_set()

    async def run(self, listener: socket.socket) -> None:
        """Serve until a signal or a request stops it. Raises: GatewayError if the gateway can't be started."""
        event_loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            event_loop.add_signal_handler(number, self._shut_down, self._settings.stop_all)
        await self._start()
        identity = identify(self._settings)
        clients, workers = self._server(identity), self._jobs_server()
        identity.write(self._home)
        save_settings(self._home, self._settings, _logger)
        _logger.info("operator started", pid=identity.pid, url=identity.url, gateway=identity.gateway_url)
        tasks = [asyncio.create_task(loop(), name=name) for name, loop in self._loops().items()]
        tasks.append(asyncio.create_task(self._keep_identity(identity), name="keep the identity"))
        workers.listen()
        tasks.append(asyncio.create_task(workers.keep_listening(), name="keep the jobs socket"))
        serving_clients = asyncio.create_task(clients.serve(sockets=[listener]), name="serve clients")
        await self._stop.wait()
        clients.should_exit = True
        await serving_clients
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._infrastructure.preparations.shutdown()
        if self._stops_all:
            await self._drain()  # before the workers' server, which gets what the gateway and the workers still send
        await workers.stop()
        with contextlib.suppress(DatabaseUnavailableError):
            await self._jobs.reconciler.log_ends()
        await self._shutdown()

    def _loops(self) -> Loops:
        return {
            **self._replicas.loops(),
            **self._jobs.loops(),
            **self._monitoring.loops(),
            **self._deploys.loops(),
            "keep gateway running": self._keep_gateway_running,
            "keep model agent running": self._model_agent.run,
        }

    async def _start(self) -> None:
        """Adopt what runs already, in the order in which the parts depend on each other."""
        self._context.projects.clean()
        engine, cluster, jobs = self._infrastructure.engine, self._infrastructure.cluster, self._jobs
        await engine.startup(self._context.wakes.both, self._monitoring.totals.end)
        self._monitoring.totals.startup(cluster.engine.unsettled() if cluster else engine.replicas().keys())
        await self._model_agent.startup(self._needs_model_agent, self._apis_with_models)
        await jobs.reconciler.startup()
        await self._deploys.fetch_projects(jobs.reconciler.revisions())
        await jobs.async_apis.startup()
        await self._replicas.reconciler.startup()

    async def _drain(self) -> None:
        """Finish the requests in progress, accept no others, and stop all replicas.

        Those that take longer are answered for their processes, which are killed; so the gateway ends last.
        """
        deadline = time.monotonic() + self._settings.drain_s
        await self._drain_gateway(self._settings.drain_s)
        await self._replicas.reconciler.stop_all(max(deadline - time.monotonic(), _REPLICA_DRAIN_S), _EXIT_S)
        await self._drain_gateway(_LAST_ANSWERS_S)

    async def _drain_gateway(self, timeout_s: float) -> None:
        try:
            await self._gateway.drain(timeout_s)
        except GatewayError as error:  # it hangs or has died
            _logger.warning("gateway can't be drained", error=error)

    async def _shutdown(self) -> None:
        if self._stops_all:
            await self._gateway.stop()  # before the node agents, which stop the gateways of their nodes
            if self._infrastructure.cluster is not None:
                await self._infrastructure.cluster.engine.end_nodes()
            await self._model_agent.stop()
            operator_file(self._home).unlink(missing_ok=True)
            for folder in (self._home.metrics_dir, self._home.sockets_dir):  # may be outside of the home
                shutil.rmtree(folder, ignore_errors=True)
        else:
            await self._model_agent.shutdown()
            await self._gateway.shutdown()
        await self._infrastructure.engine.shutdown()
        self._context.database.dispose()
        _logger.info("operator stopped", stopped_all=self._stops_all)
        await self._jobs.store.shutdown()

    def _server(self, identity: OperatorIdentity) -> uvicorn.Server:
        """Return the server of the operator's HTTP API."""
        services = Services(
            home=self._home,
            identity=identity,
            apis=self._context.apis,
            infrastructure=self._infrastructure,
            model_agent=self._model_agent,
            jobs=self._jobs,
            replicas=self._replicas,
            monitoring=self._monitoring,
            deploys=self._deploys,
            access=self._access,
            shut_down=self._shut_down,
        )
        app = create_app(services, self._settings.host, self._certificate.has_name, _logger)
        return create_server(app, self._certificate.context, self._access.tokens.check_validity)

    def _jobs_server(self) -> JobsServer:
        """Return the server of the private socket for the gateway and the workers."""
        jobs, dispatcher = self._jobs, self._jobs.reconciler.dispatcher
        bodies = WorkloadBodies(self._context.apis, self._replicas.signatures)
        routes = (
            JobRoutes(jobs.service, _logger),
            AsyncRoutes(jobs.async_apis, bodies.check, _logger),
            DocumentationRoutes(self._replicas.documentation, _logger),
        )
        workers = WorkerRoutes(dispatcher, jobs.worker_token, _logger)

        def end_waits() -> None:
            dispatcher.end_polls()
            for each in routes:
                each.stop()

        return JobsServer(
            create_jobs_app(*routes, workers, jobs.async_apis.is_async), self._home.jobs_socket, end_waits
        )

    async def _keep_identity(self, identity: OperatorIdentity) -> None:
        """Write the file by which commands find this operator again if somebody deletes it, or its folder."""
        while True:
            await asyncio.sleep(_IDENTITY_CHECK_S)
            if not operator_file(self._home).exists():
                with contextlib.suppress(OSError, CortexError):  # no disk, say: the next check tries again
                    self._home.create()
                    identity.write(self._home)

    async def _keep_gateway_running(self) -> None:
        while True:
            await asyncio.sleep(_GATEWAY_CHECK_S)
            if self._certificate.reload():
                self._gateway.use_certificate(self._certificate.pem)
            try:
                await self._gateway.ensure_running()
            except Exception as error:  # of any kind: the next check must happen
                expected = isinstance(error, GatewayError)
                _logger.error("gateway can't be kept running", None if expected else error, error=error)

    def _shut_down(self, stops_all: bool) -> None:
        self._stops_all = stops_all
        self._stop.set()

    def _needs_model_agent(self) -> bool:
        """Return True if an API or a running replica has models; in a cluster the agent lists them for the nodes."""
        replicas = self._infrastructure.engine.replicas().values()
        return bool(self._apis_with_models()) or any(spec.model_agent_socket for spec, _ in replicas)

    def _apis_with_models(self) -> set[str]:
        revisions = (revision for record in self._context.apis.records() for revision in record.revisions)
        return {revision.spec.name for revision in revisions if loads_models(revision.spec)}
