"""Figures about APIs: metrics, predictions, and the samples of the dashboard."""

from __future__ import annotations

import os

from cortex.engine.usage import resource_usage
from cortex.operator.certificates import ServedCertificate
from cortex.operator.context import Loops, OperatorContext
from cortex.operator.dashboard.samples import LoadRecorder
from cortex.operator.infrastructure import Infrastructure
from cortex.operator.jobs.jobs import Jobs
from cortex.operator.monitoring.metric_totals import MetricTotals
from cortex.operator.monitoring.metrics import Metrics
from cortex.operator.monitoring.tracking import PredictionArchive, Tracking
from cortex.operator.replicas.replicas import Replicas
from cortex.state.queries.metrics import MetricStore
from cortex.state.queries.predictions import PredictionStore


class Monitoring:
    """The subsystem of figures."""

    def __init__(
        self,
        context: OperatorContext,
        infrastructure: Infrastructure,
        jobs: Jobs,
        replicas: Replicas,
        certificate: ServedCertificate,
    ) -> None:
        home, apis, logger = context.home, context.apis, context.logger
        engine, gateway, cluster = infrastructure.engine, infrastructure.gateway, infrastructure.cluster
        state_of = replicas.reconciler.state
        archive = PredictionArchive(home, logger)
        self.totals = MetricTotals(home.metrics_dir, MetricStore(context.database), logger, archive.add)
        self.metrics = Metrics(
            apis,
            self.totals,
            gateway,
            jobs.store,
            jobs.store.workloads.counts,
            state_of,
            replicas.trials,
            certificate,
            cluster.engine.usage if cluster else lambda: resource_usage(engine.replicas().values(), os.environ),
            logger,
        )
        self.tracking = Tracking(home, apis, self.totals, archive, PredictionStore(context.database), logger)
        self.load = LoadRecorder(apis, gateway, self.totals, jobs.store.workloads.count, state_of, logger)

    def loops(self) -> Loops:
        """Return what runs until the operator stops."""
        return {"track predictions": self.tracking.run, "sample for the dashboard": self.load.run}
