"""Trials of new revisions: their steps, their ends, and what is stored of them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from cortex.config.schema import Api, CanaryConfig
from cortex.errors import ConflictError, NotFoundError
from cortex.gateway.routes import COPIES_OF_ALL
from cortex.operator.canary.controller import CanaryController
from cortex.operator.canary.judge import Finding, PropertyFinding, RevisionNumbers
from cortex.operator.canary.trials import Trial, TrialOutcome, Trials, advance
from cortex.operator.monitoring.metric_totals import MetricTotals
from cortex.state.database import open_state
from cortex.state.queries.apis import ApiChange, ApiRecord, ApiStore, Revision, StoredFailure
from cortex.state.queries.key_values import KeyValueStore
from cortex.state.queries.metrics import MetricStore
from cortex.telemetry import Logger
from cortex.worker.monitoring.answers import ANSWERS_FOLDER, answer_digest
from cortex.worker.monitoring.metrics import (
    COPIES_FOLDER,
    FINE_BOUNDS_S,
    HANDLER,
    Histogram,
    MetricFile,
    SeriesKind,
    process_file,
    series_key,
)
from cortex.worker.monitoring.tracker import PREDICTIONS_FOLDER, PredictionKind, PredictionRing
from harness.replicas.fleet import api

CONFIG = CanaryConfig.model_validate({"steps": ["10%", "50%"], "min_requests": 100})
OPEN = Trial("r2", 2, "r1", 1, step_requests=100)


def found(finding: Finding) -> list[PropertyFinding]:
    return [
        PropertyFinding("errors", finding, 0.01, 0.05, 0.005, 0.0),
        PropertyFinding("p50", Finding.NOT_WORSE, 0.5, 0.4, 0.0, 0.0),
    ]


@pytest.mark.parametrize(
    ("trial", "finding", "age_s", "config", "expected"),
    [
        (OPEN, Finding.NOT_WORSE, 9, {}, replace(OPEN, step=1, step_requests=0)),
        (replace(OPEN, step_requests=99), Finding.NOT_WORSE, 9, {}, replace(OPEN, step_requests=99)),
        (OPEN, Finding.UNKNOWN, 9, {}, OPEN),
        (replace(OPEN, step=1), Finding.NOT_WORSE, 9, {}, TrialOutcome.PROMOTED),
        (OPEN, Finding.WORSE, 9, {}, TrialOutcome.ROLLED_BACK),
        (replace(OPEN, step_requests=0), Finding.WORSE, 9, {}, TrialOutcome.ROLLED_BACK),
        (OPEN, Finding.UNKNOWN, 86_400, {}, TrialOutcome.HELD),
        (OPEN, Finding.UNKNOWN, 86_400, {"on_no_decision": "promote"}, TrialOutcome.PROMOTED),
        (OPEN, Finding.UNKNOWN, 86_400, {"on_no_decision": "roll_back"}, TrialOutcome.ROLLED_BACK),
        (OPEN, Finding.UNKNOWN, 60, {"give_up_after": "1m"}, TrialOutcome.HELD),
        (replace(OPEN, outcome=TrialOutcome.HELD), Finding.UNKNOWN, 99_999, {}, TrialOutcome.HELD),
        (replace(OPEN, step=1, outcome=TrialOutcome.HELD), Finding.NOT_WORSE, 99_999, {}, TrialOutcome.PROMOTED),
        (replace(OPEN, outcome=TrialOutcome.HELD), Finding.WORSE, 99_999, {}, TrialOutcome.ROLLED_BACK),
    ],
)
def test_a_window_advances_a_trial(
    trial: Trial, finding: Finding, age_s: float, config: dict[str, Any], expected: Trial | TrialOutcome
) -> None:
    values = {("give_up_after_s" if name == "give_up_after" else name): value for name, value in config.items()}
    settings = CanaryConfig.model_validate({**CONFIG.model_dump(), **values})
    after = advance(trial, settings, found(finding), age_s)
    if isinstance(expected, TrialOutcome):
        assert after.outcome is expected
    else:
        assert after == expected


def test_the_reason_names_the_property_that_decided() -> None:
    assert advance(OPEN, CONFIG, found(Finding.WORSE), 0).reason == "errors: 5.00% instead of 1.00%"


CANARY = {"canary": {"steps": ["10%", "50%"], "min_requests": 40, "max_error_increase": "1%"}}


class World:
    """A database with one API `iris`, whose revision `r1…` is live, and the metrics of its replicas."""

    def __init__(self, tmp_path: Path, engine: Engine) -> None:
        self.engine = engine
        self.apis = ApiStore(engine)
        self.values = KeyValueStore(engine)
        self.totals = MetricTotals(tmp_path / "metrics", MetricStore(engine), Logger("test"), lambda name, folder: None)
        self.trials = Trials(self.apis, self.values)
        self.folder = tmp_path / "metrics"
        self.files: dict[Path, tuple[MetricFile, Histogram]] = {}
        self.clock: Callable[[], float] = count(0, 30).__next__
        self.returned: list[int | None] = []
        self.is_old_gone = False
        self.woken = 0
        self.deploy("r1" * 8, api())
        self.apis.mark_serving("iris", self.record.target)

    def deploy(self, revision: str, spec: Api, project: str = "") -> None:
        self.apis.write([ApiChange(Revision(revision, spec, project or f"project-{revision}"), "nonce", "spec")])

    @property
    def record(self) -> ApiRecord:
        record = self.apis.get("iris")
        assert record is not None
        return record

    def controller(self) -> CanaryController:
        """Return a controller for which half a minute passes from one look to the next."""

        async def roll_back(name: str, number: int | None, revision: str) -> None:
            assert revision == self.record.revision
            if self.is_old_gone:
                raise NotFoundError("the files of revision 1 are gone")
            self.returned.append(number)
            self.deploy(OLD, api())

        def wake() -> None:
            self.woken += 1

        return CanaryController(self.apis, self.trials, self.totals, roll_back, wake, Logger("test"), self.clock)

    def respond(self, revision: str, good: int, bad: int, replica: str = "abcdef", is_copy: bool = False) -> None:
        """Let a replica of a revision count responses, each of which took 20 ms."""
        folder = self.folder / f"iris-{revision[:8]}-{replica}"
        path = process_file(str(folder / COPIES_FOLDER if is_copy else folder), 0, 1)
        if not path.exists():
            file = MetricFile(path)
            self.files[path] = (file, Histogram(file, HANDLER, FINE_BOUNDS_S))
        file, durations = self.files[path]
        for _ in range(good + bad):
            durations.observe(0.02)
        for code, number in (("200", good), ("500", bad)):
            index = file.index_of(series_key(SeriesKind.COUNTER, "cortex_replica_requests_total", {"code": code}))
            assert index is not None
            file.cells[index] += number


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    engine = open_state(tmp_path / "state.db", None)
    yield World(tmp_path, engine)
    engine.dispose()


NEW, OLD = "r2" * 8, "r1" * 8


def test_only_a_new_revision_of_an_api_with_a_canary_is_tried(world: World) -> None:
    assert world.trials.percents([world.record]) == {}
    world.deploy(NEW, api())
    assert world.trials.of(world.record) is None
    world.deploy(NEW, api(update_strategy=CANARY))
    assert world.trials.percents([world.record]) == {"iris": 10}


def test_a_restart_and_a_revision_that_was_live_are_not_tried(world: World) -> None:
    world.deploy(NEW, api(update_strategy=CANARY))
    world.apis.mark_serving("iris", world.record.target)
    world.deploy("r3" * 8, api(update_strategy=CANARY), project=f"project-{NEW}")
    assert world.trials.percents([world.record]) == {}
    world.deploy("r4" * 8, api(update_strategy=CANARY))
    assert world.trials.percents([world.record]) == {"iris": 10}
    world.deploy(OLD, api(update_strategy=CANARY))
    assert world.trials.percents([world.record]) == {}


@pytest.mark.parametrize(
    ("tracker", "folder", "kind"),
    [
        ({"model_type": "classification", "key": "label"}, PREDICTIONS_FOLDER, PredictionKind.CLASS),
        (None, ANSWERS_FOLDER, PredictionKind.ANSWER),
    ],
)
def test_a_shadow_comes_before_the_first_step_and_counts_pairs(
    world: World, tracker: dict[str, str] | None, folder: str, kind: PredictionKind
) -> None:
    canary = {**CANARY["canary"], "shadow": True, "max_disagreement": "1%"}
    world.deploy(NEW, api(update_strategy={"canary": canary}, tracker=tracker))
    assert world.trials.percents([world.record]) == {"iris": COPIES_OF_ALL}
    described = world.trials.describe(world.record)
    assert described is not None
    assert (described["shadow"], described["percent"]) == (True, 0)
    originals, copies = (world.folder / f"iris-{revision[:8]}-abcdef" for revision in (OLD, NEW))
    old, new = PredictionRing(originals / folder, kind), PredictionRing(copies / COPIES_FOLDER / folder, kind)
    one, another = answer_digest(None, b"one"), answer_digest(None, b"another")

    async def scenario() -> None:
        controller = world.controller()
        for number in range(6):
            await controller.judge(world.record)
            world.respond(OLD, 100, 0)
            world.respond(NEW, 100, 0, is_copy=True)
            for request in range(100):
                old.append(b"%d-%d" % (number, request), one)
                new.append(b"%d-%d" % (number, request), another if request < 10 else one)
        await controller.judge(world.record)

    asyncio.run(scenario())
    assert world.returned == [1]
    described = Trials(world.apis, world.values).describe(world.record)
    assert described is not None
    assert described["reason"].startswith("disagreement: 10.00%, tolerated: 1.00%")
    assert sum(RevisionNumbers.of(world.totals.of("iris")).durations.values()) == 600  # without the copies


def test_after_the_shadow_comes_the_first_step() -> None:
    shadow = replace(OPEN, is_shadow=True)
    assert advance(shadow, CONFIG, found(Finding.NOT_WORSE), 9) == replace(OPEN, step_requests=0)
    assert advance(shadow, CONFIG, found(Finding.UNKNOWN), 86_400).is_shadow


def test_a_worse_revision_is_rolled_back_by_its_errors(world: World) -> None:
    world.deploy(NEW, api(update_strategy=CANARY))

    async def scenario() -> None:
        controller = world.controller()
        for _ in range(4):
            await controller.judge(world.record)
            world.respond(OLD, 90, 1)
            world.respond(NEW, 6, 4)
        await controller.judge(world.record)

    asyncio.run(scenario())
    assert world.returned == [1]
    assert world.trials.percents([world.record]) == {}
    described = Trials(world.apis, world.values).describe(world.record)
    assert described is not None
    assert (described["outcome"], described["revision_number"]) == ("rolled back", 2)
    assert described["reason"].startswith("errors: 40.00% instead of 1.10%")


def test_a_rollback_that_an_operator_did_not_finish_is_carried_out_by_the_next(world: World) -> None:
    world.deploy(NEW, api(update_strategy=CANARY))
    known = world.trials.of(world.record)
    assert known is not None
    world.trials.put(world.record, replace(known[0], outcome=TrialOutcome.ROLLED_BACK))
    world.trials = Trials(world.apis, world.values)
    asyncio.run(world.controller().judge(world.record))
    assert world.returned == [1]


def test_a_rollback_that_fails_is_tried_again_and_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.deploy(NEW, api(update_strategy=CANARY))
    known = world.trials.of(world.record)
    assert known is not None
    world.trials.put(world.record, replace(known[0], outcome=TrialOutcome.ROLLED_BACK))
    world.is_old_gone = True
    controller = world.controller()

    async def scenario() -> None:
        for _ in range(3):
            await controller.judge(world.record)
        assert caplog.messages == ["a canary can't be rolled back"]
        world.is_old_gone = False
        await controller.judge(world.record)

    asyncio.run(scenario())
    assert world.returned == [1]


def test_patched_tolerances_begin_the_evidence_anew(world: World) -> None:
    world.deploy(NEW, api(update_strategy=CANARY))
    known = world.trials.of(world.record)
    assert known is not None
    known[1].observe(RevisionNumbers(90, 1), RevisionNumbers(10, 5), True, 0.0)
    world.trials.put(world.record, replace(known[0], step_requests=10))
    world.deploy(NEW, api(update_strategy={"canary": {**CANARY["canary"], "steps": ["20%"]}}))
    assert found_new(world.trials, world.record) == found_new(Trials(world.apis, world.values), world.record) == (0.5,)
    world.deploy(NEW, api(update_strategy={"canary": {**CANARY["canary"], "max_error_increase": "60%"}}))
    assert found_new(world.trials, world.record) == found_new(Trials(world.apis, world.values), world.record) == (None,)
    known = world.trials.of(world.record)
    assert known is not None
    assert known[0].step_requests == 10


def test_a_deploy_that_needs_no_new_processes_continues_the_trial_under_its_number(world: World) -> None:
    world.deploy(NEW, api(update_strategy=CANARY))
    known = world.trials.of(world.record)
    assert known is not None
    world.trials.put(world.record, replace(known[0], step_requests=10))
    world.deploy(NEW, api(update_strategy=CANARY, networking={"timeout_s": 5}))
    for trials in (world.trials, Trials(world.apis, world.values)):
        description = trials.describe(world.record)
        assert description is not None
        assert (description["revision_number"], description["step_requests"]) == (world.record.number, 10)


def found_new(trials: Trials, record: ApiRecord) -> tuple[float | None, ...]:
    known = trials.of(record)
    return tuple(each.new for each in known[1].findings()[:1]) if known else ()


@pytest.mark.parametrize(("key", "value"), [("outcome", '"unheard of"'), ("judge", "{}"), ("renamed", '"r2"')])
def test_a_trial_stored_by_another_version_does_not_stop_the_others(world: World, key: str, value: str) -> None:
    world.deploy(NEW, api(update_strategy=CANARY))
    known = world.trials.of(world.record)
    assert known is not None
    world.trials.put(world.record, known[0])
    stored = json.loads(world.values.get("canary/iris") or "")
    stored[key] = json.loads(value)
    if key == "renamed":
        del stored["number"]
    world.values.put("canary/iris", json.dumps(stored))
    assert Trials(world.apis, world.values).percents([world.record]) == {"iris": 10}


def test_another_operator_continues_with_the_evidence(world: World) -> None:
    world.deploy(NEW, api(update_strategy=CANARY))

    async def scenario() -> None:
        for number in range(120):
            if number % 3 == 0:  # each operator observes two windows, which never suffice
                world.trials = Trials(world.apis, world.values)
                controller = world.controller()
            await controller.judge(world.record)
            world.respond(OLD, 90, 1)
            world.respond(NEW, 180, 2)

    asyncio.run(scenario())
    known = Trials(world.apis, world.values).of(world.record)
    assert known is not None
    assert known[0].outcome is TrialOutcome.PROMOTED
    errors = known[1].findings()[0]
    assert errors.finding is Finding.NOT_WORSE
    assert errors.new == pytest.approx(1 / 91)


def test_a_revision_that_fails_at_a_larger_share_is_not_promoted(world: World) -> None:
    world.deploy(NEW, api(update_strategy=CANARY))
    controller = world.controller()

    async def scenario() -> None:
        while world.trials.percents([world.record]).get("iris") == 10:
            await controller.judge(world.record)
            world.respond(OLD, 90, 1)
            world.respond(NEW, 180, 2)
        for _ in range(8):
            await controller.judge(world.record)
            world.respond(OLD, 90, 1)
            world.respond(NEW, 0, 180)

    asyncio.run(scenario())
    assert world.returned == [1]


def test_trials_of_deleted_apis_are_forgotten(world: World) -> None:
    world.deploy(NEW, api(update_strategy=CANARY))
    known = world.trials.of(world.record)
    assert known is not None
    world.trials.put(world.record, known[0])
    world.values.put("canary/i%", "{}")
    world.values.put("canaries", "not a trial")
    world.trials.keep_only(["iris"])
    assert [world.values.get(name) is None for name in ("canary/iris", "canary/i%", "canaries")] == [False, True, False]
    world.trials.keep_only([])
    assert [world.values.get(name) is None for name in ("canary/iris", "canaries")] == [True, False]


def test_a_person_promotes_a_revision(world: World) -> None:
    with pytest.raises(ConflictError, match="iris has no canary"):
        world.trials.promote(world.record, "ana")
    world.deploy(NEW, api(update_strategy=CANARY))
    world.trials.promote(world.record, "ana")
    assert world.trials.percents([world.record]) == {}
    assert Trials(world.apis, world.values).percents([world.record]) == {}
    described = world.trials.describe(world.record)
    assert described is not None
    assert (described["outcome"], described["reason"]) == ("promoted", "promoted by ana")


def test_a_promotion_while_the_operator_finds_the_revision_worse_holds(world: World) -> None:
    world.deploy(NEW, api(update_strategy=CANARY))
    numbers = count(0, 30)

    def clock() -> float:  # read between the numbers and the verdict
        now = next(numbers)
        if now == 120:
            world.trials.promote(world.record, "ana")
        return float(now)

    world.clock = clock

    async def scenario() -> None:
        controller = world.controller()
        for _ in range(5):
            await controller.judge(world.record)
            world.respond(OLD, 90, 1)
            world.respond(NEW, 6, 4)
        await controller.judge(world.record)

    asyncio.run(scenario())
    assert world.returned == []
    described = Trials(world.apis, world.values).describe(world.record)
    assert described is not None and described["outcome"] == "promoted"


def test_a_version_that_was_rolled_back_is_tried_anew_if_it_is_deployed_again(world: World) -> None:
    world.deploy(NEW, api(update_strategy=CANARY))
    known = world.trials.of(world.record)
    assert known is not None
    world.trials.put(world.record, replace(known[0], outcome=TrialOutcome.ROLLED_BACK))
    asyncio.run(world.controller().judge(world.record))
    assert world.returned == [1]
    for trials in (world.trials, Trials(world.apis, world.values)):
        world.deploy(NEW, api(update_strategy=CANARY))
        again = trials.of(world.record)
        assert again is not None and again[0].is_open and again[0].number == world.record.number
        world.deploy(OLD, api())


def test_a_revision_that_a_person_rolled_back_is_tried_anew_without_its_old_evidence(world: World) -> None:
    world.deploy(NEW, api(update_strategy=CANARY))
    known = world.trials.of(world.record)
    assert known is not None
    known[1].observe(RevisionNumbers(90, 1), RevisionNumbers(10, 5), True, 0.0)
    world.trials.put(world.record, replace(known[0], step=1, step_requests=10))
    world.deploy(OLD, api())
    world.apis.mark_serving("iris", world.record.target)
    world.deploy(NEW, api(update_strategy=CANARY))
    for trials in (world.trials, Trials(world.apis, world.values)):
        again = trials.of(world.record)
        assert again is not None
        assert again[0] == Trial(NEW, 4, OLD, 3)
        assert found_new(trials, world.record) == (None,)


def test_a_revision_whose_replica_ended_loses_a_window_and_no_more(world: World) -> None:
    world.deploy(NEW, api(update_strategy=CANARY))

    async def scenario() -> None:
        controller = world.controller()
        await controller.judge(world.record)
        world.respond(OLD, 100, 0)
        world.respond(NEW, 10, 0)
        await controller.judge(world.record)
        for file in world.folder.rglob("0-1"):
            file.unlink()
        await controller.judge(world.record)
        world.respond(OLD, 100, 0)
        world.respond(NEW, 10, 0)
        await controller.judge(world.record)

    asyncio.run(scenario())
    known = world.trials.of(world.record)
    assert known is not None
    assert known[0].step_requests == 20


def test_the_requests_of_an_ended_replica_are_not_mistaken_for_errors_of_another(world: World) -> None:
    world.deploy(NEW, api(update_strategy=CANARY))

    async def scenario() -> None:
        controller = world.controller()
        await controller.judge(world.record)
        world.respond(NEW, 100, 0)
        world.respond(OLD, 100, 0)
        await controller.judge(world.record)
        shutil.rmtree(world.folder / f"iris-{NEW[:8]}-abcdef")
        world.respond(NEW, 60, 60, replica="fedcba")  # 120 requests instead of 100: the sum does not fall
        world.respond(OLD, 100, 0)
        await controller.judge(world.record)

    asyncio.run(scenario())
    known = world.trials.of(world.record)
    assert known is not None
    assert (known[0].step_requests, known[1].findings()[0].new) == (100, 0.0)


def test_latencies_count_while_all_replicas_have_served_for_a_while(world: World) -> None:
    world.deploy(NEW, api(update_strategy=CANARY))
    compared = [0]

    async def scenario() -> None:
        controller = world.controller()
        for number in range(12):
            await controller.judge(world.record)
            known = world.trials.of(world.record)
            assert known is not None
            compared.append(known[1].dump()["slow"]["p50"]["new_of"])
            world.respond(OLD, 90, 0)
            world.respond(NEW, 9, 0)
            if number == 5:  # another step began
                world.respond(NEW, 1, 0, "ghijkl")

    asyncio.run(scenario())
    assert [after - before for before, after in pairwise(compared)] == [0, 0, 0, 0, 9, 9, 0, 0, 9, 9, 9, 9]


def test_a_version_of_a_model_whose_replicas_do_not_start_is_rolled_back(world: World) -> None:
    def pinned(number: str) -> Api:
        pins = [{"model": "_cortex_default", "number": number, "digest": number, "size_bytes": 1, "modified_at": 0}]
        models = {"path": "s3://bucket/iris", "canary": True, "pinned": pins}
        handler = {"interface": "handler", "type": "python", "path": "handler.py", "models": models}
        return api(handler=handler, update_strategy=CANARY)

    world.deploy("r2" * 8, pinned("1"), "project")
    world.apis.mark_serving("iris", world.record.target)
    world.deploy("r3" * 8, pinned("2"), "project")

    async def scenario() -> None:
        controller = world.controller()
        await controller.judge(world.record)
        assert world.returned == []
        world.deploy("r4" * 8, pinned("2"), "other code")
        world.apis.mark_failed("iris", world.record.revision, StoredFailure("negative weights"))
        await controller.judge(world.record)
        assert world.returned == []  # who deployed it sees that it fails
        world.deploy("r3" * 8, pinned("2"), "project")
        world.apis.mark_failed("iris", world.record.revision, StoredFailure("negative weights"))
        await controller.judge(world.record)

    asyncio.run(scenario())
    assert world.returned == [2]
    stored = json.loads(world.values.get("canary/iris") or "")["description"]
    assert (stored["outcome"], stored["models"]) == ("rolled back", "model: version 1 → 2")
    assert stored["reason"] == "its replicas do not start: negative weights"
