"""The operator: constructs and connects all parts, runs until it is stopped, leaves replicas and gateway running."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import time

import uvicorn

from cortex.config.schema import Api
from cortex.engine.model_agent import ModelAgent
from cortex.engine.usage import CpuMeter, resource_usage
from cortex.errors import CortexError, GatewayError
from cortex.gateway.config import GatewaySettings
from cortex.home import Home
from cortex.installation import Installation, OperatorIdentity, operator_file
from cortex.jobs.store import JobStore
from cortex.lifecycle import ApiStatus
from cortex.models.source import loads_models
from cortex.operator.access.audit import AuditLog
from cortex.operator.access.keys import Keys
from cortex.operator.access.tokens import Tokens
from cortex.operator.autoscaling.autoscaler import Autoscaler, LoadSources, requests_of
from cortex.operator.bootstrap import ensure_shared_token, ensure_token, identify, save_settings
from cortex.operator.canary.controller import CanaryController
from cortex.operator.canary.model_versions import ModelVersions
from cortex.operator.canary.trials import Trials
from cortex.operator.certificates import ServedCertificate
from cortex.operator.dashboard.samples import LoadRecorder
from cortex.operator.deploy.deployer import Deployer
from cortex.operator.deploy.diagnose import Machine
from cortex.operator.deploy.projects import ProjectFolders, SharedProjects
from cortex.operator.documentation import Documentation
from cortex.operator.http.app import create_app
from cortex.operator.http.async_routes import AsyncRoutes
from cortex.operator.http.documentation_routes import DocumentationRoutes
from cortex.operator.http.gateway_routes import create_jobs_app
from cortex.operator.http.job_routes import JobRoutes
from cortex.operator.http.server import JobsServer, create_server
from cortex.operator.http.services import Services
from cortex.operator.http.worker_routes import WorkerRoutes, worker_token
from cortex.operator.infrastructure import create_infrastructure
from cortex.operator.jobs.async_apis import AsyncApis
from cortex.operator.jobs.reconciler import JobReconciler
from cortex.operator.jobs.schedules import Schedules
from cortex.operator.jobs.service import JobService
from cortex.operator.monitoring.metric_totals import MetricTotals
from cortex.operator.monitoring.metrics import Metrics
from cortex.operator.monitoring.tracking import PredictionArchive, Tracking
from cortex.operator.replicas.preparations import Preparations
from cortex.operator.replicas.reconciler import Reconciler
from cortex.operator.replicas.signatures import Signatures
from cortex.operator.settings import OperatorSettings
from cortex.state.database import open_jobs, open_state
from cortex.state.queries.apis import ApiRecord, ApiStore
from cortex.state.queries.audit import AuditStore
from cortex.state.queries.key_values import KeyValueStore
from cortex.state.queries.keys import KeyStore
from cortex.state.queries.metrics import MetricStore
from cortex.state.queries.predictions import PredictionStore
from cortex.state.queries.projects import ProjectStore
from cortex.state.queries.signatures import SignatureStore
from cortex.state.queries.tokens import TokenStore
from cortex.state.revision import Revision
from cortex.telemetry import Logger

#: Interval of the checks that the gateway runs.
_GATEWAY_CHECK_S = 1.0
_IDENTITY_CHECK_S = 1.0
#: Minimum of the drain time that replicas have after the gateway is drained.
_REPLICA_DRAIN_S = 1.0
_logger = Logger("cortex.operator")


class Operator:
    """One operator: construct it, then `run` it once. `epoch` is that of its leadership; None with SQLite."""

    def __init__(self, home: Home, settings: OperatorSettings, installation: Installation, epoch: int | None) -> None:
        self._home = home
        self._stop = asyncio.Event()
        self._stops_all = False

        # State.
        self._database = open_state(installation.database or home.database_file, epoch)
        facts = KeyValueStore(self._database)
        self._apis = ApiStore(self._database)
        self._job_store = JobStore(open_jobs(installation.database or home.jobs_database_file, epoch))
        self._projects = ProjectFolders(home)
        is_shared = installation.database is not None
        self._token = ensure_shared_token(home, facts) if is_shared else ensure_token(home)
        self._tokens = Tokens(TokenStore(self._database), self._token)
        self._audit_log = AuditLog(AuditStore(self._database), _logger)
        self._shared_projects = SharedProjects(home, ProjectStore(self._database), _logger) if is_shared else None

        # Where replicas run, and the gateway in front of them.
        self._certificate = ServedCertificate(settings.tls, home.fingerprints_file, _logger)
        self._settings = self._certificate.apply_name(settings)
        listening = GatewaySettings(settings.host, settings.gateway_port, certificate=self._certificate.pem)
        infrastructure = create_infrastructure(home, installation, listening, facts, epoch or 1, self._wake, _logger)
        self._engine, self._gateway = infrastructure.engine, infrastructure.gateway
        self._cluster = cluster = infrastructure.cluster
        self._model_agent = ModelAgent(home, os.environ, _logger)

        # Jobs. `_wake` wakes both control loops, the job reconciler's and the reconciler's.
        preparations = Preparations(infrastructure.prepare, self._wake, time.time, _logger)
        self._job_reconciler = JobReconciler(
            home,
            self._apis,
            self._job_store,
            self._engine,
            preparations,
            os.environ,
            self._worker_token,
            _logger,
        )
        self._jobs = JobService(self._apis, self._job_store, self._job_reconciler, os.environ, self._endpoint)
        self._schedules = Schedules(self._apis, self._job_store, self._jobs, _logger)
        self._async_apis = AsyncApis(
            home,
            self._apis,
            self._job_store.workloads,
            self._engine,
            self._job_reconciler.workers,
            self._job_reconciler.dispatcher,
            self._worker_token,
        )

        # Replicas of APIs. A new key is published by the reconciler, which reads all keys.
        self._keys = Keys(KeyStore(self._database), lambda: self._reconciler.publish_now())
        self._signatures = Signatures(SignatureStore(self._database), _logger)
        self._trials = Trials(self._apis, facts)
        self._reconciler = Reconciler(
            home,
            self._apis,
            self._engine,
            self._gateway,
            preparations,
            self._async_apis,
            self._job_reconciler.revisions,
            self._keys.active,
            self._signatures,
            _logger,
            gateway_secret=infrastructure.gateway_secret,
            v2_at_root=installation.v2_at_root,
            connections_per_address=installation.connections_per_address,
            gateway_count=cluster.fleet.size if cluster else lambda: 1,
            canary_percents=self._trials.percents,
            was_lost_with_node=cluster.engine.was_lost_with_node if cluster else lambda replica_id: False,
        )

        self._documentation = Documentation(self._apis, self._signatures, self._projects)

        # Metrics, predictions, autoscaling.
        archive = PredictionArchive(home, _logger)
        self._metric_totals = MetricTotals(home.metrics_dir, MetricStore(self._database), _logger, archive.add)
        self._metrics = Metrics(
            self._apis,
            self._metric_totals,
            self._gateway,
            self._job_store,
            self._job_store.workloads.counts,
            self._reconciler.state,
            cluster.engine.usage if cluster else lambda: resource_usage(self._engine.replicas().values(), os.environ),
            _logger,
        )
        predictions = PredictionStore(self._database)
        self._tracking = Tracking(home, self._apis, self._metric_totals, archive, predictions, _logger)
        cores = cluster.engine.cores if cluster else CpuMeter().cores
        sources = LoadSources(lambda: requests_of(self._gateway), self._job_store.workloads.count, cores)
        wake, speed = self._reconciler.wake, settings.autoscaler_speed
        self._autoscaler = Autoscaler(self._apis, self._engine, sources, wake, _logger, speed)

        self._load = LoadRecorder(
            self._apis,
            self._gateway,
            self._metric_totals,
            self._job_store.workloads.count,
            self._reconciler.state,
            _logger,
        )

        # Changes of what is deployed.
        self._deployer = Deployer(
            self._apis,
            self._projects,
            is_updating=self._reconciler.is_updating,
            is_failing=self._is_failing,
            on_change=self._reconciler.wake,
            inspect_machine=self._inspect_machine,
            shared=self._shared_projects,
        )

        self._canaries = CanaryController(
            self._apis, self._trials, self._metric_totals, self._return_to, self._reconciler.wake, _logger
        )
        deploy_models = self._deployer.deploy_models
        self._model_versions = ModelVersions(
            home.model_agent_socket, self._apis, self._trials, facts, deploy_models, _logger
        )

    @property
    def is_stopping(self) -> bool:
        """Return True once the operator is shutting down."""
        return self._stop.is_set()

    async def run(self, listener: socket.socket) -> None:
        """Serve until a signal or a request stops it. Raises: GatewayError if the gateway can't be started."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._shut_down, self._settings.stop_all)
        await self._start()
        identity = identify(self._settings)
        clients, workers = self._server(identity), self._jobs_server()
        identity.write(self._home)
        save_settings(self._home, self._settings, _logger)
        _logger.info("operator started", pid=identity.pid, url=identity.url, gateway=identity.gateway_url)
        tasks = [
            asyncio.create_task(self._reconciler.run(), name="reconcile"),
            asyncio.create_task(self._job_reconciler.run(), name="reconcile jobs"),
            asyncio.create_task(self._schedules.run(), name="submit scheduled jobs"),
            asyncio.create_task(self._autoscaler.run(), name="scale"),
            asyncio.create_task(self._tracking.run(), name="track predictions"),
            asyncio.create_task(self._load.run(), name="sample for the dashboard"),
            asyncio.create_task(self._canaries.run(), name="judge canaries"),
            asyncio.create_task(self._model_versions.run(), name="deploy new versions of models"),
            asyncio.create_task(self._keep_gateway_running(), name="keep gateway running"),
            asyncio.create_task(self._model_agent.run(), name="keep model agent running"),
        ]
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
        if self._stops_all:
            await self._drain()  # before the workers' server, which gets what the gateway and the workers still send
        await workers.stop()
        await self._shutdown()

    async def _start(self) -> None:
        """Adopt what runs already, in the order in which the parts depend on each other."""
        self._projects.clean()
        await self._engine.startup(self._wake, self._metric_totals.end)
        running = self._cluster.engine.unsettled() if self._cluster else self._engine.replicas().keys()
        self._metric_totals.startup(running)
        await self._model_agent.startup(self._needs_model_agent, self._apis_with_models)
        await self._job_reconciler.startup()
        if self._shared_projects is not None:
            revisions = [*self._api_revisions(), *self._job_reconciler.revisions()]
            needed = {revision.project_hash for revision in revisions}
            await self._shared_projects.keep_only(needed | self._apis.history_projects())
            await self._shared_projects.fetch(needed)
        await self._async_apis.startup()
        await self._reconciler.startup()

    async def _drain(self) -> None:
        """Finish the requests in progress, accept no others, and stop all replicas."""
        deadline = time.monotonic() + self._settings.drain_s
        try:
            await self._gateway.drain(self._settings.drain_s)
        except GatewayError as error:  # it hangs or has died
            _logger.warning("gateway can't be drained", error=error)
        await self._reconciler.stop_all(max(deadline - time.monotonic(), _REPLICA_DRAIN_S))

    async def _shutdown(self) -> None:
        if self._stops_all:
            await self._gateway.stop()  # before the node agents, which stop the gateways of their nodes
            if self._cluster is not None:
                await self._cluster.engine.end_nodes()
            await self._model_agent.stop()
            operator_file(self._home).unlink(missing_ok=True)
            for folder in (self._home.metrics_dir, self._home.sockets_dir):  # may be outside of the home
                shutil.rmtree(folder, ignore_errors=True)
        else:
            await self._model_agent.shutdown()
            await self._gateway.shutdown()
        await self._engine.shutdown()
        self._database.dispose()
        _logger.info("operator stopped", stopped_all=self._stops_all)
        await self._job_store.shutdown()

    def _server(self, identity: OperatorIdentity) -> uvicorn.Server:
        """Return the server of the operator's HTTP API."""
        services = Services(
            home=self._home,
            identity=identity,
            apis=self._apis,
            engine=self._engine,
            gateway=self._gateway,
            model_agent=self._model_agent,
            cluster=self._cluster,
            reconciler=self._reconciler,
            deployer=self._deployer,
            keys=self._keys,
            tokens=self._tokens,
            audit_log=self._audit_log,
            jobs=self._jobs,
            async_apis=self._async_apis,
            schedules=self._schedules,
            autoscaler=self._autoscaler,
            metrics=self._metrics,
            tracking=self._tracking,
            trials=self._trials,
            documentation=self._documentation,
            load=self._load,
            shut_down=self._shut_down,
        )
        app = create_app(services, self._settings.host, self._certificate.has_name, _logger)
        return create_server(app, self._certificate.context, self._tokens.check_validity)

    def _jobs_server(self) -> JobsServer:
        """Return the server of the private socket for the gateway and the workers."""
        jobs = JobRoutes(self._jobs, _logger)
        workloads = AsyncRoutes(self._async_apis, _logger)
        documentation = DocumentationRoutes(self._documentation, _logger)
        workers = WorkerRoutes(self._job_reconciler.dispatcher, self._worker_token, _logger)
        app = create_jobs_app(jobs, workloads, documentation, workers, self._async_apis.is_async)
        return JobsServer(app, self._home.jobs_socket, self._job_reconciler.dispatcher.end_polls)

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

    def _wake(self) -> None:
        self._reconciler.wake()
        self._job_reconciler.wake()

    def _worker_token(self, worker: str) -> str:
        return worker_token(self._token, worker)

    def _endpoint(self, api: Api) -> str:
        return self._settings.url(self._settings.gateway_port) + api.networking.endpoint

    def _is_failing(self, record: ApiRecord) -> bool:
        return self._reconciler.own_state(record).status in (ApiStatus.ERROR, ApiStatus.OOM)

    async def _return_to(self, api: str, number: int | None, revision: str) -> None:
        await self._deployer.rollback(api, number, force=True, by="canary", only_from=revision)

    async def _inspect_machine(self) -> Machine:
        return Machine(os.environ, await self._engine.find_devices())

    def _api_revisions(self) -> list[Revision]:
        """Return the newest and the serving revision of every API."""
        return [revision for record in self._apis.records() for revision in record.revisions]

    def _needs_model_agent(self) -> bool:
        """Return True if an API or a running replica has models; in a cluster the agent lists them for the nodes."""
        return bool(self._apis_with_models()) or any(
            spec.model_agent_socket for spec, _ in self._engine.replicas().values()
        )

    def _apis_with_models(self) -> set[str]:
        return {revision.spec.name for revision in self._api_revisions() if loads_models(revision.spec)}
