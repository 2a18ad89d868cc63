"""A deployer over a real store, without replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from cortex.home import Home
from cortex.operator.access.tokens import Principal
from cortex.operator.deploy.deployer import Deployer, DeployResult
from cortex.operator.deploy.diagnose import Machine
from cortex.operator.deploy.projects import ProjectFolders, SharedProjects
from cortex.state.database import open_sqlite
from cortex.state.queries.apis import ApiRecord, ApiStore
from harness.installations.running import HANDLER, config, project


@dataclass
class Desk:
    """A deployer with its store and a fake reconciler state."""

    home: Home
    updating: set[str] = field(default_factory=set)
    changes: int = 0
    failing: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.store = ApiStore(open_sqlite(self.home.database_file))
        self.projects = ProjectFolders(self.home)
        self.deployer = self.new_deployer()

    def new_deployer(
        self,
        shared: SharedProjects | None = None,
        inspect_machine: Callable[[], Awaitable[Machine]] | None = None,
    ) -> Deployer:
        return Deployer(
            self.store,
            self.projects,
            is_updating=lambda record: record.name in self.updating,
            is_failing=lambda record: record.name in self.failing,
            on_change=self._changed,
            inspect_machine=inspect_machine,
            shared=shared,
        )

    def deploy(
        self,
        yaml: str | None = None,
        handler: str = HANDLER,
        force: bool = False,
        principal: Principal | None = None,
        **files: str,
    ) -> list[DeployResult]:
        archive = project(config() if yaml is None else yaml, handler, **files)
        return asyncio.run(self.deployer.deploy(archive, "cortex.yaml", force, principal))

    def rollback(
        self, number: int | None = None, name: str = "iris", force: bool = False, principal: Principal | None = None
    ) -> DeployResult:
        return asyncio.run(self.deployer.rollback(name, number, force, "ana", principal=principal))

    def go_live(self, name: str = "iris") -> None:
        """Record that the newest revision became ready, as the reconciler does."""
        self.store.mark_serving(name, self.record(name).target)

    def patch(self, yaml: str, force: bool = False, principal: Principal | None = None) -> list[DeployResult]:
        return asyncio.run(self.deployer.patch(yaml.encode(), force, principal))

    def record(self, name: str = "iris") -> ApiRecord:
        record = self.store.get(name)
        assert record is not None
        return record

    def _changed(self) -> None:
        self.changes += 1
