from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
import time
from contextlib import closing
from dataclasses import replace

import pytest

from cortex.errors import ConfigError, ConflictError, ForbiddenError, InputError, NotFoundError
from cortex.lifecycle import TokenScope
from cortex.operator.access.tokens import Principal
from cortex.operator.deploy.deployer import DeployResult
from cortex.operator.deploy.diagnose import Machine
from cortex.state.queries.apis import ApiChange
from harness.installations.deploy_desk import Desk
from harness.installations.running import HANDLER, config, project

pytestmark = pytest.mark.processes

FUNCTIONS = "def predict(sample, metadata):\n    return sample\n"


def messages(results: list[DeployResult]) -> list[str]:
    return [result.error or result.message for result in results]


def test_a_first_deploy_creates_and_a_second_changes_nothing(desk: Desk) -> None:
    assert desk.deploy() == [DeployResult("iris", "creating iris (RealtimeAPI)")]
    before = desk.record()
    assert desk.deploy() == [DeployResult("iris", "iris (RealtimeAPI) is up to date")]
    assert (desk.record(), desk.changes) == (before, 1)
    desk.updating.add("iris")
    assert desk.deploy() == [DeployResult("iris", "iris (RealtimeAPI) is already updating")]


def test_an_unchanged_deploy_of_a_failing_api_retries_it(desk: Desk) -> None:
    desk.deploy()
    before = desk.record()
    desk.failing.add("iris")
    assert desk.deploy() == [DeployResult("iris", "updating iris (RealtimeAPI)")]
    after = desk.record()
    assert (after.spec, after.target.project_hash) == (before.spec, before.target.project_hash)
    assert after.revision != before.revision


def test_stores_the_project_under_its_hash_without_the_configuration(desk: Desk) -> None:
    desk.deploy(data="1,2")
    (folder,) = desk.home.projects_dir.iterdir()
    assert folder.name == desk.record().target.project_hash
    assert sorted(path.name for path in folder.iterdir()) == ["data", "handler.py"]


@pytest.mark.parametrize(
    ("yaml", "restarts"),
    [
        (config(answer="two"), True),
        (config(extra="  compute: {cpu: 1}"), True),
        (config(extra="  networking: {timeout: 5s, max_body_size: 1Mi}"), False),
        (config(extra="  networking: {endpoint: /other}"), False),
        (config(replicas=3), False),
        (config(extra="  update_strategy: {max_surge: 2}"), False),
        (config(extra="  networking: {access_log: true}"), False),
        (config(extra="  tracker: {model_type: regression}"), True),
    ],
)
def test_only_changes_that_need_new_processes_change_the_revision(desk: Desk, yaml: str, restarts: bool) -> None:
    desk.deploy()
    before = desk.record()
    assert messages(desk.deploy(yaml)) == ["updating iris (RealtimeAPI)"]
    after = desk.record()
    assert (after.revision != before.revision) == restarts
    assert after.spec_id != before.spec_id
    assert after.api_id < before.api_id


def test_changing_drift_settings_keeps_the_revision(desk: Desk) -> None:
    desk.deploy(config(extra="  tracker: {model_type: regression}"))
    before = desk.record()
    desk.deploy(config(extra="  tracker: {model_type: regression, window: 200, false_alarm_rate: 0.01}"))
    assert desk.record().revision == before.revision


def test_a_changed_file_of_the_project_changes_the_revision(desk: Desk) -> None:
    desk.deploy()
    before = desk.record()
    desk.deploy(handler=HANDLER + "\n# changed\n")
    assert desk.record().revision != before.revision


def test_changes_an_updating_api_only_with_force(desk: Desk) -> None:
    desk.deploy()
    before = desk.record()
    desk.updating.add("iris")
    error = "iris is updating (override with --force)"
    assert desk.deploy(config(answer="two")) == [DeployResult("iris", error=error)]
    assert desk.patch(config(answer="two")) == [DeployResult("iris", error=error)]
    with pytest.raises(ConflictError, match="is updating"):
        asyncio.run(desk.deployer.refresh("iris"))
    assert desk.record() == before
    assert messages(desk.deploy(config(answer="two"), force=True)) == ["updating iris (RealtimeAPI)"]


