"""What the operator's HTTP routes show: APIs, replicas and itself as JSON. Decides and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from cortex.cluster.engine import ClusterEngine
from cortex.cluster.gateways import Fleet
from cortex.cluster.placement import Placer
from cortex.config.schema import Api
from cortex.engine.base import Engine
from cortex.engine.log_source import LocalLogs, LogSource
from cortex.engine.model_agent import ModelAgent
from cortex.errors import GatewayError, NotFoundError
from cortex.gateway.access_log import AccessSource, LocalAccess
from cortex.gateway.base import AnyGateway
from cortex.home import Home
from cortex.jobs.http.view import status_json
from cortex.lifecycle import ApiKind
from cortex.operator.autoscaling.sampler import Scaling
from cortex.operator.deploy.deployer import Deployer
from cortex.operator.deploy.keys import Keys
from cortex.operator.jobs.schedules import Schedules
from cortex.operator.jobs.service import NO_JOBS, Jobs
from cortex.operator.monitoring.metrics import Metrics
from cortex.operator.monitoring.tracking import Tracking
from cortex.operator.replicas.models_view import as_metadata, describe_models
from cortex.operator.replicas.reconciler import Reconciler
from cortex.processes.identity import Identity as ProcessIdentity
from cortex.state.apis import ApiRecord, ApiStore
from cortex.telemetry import Logger

Json = dict[str, Any]

#: What an API is that runs code, besides what every API is.
_OF_CODE = ("handler", "compute", "autoscaling")


@dataclass(frozen=True)
class Identity:
    """Who this operator is and where it and its gateway answer."""

    process: ProcessIdentity
    url: str
    gateway_url: str
    version: str
    started_at: datetime
    address: str = ""  #: on which both listen, as it is called from this machine
    tls_cert: str = ""  #: files of the certificate and its key; "" without TLS
    tls_key: str = ""
    host: str = ""  #: on which both listen, as it was asked for

    def to_json(self) -> Json:
        """Return what `run/operator.json` holds."""
        data = asdict(self)
        return {**data.pop("process"), **data, "started_at": self.started_at.isoformat()}


@dataclass(frozen=True)
class Operator:
    """All that the routes need."""

    home: Home
    identity: Identity
    store: ApiStore
    engine: Engine
    gateway: AnyGateway
    model_agent: ModelAgent
    reconciler: Reconciler
    deployer: Deployer
    jobs: Jobs
    schedules: Schedules
    metrics: Metrics
    scaling: Scaling
    tracking: Tracking
    keys: Keys
    logger: Logger
    cluster: ClusterEngine | None = None
    fleet: Fleet | None = None
    placer: Placer | None = None

    def log_sources(self) -> Sequence[LogSource]:
        """Return where lines of logs come from: this machine, and the nodes of the cluster that answer."""
        nodes = self.cluster.links.values() if self.cluster else ()
        return [LocalLogs(self.home.logs_dir), *(node for node in nodes if node.is_up)]

    def access_sources(self) -> Sequence[AccessSource]:
        """Return where lines of access logs come from: this machine's gateway, and those on nodes that answer."""
        fed = {gateway["node"] for gateway in self.fleet.describe()} if self.fleet else set()
        nodes = self.cluster.links.values() if self.cluster else ()
        return [LocalAccess(self.home.logs_dir), *(node for node in nodes if node.is_up and node.address.host in fed)]

    def require(self, name: str) -> ApiRecord:
        """Return an API. Raises: NotFoundError."""
        record = self.store.get(name)
        if record is None:
            raise NotFoundError(f"{name} is not deployed")
        return record

    async def describe(self, record: ApiRecord) -> Json:
        """Return one API as JSON, with its newest jobs if it runs any."""
        described = self._describe(record, await self._metrics())
        if record.spec.kind.runs_jobs:
            jobs = await self.jobs.list(record.name)
            described |= (await self.jobs.summaries()).get(record.name, NO_JOBS)
            described["schedule"] = await self.schedules.describe(record)
            name = "task_job_statuses" if record.spec.kind is ApiKind.TASK else "batch_job_statuses"
            described[name] = [status_json(job) for job in jobs]
        if record.spec.tracker is not None:
            described["tracker"] = await asyncio.to_thread(self.tracking.describe, record)
        return described

    async def describe_all(self) -> list[Json]:
        """Return every API as JSON."""
        metrics, records = await self._metrics(), self.store.records()
        jobs = await self.jobs.summaries() if any(record.spec.kind.runs_jobs for record in records) else {}
        return [
            self._describe(record, metrics) | (jobs.get(record.name, NO_JOBS) if record.spec.kind.runs_jobs else {})
            for record in records
        ]

    def describe_processes(self) -> list[Json]:
        """Return one entry per process of each replica."""
        statuses = sorted((status for _, status in self.engine.replicas().values()), key=lambda status: status.id)
        return [row for status in statuses for row in status.describe_processes()]

    def describe_self(self) -> Json:
        """Return what `cortex status` shows."""
        identity, models_pid = self.identity, self.model_agent.pid
        return {
            "operator": {
                "pid": identity.process.pid,
                "url": identity.url,
                "version": identity.version,
                "started_at": identity.started_at.isoformat(),
            },
            "gateway": {"pid": self.gateway.pid, "url": identity.gateway_url},
            "gateways": self.fleet.describe() if self.fleet else [],
            "cluster": self._describe_cluster(),
            "models": {"pid": models_pid} if models_pid else None,
            "replicas": self.describe_processes(),
        }

    def _describe_cluster(self) -> Json | None:
        if self.placer is None or self.cluster is None:
            return None
        nodes = sorted(host for host, link in self.cluster.links.items() if link.is_up)
        return {"problem": self.placer.reason, "nodes": nodes}

    async def _metrics(self) -> dict[str, Json]:
        try:
            stats = await self.gateway.stats()
        except GatewayError as error:
            self.logger.warning("gateway does not tell its counts", error=error)
            return {}
        return {
            name: {
                "requests": {f"{kind}xx": api.responses.get(kind, 0) for kind in range(1, 6)},
                "in_flight": api.in_flight,
                "queued": api.queued,
                "average_ms": api.average_ms,
            }
            for name, api in stats.items()
        }

    def _describe(self, record: ApiRecord, metrics: dict[str, Json]) -> Json:
        versions = self.store.versions(record.name)
        models = describe_models(self.reconciler.statuses(record.name))
        return {
            "spec": _shown(record.spec),
            "status": self.reconciler.state(record).to_json(),
            "metrics": metrics.get(record.name, {}),
            "open_workloads": self.jobs.open_workloads(record.name),
            "endpoint": self.identity.gateway_url + record.spec.networking.endpoint,
            "deployment": record.deployment,
            "api_id": record.api_id,
            "revision": record.revision,
            "models": models,
            "realtime_model_metadata": as_metadata(models) if models else None,
            "last_updated": record.updated_at.isoformat(),
            "api_versions": [
                {"api_id": version.api_id, "last_updated": version.deployed_at.isoformat()} for version in versions
            ],
        }


def _shown(spec: Api) -> Json:
    """Return a spec without the values of its environment variables, which are where secrets are."""
    data = spec.model_dump(mode="json")
    if spec.kind is ApiKind.SPLITTER:  # which runs no code of its own
        return {name: value for name, value in data.items() if name not in _OF_CODE}
    data["handler"]["env"] = dict.fromkeys(data["handler"]["env"], "********")
    return data
