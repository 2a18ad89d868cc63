"""The routing table as JSON: whatever is in a table comes out again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.gateway.routes import ApiKey, Backend, RoutingTable, Server, Share, Split
from cortex.gateway.table_json import table_from_json, table_to_json

TABLE = RoutingTable((Backend("a", "/a", 1.0, 1, 1, "", (Server("s", "/s", 1),)),), keys=(ApiKey("k", "0" * 64),))
tables = st.builds(
    RoutingTable,
    st.lists(
        st.builds(Backend, timeout_s=st.floats(allow_nan=False), servers=st.lists(st.builds(Server)).map(tuple))
    ).map(tuple),
    st.lists(st.builds(Split, shares=st.lists(st.builds(Share)).map(tuple), shadow=st.none() | st.builds(Share))).map(
        tuple
    ),
    st.lists(st.builds(ApiKey, apis=st.lists(st.text()).map(tuple))).map(tuple),
    st.text(),
)


@given(tables)
def test_a_table_comes_out_as_it_went_in(table: RoutingTable) -> None:
    assert table_from_json(json.loads(json.dumps(table_to_json(table)))) == table


@pytest.mark.parametrize(
    "change",
    [
        {"doors": []},
        {"backends": [{"api": "a"}]},
        {"backends": [{**table_to_json(TABLE)["backends"][0], "needs_fingerprint": True}]},
        {"keys": [{"id": "a", "digest": "", "until": 1}]},
        {"splits": None},
        {"splits": [[]]},
    ],
    ids=lambda change: json.dumps(change)[:20],
)
def test_what_is_not_known_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, KeyError, AttributeError)):
        table_from_json({**table_to_json(TABLE), **change})
