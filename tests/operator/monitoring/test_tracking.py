"""Predictions of running and ended replicas: summaries, drift, feedback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Mapping
from typing import Any

import pytest

from cortex.config.schema import Api
from cortex.errors import InputError
from cortex.home import Home
from cortex.operator.monitoring.feedback import parse_feedback
from cortex.operator.monitoring.metric_totals import MetricTotals
from cortex.operator.monitoring.prediction_summary import categories, quantile
from cortex.operator.monitoring.tracking import KEPT_HOURS, PredictionArchive, Tracking
from cortex.state.database import open_sqlite
from cortex.state.queries.apis import ApiChange, ApiRecord, ApiStore
from cortex.state.queries.metrics import MetricStore
from cortex.state.queries.predictions import MAX_ERROR, PredictionStore
from cortex.state.revision import Revision
from cortex.telemetry import Logger
from cortex.worker.monitoring.metrics import MetricFile, process_file
from cortex.worker.monitoring.tracker import RELATIVE_ERROR, PredictionTracker, bucket_of, class_key
from cortex.worker.spec import ReplicaSpec
from harness.replicas.specs import replica_spec

HOUR = 487_000
NOW = HOUR * 3600.0
PID = 2**22 + 1  # never a process


class Operated:
    """A deployed API, the metric files of its replicas, and their tracking."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.folder = home.path / "metrics"
        self.database = open_sqlite(self.home.database_file)
        self.apis = ApiStore(self.database)
        self.trackers: dict[str, PredictionTracker] = {}
        self.restart()

    def restart(self) -> None:
        logger = Logger("test")
        archive, store = PredictionArchive(self.home, logger), PredictionStore(self.database)
        self.totals = MetricTotals(self.folder, MetricStore(self.database), logger, archive.add)
        self.tracking = Tracking(self.home, self.apis, self.totals, archive, store, logger, lambda: NOW)

    def deploy(self, project: str = "project", revision: str = "aaaaaaaa-and-more", **tracker: Any) -> None:
        handler = {"interface": "handler", "type": "python", "path": "handler.py"}
        api = Api.model_validate({"name": "iris", "handler": handler, "tracker": tracker or None})
        self.apis.write([ApiChange(Revision(revision, api, project), "nonce", "spec")])

    @property
    def record(self) -> ApiRecord:
        record = self.apis.get("iris")
        assert record is not None
        return record

    def spec(self, replica: str) -> ReplicaSpec:
        tracker = self.record.spec.tracker
        return replica_spec(
            id=replica, metrics_dir=str(self.folder / replica),
            tracker_key=tracker.key if tracker else None, tracker_type=tracker.model_type if tracker else None,
        )  # fmt: skip

    def predict(self, replica: str, *results: Any, first: int = 0) -> None:
        """Track predictions of a replica; request ids start at `first`."""
        if replica not in self.trackers:
            spec = self.spec(replica)
            self.trackers[replica] = PredictionTracker(spec, MetricFile(process_file(spec.metrics_dir, 0, PID)))
        for number, result in enumerate(results, start=first):
            self.trackers[replica].track(result, request_id(number).encode())

    def end(self, replica: str) -> None:
        del self.trackers[replica]
        self.totals.end(self.folder / replica)

    def add_feedback(self, truths: Mapping[str, str | float]) -> dict[str, Any]:
        return self.tracking.add_feedback(self.record, truths)

    def update(self) -> dict[str, Any]:
        self.tracking.update(self.record)
        described = self.tracking.describe(self.record)
        assert described is not None
        return described


def request_id(number: int) -> str:
    return f"{HOUR * 3_600_000 + number}-7-{number}"


@pytest.fixture
def operated(home: Home) -> Operated:
    return Operated(home)


FIRST, SECOND, NEXT = "iris-aaaaaaaa-000001", "iris-aaaaaaaa-000002", "iris-bbbbbbbb-000001"


def test_counts_the_classes_of_all_replicas(operated: Operated) -> None:
    operated.deploy(model_type="classification", key="label")
    operated.predict(FIRST, *[{"label": f"c{number % 30}"} for number in range(90)], {"label": "c7"}, {"other": 1})
    operated.predict(SECOND, {"label": "c7"})
    operated.end(FIRST)
    operated.restart()

    described = operated.update()

    assert list(described["classes"].items())[:2] == [("c7", 5), ("c0", 3)]
    assert (len(described["classes"]), described["class_count"]) == (20, 30)
    assert (described["predictions"], described["untracked"]) == (92, 1)
    assert described["truth"] is None
    assert json.loads(json.dumps(described)) == described


