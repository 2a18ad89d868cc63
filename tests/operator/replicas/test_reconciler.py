"""The reconciler with real stores, a scripted engine and a scripted gateway. Time moves only when a test sets it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from cortex.config.schema import Api
from cortex.engine.environment import Prepared
from cortex.errors import EnvironmentBuildError
from cortex.gateway.routes import ApiKey
from cortex.home import Home
from cortex.installation import Installation
from cortex.jobs.store import JobStore
from cortex.lifecycle import ApiStatus
from cortex.operator.context import OperatorContext
from cortex.operator.infrastructure import Infrastructure
from cortex.operator.jobs.async_apis import AsyncApis
from cortex.operator.jobs.dispatcher import Dispatcher
from cortex.operator.jobs.workers import JobWorkers
from cortex.operator.replicas.reconciler import Reconciler
from cortex.operator.replicas.routing import server_name
from cortex.operator.replicas.signatures import Signatures
from cortex.operator.replicas.status import ApiState
from cortex.operator.revisions.preparations import Preparations
from cortex.operator.settings import OperatorSettings
from cortex.state.database import open_jobs_sqlite, open_sqlite
from cortex.state.queries.apis import ApiChange, ApiRecord
from cortex.state.queries.signatures import SignatureStore
from cortex.state.revision import Revision
from cortex.telemetry import Logger
from harness.replicas.fleet import api, deployed
from harness.replicas.scripted import ScriptedEngine, ScriptedGateway, until
from harness.wait import PATIENCE_S

KEY = ApiKey("k1", "digest", ("iris",))


class Scene:
    """A reconciler with everything that it is constructed from."""

    def __init__(self, home: Home) -> None:
        self.now = 1_000_000.0
        self._databases = open_sqlite(home.database_file), open_jobs_sqlite(home.jobs_database_file)
        logger = Logger("test")
        settings, installation = OperatorSettings(), Installation()
        context = OperatorContext(home, settings, installation, self._databases[0], None, logger, clock=self._clock)
        self.apis, self._awake = context.apis, context.wakes.replicas
        self.signatures = SignatureStore(self._databases[0])
        self.jobs = JobStore(self._databases[1], self._clock)
        self.engine, self.gateway = ScriptedEngine(), ScriptedGateway()
        self.prepare_errors: list[Exception] = []
        self.prepared: list[str] = []
        self.lost_with_node: set[str] = set()
        self.job_revisions: list[Revision] = []
        self.preparations = Preparations(self._prepare, self._wake, self._clock, logger)
        dispatcher = Dispatcher(self.jobs, asyncio.Event(), self._clock)
        token = "token-of-{}".format
        self.workers = JobWorkers(self.engine, self.jobs, dispatcher, token, lambda *_: None, logger, self._clock)
        infrastructure = Infrastructure(
            self.engine,
            self.gateway,
            self.preparations,
            "secret",
            was_lost_with_node=lambda replica_id: replica_id in self.lost_with_node,
        )
        self.reconciler = Reconciler(
            context,
            infrastructure,
            AsyncApis(home, self.apis, self.jobs.workloads, self.engine, self.workers),
            lambda: self.job_revisions,
            lambda: [KEY],
            Signatures(self.signatures, logger),
            lambda records: {},
        )
        self.engine.on_change = self._wake

    def deploy(self, revision: str = "r1", spec: Api | None = None) -> None:
        self.apis.write([ApiChange(deployed(revision, spec), "nonce", "spec")])
        self._awake.set()

    def delete(self) -> None:
        self.apis.write([], ["iris"])
        self._awake.set()

    def advance(self, seconds: float) -> None:
        """Move the clock, and run a pass."""
        self.now += seconds
        self._awake.set()

    def record(self) -> ApiRecord:
        record = self.apis.get("iris")
        assert record is not None
        return record

    def state(self) -> ApiState:
        return self.reconciler.state(self.record())

    async def settled(self) -> ApiState:
        await self.reconciler.settled("iris", PATIENCE_S)
        return self.state()

    async def ready(self, revision: str = "r1", count: int = 1) -> list[str]:
        """Wait for the replicas of a revision and make them ready; return their ids."""
        await until(lambda: len(self.engine.ids(revision)) == count)
        for replica_id in self.engine.ids(revision):
            self.engine.make_ready(replica_id)
        await until(lambda: self.record().serving == self.record().target)
        return self.engine.ids(revision)

    async def passes(self) -> None:
        """Wait until a complete pass has run."""
        for _ in range(2):  # the first one may have begun before
            changed = self.reconciler._changed
            self._awake.set()
            await asyncio.wait_for(changed.wait(), PATIENCE_S)

    def dispose(self) -> None:
        for database in self._databases:
            database.dispose()

    async def _prepare(self, target: Revision) -> Prepared:
        self.prepared.append(target.hash)
        if self.prepare_errors:
            raise self.prepare_errors.pop(0)
        return Prepared("python", {})

    def _clock(self) -> float:
        return self.now

    def _wake(self) -> None:
        self._awake.set()


@contextlib.asynccontextmanager
async def scene(home: Home) -> AsyncIterator[Scene]:
    made = Scene(home)
    await made.jobs.startup()
    running = asyncio.create_task(made.reconciler.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield made
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await made.preparations.shutdown()
        await made.jobs.shutdown()
        made.dispose()


async def test_an_api_whose_replicas_are_ready_is_live_once_routes_lead_to_them(home: Home) -> None:
    async with scene(home) as made:
        made.deploy()
        await until(lambda: made.engine.ids())
        made.engine.make_ready(made.engine.ids()[0])
        assert made.gateway.servers() == set()
        assert made.state().status is ApiStatus.UPDATING
        assert (await made.settled()).status is ApiStatus.LIVE
        assert made.gateway.servers() != set()


async def test_starts_replicas_of_a_deployed_api_and_routes_to_them_once_they_are_ready(home: Home) -> None:
    async with scene(home) as made:
        made.deploy(spec=api(replicas=2))
        await until(lambda: len(made.engine.ids()) == 2)
        assert made.state().status is ApiStatus.UPDATING
        assert made.gateway.servers() == set()
        replicas = await made.ready(count=2)
        assert (await made.settled()).status is ApiStatus.LIVE
        assert made.gateway.servers() == {server_name(replica, 0) for replica in replicas}
        table = made.gateway.tables[-1]
        assert (table.gateway_secret, table.keys) == ("secret", (KEY,))


async def test_retries_a_failed_preparation_after_its_backoff(home: Home) -> None:
    async with scene(home) as made:
        made.prepare_errors = [EnvironmentBuildError("no such package")]
        made.deploy()
        state = await made.settled()
        assert state.status is ApiStatus.ERROR
        assert state.failure is not None and state.failure.message == "no such package"
        await made.passes()
        assert made.prepared == ["r1"]
        made.advance(10)
        await made.ready()
        assert (await made.settled()).status is ApiStatus.LIVE


async def test_replaces_a_crashed_replica_at_once_and_the_next_one_after_a_delay(home: Home) -> None:
    async with scene(home) as made:
        made.deploy()
        (first,) = await made.ready()
        await made.passes()
        made.engine.end(first)
        (second,) = await made.ready()
        assert second != first
        await made.passes()
        made.now += 1
        made.engine.end(second)
        await made.passes()
        assert made.engine.ids() == []
        made.advance(1)
        await made.ready()


async def test_blames_a_revision_whose_replicas_end_twice_before_they_are_ready(home: Home) -> None:
    async with scene(home) as made:
        made.deploy()
        for _ in range(2):
            assert made.record().failure is None
            await until(made.engine.ids)
            await made.passes()
            made.engine.end(made.engine.ids()[0])
            await made.passes()
        failure = made.record().failure
        assert failure is not None and failure.message.startswith("a replica ended before it was ready")


async def test_does_not_blame_a_revision_for_a_replica_that_was_lost_with_its_node(home: Home) -> None:
    async with scene(home) as made:
        made.deploy()
        await until(made.engine.ids)
        await made.passes()
        (lost,) = made.engine.ids()
        made.lost_with_node.add(lost)
        made.engine.end(lost)
        await until(made.engine.ids)
        assert made.record().failure is None


async def test_an_update_retires_the_old_replica_only_after_the_new_one_is_ready(home: Home) -> None:
    async with scene(home) as made:
        made.deploy()
        (old,) = await made.ready()
        await made.settled()
        made.deploy("r2")
        await until(lambda: made.engine.ids("r2"))
        await made.passes()
        assert made.gateway.servers() == {server_name(old, 0)}
        assert made.engine.stopped == {}
        (new,) = await made.ready("r2")
        await until(lambda: old in made.engine.stopped)
        assert made.gateway.servers() == {server_name(new, 0)}
        made.engine.end(old)
        assert (await made.settled()).status is ApiStatus.LIVE


async def test_a_revision_that_fails_leaves_the_previous_one_in_service_and_can_be_rolled_back(home: Home) -> None:
    async with scene(home) as made:
        made.deploy()
        (old,) = await made.ready()
        await made.settled()
        made.deploy("r2")
        await until(lambda: made.engine.ids("r2"))
        (failed,) = made.engine.ids("r2")
        made.engine.fail_to_start(failed, "ValueError: bad weights")
        await until(lambda: made.record().failure)
        state = await made.settled()
        assert (state.status, state.ready) == (ApiStatus.ERROR, 1)
        assert made.gateway.servers() == {server_name(old, 0)}
        made.deploy("r1")
        await until(lambda: failed in made.engine.stopped)
        assert (await made.settled()).status is ApiStatus.LIVE
        assert made.engine.ids("r1") == [old]


async def test_a_retired_replica_is_stopped_after_its_last_request(home: Home) -> None:
    async with scene(home) as made:
        made.deploy()
        (old,) = await made.ready()
        await made.settled()
        made.gateway.busy = {server_name(old, 0)}
        made.delete()
        await until(lambda: made.gateway.servers() == set())
        await made.passes()
        assert made.engine.stopped == {}
        made.gateway.busy = set()
        await until(lambda: old in made.engine.stopped)
        made.engine.end(old)
        await made.reconciler.settled("iris", PATIENCE_S)


async def test_a_retired_replica_is_stopped_although_the_gateway_fails(home: Home) -> None:
    async with scene(home) as made:
        made.deploy()
        (old,) = await made.ready()
        await made.settled()
        made.gateway.busy = {server_name(old, 0)}
        made.delete()
        await until(lambda: made.gateway.servers() == set())
        made.gateway.is_reachable = False
        await until(lambda: old in made.engine.stopped)


async def test_changed_limits_are_sent_to_running_replicas(home: Home) -> None:
    async with scene(home) as made:
        made.deploy()
        (replica,) = await made.ready()
        made.deploy(spec=api(networking={"timeout_s": 7}))
        await until(lambda: replica in made.engine.configured)
        assert made.engine.configured[replica].timeout_s == 7
        assert made.engine.ids() == [replica]


async def test_keeps_the_preparation_of_a_revision_that_only_jobs_need(home: Home) -> None:
    async with scene(home) as made:
        made.deploy()
        await made.ready()
        made.job_revisions = [deployed("r1")]
        made.delete()
        await made.passes()
        assert ("iris", "r1") in made.preparations.states()
        made.job_revisions = []
        await made.passes()
        assert made.preparations.states() == {}


async def test_replicas_of_an_async_api_get_access_to_its_queue_and_finish_their_workload(home: Home) -> None:
    async with scene(home) as made:
        made.deploy(spec=api(kind="AsyncAPI"))
        (replica,) = await made.ready()
        spec = made.engine.spec(replica)
        assert (spec.jobs_token, spec.jobs_socket is not None) == (f"token-of-{replica}", True)
        assert made.gateway.servers() == set()
        assert made.jobs.workloads.apis == ("iris",)
        made.delete()
        await until(lambda: replica in made.engine.stopped)


async def test_the_reconciler_ignores_job_workers(home: Home) -> None:
    async with scene(home) as made:
        made.deploy()
        (replica,) = await made.ready()
        spec, status = made.engine.running.pop(replica)
        made.engine.running["worker"] = replace(spec, id="worker", jobs_socket="/jobs"), status
        made.delete()
        await made.passes()
        assert made.engine.stopped == {}
