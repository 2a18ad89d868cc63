from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cortex.state.database import Where, open_state
from cortex.state.queries.projects import ProjectStore

LARGE = bytes(range(256)) * 10_000  # stored in three parts


@pytest.fixture
def store(where: Where) -> Iterator[ProjectStore]:
    engine = open_state(where)
    yield ProjectStore(engine)
    engine.dispose()


def test_projects_round_trip(store: ProjectStore, tmp_path: Path) -> None:
    for name, data in {"large": LARGE, "small": b"zip"}.items():
        (tmp_path / name).write_bytes(data)
        store.put(name, tmp_path / name)
    assert b"".join(store.get("large")) == LARGE
    assert b"".join(store.get("small")) == b"zip"
    assert list(store.get("unknown")) == []


def test_a_project_is_stored_once(store: ProjectStore, tmp_path: Path) -> None:
    (tmp_path / "first").write_bytes(b"first")
    (tmp_path / "second").write_bytes(b"second")
    store.put("same", tmp_path / "first")
    store.put("same", tmp_path / "second")
    assert b"".join(store.get("same")) == b"first"


def test_unused_projects_are_removed(store: ProjectStore, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"data")
    for name in ("used", "unused"):
        store.put(name, tmp_path / "data")
    store.keep_only({"used", "new"})
    assert store.hashes() == {"used"}
