from __future__ import annotations

from dataclasses import replace

import pytest

from cortex.config.schema import Api
from cortex.gateway.protocols import Protocol
from cortex.gateway.routes import COPIES_OF_ALL, ApiBackend, Canary, Share, Split
from cortex.lifecycle import ApiKind, DeathCause, ProcessState
from cortex.operator.replicas.plan import Replica
from cortex.operator.replicas.routing import requests_ahead, routes_of, server_capacity
from cortex.operator.revisions.preparation_states import Preparation, Stage
from cortex.state.queries.apis import StoredFailure
from cortex.worker.spec import Death, StartFailure
from harness.replicas.fleet import (
    BROKEN,
    FAILED,
    READY,
    RESTARTING,
    STARTING,
    UNREADY,
    api,
    deployed,
    process,
    record,
    replica,
)

BACKING_OFF = process(state=ProcessState.BACKING_OFF, restarts=3)


def backend(replicas: list[Replica], preparation: Preparation | None = None, **spec: object) -> ApiBackend:
    desired = record(deployed(spec=api(**spec)))  # type: ignore[arg-type]
    preparations = {("iris", "r1"): preparation} if preparation else {}
    (found,) = routes_of([desired], replicas, preparations).backends
    return found


def names(found: ApiBackend) -> list[str]:
    return [server.name for server in found.servers]


def test_every_ready_process_of_every_revision_is_routed_under_a_stable_name() -> None:
    replicas = [replica("b", READY, READY), replica("a", revision="r0")]
    assert names(backend(replicas)) == ["a-0", "b-0", "b-1"]


def test_a_process_that_was_never_ready_is_not_routed() -> None:
    assert names(backend([replica("a", STARTING), replica("b", FAILED)])) == []


def test_a_restarting_process_is_routed_only_if_no_process_is_ready() -> None:
    assert names(backend([replica("a", RESTARTING), replica("b")])) == ["b-0"]
    assert names(backend([replica("a", RESTARTING)])) == ["a-0"]
    assert names(backend([replica("a", BACKING_OFF)])) == []


def test_a_process_that_is_no_longer_ready_is_not_routed_and_the_reason_is_known() -> None:
    assert names(backend([replica("a", UNREADY)])) == []
    assert names(backend([replica("a", UNREADY, READY)])) == ["a-1"]
    assert names(backend([replica("a", UNREADY), replica("b", RESTARTING)])) == ["b-0"]
    reason = "ValueError while it started; `cortex get iris` shows why"
    assert backend([replica("a", UNREADY)]).unavailable == reason


def test_the_backend_contains_the_reason_why_no_replica_is_ready() -> None:
    assert backend([]).unavailable == "starting"
    reason = "ValueError while it started; `cortex get iris` shows why"
    assert backend([replica("a", FAILED)]).unavailable == reason
    assert backend([], Preparation(failure=BROKEN)).unavailable == reason
    assert backend([], Preparation(shortage="no node has 2 GPUs")).unavailable == "no node has 2 GPUs"
    killed = replace(FAILED, failure=None, death=Death(DeathCause.KILLED, "killed (SIGKILL)", 0))
    assert backend([replica("a", killed)]).unavailable == "killed (SIGKILL)"


def test_callers_do_not_get_the_text_of_a_failure_that_may_be_of_user_code() -> None:
    secret = StartFailure("cannot connect to postgres://user:pa55@db.internal")
    for found in (
        backend([], Preparation(failure=secret)),
        backend([replica("a", replace(FAILED, failure=secret))]),
    ):
        assert found.unavailable == "it does not start; `cortex get iris` shows why"
    stored = record(deployed(), failure=StoredFailure(secret.message))
    (found,) = routes_of([stored], [], {}).backends
    assert found.unavailable == "it does not start; `cortex get iris` shows why"


