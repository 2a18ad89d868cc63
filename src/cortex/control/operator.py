"""What the operator's HTTP routes show: APIs, replicas and itself as JSON. Decides and changes nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from cortex.config.schema import Api
from cortex.control.deployer import Deployer
from cortex.control.models_view import as_metadata, describe_models
from cortex.control.reconciler import Reconciler
from cortex.engine.base import Engine
from cortex.engine.model_agent import ModelAgent
from cortex.errors import GatewayError, NotFoundError
from cortex.gateway.haproxy import Gateway
from cortex.home import Home
from cortex.state.apis import ApiRecord, ApiStore
from cortex.telemetry import Logger

Json = dict[str, Any]


@dataclass(frozen=True)
class Identity:
    """Who this operator is and where it and its gateway answer."""

    pid: int
    create_time: float  #: when its process started, UNIX seconds: a pid alone may be reused
    url: str
    gateway_url: str
    version: str
    started_at: datetime

    def to_json(self) -> Json:
        """Return what `run/operator.json` holds."""
        return {**asdict(self), "started_at": self.started_at.isoformat()}


@dataclass(frozen=True)
class Operator:
    """All that the routes need."""

    home: Home
    identity: Identity
    store: ApiStore
    engine: Engine
    gateway: Gateway
    model_agent: ModelAgent
    reconciler: Reconciler
    deployer: Deployer
    logger: Logger

    def require(self, name: str) -> ApiRecord:
        """Return an API. Raises: NotFoundError."""
        record = self.store.get(name)
        if record is None:
            raise NotFoundError(f"{name} is not deployed")
        return record

    async def describe(self, record: ApiRecord) -> Json:
        """Return one API as JSON."""
        return self._describe(record, await self._metrics())

    async def describe_all(self) -> list[Json]:
        """Return every API as JSON."""
        metrics = await self._metrics()
        return [self._describe(record, metrics) for record in self.store.records()]

    def describe_processes(self) -> list[Json]:
        """Return one entry per process of each replica."""
        statuses = sorted((status for _, status in self.engine.replicas().values()), key=lambda status: status.id)
        return [row for status in statuses for row in status.describe_processes()]

    def describe_self(self) -> Json:
        """Return what `cortex status` shows."""
        identity, models_pid = self.identity, self.model_agent.pid
        return {
            "operator": {
                "pid": identity.pid,
                "url": identity.url,
                "version": identity.version,
                "started_at": identity.started_at.isoformat(),
            },
            "gateway": {"pid": self.gateway.pid, "url": identity.gateway_url},
            "models": {"pid": models_pid} if models_pid else None,
            "replicas": self.describe_processes(),
        }

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
    data["handler"]["env"] = dict.fromkeys(data["handler"]["env"], "********")
    return data
