"""Replicas, the routes of the gateway to them, and their number."""

from __future__ import annotations

from cortex.engine.usage import CpuMeter
from cortex.lifecycle import ApiStatus
from cortex.operator.access.keys import ActiveKeys
from cortex.operator.autoscaling.autoscaler import Autoscaler, LoadSources, requests_of
from cortex.operator.canary.trials import Trials
from cortex.operator.context import Loops, OperatorContext
from cortex.operator.documentation import Documentation
from cortex.operator.infrastructure import Infrastructure
from cortex.operator.jobs.jobs import Jobs
from cortex.operator.replicas.reconciler import Reconciler
from cortex.operator.replicas.routing import RouteSettings
from cortex.operator.replicas.signatures import Signatures
from cortex.state.queries.apis import ApiRecord
from cortex.state.queries.keys import KeyStore
from cortex.state.queries.signatures import SignatureStore


class Replicas:
    """The subsystem of replicas."""

    def __init__(self, context: OperatorContext, infrastructure: Infrastructure, jobs: Jobs) -> None:
        apis, logger, installation = context.apis, context.logger, context.installation
        engine, gateway, cluster = infrastructure.engine, infrastructure.gateway, infrastructure.cluster
        self.active_keys = ActiveKeys(KeyStore(context.database))
        self.signatures = Signatures(SignatureStore(context.database), logger)
        self.trials = Trials(apis, context.facts)
        self.documentation = Documentation(apis, self.signatures, context.projects)
        self.reconciler = Reconciler(
            context.home,
            apis,
            engine,
            gateway,
            infrastructure.preparations,
            jobs.async_apis,
            jobs.reconciler.revisions,
            self.active_keys.for_gateway,
            self.signatures,
            logger,
            route_settings=RouteSettings(
                infrastructure.gateway_secret, installation.v2_at_root, installation.connections_per_address
            ),
            gateway_count=cluster.fleet.size if cluster else lambda: 1,
            canary_percents=self.trials.percents,
            was_lost_with_node=cluster.engine.was_lost_with_node if cluster else lambda replica_id: False,
            awake=context.wakes.replicas,
        )
        cores = cluster.engine.cores if cluster else CpuMeter().cores
        sources = LoadSources(lambda: requests_of(gateway), jobs.store.workloads.count, cores)
        speed = context.settings.autoscaler_speed
        self.autoscaler = Autoscaler(apis, engine, sources, context.wakes.replicas.set, logger, speed)

    def is_failing(self, record: ApiRecord) -> bool:
        """Return whether an API does not answer because its code fails."""
        return self.reconciler.own_state(record).status in (ApiStatus.ERROR, ApiStatus.OOM)

    def loops(self) -> Loops:
        """Return what runs until the operator stops."""
        return {"reconcile": self.reconciler.run, "scale": self.autoscaler.run}