def test_a_deploy_whose_check_takes_long_delays_no_other_api(desk: Desk) -> None:
    desk.deploy()

    async def scenario() -> None:
        is_checking, ends = asyncio.Event(), asyncio.Event()

        async def inspect_machine() -> Machine:
            if not is_checking.is_set():
                is_checking.set()
                await ends.wait()  # as for a bucket that does not answer
            return Machine(os.environ)

        deployer = desk.new_deployer(inspect_machine=inspect_machine)
        waiting = asyncio.create_task(deployer.deploy(project(config("slow")), "cortex.yaml"))
        await is_checking.wait()
        later = asyncio.create_task(deployer.deploy(project(config("slow", answer="two")), "cortex.yaml"))
        quick = await deployer.deploy(project(config("quick")), "cortex.yaml")
        assert messages(quick) == ["creating quick (RealtimeAPI)"]
        await deployer.refresh("iris")
        await deployer.delete("quick")
        assert not waiting.done()
        assert not later.done()
        ends.set()
        assert messages(await waiting) == ["creating slow (RealtimeAPI)"]
        await later

    asyncio.run(scenario())
    assert desk.record("slow").spec.handler.config == {"answer": "two"}


def test_a_mistake_changes_nothing_and_leaves_nothing(desk: Desk) -> None:
    desk.deploy()
    before = desk.record()
    wrong = config(answer="two") + config("Other").replace("handler.py", "missing.py")
    with pytest.raises(ConfigError) as caught:
        desk.deploy(wrong, handler="class Handler:\n    pass\n")
    assert len(caught.value.diagnostics) >= 2
    assert desk.record() == before
    assert len(list(desk.home.projects_dir.iterdir())) == 1


def test_mistakes_in_the_source_are_found_before_anything_runs(desk: Desk) -> None:
    with pytest.raises(ConfigError, match=r"handler\.py:\d+:\d+"):
        desk.deploy(handler="class Handler:\n    def handle_post(self, payload)\n        pass\n")


@pytest.mark.parametrize("name", ["", "..", "a/b", "../cortex.yaml", "a\\b"])
def test_rejects_a_configuration_name_that_is_a_path(desk: Desk, name: str) -> None:
    with pytest.raises(InputError, match="not the name of a file"):
        asyncio.run(desk.deployer.deploy(project(config()), name))


def test_rejects_a_body_that_is_no_zip(desk: Desk) -> None:
    with pytest.raises(InputError, match="zip"):
        asyncio.run(desk.deployer.deploy(b"hello", "cortex.yaml"))


def test_a_patch_keeps_each_apis_own_project(desk: Desk) -> None:
    desk.deploy(config("one"))
    desk.deploy(config("two"), handler=HANDLER + "\n# another project\n")
    hashes = [desk.record(name).target.project_hash for name in ("one", "two")]
    results = desk.patch(config("two", replicas=2) + config("one", answer="new"))
    assert messages(results) == ["updating two (RealtimeAPI)", "updating one (RealtimeAPI)"]
    assert [desk.record(name).target.project_hash for name in ("one", "two")] == hashes
    assert desk.record("two").spec.autoscaling.min_replicas == 2


def test_a_file_named_like_the_configuration_is_part_of_the_project(desk: Desk) -> None:
    readiness = "  readiness: cortex.yaml\n"
    archive = project('{"values": 1}', **{"prod.yaml": config(extra=readiness), "sub/cortex.yaml": "a: 1"})
    asyncio.run(desk.deployer.deploy(archive, "prod.yaml"))
    stored = desk.projects.path(desk.record().target.project_hash)
    assert (stored / "cortex.yaml").read_text() == '{"values": 1}'
    assert (stored / "sub/cortex.yaml").read_text() == "a: 1"
    assert not (stored / "prod.yaml").exists()
    assert messages(desk.patch(config(replicas=2, extra=readiness))) == ["updating iris (RealtimeAPI)"]


def test_rejects_a_change_of_kind_until_the_api_is_deleted(desk: Desk) -> None:
    jobs = config().replace("RealtimeAPI", "BatchAPI").split("  autoscaling")[0]
    handler = HANDLER + "\n    def handle_batch(self, payload):\n        return payload\n"
    desk.deploy(handler=handler)
    for change in (
        lambda: desk.deploy(jobs, handler),
        lambda: desk.patch(jobs),
        lambda: desk.deploy(jobs, handler, True),
    ):
        with pytest.raises(
            ConfigError, match=r'cannot change the kind .* \(run "cortex delete iris" and deploy again\)'
        ):
            change()
    assert desk.record().spec.kind == "RealtimeAPI"
    asyncio.run(desk.deployer.delete("iris"))
    assert desk.deploy(jobs, handler) == [DeployResult("iris", "creating iris (BatchAPI)")]


def test_a_patch_is_checked_like_a_deploy(desk: Desk) -> None:
    desk.deploy()
    with pytest.raises(ConfigError, match="missing.py"):
        desk.patch(config().replace("handler.py", "missing.py"))
    with pytest.raises(NotFoundError, match="other is not deployed"):
        desk.patch(config("other"))
    with pytest.raises(ConfigError):
        desk.patch("not: [valid")