@pytest.mark.parametrize(
    ("slots", "limit", "only_process", "expected"),
    [
        (1, 1024, False, 2),
        (4, 1024, False, 5),
        (8, 1024, False, 5),
        (1, 1024, True, 15),
        (1, 128, True, 8),
        (8, 64, False, 4),
        (1, 16, False, 1),
        (1, 15, True, 0),
    ],
)
def test_requests_are_sent_ahead_of_short_calls_only(slots: int, limit: int, only_process: bool, expected: int) -> None:
    assert requests_ahead(slots, limit, True, only_process) == expected
    assert requests_ahead(slots, limit, False, only_process) == 0


@pytest.mark.parametrize(
    ("slots", "lent", "limit", "ahead", "expected"),
    [
        (1, 0, 1024, 0, 1),
        (4, 0, 1024, 0, 4),
        (4, 0, 1024, 5, 9),
        (8, 0, 4, 5, 4),
        (1, 1, 1024, 0, 1 + 2),
        (1, 4, 1024, 0, 1 + 6),
        (1, 1, 1024, 2, 3 + 8),
        (1, 4, 1024, 2, 3 + 8),
        (1, 5, 1024, 2, 3 + 16),
        (1, 200, 1024, 2, 3 + 304),
    ],
)
def test_capacity_is_slots_plus_requests_ahead_plus_lent_connections(
    slots: int, lent: int, limit: int, ahead: int, expected: int
) -> None:
    assert server_capacity(slots, lent, limit, ahead) == expected


def test_each_process_with_short_calls_gets_requests_ahead() -> None:
    quick = replace(READY, has_short_calls=True)
    assert [server.capacity for server in backend([replica("a")]).servers] == [1]
    assert [server.capacity for server in backend([replica("a", quick)]).servers] == [16]
    assert [server.capacity for server in backend([replica("a", quick, READY)]).servers] == [3, 1]


@pytest.mark.parametrize(
    ("slots", "lent", "limit", "ahead", "gateways", "expected"),
    [
        (1, 0, 1024, 2, 2, 2),
        (1, 0, 1024, 2, 50, 2),
        (1, 0, 1024, 0, 50, 1),
        (8, 0, 1024, 5, 5, 9),
        (8, 0, 8, 5, 2, 4),
        (8, 0, 3, 5, 2, 2),
        (8, 0, 1, 5, 3, 1),
        (1, 5, 1024, 2, 2, 2 + 16),
    ],
)
def test_gateways_share_the_limit_of_a_process_and_each_may_fill_all_slots(
    slots: int, lent: int, limit: int, ahead: int, gateways: int, expected: int
) -> None:
    assert server_capacity(slots, lent, limit, ahead, gateways) == expected


@pytest.mark.parametrize("gateways", [1, 2, 3, 7])
def test_queue_and_capacity_of_all_gateways_add_up_to_the_limit(gateways: int) -> None:
    desired = record(deployed(spec=api(autoscaling={"max_replica_concurrency": 100})))
    (found,) = routes_of([desired], [replica("a", slots=2)], {}, gateways=gateways).backends
    allowed = gateways * (found.max_queue + found.servers[0].capacity)
    assert 100 <= allowed < 100 + gateways


def test_the_queue_is_the_limit_minus_the_slots() -> None:
    spec = {"processes": 4, "autoscaling": {"max_replica_concurrency": 100}}
    assert backend([replica("a", *[READY] * 4, slots=5)], **spec).max_queue == 25 - 5
    assert backend([replica("a")], autoscaling={"max_replica_concurrency": 1}).max_queue == 0


def test_the_queue_is_the_same_for_any_number_of_replicas() -> None:
    bounds = {backend([replica(str(number)) for number in range(count)]).max_queue for count in range(4)}
    assert bounds == {1024 - 1}


def test_changes_of_networking_reach_the_gateway() -> None:
    found = backend([], networking={"endpoint": "/flowers", "timeout_s": 1.5, "max_body_size": 1000})
    assert (found.endpoint, found.timeout_s, found.max_body_bytes) == ("/flowers", 1.5, 1000)


