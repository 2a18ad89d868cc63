"""Changes of what is deployed: by people, by the judge of canaries, and for new versions of models."""

from __future__ import annotations

import os
from collections.abc import Iterable

from cortex.engine.base import Engine
from cortex.operator.canary.controller import CanaryController
from cortex.operator.canary.model_versions import ModelVersions
from cortex.operator.context import Loops, OperatorContext
from cortex.operator.deploy.deployer import Deployer
from cortex.operator.deploy.diagnose import Machine
from cortex.operator.deploy.projects import SharedProjects
from cortex.operator.monitoring.metric_totals import MetricTotals
from cortex.operator.replicas.replicas import Replicas
from cortex.state.queries.history import BY_CANARY
from cortex.state.queries.projects import ProjectStore
from cortex.state.revision import Revision


class Deploys:
    """The subsystem of deploys."""

    def __init__(self, context: OperatorContext, engine: Engine, replicas: Replicas, totals: MetricTotals) -> None:
        home, apis, logger, wake = context.home, context.apis, context.logger, context.wakes.replicas.set
        self._apis = apis
        self._engine = engine
        self._shared = SharedProjects(home, ProjectStore(context.database), logger) if context.is_shared else None
        self.deployer = Deployer(
            apis,
            context.projects,
            is_updating=replicas.reconciler.is_updating,
            is_failing=replicas.is_failing,
            on_change=wake,
            inspect_machine=self._inspect_machine,
            shared=self._shared,
        )
        self._canaries = CanaryController(apis, replicas.trials, totals, self._return_to, wake, logger)
        self._model_versions = ModelVersions(
            home.model_agent_socket, apis, replicas.trials, context.facts, self.deployer.deploy_models, logger
        )

    async def fetch_projects(self, job_revisions: Iterable[Revision]) -> None:
        """Fetch the projects of all revisions that this operator did not deploy itself."""
        if self._shared is not None:
            revisions = [
                *(revision for record in self._apis.records() for revision in record.revisions),
                *job_revisions,
            ]
            needed = {revision.project_hash for revision in revisions}
            await self._shared.keep_only(needed | self._apis.history_projects())
            await self._shared.fetch(needed)

    def loops(self) -> Loops:
        """Return what runs until the operator stops."""
        return {"judge canaries": self._canaries.run, "deploy new versions of models": self._model_versions.run}

    async def _return_to(self, api: str, number: int | None, revision: str) -> None:
        await self.deployer.rollback(api, number, force=True, by=BY_CANARY, only_from=revision)

    async def _inspect_machine(self) -> Machine:
        return Machine(os.environ, await self._engine.find_devices())
