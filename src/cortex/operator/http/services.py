"""The services that the operator's HTTP routes call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cortex.engine.base import Engine
from cortex.engine.logs import LocalLogs, LogSource
from cortex.engine.model_agent import ModelAgent
from cortex.errors import NotFoundError
from cortex.gateway.access_log import AccessSource, LocalAccess
from cortex.gateway.base import Gateway
from cortex.home import Home
from cortex.installation import OperatorIdentity
from cortex.operator.access.audit import AuditLog
from cortex.operator.access.keys import Keys
from cortex.operator.access.tokens import Tokens
from cortex.operator.autoscaling.autoscaler import Autoscaler
from cortex.operator.canary.trials import Trials
from cortex.operator.dashboard.samples import LoadRecorder
from cortex.operator.deploy.deployer import Deployer
from cortex.operator.documentation import Documentation
from cortex.operator.infrastructure import Cluster
from cortex.operator.jobs.async_apis import AsyncApis
from cortex.operator.jobs.schedules import Schedules
from cortex.operator.jobs.service import JobService
from cortex.operator.monitoring.metrics import Metrics
from cortex.operator.monitoring.tracking import Tracking
from cortex.operator.replicas.reconciler import Reconciler
from cortex.state.queries.apis import ApiRecord, ApiStore


@dataclass(frozen=True)
class Services:
    """One instance per operator; every group of routes takes what it needs from it."""

    home: Home
    identity: OperatorIdentity
    apis: ApiStore
    engine: Engine
    gateway: Gateway
    model_agent: ModelAgent
    cluster: Cluster | None
    reconciler: Reconciler
    deployer: Deployer
    keys: Keys
    tokens: Tokens
    audit_log: AuditLog
    jobs: JobService
    async_apis: AsyncApis
    schedules: Schedules
    autoscaler: Autoscaler
    metrics: Metrics
    tracking: Tracking
    trials: Trials
    documentation: Documentation
    load: LoadRecorder
    shut_down: Callable[[bool], None]  #: stop the operator soon; with True the gateway and all replicas, too

    def api(self, name: str) -> ApiRecord:
        """Return a deployed API. Raises: NotFoundError."""
        record = self.apis.get(name)
        if record is None:
            raise NotFoundError(f"{name} is not deployed")
        return record

    def log_sources(self) -> Sequence[LogSource]:
        """Return the logs of this machine and of every cluster node that is up."""
        nodes = self.cluster.engine.nodes.values() if self.cluster else ()
        return [LocalLogs(self.home.logs_dir), *(node for node in nodes if node.is_up)]

    def access_log_sources(self) -> Sequence[AccessSource]:
        """Return the access logs of this machine's gateway and of every node gateway that is up."""
        sources: list[AccessSource] = [LocalAccess(self.home.logs_dir)]
        if self.cluster is not None:
            with_gateway = {gateway["node"] for gateway in self.cluster.fleet.describe()}
            nodes = self.cluster.engine.nodes.values()
            sources += [node for node in nodes if node.is_up and node.address.host in with_gateway]
        return sources
