from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from cortex.config.schema import Api
from cortex.operator.monitoring import metric_totals
from cortex.operator.monitoring.metric_totals import MetricTotals
from cortex.state.database import open_sqlite
from cortex.state.queries.apis import ApiChange, ApiStore
from cortex.state.queries.metrics import MetricStore
from cortex.state.revision import Revision
from cortex.telemetry import Logger
from cortex.worker.monitoring.metrics import MetricFile, SeriesKind, process_file, series_key

REQUESTS = series_key(SeriesKind.COUNTER, "requests", {"code": "200"})
LOWEST = series_key(SeriesKind.MIN, "value")
LEVEL, LEVEL_AT = series_key(SeriesKind.GAUGE, "level"), series_key(SeriesKind.SET_AT, "level")
PID = 2**22 + 1  # never a process


@pytest.fixture
def database(tmp_path: Path) -> Engine:
    engine = open_sqlite(tmp_path / "state.db")
    handler = {"interface": "handler", "type": "python", "path": "handler.py"}
    apis = [Api.model_validate({"name": name, "handler": handler}) for name in ("iris", "iris-two")]
    ApiStore(engine).write([ApiChange(Revision("aaaaaaaa-and-more", api, "project"), "nonce", "spec") for api in apis])
    return engine


def totals_of(database: Engine, folder: Path, removals: list[tuple[str, Path]] | None = None) -> MetricTotals:
    """Open the totals like an operator that starts; `removals` collects the calls of `before_removal`."""
    found = [] if removals is None else removals
    return MetricTotals(folder, MetricStore(database), Logger("test"), lambda api, path: found.append((api, path)))


def write(folder: Path, replica: str, **numbers: float) -> None:
    file = MetricFile(process_file(str(folder / replica), 0, PID))
    keys = {"requests": REQUESTS, "lowest": LOWEST, "level": LEVEL, "level_at": LEVEL_AT}
    for name, number in numbers.items():
        index = file.index_of(keys[name])
        assert index is not None
        file.cells[index] = number


def test_adds_the_numbers_of_running_and_ended_replicas(database: Engine, tmp_path: Path) -> None:
    folder, first, second, other = (
        tmp_path / "m",
        "iris-aaaaaaaa-000001",
        "iris-aaaaaaaa-000002",
        "iris-two-aaaaaaaa-00",
    )
    write(folder, first, requests=3, lowest=0.5, level=7, level_at=200)
    write(folder, second, requests=4, lowest=0.25, level=8, level_at=100)
    write(folder, other, requests=100)
    totals = totals_of(database, folder)
    expected = {REQUESTS: 7, LOWEST: 0.25, LEVEL: 7, LEVEL_AT: 200}
    assert totals.of("iris") == expected
    totals.startup([second, other])
    assert not (folder / first).exists()
    assert totals.of("iris") == expected
    assert totals.folders("iris") == [folder / second]
    totals.startup([])
    assert totals_of(database, folder).of("iris") == expected
    assert totals.of("iris-two") == {REQUESTS: 100}
    assert totals.of("unknown") == {}


