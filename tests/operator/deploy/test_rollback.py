from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from cortex.errors import ConflictError, NotFoundError
from cortex.operator.deploy.projects import SharedProjects
from cortex.state.database import open_sqlite
from cortex.state.queries.history import KEPT_ENTRIES
from cortex.state.queries.projects import ProjectStore
from cortex.telemetry import Logger
from harness.installations.deploy_desk import Desk
from harness.installations.running import HANDLER, config, project

pytestmark = pytest.mark.processes

CHANGED = HANDLER + "\n# changed\n"


def history(desk: Desk, name: str = "iris") -> list[tuple[int, str, bool]]:
    """Return number, action and whether it was live, of each entry."""
    return [(entry.number, entry.action, entry.live_at is not None) for entry in desk.store.history(name)]


def test_each_change_of_an_api_is_an_entry_of_its_history(desk: Desk) -> None:
    desk.deploy()
    desk.go_live()
    desk.deploy()  # up to date
    desk.deploy(handler=CHANGED)
    desk.patch(config(replicas=2))
    assert history(desk) == [(3, "patch", False), (2, "deploy", False), (1, "deploy", True)]
    assert (desk.record().number, desk.record().live_number) == (3, 1)


def test_a_rollback_deploys_the_revision_that_was_live_before(desk: Desk) -> None:
    desk.deploy()
    desk.go_live()
    first = desk.record()
    desk.deploy(config(answer="two"), CHANGED)
    desk.go_live()
    result = desk.rollback()
    assert result.message == "rolling back iris (RealtimeAPI) from revision 2 to 1"
    assert result.changes == ("handler.config.answer: two → one", "files changed: handler.py")
    assert desk.record().target == first.target
    desk.go_live()
    assert history(desk) == [(3, "rollback to 1", True), (2, "deploy", True), (1, "deploy", True)]
    assert desk.store.history("iris")[0].deployed_by == "ana"


def test_a_deploy_of_the_same_files_after_a_rollback_updates_the_api(desk: Desk) -> None:
    desk.deploy()
    desk.go_live()
    desk.deploy(handler=CHANGED)
    desk.go_live()
    newer = desk.record().target
    desk.rollback()
    desk.go_live()
    (result,) = desk.deploy(handler=CHANGED)
    assert (result.message, result.changes) == ("updating iris (RealtimeAPI)", ("files changed: handler.py",))
    assert desk.record().target == newer


def test_a_rollback_of_a_failed_deploy_returns_to_what_serves_without_an_update(desk: Desk) -> None:
    desk.deploy()
    desk.go_live()
    desk.deploy(handler=CHANGED)
    desk.deploy(handler=CHANGED + "#")
    assert desk.rollback().message == "rolling back iris (RealtimeAPI) from revision 3 to 1"
    record = desk.record()
    assert record.target == record.serving
    assert record.live_number == record.number == 4


def test_a_rollback_cancels_an_update_but_starts_another_one_only_with_force(desk: Desk) -> None:
    desk.deploy()
    desk.go_live()
    desk.deploy(handler=CHANGED)
    desk.go_live()
    desk.deploy(handler=CHANGED + "#")
    desk.updating.add("iris")
    with pytest.raises(ConflictError, match=r"iris is updating \(override with --force\)"):
        desk.rollback(1)
    desk.rollback(1, force=True)
    assert desk.rollback(2).message == "rolling back iris (RealtimeAPI) from revision 4 to 2"


def test_a_rollback_without_an_earlier_live_revision_changes_nothing(desk: Desk) -> None:
    desk.deploy()
    desk.deploy(handler=CHANGED)
    with pytest.raises(NotFoundError, match="iris has no earlier revision that was live; `cortex history iris`"):
        desk.rollback()
    with pytest.raises(NotFoundError, match="iris has no revision 7 in its history, which has 1, 2;"):
        desk.rollback(7)
    with pytest.raises(NotFoundError, match="rose is not deployed"):
        desk.rollback(name="rose")
    assert desk.rollback(2).message == "iris (RealtimeAPI) already has the files and configuration of revision 2"
    assert len(history(desk)) == 2


def test_a_refresh_and_a_retry_are_no_entries_of_the_history(desk: Desk) -> None:
    desk.deploy()
    desk.go_live()
    desk.deploy(handler=CHANGED)
    desk.go_live()
    asyncio.run(desk.deployer.refresh("iris"))
    desk.failing.add("iris")
    desk.deploy(handler=CHANGED)
    assert history(desk) == [(2, "deploy", True), (1, "deploy", True)]
    refreshed = desk.record().target
    desk.rollback(1)
    desk.rollback(2)
    assert desk.record().target == refreshed