def test_lent_connections_raise_the_capacity_of_their_process_only() -> None:
    replicas = [replica("a", replace(READY, lent=3), READY)]
    assert [server.capacity for server in backend(replicas).servers] == [1 + 4, 1]


def test_an_api_at_zero_replicas_holds_requests_unless_none_can_start() -> None:
    idle = {"autoscaling": {"min_replicas": 0}}
    assert not backend([]).holds
    assert backend([], **idle).holds
    assert backend([replica("a")], **idle).holds
    assert not backend([replica("a", FAILED)], **idle).holds
    assert not backend([], Preparation(shortage="no GPU"), **idle).holds


def test_a_revision_that_has_served_holds_requests_until_it_serves_again() -> None:
    new = deployed()
    for stored, holds in (
        (record(new), False),
        (record(new, serving=new), True),
        (record(new, serving=deployed("r0")), True),
        (record(new, serving=deployed("r0"), failure=StoredFailure("ValueError")), True),
        (record(new, serving=new, failure=StoredFailure("ValueError")), False),
    ):
        assert routes_of([stored], [], {}).backends[0].holds == holds
    served = record(new, serving=new)
    broken = {("iris", "r1"): Preparation(failure=BROKEN)}
    assert not routes_of([served], [], broken).backends[0].holds


def test_nothing_keeps_an_api_from_answering_that_was_ready_and_scaled_to_zero() -> None:
    first, again = deployed(spec=api(autoscaling={"min_replicas": 0})), deployed(revision="r0")
    assert [routes_of([record(first, serving)], [], {}).backends[0].unavailable for serving in (None, again)] == [
        "starting",
        "",
    ]
    (failed,) = routes_of([record(first, again)], [replica("a", FAILED, revision="r0")], {}).backends
    assert failed.unavailable == "ValueError while it started; `cortex get iris` shows why"


@pytest.mark.parametrize(
    ("kind", "replicas", "preparation", "unavailable"),
    [
        (ApiKind.BATCH, [], Preparation(), "starting"),
        (ApiKind.BATCH, [], Preparation(Stage.DONE), ""),
        (ApiKind.BATCH, [], Preparation(failure=BROKEN), "ValueError while it started; `cortex get iris` shows why"),
        (ApiKind.ASYNC, [], Preparation(Stage.DONE), "starting"),
        (ApiKind.ASYNC, [replica("a", STARTING)], Preparation(Stage.DONE), "starting"),
        (ApiKind.ASYNC, [replica("a", READY)], Preparation(Stage.DONE), ""),
        (ApiKind.ASYNC, [replica("a", FAILED)], Preparation(Stage.DONE), "ValueError while it started; `cortex get"),
        (ApiKind.ASYNC, [replica("a", READY), replica("b", FAILED)], Preparation(Stage.DONE), ""),
    ],
)
def test_an_api_behind_the_operator_has_the_reason_why_it_can_not_work(
    kind: ApiKind, replicas: list[Replica], preparation: Preparation, unavailable: str
) -> None:
    spec = api().model_copy(update={"kind": kind})
    (found,) = routes_of([record(deployed(spec=spec))], replicas, {("iris", "r1"): preparation}, "/s/jobs").backends
    assert (found.jobs_socket, found.unavailable[: len(unavailable)]) == ("/s/jobs", unavailable)
    assert bool(found.unavailable) == bool(unavailable)


def test_a_broken_new_revision_does_not_make_an_async_api_unready_whose_old_one_restarts() -> None:
    spec = api().model_copy(update={"kind": ApiKind.ASYNC})
    stored = record(deployed(spec=spec), serving=deployed("r0", spec), failure=StoredFailure("ValueError"))
    broken = {("iris", "r1"): Preparation(failure=BROKEN)}
    (found,) = routes_of([stored], [replica("a", RESTARTING, revision="r0")], broken, "/s/jobs").backends
    assert found.unavailable == ""