def test_adds_a_replica_once_even_if_its_folder_outlives_the_operator(
    database: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, replica = tmp_path / "m", "iris-aaaaaaaa-000001"
    write(folder, replica, requests=3)
    with monkeypatch.context() as patch:  # killed right after the transaction
        patch.setattr(metric_totals.shutil, "rmtree", lambda *_, **__: None)
        totals_of(database, folder).startup([])
    assert (folder / replica).is_dir()
    assert totals_of(database, folder).of("iris") == {REQUESTS: 3}
    totals_of(database, folder).startup([])
    assert not (folder / replica).exists()
    assert totals_of(database, folder).of("iris") == {REQUESTS: 3}
    other = "iris-aaaaaaaa-000002"
    write(folder, other, requests=1)
    totals_of(database, folder).startup([])
    assert MetricStore(database).folded() == {other}, "the id is deleted once the folder is gone"


def test_a_replica_that_fails_to_be_stored_still_counts_and_is_stored_later(database: Engine, tmp_path: Path) -> None:
    folder, replica = tmp_path / "m", "iris-aaaaaaaa-000001"
    write(folder, replica, requests=3)
    seen: list[tuple[str, Path]] = []
    totals = totals_of(database, folder, seen)
    with database.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE metric_totals RENAME TO elsewhere")
    totals.startup([])
    with database.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE elsewhere RENAME TO metric_totals")
    assert totals.of("iris") == {REQUESTS: 3}
    totals.startup([])
    assert totals.of("iris") == {REQUESTS: 3}
    assert not (folder / replica).exists()
    assert set(seen) == {("iris", folder / replica)}


def test_deleting_an_api_deletes_its_numbers(database: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write(folder, "iris-aaaaaaaa-000001", requests=3)
    totals = totals_of(database, folder)
    totals.startup([])
    ApiStore(database).write([], ["iris"])
    write(folder, "iris-aaaaaaaa-000002", requests=3)  # was stopped with it
    totals.startup([])
    assert totals.of("iris") == {}
    assert not any(folder.iterdir())


def test_a_new_api_does_not_inherit_the_numbers_of_a_deleted_one(database: Engine, tmp_path: Path) -> None:
    folder, apis = tmp_path / "m", ApiStore(database)
    record = apis.get("iris")
    assert record is not None
    write(folder, "iris-aaaaaaaa-000001", requests=3)  # drains
    write(folder, "iris-aaaaaaaa-000002", requests=3)
    apis.write([], ["iris"])
    apis.write([ApiChange(Revision("bbbbbbbb-and-more", record.spec, "project"), "another", "spec")])
    apis.write([ApiChange(Revision("cccccccc-and-more", record.spec, "project"), "another", "spec")])
    write(folder, "iris-bbbbbbbb-000001", requests=1)
    write(folder, "iris-cccccccc-000001", requests=1)
    removed: list[tuple[str, Path]] = []
    totals = totals_of(database, folder, removed)

    assert totals.of("iris") == {REQUESTS: 2}
    assert len(totals.folders("iris")) == 2
    totals.startup([])
    assert totals.of("iris") == {REQUESTS: 2}
    assert sorted(path.name for _, path in removed) == ["iris-bbbbbbbb-000001", "iris-cccccccc-000001"]
    assert not any(folder.iterdir())


def test_recognizes_revisions_after_the_clock_was_set_back(database: Engine, tmp_path: Path) -> None:
    record = ApiStore(database).get("iris")
    assert record is not None
    past = ApiStore(database, now=lambda: record.created_at - timedelta(hours=1))
    past.write([ApiChange(Revision("bbbbbbbb-and-more", record.spec, "project"), "nonce", "spec")])
    write(tmp_path / "m", "iris-bbbbbbbb-000001", requests=1)

    assert totals_of(database, tmp_path / "m").of("iris") == {REQUESTS: 1}


def test_rings_are_those_of_one_revision_and_no_file_that_is_being_written(database: Engine, tmp_path: Path) -> None:
    for name in ("iris-aaaaaaaa-000001/predictions/0", "iris-aaaaaaaa-000001/copies/predictions/0"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (tmp_path / "iris-aaaaaaaa-000001/predictions/.0.part").touch()  # the mirror of a cluster writes it
    (tmp_path / "iris-bbbbbbbb-000001/predictions").mkdir(parents=True)
    (tmp_path / "iris-bbbbbbbb-000001/predictions/0").touch()
    found = totals_of(database, tmp_path).ring_files("iris", "aaaaaaaa-and-more", "predictions")
    names = ["iris-aaaaaaaa-000001/predictions/0", "iris-aaaaaaaa-000001/copies/predictions/0"]
    assert [path.relative_to(tmp_path).as_posix() for path in found] == names


def test_limits_the_number_of_series(database: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_totals, "MAX_SERIES", 2)
    folder = tmp_path / "m"
    write(folder, "iris-aaaaaaaa-000001", requests=3)
    totals = totals_of(database, folder)
    totals.startup([])
    write(folder, "iris-aaaaaaaa-000002", requests=1, lowest=1, level=1)
    totals.startup([])
    assert totals.of("iris") == {REQUESTS: 4, LOWEST: 1}


def test_drops_nan(database: Engine, tmp_path: Path) -> None:
    write(tmp_path / "m", "iris-aaaaaaaa-000001", requests=3, level=float("nan"), lowest=float("-inf"))
    totals = totals_of(database, tmp_path / "m")
    totals.startup([])
    assert totals.of("iris") == {REQUESTS: 3, LOWEST: float("-inf")}


def test_a_counter_that_became_nan_does_not_restart(database: Engine, tmp_path: Path) -> None:
    write(tmp_path / "m", "iris-aaaaaaaa-000001", requests=float("nan"))
    totals = totals_of(database, tmp_path / "m")
    totals.startup([])
    write(tmp_path / "m", "iris-aaaaaaaa-000002", requests=3)
    totals.startup([])
    assert totals.of("iris") == {REQUESTS: float("inf")}
