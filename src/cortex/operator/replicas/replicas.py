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
from cortex.operator.replicas.signatures import Signatures
from cortex.state.queries.apis import ApiRecord
from cortex.state.queries.keys import KeyStore
from cortex.state.queries.signatures import SignatureStore


class Replicas:
    """The subsystem of replicas."""

    def __init__(self, context: OperatorContext, infrastructure: Infrastructure, jobs: Jobs) -> None:
        apis, logger, cluster = context.apis, context.logger, infrastructure.cluster
        self.active_keys = ActiveKeys(KeyStore(context.database))
        self.signatures = Signatures(SignatureStore(context.database), logger)
        self.trials = Trials(apis, context.facts)
        self.documentation = Documentation(apis, self.signatures, context.projects)
        self.reconciler = Reconciler(
            context,
            infrastructure,
            jobs.async_apis,
            jobs.reconciler.revisions,
            self.active_keys.for_gateway,
            self.signatures,
            self.trials.percents,
        )
        cores = cluster.engine.cores if cluster else CpuMeter().cores
        sources = LoadSources(lambda: requests_of(infrastructure.gateway), jobs.store.workloads.count, cores)
        speed = context.settings.autoscaler_speed
        self._wake = context.wakes.replicas.set
        self.autoscaler = Autoscaler(apis, infrastructure.engine, sources, self._wake, logger, speed)

    def promote(self, record: ApiRecord, by: str) -> None:
        """End the trial of an API in favour of its newest revision. Raises: ConflictError if none is open."""
        self.trials.promote(record, by)
        self._wake()

    def is_failing(self, record: ApiRecord) -> bool:
        """Return whether an API does not answer because its code fails."""
        return self.reconciler.own_state(record).status in (ApiStatus.ERROR, ApiStatus.OOM)

    def loops(self) -> Loops:
        """Return what runs until the operator stops."""
        return {"reconcile": self.reconciler.run, "scale": self.autoscaler.run}