def test_requests_are_held_after_one_kill_of_a_process_that_starts() -> None:
    idle = {"autoscaling": {"min_replicas": 0}}
    killed = replace(FAILED, failure=StartFailure("the process ended while it started", was_killed=True))
    assert backend([replica("a", killed)], **idle).holds
    assert not backend([replica("a", killed, FAILED)], **idle).holds
    assert not backend([replica("a", replace(killed, failed_starts=2))], **idle).holds
    assert not backend(
        [replica("a", replace(FAILED, death=Death(DeathCause.KILLED, "killed (SIGKILL)", 0)))], **idle
    ).holds


def test_documentation_follows_the_configuration() -> None:
    assert backend([]).has_docs
    assert not backend([], networking={"docs": False}).has_docs
    hidden = record(deployed(spec=api(networking={"docs": False})))
    assert routes_of([hidden], [], {}, "/s/jobs").operator_socket == ""
    assert routes_of([record(deployed())], [], {}, "/s/jobs").operator_socket == "/s/jobs"


def test_access_log_follows_the_configuration() -> None:
    assert not backend([]).access_log
    assert backend([], networking={"access_log": True}).access_log


def test_a_splitter_has_shares_and_a_shadow() -> None:
    shares = [
        {"name": "one", "weight": 30},
        {"name": "two", "weight": 70},
        {"name": "dark", "weight": 5, "shadow": True},
    ]
    split = Api.model_validate({"name": "iris", "kind": "TrafficSplitter", "apis": shares})
    table = routes_of([record(deployed(spec=split))], [], {})
    assert table.backends == ()
    shares = (Share("one", 30), Share("two", 70))
    assert table.splits == (Split("iris", "/iris", shares, Share("dark", 5), has_docs=True),)


def test_a_command_gets_every_path_below_its_endpoint_as_it_arrives() -> None:
    handler = {"interface": "handler", "type": "command", "command": ["node", "server.js"]}
    found = backend([], handler=handler)
    assert found.subpaths == ("/",)
    assert found.protocol is Protocol.COMMAND


def canary_backend(*replicas: Replica, percent: int = 10) -> ApiBackend:
    desired = record(deployed("r2"), deployed("r1"))
    (found,) = routes_of([desired], replicas, {}, canaries={"iris": percent}).backends
    return found


def test_a_canary_has_servers_of_its_own() -> None:
    found = canary_backend(replica("old"), replica("new", revision="r2"))
    assert names(found) == ["old-0"]
    assert found.canary is not None
    assert (found.canary.percent, [server.name for server in found.canary.servers]) == (10, ["new-0"])


def test_a_shadow_gets_copies_and_no_share() -> None:
    found = canary_backend(replica("old"), replica("new", revision="r2"), percent=COPIES_OF_ALL).canary
    assert found is not None
    assert (found.percent, found.gets_copies, len(found.servers)) == (0, True, 1)


@pytest.mark.parametrize("revision", ["r1", "r2"])
def test_a_revision_alone_gets_all_requests_of_a_trial(revision: str) -> None:
    found = canary_backend(replica("a", revision=revision), replica("b", STARTING, revision="r1"))
    assert names(found) == ["a-0"]
    assert found.canary is not None
    assert (found.canary.percent, found.canary.servers) == (0, ())


def test_a_revision_that_was_tried_before_gets_no_request() -> None:
    before = replica("before", revision="r0")
    found = canary_backend(replica("old"), before, replica("new", STARTING, revision="r2"))
    assert (names(found), found.canary) == (["old-0"], Canary(0))
    assert names(canary_backend(replica("old"), before, replica("new", revision="r2"))) == ["old-0"]


def test_without_a_trial_all_revisions_share_the_requests() -> None:
    (found,) = routes_of(
        [record(deployed("r2"), deployed("r1"))], [replica("a"), replica("b", revision="r2")], {}
    ).backends
    assert names(found) == ["a-0", "b-0"]
    assert found.canary is None
