"""The services that the operator's HTTP routes call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cortex.engine.logs import LocalLogs, LogSource
from cortex.engine.model_agent import ModelAgent
from cortex.errors import NotFoundError
from cortex.gateway.access_log import AccessSource, LocalAccess
from cortex.home import Home
from cortex.installation import OperatorIdentity
from cortex.operator.access.access_control import AccessControl
from cortex.operator.deploy.deploys import Deploys
from cortex.operator.infrastructure import Infrastructure
from cortex.operator.jobs.jobs import Jobs
from cortex.operator.monitoring.monitoring import Monitoring
from cortex.operator.replicas.replicas import Replicas
from cortex.state.queries.apis import ApiRecord, ApiStore


@dataclass(frozen=True)
class Services:
    """One instance per operator; every group of routes takes what it needs from it."""

    home: Home
    identity: OperatorIdentity
    apis: ApiStore
    infrastructure: Infrastructure
    model_agent: ModelAgent
    jobs: Jobs
    replicas: Replicas
    monitoring: Monitoring
    deploys: Deploys
    access: AccessControl
    shut_down: Callable[[bool], None]  #: stop the operator soon; with True the gateway and all replicas, too

    def api(self, name: str) -> ApiRecord:
        """Return a deployed API. Raises: NotFoundError."""
        record = self.apis.get(name)
        if record is None:
            raise NotFoundError(f"{name} is not deployed")
        return record

    def log_sources(self) -> Sequence[LogSource]:
        """Return the logs of this machine and of every cluster node that is up."""
        nodes = self.infrastructure.cluster.engine.nodes.values() if self.infrastructure.cluster else ()
        return [LocalLogs(self.home.logs_dir), *(node for node in nodes if node.is_up)]

    def access_log_sources(self) -> Sequence[AccessSource]:
        """Return the access logs of this machine's gateway and of every node gateway that is up."""
        sources: list[AccessSource] = [LocalAccess(self.home.logs_dir)]
        if self.infrastructure.cluster is not None:
            with_gateway = {gateway["node"] for gateway in self.infrastructure.cluster.fleet.describe()}
            nodes = self.infrastructure.cluster.engine.nodes.values()
            sources += [node for node in nodes if node.is_up and node.address.host in with_gateway]
        return sources