def test_an_unchanged_project_is_up_to_date_after_an_upgrade_that_brings_new_keys(desk: Desk) -> None:
    desk.deploy()
    with closing(sqlite3.connect(desk.home.database_file)) as database, database:
        (spec,) = database.execute("SELECT spec FROM apis").fetchone()
        older = {key: value for key, value in json.loads(spec).items() if key != "readiness"}
        assert older != json.loads(spec)
        for networking in (older["networking"], older["as_written"]["networking"]):
            del networking["max_body_size"]
        database.execute("UPDATE apis SET spec = ?, spec_id = 'of the older version'", [json.dumps(older)])
    assert Desk(desk.home).deploy() == [DeployResult("iris", "iris (RealtimeAPI) is up to date")]


def test_a_refresh_makes_a_new_revision_of_the_same_spec(desk: Desk) -> None:
    desk.deploy()
    before = desk.record()
    assert asyncio.run(desk.deployer.refresh("iris")) == DeployResult("iris", "updating iris (RealtimeAPI)")
    after = desk.record()
    assert after.revision != before.revision
    assert after.spec == before.spec
    assert desk.deploy() == [DeployResult("iris", "iris (RealtimeAPI) is up to date")]


def test_deleting_an_api_twice_is_an_error(desk: Desk) -> None:
    desk.deploy()
    assert asyncio.run(desk.deployer.delete("iris")) == DeployResult("iris", "deleting iris")
    assert desk.store.records() == ()
    with pytest.raises(NotFoundError, match="iris is not deployed"):
        asyncio.run(desk.deployer.delete("iris"))


def test_a_deploy_leaves_the_apis_of_other_files_alone(desk: Desk) -> None:
    desk.deploy(config("one"))
    desk.deploy(config("two"))
    assert [record.name for record in desk.store.records()] == ["one", "two"]


def deployment(*names: str) -> str:
    apis = "".join(f"- kind: api\n  name: {name}\n  predictor: {{path: handler.py}}\n" for name in names)
    return "- kind: deployment\n  name: flowers\n" + apis


def test_apis_missing_from_a_later_deploy_of_their_deployment_are_deleted(desk: Desk) -> None:
    desk.deploy(config("other"))
    created = desk.deploy(deployment("a", "b"), FUNCTIONS)
    assert [result.message for result in created] == ["creating a api", "creating b api"]
    later = desk.deploy(deployment("b", "c"), FUNCTIONS)
    assert [result.message for result in later] == ["b api is up to date", "creating c api", "deleting a api"]
    assert [record.name for record in desk.store.records()] == ["b", "c", "other"]
    same = desk.deploy(deployment("b", "c"), FUNCTIONS)
    assert {result.message for result in same} == {"flowers deployment is up to date"}


SPLITTER = "- name: split\n  kind: TrafficSplitter\n  apis: [{name: iris, weight: 100}]\n"


def test_rejects_the_deletion_of_an_api_that_a_splitter_uses(desk: Desk) -> None:
    with pytest.raises(ConfigError, match='"iris" is neither in this file nor deployed'):
        desk.deploy(SPLITTER)
    desk.deploy()
    assert desk.deploy(SPLITTER) == [DeployResult("split", "creating split (TrafficSplitter)")]
    with pytest.raises(ConflictError, match=r"used by the following TrafficSplitter\(s\): split"):
        asyncio.run(desk.deployer.delete("iris"))
    with pytest.raises(InputError, match="has no replicas"):
        asyncio.run(desk.deployer.refresh("split"))
    with pytest.raises(ConfigError, match="must add up to 100"):
        desk.patch(SPLITTER.replace("100", "90"))
    asyncio.run(desk.deployer.delete("split"))
    asyncio.run(desk.deployer.delete("iris"))


def test_a_deployment_keeps_an_api_that_a_splitter_uses(desk: Desk) -> None:
    desk.deploy(deployment("a", "b"), FUNCTIONS)
    desk.deploy(SPLITTER.replace("iris", "a"))
    assert desk.deploy(deployment("b"), FUNCTIONS) == [
        DeployResult("a", error="cannot delete a because it is used by the following TrafficSplitter(s): split")
    ]
    assert [record.name for record in desk.store.records()] == ["a", "b", "split"]


def test_checks_a_schedules_submission_like_a_real_one(desk: Desk) -> None:
    text = "- name: jobs\n  kind: BatchAPI\n  handler: {type: python, path: handler.py}\n"
    schedule = "  schedule:\n    cron: '0 3 * * *'\n    submission: {workers: 0, item_list: {items: [1]}}\n"
    with pytest.raises(ConfigError) as raised:
        desk.deploy(text + schedule)
    said = "cortex.yaml:6:5: jobs.schedule.submission: workers: must be at least 1 (got 0)"
    assert str(raised.value).startswith(said)