def test_summarizes_the_numbers_of_all_replicas(operated: Operated) -> None:
    operated.deploy(model_type="regression")
    operated.predict(FIRST, *map(float, range(0, 1001, 2)))
    operated.end(FIRST)
    assert operated.update()["regression"]["max"] == 1000
    operated.predict(SECOND, *map(float, range(1, 1001, 2)))

    regression = operated.update()["regression"]

    assert regression["count"] == 1001
    assert (regression["min"], regression["max"], regression["avg"]) == (0, 1000, 500)
    for q, value in regression["quantiles"].items():
        assert value == pytest.approx(1000 * float(q), rel=RELATIVE_ERROR + 0.002)


def test_numbers_whose_sum_overflows_become_null(operated: Operated) -> None:
    operated.deploy(model_type="regression")
    operated.predict(FIRST, 1.7e308, 1.7e308, -1.7e308)
    operated.predict(SECOND, -1.7e308, -1.7e308, first=10)
    operated.end(FIRST)
    operated.end(SECOND)
    assert operated.add_feedback({request_id(0): -1.7e308, request_id(1): 1.7e308})["matched"] == 2

    described = operated.update()

    assert described["regression"]["avg"] is None
    assert described["regression"]["max"] == 1.7e308
    assert described["truth"]["mean_absolute_error"] == described["truth"]["mean_error"] == MAX_ERROR / 2
    json.dumps(described, allow_nan=False)


def test_half_of_a_surrogate_pair_can_be_a_class(operated: Operated) -> None:
    operated.deploy(model_type="classification")
    operated.predict(FIRST, "\ud800", "cat")
    told = parse_feedback(rb'[{"request_id": "%s", "truth": "\ud800"}]' % request_id(0).encode(), counts_classes=True)
    assert operated.add_feedback(told)["matched"] == 1

    described = operated.update()

    assert described["classes"] == {r"\ud800": 1, "cat": 1}
    assert described["truth"]["accuracy"] == 1
    assert categories({class_key("\ud800"): 2, class_key(r"\ud800"): 3}, counts_classes=True) == {r"\ud800": 5}


def test_describes_an_api_without_predictions(operated: Operated) -> None:
    operated.deploy(model_type="regression")
    assert operated.update()["regression"] is None
    operated.deploy()
    assert operated.tracking.describe(operated.record) is None
    operated.tracking.update(operated.record)


@pytest.mark.parametrize("q", [0, 0.25, 0.5, 1])
def test_quantiles_of_few_numbers(q: float) -> None:
    values = [-100.0, -1e-3, 0.0, 3.0, 1e6]
    counts = {str(bucket_of(value)): 1 for value in values}

    expected = {0: -100.0, 0.25: -1e-3, 0.5: 0.0, 1: 1e6}[q]
    assert quantile(counts, q) == pytest.approx(expected, rel=RELATIVE_ERROR)


def test_drift_detection_continues_after_a_restart(operated: Operated) -> None:
    operated.deploy(model_type="classification", window=200)
    operated.update()
    operated.predict(FIRST, *["cat", "dog"] * 100)
    assert operated.update()["drift"]["baseline_count"] == 200
    operated.predict(FIRST, *["cat", "dog"] * 60)
    operated.restart()
    drift = operated.update()["drift"]
    assert (drift["is_drift"], drift["pending"]) == (None, 120)

    operated.end(FIRST)
    operated.predict(SECOND, *["dog"] * 100)
    drift = operated.update()["drift"]

    assert drift["is_drift"] and drift["psi"] > drift["threshold"] > 0
    assert (drift["windows"], drift["windows_with_drift"], drift["pending"]) == (1, 1, 0)
    assert drift["last_windows"][0]["count"] == 220


def test_a_new_model_gets_a_new_baseline(operated: Operated) -> None:
    operated.deploy(model_type="classification", window=100)
    operated.update()
    operated.predict(FIRST, *["cat"] * 100)
    operated.update()
    operated.deploy("other project", "bbbbbbbb-and-more", model_type="classification", window=100)
    operated.update()
    operated.predict(NEXT, *["dog"] * 150)
    operated.update()
    operated.predict(NEXT, *["dog"] * 150)

    drift = operated.update()["drift"]

    assert (drift["baseline_count"], drift["windows"], drift["is_drift"]) == (150, 1, False)


