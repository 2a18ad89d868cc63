"""The command that the dashboard shows for an API without a documentation page."""

from __future__ import annotations

import pytest

from cortex.operator.dashboard.pages.apis import call_command

BODY = " -H 'content-type: application/json' -d @FILE.json"


@pytest.mark.parametrize(
    ("kind", "handler", "endpoint", "needs_key", "command"),
    [
        ("RealtimeAPI", {"type": "python"}, "/a", False, f"curl http://h/a{BODY}"),
        ("RealtimeAPI", {"type": "python"}, "/a", True, f"curl http://h/a -H 'x-api-key: KEY'{BODY}"),
        ("RealtimeAPI", {"type": "asgi"}, "/a", True, "curl http://h/a/ -H 'x-api-key: KEY'"),
        ("RealtimeAPI", {"type": "command"}, "/a", False, "curl http://h/a/"),
        ("RealtimeAPI", {"protobuf_path": "a.proto"}, "/a", False, "cortex predict one FILE.json --method METHOD"),
        ("TrafficSplitter", None, "/a", False, "curl http://h/a/"),
        ("TaskAPI", {"type": "python"}, "/a", False, f"curl http://h/a{BODY}"),
    ],
)
def test_each_kind_has_a_command(
    kind: str, handler: dict[str, str] | None, endpoint: str, needs_key: bool, command: str
) -> None:
    spec = {"name": "one", "kind": kind, "handler": handler}
    assert call_command({"spec": spec, "endpoint": f"http://h{endpoint}", "needs_key": needs_key}) == command