def test_a_deployment_that_is_updating_is_not_changed_in_part(desk: Desk) -> None:
    desk.deploy(deployment("a", "b"), FUNCTIONS)
    before = desk.store.records()
    desk.updating.add("a")
    results = desk.deploy(deployment("a", "b"), FUNCTIONS + "\n# changed\n")
    assert {result.error for result in results} == {"previous flowers deployment is updating (override with --force)"}
    assert desk.store.records() == before


def test_a_huge_upload_does_not_block_the_event_loop(desk: Desk) -> None:
    archive = project(config(), HANDLER, zeros="\0" * (250 * 1024**2))

    async def scenario() -> float:
        deploying = asyncio.create_task(desk.deployer.deploy(archive, "cortex.yaml"))
        longest, last = 0.0, time.thread_time()  # what the loop's own thread does: another's work may delay it
        while not deploying.done():
            await asyncio.sleep(0.005)
            longest, last = max(longest, time.thread_time() - last), time.thread_time()
        await deploying
        return longest

    assert asyncio.run(scenario()) < 0.4


LIMITED = Principal("ci", TokenScope.DEPLOY, api="open")


def endpoint_of(name: str, path: str) -> str:
    return config(name, extra=f"  networking: {{endpoint: {path}}}")


@pytest.mark.parametrize(
    ("path", "relation"),
    [
        ("/vault/login", "is below the endpoint of vault"),
        ("/vault/info", "is below the endpoint of vault"),
        ("/vault/docs/", "is below the endpoint of vault"),
        ("/vault/v2/models/vault/infer", "is below the endpoint of vault"),
        ("/shop/cart/pay", "is below the endpoint of cart"),
        ("/shop", "is above the endpoint of cart"),
    ],
)
def test_a_limited_token_takes_no_path_around_the_endpoint_of_another_api(desk: Desk, path: str, relation: str) -> None:
    desk.deploy(endpoint_of("vault", "/vault"))
    desk.deploy(endpoint_of("cart", "/shop/cart"))
    message = re.escape(
        f"the token 'ci' is limited to the API open, and {path.rstrip('/')} {relation}, so nothing was changed: "
        "choose another endpoint, or use a token that is not limited"
    )
    with pytest.raises(ForbiddenError, match=message):
        desk.deploy(endpoint_of("open", path), principal=LIMITED)
    desk.deploy(endpoint_of("open", "/vaults"), principal=LIMITED)
    with pytest.raises(ForbiddenError, match=message):
        desk.patch(endpoint_of("open", path), principal=LIMITED)
    desk.deploy(endpoint_of("open", path))  # with a token for all APIs
    desk.go_live("open")
    desk.deploy(endpoint_of("open", "/open"), principal=LIMITED)
    with pytest.raises(ForbiddenError, match=message):
        desk.rollback(name="open", principal=LIMITED)
    assert desk.rollback(name="open").message.startswith("rolling back")


def test_a_limited_token_keeps_the_endpoint_of_its_api(desk: Desk) -> None:
    desk.deploy(endpoint_of("open", "/open"), principal=LIMITED)
    desk.deploy(endpoint_of("cart", "/open/cart"))
    assert messages(desk.deploy(config("open", answer="one"), principal=LIMITED)) == [
        "open (RealtimeAPI) is up to date"
    ]
    desk.deploy(endpoint_of("open", "/open/cart/below"))  # with a token for all APIs
    below = config("open", answer="two", extra="  networking: {endpoint: /open/cart/below}")
    assert messages(desk.deploy(below, principal=LIMITED)) == ["updating open (RealtimeAPI)"]
    desk.deploy(endpoint_of("open", "/open"))
    assert messages(desk.deploy(config("open", answer="two"), principal=LIMITED)) == ["updating open (RealtimeAPI)"]


def test_a_deployed_api_at_a_path_of_the_gateway_survives_until_it_is_changed(desk: Desk) -> None:
    desk.deploy(endpoint_of("iris", "/iris"))
    record = desk.record()
    networking = record.spec.networking.model_copy(update={"endpoint": "/livez"})  # as an older version accepts
    spec = record.spec.model_copy(update={"networking": networking})
    desk.store.write([ApiChange(replace(record.target, spec=spec), record.nonce, "older")])
    assert desk.record().spec.networking.endpoint == "/livez"
    asyncio.run(desk.deployer.refresh("iris"))
    for change in (desk.deploy, desk.patch):
        with pytest.raises(ConfigError, match='"/livez" belongs to the gateway\'s health check'):
            change(endpoint_of("iris", "/livez"))
    desk.go_live()
    desk.deploy(endpoint_of("iris", "/iris2"))
    with pytest.raises(ConflictError, match="/livez belongs to the gateway's health check"):
        desk.rollback()
