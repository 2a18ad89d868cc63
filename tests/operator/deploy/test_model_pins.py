"""The versions of models that a deploy pins, and how they follow the API through its changes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from cortex.errors import InputError
from cortex.operator.deploy.deployer import revision_of
from cortex.operator.deploy.model_pins import pin_models, pins_of, with_pins
from harness.installations.deploy_desk import Desk
from harness.installations.running import config

pytestmark = pytest.mark.processes

HANDLER = """
class Handler:
    def __init__(self, config, model_client):
        self.client = model_client
    def load_model(self, model_path):
        return model_path
    def handle_post(self, payload):
        return self.client.get_model()
"""


def yaml(source: Path, answer: str = "one", canary: bool = True) -> str:
    models = f"    multi_model_reloading: {{path: {source}, canary: {str(canary).lower()}}}\n"
    return config(answer=answer, extra="  update_strategy: {canary: {}}").replace(
        "  autoscaling", models + "  autoscaling"
    )


def put(source: Path, version: int, text: str = "weights") -> None:
    """Store a version that was uploaded an hour ago."""
    file = source / str(version) / "model"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    hour_ago = file.stat().st_mtime - 3600 - version
    os.utime(file, (hour_ago, hour_ago))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    put(tmp_path / "bucket", 1)
    put(tmp_path / "bucket", 2)
    return tmp_path / "bucket"


def numbers(desk: Desk) -> list[str]:
    return [pin.number for pin in pins_of(desk.record().spec)]


def test_a_first_deploy_pins_the_latest_version_and_later_ones_keep_it(desk: Desk, source: Path) -> None:
    desk.deploy(yaml(source), HANDLER)
    assert numbers(desk) == ["2"]
    first = desk.record()
    put(source, 3)
    assert desk.deploy(yaml(source), HANDLER)[0].message.endswith("is up to date")
    assert desk.record() == first
    desk.deploy(yaml(source, answer="two"), HANDLER)
    assert numbers(desk) == ["2"]
    desk.patch(yaml(source, answer="three"))
    assert numbers(desk) == ["2"]


def test_another_location_has_other_versions(desk: Desk, source: Path, tmp_path: Path) -> None:
    desk.deploy(yaml(source), HANDLER)
    put(tmp_path / "other", 7)
    desk.deploy(yaml(tmp_path / "other"), HANDLER)
    assert numbers(desk) == ["7"]


def test_without_canary_nothing_is_pinned(desk: Desk, source: Path) -> None:
    desk.deploy(yaml(source), HANDLER)
    pinned = desk.record()
    desk.deploy(yaml(source, canary=False), HANDLER)
    assert numbers(desk) == []
    assert desk.record().revision != pinned.revision


def test_a_new_version_is_a_revision_that_can_be_rolled_back(desk: Desk, source: Path) -> None:
    desk.deploy(yaml(source), HANDLER)
    desk.go_live()
    first = desk.record()
    put(source, 3)
    found = asyncio.run(pin_models(first.spec, None, {}))
    asyncio.run(desk.deployer.deploy_models("iris", pins_of(found), first.revision))
    assert numbers(desk) == ["3"]
    assert desk.record().target.project_hash == first.target.project_hash
    (entry, _) = desk.store.history("iris")
    assert (entry.action, entry.changes) == ("new model version", ("model: version 2 → 3",))
    desk.rollback()
    assert desk.record().target == first.target


def test_the_field_canary_alone_restarts_nothing(desk: Desk, source: Path) -> None:
    desk.deploy(yaml(source, canary=False), HANDLER)
    spec = desk.record().spec
    assert spec.handler.models is not None
    models = spec.handler.models.model_copy(update={"canary": True})
    tried = spec.model_copy(update={"handler": spec.handler.model_copy(update={"models": models})})
    assert revision_of(tried, "project", "n") == revision_of(spec, "project", "n")
    pinned = with_pins(tried, pins_of(asyncio.run(pin_models(tried, None, {}))))
    assert revision_of(pinned, "project", "n") != revision_of(spec, "project", "n")


def test_a_version_that_is_being_uploaded_is_pinned_once_it_is_complete(desk: Desk, tmp_path: Path) -> None:
    file = tmp_path / "bucket" / "1" / "model"
    file.parent.mkdir(parents=True)
    file.write_text("weights")  # just now
    desk.deploy(yaml(tmp_path / "bucket"), HANDLER)
    assert numbers(desk) == ["1"]


def test_versions_that_cannot_be_listed_are_an_error(desk: Desk, source: Path, tmp_path: Path) -> None:
    def pinned_at(folder: Path) -> None:
        spec = desk.record().spec
        assert spec.handler.models is not None
        models = spec.handler.models.model_copy(update={"path": str(folder)})
        moved = spec.model_copy(update={"handler": spec.handler.model_copy(update={"models": models})})
        asyncio.run(pin_models(moved, spec, {}))

    desk.deploy(yaml(source), HANDLER)
    with pytest.raises(InputError, match=r"the models of iris can't be listed: .*gone does not exist"):
        pinned_at(tmp_path / "gone")
    (tmp_path / "empty" / "1").mkdir(parents=True)
    with pytest.raises(InputError, match="empty has no complete version of a model"):
        pinned_at(tmp_path / "empty")
