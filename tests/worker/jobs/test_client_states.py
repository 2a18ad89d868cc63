from __future__ import annotations

import pytest

from cortex.worker.jobs.client_states import ClientEvent, ClientState, state_after

S, E = ClientState, ClientEvent

TABLE = {
    S.JOINING: {E.ASSIGNED: S.CONSTRUCTING},
    S.CONSTRUCTING: {E.CONSTRUCTED: S.IDLE},
    S.IDLE: {E.QUICK_LEASE: S.FETCHING_AHEAD, E.SLOW_LEASE: S.RUNNING, E.JOB_OVER: S.JOB_OVER},
    S.FETCHING_AHEAD: {
        E.SLOW_LEASE: S.RUNNING,
        E.LEASE_DONE: S.IDLE,
        E.NOTHING_LEASED: S.RUNNING,
        E.JOB_OVER: S.JOB_OVER,
    },
    S.RUNNING: {E.QUICK_LEASE: S.FETCHING_AHEAD, E.LEASE_DONE: S.IDLE, E.JOB_OVER: S.JOB_OVER},
    S.JOB_OVER: {},
    S.ENDING: {},
    S.FINISHED: {},
}


@pytest.mark.parametrize("state", ClientState)
def test_each_event_leads_to_the_state_of_the_table_or_changes_nothing(state: ClientState) -> None:
    ends = {E.STOPPED: S.FINISHED if state is S.FINISHED else S.ENDING, E.FINISHED: S.FINISHED}
    expected = dict.fromkeys(ClientEvent, state) | TABLE[state] | ends
    assert {event: state_after(state, event) for event in ClientEvent} == expected