def test_predictions_before_the_first_update_after_a_deploy_count_for_the_new_model(operated: Operated) -> None:
    operated.deploy(model_type="classification", window=1000)
    operated.predict(FIRST, *["cat"] * 300)
    operated.predict(SECOND, *["cat"] * 300)
    assert operated.update()["drift"]["pending"] == 600
    operated.deploy("other project", "bbbbbbbb-and-more", model_type="classification", window=1000)
    operated.end(SECOND)
    operated.predict(NEXT, *["dog"] * 200)

    described = operated.tracking.describe(operated.record)

    assert described is not None and described["drift"]["pending"] == 200
    assert operated.update()["drift"]["pending"] == 200
    operated.end(FIRST)
    operated.end(NEXT)
    assert operated.update()["drift"]["pending"] == 200


@pytest.mark.parametrize(
    ("text", "count", "problem"),
    [
        ('{"cat": 500, "dog": 500}', 1000, ""),
        ("[1, 2]", 0, "it has 2 predictions; at least 100 are needed"),
        (None, 0, "No such file"),
    ],
    ids=["good", "short", "missing"],
)
def test_reads_the_baseline_from_the_project(operated: Operated, text: str | None, count: int, problem: str) -> None:
    project = operated.home.projects_dir / "project"
    project.mkdir()
    if text is not None:
        (project / "baseline.json").write_text(text)
    operated.deploy(model_type="classification", window=100, baseline="baseline.json")

    drift = operated.update()["drift"]

    assert (drift["baseline"], drift["baseline_count"]) == ("baseline.json", count)
    assert problem in drift["problem"]
    operated.predict(FIRST, *["cat"] * 100)
    assert operated.update()["drift"]["is_drift"] is (True if count else None)


def test_accepts_feedback_after_the_replica_has_ended(operated: Operated) -> None:
    operated.deploy(model_type="classification")
    operated.predict(FIRST, "cat", "dog")
    operated.predict(SECOND, "cat", first=10)
    operated.end(FIRST)
    operated.restart()
    told = {request_id(0): "cat", request_id(1): "cat", request_id(10): "cat", "never": "cat"}

    answer = operated.add_feedback(told)

    assert answer == {"matched": 3, "unknown": 1, "unknown_ids": ["never"]}
    truth = operated.update()["truth"]
    assert (truth["count"], truth["accuracy"]) == (3, pytest.approx(2 / 3))
    assert [hour["count"] for hour in truth["hours"]] == [3]


def test_feedback_counts_once_per_request(operated: Operated) -> None:
    operated.deploy(model_type="regression")
    operated.predict(FIRST, 1.0, 3.0)

    def tell(told: dict[str, str | float]) -> Any:
        return operated.add_feedback(told)

    tell({request_id(0): 2.0, request_id(1): 3.0})
    operated.end(FIRST)
    for path in (operated.home.path / "predictions").rglob("*-0"):
        path.unlink()  # the stored prediction stays, even without its file
    assert tell({request_id(0): 4.0})["matched"] == 1

    truth = operated.update()["truth"]
    assert (truth["count"], truth["mean_error"], truth["mean_absolute_error"]) == (2, -1.5, 1.5)
    assert truth["root_mean_squared_error"] == pytest.approx(4.5**0.5)


def test_feedback_requires_a_tracker(operated: Operated) -> None:
    operated.deploy()
    with pytest.raises(InputError, match="iris has no `tracker`"):
        operated.add_feedback({"a": "cat"})


def test_deletes_old_feedback_and_the_archive_of_deleted_apis(operated: Operated) -> None:
    operated.deploy(model_type="regression")
    operated.predict(FIRST, 1.0)
    operated.predict(FIRST, 1.0, first=-(KEPT_HOURS + 1) * 3_600_000)
    operated.add_feedback({request_id(0): 1.0, request_id(-(KEPT_HOURS + 1) * 3_600_000): 1.0})
    operated.end(FIRST)
    assert operated.update()["truth"]["count"] == 2

    operated.tracking.clean({"iris"})
    assert operated.update()["truth"]["count"] == 1
    kept = operated.home.path / "predictions" / "iris"
    assert kept.is_dir()
    operated.tracking.clean(set())
    assert not kept.exists()


def test_the_loop_survives_an_unreadable_database(operated: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        with contextlib.closing(sqlite3.connect(operated.home.database_file, isolation_level=None)) as database:
            database.execute("ALTER TABLE apis RENAME TO elsewhere")
            running = asyncio.create_task(operated.tracking.run())
            for _ in range(100):
                await asyncio.sleep(0)
            database.execute("ALTER TABLE elsewhere RENAME TO apis")
        store = PredictionStore(operated.database)
        async with asyncio.timeout(20):
            while store.drift("iris") is None:
                assert not running.done()
                await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    monkeypatch.setattr("cortex.operator.monitoring.tracking.UPDATE_S", 0.001)
    operated.deploy(key="label", model_type="classification")
    asyncio.run(scenario())
