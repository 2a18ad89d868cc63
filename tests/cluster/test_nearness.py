"""Whether a node is this machine: true of an agent here, false as soon as one thing about it is another's."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.local_nodes import SECRET, LocalNode, local_nodes
from cortex.cluster.nearness import is_here
from cortex.cluster.wire import connect, derived
from cortex.home import Home


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with tempfile.TemporaryDirectory(prefix="cx-") as folder, local_nodes(Path(folder), 1) as [made]:
        yield made


@pytest.fixture(scope="module")
def told(node: LocalNode) -> dict[str, Any]:
    """What the agent says of itself to an operator."""

    async def ask() -> dict[str, Any]:
        wire = await connect(node.host, node.address.port, derived(SECRET, "node"))
        wire.send({"purpose": "control", "host": "127.0.0.1", "port": 1, "epoch": 1})
        message = await wire.receive()
        wire.close()
        return message or {}

    return asyncio.run(ask())


def test_an_agent_of_this_machine_is_here(told: dict[str, Any]) -> None:
    assert is_here(told)


def test_an_agent_elsewhere_or_out_of_our_sight_is_not(told: dict[str, Any], tmp_path: Path) -> None:
    identity = json.loads(told["identity"])
    for change in (
        {"host": "192.0.2.1"},
        {"host": "not an address"},
        {"home": str(tmp_path)},
        {"identity": json.dumps({**identity, "boot_id": "of another machine, or of before"})},
        {"identity": json.dumps({**identity, "boot_id": ""})},
        {"identity": json.dumps({**identity, "pid": identity["pid"] + 1})},
        {"identity": None},
        {"identity": "7"},
    ):
        assert not is_here({**told, **change}), change
    assert not is_here({})


def test_a_file_of_an_agent_before_does_not_count(told: dict[str, Any], tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    before = json.dumps({**json.loads(told["identity"]), "start_ticks": 1})
    (home.run_dir / "node.json").write_text(json.dumps({**told, "identity": before}))
    assert not is_here({**told, "home": str(home.path)})
    (home.run_dir / "node.json").write_text(json.dumps(told))
    assert is_here({**told, "home": str(home.path)})
