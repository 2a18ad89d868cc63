"""One run of the operator: puts together every concrete class, runs until told to stop, leaves replicas running."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket

import uvicorn

from cortex import __version__
from cortex.config.schema import Api
from cortex.engine.cpu import CpuMeter
from cortex.engine.model_agent import ModelAgent
from cortex.errors import GatewayError
from cortex.gateway.base import AnyGateway
from cortex.gateway.haproxy import Gateway, GatewaySettings
from cortex.home import Home
from cortex.installation import Installation
from cortex.jobs.http.app import create_jobs_app
from cortex.jobs.http.worker_endpoints import worker_token
from cortex.jobs.store import JobStore
from cortex.lifecycle import ApiStatus
from cortex.models.source import loads_models
from cortex.operator.autoscaling.sampler import Scaling, Sources, requests_of
from cortex.operator.bootstrap import identify, keep_settings, read_token, shared_token, tell_identity
from cortex.operator.certificates import ServedCertificate
from cortex.operator.deploy.deployer import Deployer
from cortex.operator.deploy.diagnose import Surroundings
from cortex.operator.deploy.keys import Keys
from cortex.operator.deploy.projects import ProjectFolders
from cortex.operator.deploy.shared_projects import SharedProjects
from cortex.operator.engine_factory import Place, create_place
from cortex.operator.http.app import create_app
from cortex.operator.http.server import create_jobs_server, create_server, listen_privately
from cortex.operator.jobs.async_apis import AsyncApis
from cortex.operator.jobs.public_jobs import PublicJobs
from cortex.operator.jobs.schedules import Schedules
from cortex.operator.jobs.service import Jobs
from cortex.operator.jobs.supervisor import JobSupervisor
from cortex.operator.monitoring.metric_totals import MetricTotals
from cortex.operator.monitoring.metrics import Metrics
from cortex.operator.monitoring.tracking import Tracking
from cortex.operator.replicas.reconciler import Reconciler
from cortex.operator.settings import Settings
from cortex.operator.views import Identity, Operator
from cortex.state.apis import ApiStore
from cortex.state.database import open_jobs, open_state
from cortex.state.key_values import FactStore
from cortex.state.keys import KeyStore
from cortex.state.metrics import MetricStore
from cortex.state.predictions import PredictionStore
from cortex.state.projects import ProjectStore
from cortex.telemetry import Logger

#: How often it is made sure that the gateway runs.
_GATEWAY_CHECK_S = 1.0
#: What `cortex down` grants the requests that are inside replicas.
_DOWN_DRAIN_S = 10.0
_logger = Logger("cortex.operator")


class OperatorProcess:
    """Made, then `run` once."""

    def __init__(self, home: Home, settings: Settings, installation: Installation, epoch: int | None) -> None:
        self._home = home
        self._settings = settings
        self._stop = asyncio.Event()
        self._stops_all = False
        self._database = open_state(installation.database or home.database_file, epoch)
        self._store = ApiStore(self._database)
        self._jobs_database = open_jobs(installation.database or home.jobs_database_file, epoch)
        facts = FactStore(self._database)
        self._token = shared_token(home, facts) if installation.database else read_token(home)
        place = create_place(home, installation, facts, epoch or 1, _logger)
        self._cluster, self._engine, self._placer = place.cluster, place.engine, place.placer
        self._shared = SharedProjects(home, ProjectStore(self._database), _logger) if installation.database else None
        self._metric_totals = MetricTotals(home.metrics_dir, MetricStore(self._database), _logger)
        self._engine.on_end = self._metric_totals.end
        self._model_agent = ModelAgent(home, os.environ, _logger)
        self._certificate = ServedCertificate(settings.tls, home.fingerprints_file, _logger)
        self._settings = self._certificate.named(settings)
        listening = GatewaySettings(settings.host, settings.gateway_port, certificate=self._certificate.pem)
        own = Gateway(home, listening)
        self._fleet = place.fleet(own, listening) if place.fleet else None
        self._gateway: AnyGateway = self._fleet or own
        self._reconciler = self._make_reconciler(place)
        self._keys = Keys(KeyStore(self._database), self._reconciler.publish_now)
        self._reconciler.keys = self._keys.in_force
        self._job_store = JobStore(self._jobs_database)
        self._supervisor = JobSupervisor(
            home,
            self._store,
            self._job_store,
            self._engine,
            self._reconciler.preparations,
            os.environ,
            self._worker_token,
            _logger,
        )
        self._metrics = Metrics(
            self._store, self._metric_totals, self._gateway, self._job_store, self._reconciler.state, _logger
        )
        self._scaling = self._make_scaling()
        self._tracking = Tracking(home, self._store, self._metric_totals, PredictionStore(self._database), _logger)
        self._jobs = Jobs(self._store, self._job_store, self._supervisor, os.environ, self._endpoint)
        self._schedules = Schedules(self._store, self._job_store, self._jobs, _logger)
        self._async_apis = AsyncApis(
            home,
            self._store,
            self._job_store.workloads,
            self._engine,
            self._supervisor.crews,
            self._supervisor.dispatcher,
            self._worker_token,
        )
        self._reconciler.async_apis = self._async_apis
        self._metrics.open_workloads = self._job_store.workloads.counts
        self._reconciler.targets_of_jobs = self._supervisor.targets
        self._engine.on_change = self._reconciler.preparations.on_change = self._wake

    def _make_reconciler(self, place: Place) -> Reconciler:
        made = Reconciler(self._home, self._store, self._engine, self._gateway, place.prepare, _logger)
        made.gateway_secret = place.gateway_secret
        if self._cluster is not None:
            made.is_blameless = self._cluster.was_lost_with_node
        if self._fleet is not None:
            made.gateways = self._fleet.size
            self._fleet.on_change = made.wake
        return made

    def _make_scaling(self) -> Scaling:
        cores = self._cluster.cores if self._cluster else CpuMeter().cores
        sources = Sources(lambda: requests_of(self._gateway), self._job_store.workloads.count, cores)
        speed = self._settings.autoscaler_speed
        return Scaling(self._store, self._engine, sources, self._reconciler.wake, _logger, speed)

    def _wake(self) -> None:
        self._reconciler.wake()
        self._supervisor.wake()

    def _worker_token(self, worker: str) -> str:
        return worker_token(self._token, worker)

    def _endpoint(self, api: Api) -> str:
        return self._settings.url(self._settings.gateway_port) + api.networking.endpoint

    @property
    def is_stopping(self) -> bool:
        """Tell whether it was told to end."""
        return self._stop.is_set()

    async def run(self, listener: socket.socket) -> None:
        """Serve until a signal or a request ends it. Raises: GatewayError if the gateway can't be started."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        projects = ProjectFolders(self._home)
        projects.clean()
        await self._engine.startup()
        self._metric_totals.startup(self._cluster.unsettled() if self._cluster else self._engine.replicas().keys())
        await self._model_agent.startup(self._needs_model_agent)
        await self._supervisor.startup()
        if self._shared is not None:
            await self._bring_projects(self._shared)
        await self._async_apis.startup()
        await self._gateway.startup(self._reconciler.routes())
        identity = identify(self._settings)
        server = self._server(identity, projects)
        tell_identity(self._home, identity)
        keep_settings(self._home, self._settings, _logger)
        _logger.info("operator started", pid=identity.process.pid, url=identity.url, gateway=identity.gateway_url)
        tasks = [
            asyncio.create_task(self._reconciler.run(), name="reconcile"),
            asyncio.create_task(self._supervisor.run(), name="supervise jobs"),
            asyncio.create_task(self._schedules.run(), name="submit what is due"),
            asyncio.create_task(self._scaling.run(), name="scale"),
            asyncio.create_task(self._tracking.run(), name="follow predictions"),
            asyncio.create_task(self._keep_gateway(), name="keep gateway"),
            asyncio.create_task(self._model_agent.run(), name="keep model agent"),
        ]
        servers = [(server, listener), (self._jobs_server(), listen_privately(self._home.jobs_socket))]
        serving = [asyncio.create_task(server.serve(sockets=[socket]), name="serve") for server, socket in servers]
        await self._stop.wait()
        for server, _ in servers:
            server.should_exit = True
        await asyncio.gather(*serving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._shutdown()
        await self._job_store.shutdown()

    async def _bring_projects(self, shared: SharedProjects) -> None:
        """Have every project that an API, or a job, names."""
        targets = [target for record in self._store.records() for target in (record.target, record.serving) if target]
        await shared.bring({target.project_hash for target in [*targets, *self._supervisor.targets()]})

    async def _shutdown(self) -> None:
        if self._stops_all:
            await self._reconciler.stop_all(_DOWN_DRAIN_S)
            await self._gateway.stop()  # before the agents of nodes, which end theirs
            if self._cluster is not None:
                await self._cluster.end_nodes()
            await self._model_agent.stop()
            (self._home.run_dir / "operator.json").unlink(missing_ok=True)
            shutil.rmtree(self._home.metrics_dir, ignore_errors=True)  # it may be outside of the home
        else:
            await self._model_agent.shutdown()
            await self._gateway.shutdown()
        await self._engine.shutdown()
        self._database.dispose()
        _logger.info("operator stopped", stopped_all=self._stops_all)

    def _shut_down(self, stops_all: bool) -> None:
        self._stops_all = stops_all
        self._stop.set()

    def _server(self, identity: Identity, projects: ProjectFolders) -> uvicorn.Server:
        reconciler = self._reconciler
        deployer = Deployer(
            self._store,
            projects,
            is_updating=reconciler.is_updating,
            is_failing=lambda record: reconciler.own_state(record).status in (ApiStatus.ERROR, ApiStatus.OOM),
            on_change=reconciler.wake,
            look_around=self._look_around,
        )
        deployer.share = self._shared.save if self._shared else None
        operator = Operator(
            self._home,
            identity,
            self._store,
            self._engine,
            self._gateway,
            self._model_agent,
            reconciler,
            deployer,
            self._jobs,
            self._schedules,
            self._metrics,
            self._scaling,
            self._tracking,
            self._keys,
            _logger,
            self._cluster,
            self._fleet,
            self._placer,
        )
        host, is_name = self._settings.host, self._certificate.is_name
        app = create_app(operator, self._token, host, _logger, self._shut_down, __version__, is_name)
        return create_server(app, self._certificate.context)

    def _jobs_server(self) -> uvicorn.Server:
        """Return the server of the private socket on which the gateway and the workers call."""
        return create_jobs_server(
            create_jobs_app(
                PublicJobs(self._jobs), self._async_apis, self._supervisor.dispatcher, self._worker_token, _logger
            )
        )

    def _needs_model_agent(self) -> bool:
        """Tell whether an API, or a replica that runs still, has models. In a cluster, it lists them for the nodes."""
        targets = [target for record in self._store.records() for target in (record.target, record.serving) if target]
        return any(loads_models(target.spec) for target in targets) or any(
            spec.model_agent_socket for spec, _ in self._engine.replicas().values()
        )

    async def _look_around(self) -> Surroundings:
        return Surroundings(os.environ, await self._engine.find_devices())

    async def _keep_gateway(self) -> None:
        while True:
            await asyncio.sleep(_GATEWAY_CHECK_S)
            if self._certificate.renew():
                self._gateway.use_certificate(self._certificate.pem)
            try:
                await self._gateway.ensure_running()
            except Exception as error:  # whatever it is, it must be tried again
                expected = isinstance(error, GatewayError)
                _logger.error("gateway can't be kept running", None if expected else error, error=error)
