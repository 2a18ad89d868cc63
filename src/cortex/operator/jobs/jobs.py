"""Jobs, schedules and AsyncAPIs: the loop that runs them, and the services of their routes."""

from __future__ import annotations

import hmac
import os

from cortex.jobs.store import JobStore
from cortex.operator.context import Loops, OperatorContext
from cortex.operator.infrastructure import Infrastructure
from cortex.operator.jobs.async_apis import AsyncApis
from cortex.operator.jobs.completion import JobLog
from cortex.operator.jobs.dispatcher import Dispatcher
from cortex.operator.jobs.reconciler import JobReconciler
from cortex.operator.jobs.schedules import Schedules
from cortex.operator.jobs.service import JobService
from cortex.operator.jobs.workers import JobWorkers
from cortex.state.database import open_jobs


def worker_token(operator_token: str, worker: str) -> str:
    """Return a worker's token, derived from the operator's token, which it does not reveal."""
    return hmac.new(operator_token.encode(), worker.encode(), "sha256").hexdigest()


class Jobs:
    """The subsystem of jobs."""

    def __init__(self, context: OperatorContext, infrastructure: Infrastructure) -> None:
        home, apis, logger = context.home, context.apis, context.logger
        self._operator_token = context.token
        self.store = JobStore(open_jobs(context.installation.database or home.jobs_database_file, context.epoch))
        dispatcher = Dispatcher(self.store, context.wakes.jobs)
        log = JobLog(home).line
        workers = JobWorkers(infrastructure.engine, self.store, dispatcher, self.worker_token, log, logger)
        self.reconciler = JobReconciler(
            home, apis, self.store, workers, infrastructure.preparations, os.environ, logger
        )
        self.service = JobService(apis, self.store, self.reconciler, os.environ, context.endpoint)
        self.schedules = Schedules(apis, self.store, self.service, logger)
        self.async_apis = AsyncApis(home, apis, self.store.workloads, infrastructure.engine, workers)

    def worker_token(self, worker: str) -> str:
        """Return the token with which a job worker authenticates."""
        return worker_token(self._operator_token, worker)

    def loops(self) -> Loops:
        """Return what runs until the operator stops."""
        return {"reconcile jobs": self.reconciler.run, "submit scheduled jobs": self.schedules.run}
