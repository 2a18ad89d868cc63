from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from cortex.config.schema import Api
from cortex.operator.monitoring import metric_totals
from cortex.operator.monitoring.metric_totals import MetricTotals
from cortex.replica.metric_file import MetricFile
from cortex.replica.metric_folder import process_file
from cortex.replica.series import SeriesKind, series_key
from cortex.state.apis import ApiStore, Change, Target
from cortex.state.database import open_sqlite
from cortex.state.metrics import MetricStore
from cortex.telemetry import Logger

REQUESTS = series_key(SeriesKind.COUNTER, "requests", {"code": "200"})
LOWEST = series_key(SeriesKind.MIN, "value")
LEVEL, LEVEL_AT = series_key(SeriesKind.GAUGE, "level"), series_key(SeriesKind.SET_AT, "level")
PID = 2**22 + 1  # never a process


@pytest.fixture
def database(tmp_path: Path) -> Engine:
    engine = open_sqlite(tmp_path / "state.db")
    handler = {"interface": "handler", "type": "python", "path": "handler.py"}
    apis = [Api.model_validate({"name": name, "handler": handler}) for name in ("iris", "iris-two")]
    ApiStore(engine).write([Change(Target("aaaaaaaa-and-more", api, "project"), "nonce", "spec") for api in apis])
    return engine


def totals_of(database: Engine, folder: Path) -> MetricTotals:
    """Open the totals as an operator that starts anew does."""
    return MetricTotals(folder, MetricStore(database), Logger("test"))


def write(folder: Path, replica: str, **numbers: float) -> None:
    file = MetricFile(process_file(str(folder / replica), 0, PID))
    keys = {"requests": REQUESTS, "lowest": LOWEST, "level": LEVEL, "level_at": LEVEL_AT}
    for name, number in numbers.items():
        index = file.index_of(keys[name])
        assert index is not None
        file.cells[index] = number


def test_numbers_of_replicas_that_ended_and_of_those_that_run_are_added(database: Engine, tmp_path: Path) -> None:
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


def test_a_replica_is_added_once_even_if_its_folder_outlives_the_operator(
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
    assert MetricStore(database).folded() == {other}, "it is forgotten once there is nothing to be counted twice"


def test_what_can_not_be_stored_is_still_counted_and_stored_later(database: Engine, tmp_path: Path) -> None:
    folder, replica = tmp_path / "m", "iris-aaaaaaaa-000001"
    write(folder, replica, requests=3)
    totals, seen = totals_of(database, folder), list[tuple[str, Path]]()
    with database.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE metric_totals RENAME TO elsewhere")
    totals.before_removal.append(lambda api, path: seen.append((api, path)))
    totals.startup([])
    with database.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE elsewhere RENAME TO metric_totals")
    assert totals.of("iris") == {REQUESTS: 3}
    totals.startup([])
    assert totals.of("iris") == {REQUESTS: 3}
    assert not (folder / replica).exists()
    assert set(seen) == {("iris", folder / replica)}


def test_numbers_go_with_their_api(database: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write(folder, "iris-aaaaaaaa-000001", requests=3)
    totals = totals_of(database, folder)
    totals.startup([])
    ApiStore(database).write([], ["iris"])
    write(folder, "iris-aaaaaaaa-000002", requests=3)  # was stopped with it
    totals.startup([])
    assert totals.of("iris") == {}
    assert not any(folder.iterdir())


def test_numbers_of_a_deleted_api_are_none_of_the_one_that_has_its_name_now(database: Engine, tmp_path: Path) -> None:
    folder, apis = tmp_path / "m", ApiStore(database)
    record = apis.get("iris")
    assert record is not None
    write(folder, "iris-aaaaaaaa-000001", requests=3)  # drains
    write(folder, "iris-aaaaaaaa-000002", requests=3)
    apis.write([], ["iris"])
    apis.write([Change(Target("bbbbbbbb-and-more", record.spec, "project"), "another", "spec")])
    apis.write([Change(Target("cccccccc-and-more", record.spec, "project"), "another", "spec")])
    write(folder, "iris-bbbbbbbb-000001", requests=1)
    write(folder, "iris-cccccccc-000001", requests=1)
    totals = totals_of(database, folder)
    kept: list[str] = []
    totals.before_removal.append(lambda _, ended: kept.append(ended.name))

    assert totals.of("iris") == {REQUESTS: 2}
    assert len(totals.folders("iris")) == 2
    totals.startup([])
    assert totals.of("iris") == {REQUESTS: 2}
    assert sorted(kept) == ["iris-bbbbbbbb-000001", "iris-cccccccc-000001"]
    assert not any(folder.iterdir())


def test_versions_are_of_their_api_also_where_the_clock_was_set_back(database: Engine, tmp_path: Path) -> None:
    record = ApiStore(database).get("iris")
    assert record is not None
    past = ApiStore(database, now=lambda: record.created_at - timedelta(hours=1))
    past.write([Change(Target("bbbbbbbb-and-more", record.spec, "project"), "nonce", "spec")])
    write(tmp_path / "m", "iris-bbbbbbbb-000001", requests=1)

    assert totals_of(database, tmp_path / "m").of("iris") == {REQUESTS: 1}


def test_series_without_end_are_cut_off(database: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_totals, "MAX_SERIES", 2)
    folder = tmp_path / "m"
    write(folder, "iris-aaaaaaaa-000001", requests=3)
    totals = totals_of(database, folder)
    totals.startup([])
    write(folder, "iris-aaaaaaaa-000002", requests=1, lowest=1, level=1)
    totals.startup([])
    assert totals.of("iris") == {REQUESTS: 4, LOWEST: 1}


def test_what_is_no_number_is_left_out(database: Engine, tmp_path: Path) -> None:
    write(tmp_path / "m", "iris-aaaaaaaa-000001", requests=3, level=float("nan"), lowest=float("-inf"))
    totals = totals_of(database, tmp_path / "m")
    totals.startup([])
    assert totals.of("iris") == {REQUESTS: 3, LOWEST: float("-inf")}


def test_a_sum_that_is_no_number_any_more_does_not_begin_anew(database: Engine, tmp_path: Path) -> None:
    write(tmp_path / "m", "iris-aaaaaaaa-000001", requests=float("nan"))
    totals = totals_of(database, tmp_path / "m")
    totals.startup([])
    write(tmp_path / "m", "iris-aaaaaaaa-000002", requests=3)
    totals.startup([])
    assert totals.of("iris") == {REQUESTS: float("inf")}