def test_the_last_revisions_and_the_last_live_one_can_be_restored(desk: Desk) -> None:
    desk.deploy()
    desk.go_live()
    for number in range(KEPT_ENTRIES + 3):
        desk.deploy(handler=f"{HANDLER}\n# {number}\n")
    kept = [entry.number for entry in desk.store.history("iris")]
    assert kept == [*range(KEPT_ENTRIES + 4, 4, -1), 1]
    hashes = {entry.project_hash for entry in desk.store.history("iris")}
    assert desk.store.history_projects() == hashes
    desk.rollback()
    desk.go_live()
    desk.deploy()
    assert 1 not in [entry.number for entry in desk.store.history("iris")]


def test_a_deletion_ends_the_history(desk: Desk) -> None:
    desk.deploy()
    desk.go_live()
    desk.deploy(handler=CHANGED)
    asyncio.run(desk.deployer.delete("iris", keep_cache=True))
    assert (history(desk), desk.store.history_projects()) == ([], frozenset())
    desk.deploy()
    assert history(desk) == [(1, "deploy", False)]


def test_only_the_named_api_of_a_file_is_rolled_back(desk: Desk) -> None:
    desk.deploy(config() + config("rose"))
    desk.go_live()
    desk.go_live("rose")
    desk.deploy(config() + config("rose"), CHANGED)
    rose = desk.record("rose")
    desk.rollback()
    assert desk.record("rose") == rose


def test_a_rollback_that_clashes_with_other_apis_is_rejected(desk: Desk) -> None:
    desk.deploy(config(extra="  networking: {endpoint: /old}"))
    desk.go_live()
    desk.deploy(config(extra="  networking: {endpoint: /new}"))
    desk.deploy(config("rose", extra="  networking: {endpoint: /old}"))
    before = desk.record()
    with pytest.raises(ConflictError, match="/old is now the endpoint of rose"):
        desk.rollback()
    assert desk.record() == before


def test_a_splitter_is_rolled_back_only_to_apis_that_exist(desk: Desk) -> None:
    split = "- name: split\n  kind: TrafficSplitter\n  apis: [{name: %s, weight: 100}]\n"
    desk.deploy(config() + config("rose"))
    desk.deploy(split % "rose")
    desk.go_live("split")
    (result,) = desk.deploy(split % "iris")
    assert result.changes == ("apis.0.name: rose → iris",)
    asyncio.run(desk.deployer.delete("rose"))
    with pytest.raises(ConflictError, match="rose, to which this revision sends requests, is no RealtimeAPI now"):
        desk.rollback(name="split")


def test_a_revision_whose_files_are_gone_cannot_be_restored(desk: Desk) -> None:
    desk.deploy()
    desk.go_live()
    first = desk.record().target
    desk.deploy(handler=CHANGED)
    shutil.rmtree(desk.projects.path(first.project_hash))
    with pytest.raises(NotFoundError, match="the files of revision 1 are gone; deploy them again"):
        desk.rollback()


def test_an_operator_on_another_machine_fetches_the_files_of_a_revision_from_the_shared_database(
    desk: Desk, tmp_path: Path
) -> None:
    desk.deploy()
    desk.go_live()
    first = desk.record().target
    desk.deploy(handler=CHANGED)
    projects = ProjectStore(open_sqlite(tmp_path / "shared.db"))
    asyncio.run(
        SharedProjects(desk.home, projects, Logger("test")).save(
            first.project_hash, desk.projects.path(first.project_hash)
        )
    )
    shutil.rmtree(desk.projects.path(first.project_hash))
    desk.deployer = desk.new_deployer(SharedProjects(desk.home, projects, Logger("test")))
    desk.rollback()
    assert (desk.projects.path(first.project_hash) / "handler.py").read_text() == HANDLER


def test_a_rollback_of_one_revision_leaves_a_newer_one_alone(desk: Desk) -> None:
    desk.deploy()
    desk.go_live()
    desk.deploy(handler=CHANGED)
    judged = desk.record().revision
    desk.deploy(handler=CHANGED + "#")
    with pytest.raises(ConflictError, match="iris was deployed again"):
        asyncio.run(desk.deployer.rollback("iris", 1, force=True, only_from=judged))
    assert desk.rollback(1, force=True).message == "rolling back iris (RealtimeAPI) from revision 3 to 1"


def test_concurrent_deploys_and_rollbacks_happen_one_after_the_other(desk: Desk) -> None:
    desk.deploy()
    desk.go_live()

    async def scenario() -> None:
        archives = [project(config(), f"{HANDLER}\n# {number}\n") for number in range(4)]
        deploys = [desk.deployer.deploy(archive, "cortex.yaml") for archive in archives]
        await asyncio.gather(*deploys, *(desk.deployer.rollback("iris", 1) for _ in range(3)))

    asyncio.run(scenario())
    numbers = [entry.number for entry in desk.store.history("iris")]
    assert numbers == sorted(numbers, reverse=True)
    assert all(desk.projects.path(entry.project_hash).is_dir() for entry in desk.store.history("iris"))
