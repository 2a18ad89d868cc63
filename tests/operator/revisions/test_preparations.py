from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from cortex.engine.environment import Prepared
from cortex.errors import EnvironmentBuildError
from cortex.operator.revisions.preparation_states import Preparation, Stage
from cortex.operator.revisions.preparations import Preparations
from cortex.state.revision import Revision
from cortex.telemetry import Logger
from cortex.worker.spec import StartFailure
from harness.replicas.fleet import deployed

KEY = ("iris", "r1")
PREPARED = Prepared("python", {})


@dataclass
class Desk:
    """Preparations with scripted outcomes and clock."""

    outcomes: list[Prepared | Exception] = field(default_factory=list)
    now: float = 0.0
    changes: int = 0

    def __post_init__(self) -> None:
        self.preparations = Preparations(self._prepare, self._changed, lambda: self.now, Logger("test"))

    async def _prepare(self, _: Revision) -> Prepared:
        await asyncio.sleep(0)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _changed(self) -> None:
        self.changes += 1

    async def attempt(self) -> Preparation:
        before = self.changes
        self.preparations.begin(deployed())
        while self.changes == before:
            await asyncio.sleep(0)
        return self.state

    @property
    def state(self) -> Preparation:
        return self.preparations.states()[KEY]


@contextlib.asynccontextmanager
async def open_desk() -> AsyncIterator[Desk]:
    desk = Desk()
    yield desk
    await desk.preparations.shutdown()


async def test_a_revision_is_prepared_once() -> None:
    async with open_desk() as desk:
        desk.outcomes = [PREPARED]
        assert await desk.attempt() == Preparation(Stage.DONE)
        desk.preparations.begin(deployed())
        assert desk.preparations.prepared(deployed()) == PREPARED


async def test_a_failure_is_kept_while_the_next_attempt_runs_and_delays_it_longer_each_time() -> None:
    async with open_desk() as desk:
        desk.outcomes = [EnvironmentBuildError("no such package"), RuntimeError("disk"), PREPARED]
        failed = await desk.attempt()
        failure = StartFailure("no such package", summary="its environment can't be installed")
        assert failed == Preparation(Stage.NEEDED, failure, hold_until=10.0, failures=1)
        desk.preparations.begin(deployed())
        assert (desk.state.stage, desk.state.failure) == (Stage.RUNNING, failure)
        while desk.changes < 2:
            await asyncio.sleep(0)
        assert (desk.state.hold_until, desk.state.failure) == (20.0, StartFailure("disk"))
        assert await desk.attempt() == Preparation(Stage.DONE)


async def test_replacement_delays_grow_with_each_loss_and_reset_after_a_quiet_time() -> None:
    async with open_desk() as desk:
        delays = []
        for _ in range(9):
            desk.preparations.lost(KEY, is_blameless=True)
            delays.append(desk.state.hold_until - desk.now)
            desk.now += delays[-1]
            desk.now += 1
        assert delays == [0, 1, 2, 4, 8, 16, 32, 60, 60]
        desk.now += 1000
        desk.preparations.lost(KEY, is_blameless=True)
        assert desk.state.hold_until == desk.now
        assert desk.state.failure is None


async def test_replicas_lost_at_the_same_time_count_as_one_loss() -> None:
    async with open_desk() as desk:
        for _ in range(20):
            desk.preparations.lost(KEY, is_blameless=True)
            desk.now += 0.01
        assert desk.state.hold_until <= desk.now


async def test_a_replica_that_ends_before_it_is_ready_is_a_failure_until_one_becomes_ready() -> None:
    async with open_desk() as desk:
        desk.preparations.lost(KEY, is_blameless=False)
        assert desk.state.failure is None  # it may have been killed
        assert desk.state.hold_until == desk.now
        desk.preparations.lost(KEY, is_blameless=False)
        assert desk.state.failure is not None
        desk.preparations.became_ready(KEY)
        assert desk.state.failure is None


async def test_dropping_a_revision_cancels_its_preparation() -> None:
    async with open_desk() as desk:
        desk.outcomes = [PREPARED]
        desk.preparations.begin(deployed())
        desk.preparations.keep_only(())
        assert desk.preparations.states() == {}
        await asyncio.sleep(0.01)
        assert desk.outcomes == [PREPARED]
