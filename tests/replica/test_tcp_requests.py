"""Tests of requests over unix sockets, once more over TCP."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_app_requests as app_requests
import test_app_streams as app_streams
import test_hostile_code as hostile_code

from harness.replicas import replicas


@pytest.mark.parametrize(
    "test",
    [
        app_requests.test_each_verb_has_its_method_and_others_get_405,
        app_streams.test_generator_is_streamed_while_it_runs,
        app_requests.test_bodies_of_every_framing_arrive_whole_and_too_large_ones_are_refused,
        app_streams.test_large_answers_arrive_whole,
        app_streams.test_starlette_responses_are_sent_as_they_are,
        hostile_code.test_hang_ups_while_a_call_runs_leave_no_connection_behind,
        hostile_code.test_process_that_reads_no_request_any_more_is_replaced,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_over_tcp(test: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(replicas.DEFAULTS, "listen_host", "127.0.0.1")
    monkeypatch.setitem(replicas.DEFAULTS, "gateway_secret", "5ec2e7")
    test()
