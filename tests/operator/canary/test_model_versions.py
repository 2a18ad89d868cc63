"""The choice of new versions of models, and what is deployed while versions come and go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cortex.config.schema import Api, PinnedModel
from cortex.errors import ConflictError
from cortex.models.spec import Catalogue, Model, Version
from cortex.operator.canary.model_versions import ModelVersions, newest_versions
from cortex.operator.canary.trials import TrialOutcome, Trials
from cortex.operator.deploy.deployer import revision_of
from cortex.operator.deploy.model_pins import pins_of, with_pins
from cortex.state.database import open_state
from cortex.state.queries.apis import ApiChange, ApiRecord, ApiStore, StoredFailure
from cortex.state.queries.key_values import KeyValueStore
from cortex.state.revision import Revision
from cortex.telemetry import Logger
from harness.replicas.fleet import api


def catalogue(**models: Mapping[int, str]) -> Catalogue:
    """Write `m={1: "a", 2: "b"}` for a model of two versions with these contents."""
    return Catalogue(
        tuple(
            Model(name, tuple(Version(str(number), digest, 1, 0.0) for number, digest in sorted(versions.items())))
            for name, versions in models.items()
        )
    )


def pin(number: int, digest: str, model: str = "m") -> PinnedModel:
    return PinnedModel(model, str(number), digest, 1, 0.0)


@pytest.mark.parametrize(
    ("versions", "tried", "expected"),
    [
        ({1: "a", 2: "b"}, "", (2, "b")),
        ({0: "z", 2: "b"}, "", (2, "b")),
        ({2: "b", 3: "c"}, "", (3, "c")),
        ({2: "b", 3: "c", 4: "d"}, "d", (3, "c")),
        ({2: "b", 3: "c", 4: "d"}, "cd", (2, "b")),
        ({2: "x"}, "", (2, "x")),
        ({2: "x"}, "x", (2, "b")),
        ({1: "a"}, "", (1, "a")),
        ({0: "z", 1: "a"}, "za", (1, "a")),
        ({3: "c"}, "c", (2, "b")),
        ({}, "", (2, "b")),
    ],
    ids=[
        "a lower version is not newer",
        "nor is one that was deleted and came back",
        "a higher one is",
        "a version that was tried is skipped",
        "if all were tried, the present one stays",
        "other content at the same number is newer",
        "unless it was tried",
        "a deleted version is replaced by the next lower one",
        "although that was tried: it was the one before",
        "a deleted version without a lower one stays",
        "so does the only one of a model that is gone",
    ],
)
def test_the_newest_version_of_a_model(versions: dict[int, str], tried: str, expected: tuple[int, str]) -> None:
    contents = {("m", str(number), digest) for number, digest in versions.items() if digest in tried}
    listed = catalogue(m=versions) if versions else Catalogue(())
    assert newest_versions([pin(2, "b")], listed, contents) == [pin(*expected)]


def test_models_have_their_versions_independently() -> None:
    listed = catalogue(m={1: "a", 2: "b"}, n={1: "b", 2: "c"})
    tried = {("n", "2", "c")}
    assert newest_versions([pin(1, "a"), pin(1, "b", "n")], listed, tried) == [pin(2, "b"), pin(1, "b", "n")]


MODELS = {"paths": [{"name": "m", "path": "s3://b/m"}], "canary": True}


def spec(pins: Sequence[PinnedModel]) -> Api:
    made = api(
        handler={"interface": "handler", "type": "python", "path": "handler.py", "models": MODELS},
        update_strategy={"canary": {}},
    )
    return with_pins(made, pins)


class World:
    """A database with one API, which serves version 1 of its model, and the loop that deploys versions."""

    def __init__(self, folder: Path) -> None:
        self.engine = open_state(folder / "state.db", None)
        self.apis = ApiStore(self.engine)
        self.restart()
        self.write([pin(1, "a")])
        self.go_live()

    def restart(self) -> None:
        """Begin with another operator, which knows only what is stored."""
        values = KeyValueStore(self.engine)
        self.trials = Trials(self.apis, values)
        self.versions = ModelVersions(Path("/nowhere"), self.apis, self.trials, values, self.deploy, Logger("test"))

    async def deploy(self, name: str, pins: Sequence[PinnedModel], revision: str) -> None:
        if self.record.revision != revision:
            raise ConflictError("it was deployed again")
        self.write(pins)

    def write(self, pins: Sequence[PinnedModel]) -> None:
        made = spec(pins)
        self.apis.write([ApiChange(Revision(revision_of(made, "project", "n"), made, "project"), "n", "spec")])

    def go_live(self) -> None:
        self.apis.mark_serving("iris", self.record.target)

    def fail(self) -> None:
        self.apis.mark_failed("iris", self.record.revision, StoredFailure("negative weights"))

    def end(self, outcome: TrialOutcome) -> None:
        known = self.trials.of(self.record)
        assert known is not None
        self.trials.put(self.record, replace(known[0], outcome=outcome))

    def see(self, **versions: str) -> tuple[int, str]:
        """Return the version of the newest revision after the catalogue has these: `v2="b"`."""
        listed = catalogue(m={int(name[1:]): digest for name, digest in versions.items()})
        asyncio.run(self.versions.check(self.record, listed))
        (now,) = pins_of(self.record.spec)
        return int(now.number), now.digest

    @property
    def record(self) -> ApiRecord:
        record = self.apis.get("iris")
        assert record is not None
        return record


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.engine.dispose()


def test_a_new_version_begins_a_trial_which_names_it(world: World) -> None:
    assert world.see(v1="a") == (1, "a")
    assert world.trials.percents([world.record]) == {}
    assert world.see(v1="a", v2="b") == (2, "b")
    assert world.trials.percents([world.record]) == {"iris": 1}
    described = world.trials.describe(world.record)
    assert described is not None and described["models"] == "model m: version 1 → 2"


def test_a_version_that_was_rolled_back_is_not_tried_again_by_another_operator_either(world: World) -> None:
    world.see(v1="a", v2="b")
    world.write([pin(1, "a")])  # the rollback
    assert world.see(v1="a", v2="b") == (1, "a")
    world.restart()
    assert world.see(v1="a", v2="b") == (1, "a")
    assert world.see(v1="a", v2="b", v3="c") == (3, "c")


def test_a_version_that_left_the_bucket_and_came_back_is_tried_again(world: World) -> None:
    world.see(v1="a", v2="b")
    world.write([pin(1, "a")])
    assert world.see(v1="a") == (1, "a")
    assert world.see(v1="a", v2="b") == (2, "b")


def test_the_return_to_a_version_that_was_live_is_not_undone(world: World) -> None:
    world.see(v1="a", v2="b")
    world.go_live()
    world.write([pin(1, "a")])
    world.go_live()
    assert world.see(v1="a", v2="b") == (1, "a")


def test_a_version_that_appears_during_a_trial_waits_for_its_end(world: World) -> None:
    world.see(v1="a", v2="b")
    assert world.see(v1="a", v2="b", v3="c") == (2, "b")
    world.end(TrialOutcome.PROMOTED)
    assert world.see(v1="a", v2="b", v3="c") == (2, "b")  # it still replaces the old one
    world.go_live()
    assert world.see(v1="a", v2="b", v3="c") == (3, "c")


def test_a_held_trial_is_replaced_by_that_of_a_newer_version(world: World) -> None:
    world.see(v1="a", v2="b")
    world.end(TrialOutcome.HELD)
    assert world.see(v1="a", v2="b") == (2, "b")
    assert world.see(v1="a", v2="b", v3="c") == (3, "c")
    assert world.record.serving is not None and pins_of(world.record.serving.spec) == [pin(1, "a")]


def test_a_version_that_is_deleted_during_its_trial_ends_it(world: World) -> None:
    before = world.record.target
    world.see(v1="a", v2="b")
    assert world.see(v1="a") == (1, "a")
    assert world.record.target == before
    assert world.trials.of(world.record) is None


def test_the_trial_continues_if_the_old_version_is_deleted(world: World) -> None:
    world.see(v1="a", v2="b")
    assert world.see(v2="b") == (2, "b")
    assert world.trials.percents([world.record]) == {"iris": 1}


def test_a_first_version_that_does_not_start_is_replaced_without_a_trial(tmp_path: Path, world: World) -> None:
    world.apis.write([], ["iris"])
    world.write([pin(1, "a")])
    assert world.see(v1="a", v2="b") == (1, "a")  # it may still start
    world.fail()
    assert world.see(v1="a", v2="b") == (2, "b")
    assert world.trials.of(world.record) is None


def test_a_deploy_that_comes_first_wins(world: World) -> None:
    outdated = world.record
    world.write([pin(5, "e")])
    asyncio.run(world.versions.check(outdated, catalogue(m={1: "a", 2: "b"})))
    assert pins_of(world.record.spec) == [pin(5, "e")]


def test_nothing_is_deployed_before_the_bucket_was_listed(world: World) -> None:
    asyncio.run(world.versions.check(world.record, None))
    assert pins_of(world.record.spec) == [pin(1, "a")]


def stored(world: World) -> Collection[tuple[str, str, str]]:
    return [tuple(each) for each in json.loads(KeyValueStore(world.engine).get("models/iris") or "[]")]


def test_the_stored_versions_are_those_of_the_bucket_and_of_the_present_revisions(world: World) -> None:
    for number in range(2, 30):
        world.see(**{f"v{number}": f"content {number}"})
        world.go_live()
    assert stored(world) == [("m", "28", "content 28"), ("m", "29", "content 29")]
