"""Caches of models in a real API: their limits, one load for simultaneous requests, replacement without a failure."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from harness.installations.installation import Installation, installation, write_project
from harness.models.model_makers import python_model
from harness.servers.buckets import BUCKET, Bucket, LocalBucket, RemoteBucket, start_gcs
from harness.servers.gcs import FakeGcsServer
from harness.wait import wait_until

MEBIBYTE = 1024 * 1024

#: Its models count themselves: how many there are at once, and how often each was loaded.
PREDICTOR = """
    import collections, json, os, pathlib, threading, time
    import numpy

    class Model:
        alive, most, loads, lock = 0, 0, collections.Counter(), threading.Lock()

        def __init__(self, folder):
            with Model.lock:
                Model.alive += 1
                Model.most = max(Model.most, Model.alive)
            self.number = json.loads((folder / "first.json").read_text())["number"]
            Model.loads[str(self.number)] += 1
            weights = folder / "weights.npy"
            self.weights = numpy.load(weights) + 1 if weights.exists() else None  # + 1: touches every page
            time.sleep(0.2 if weights.exists() else 0.05)

        def __del__(self):
            with Model.lock:
                Model.alive -= 1

    class PythonPredictor:
        def __init__(self, config, python_client):
            self.client = python_client

        def load_model(self, model_path):
            return Model(pathlib.Path(model_path))

        def predict(self, payload, query_params):
            if "model" not in query_params:
                return {"pid": os.getpid(), "most": Model.most, "loads": Model.loads}
            model = self.client.get_model(query_params["model"])
            time.sleep(float(query_params.get("hold", 0)))
            return model.number
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGcsServer]:
    made = start_gcs(tmp_path_factory.mktemp("gcs"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def bucket(server: FakeGcsServer) -> Bucket:
    return RemoteBucket(f"gs://{BUCKET}", server)


@pytest.fixture(scope="module")
def cortex(server: FakeGcsServer) -> Iterator[Installation]:
    with installation({"STORAGE_EMULATOR_HOST": server.url}) as made:
        yield made


def put_model(bucket: Bucket, key: str, number: int, size_bytes: int = 0) -> None:
    for name, data in python_model(number, size_bytes).items():
        bucket.put(f"{key}/{name}", data)


def deploy(cortex: Installation, folder: Path, name: str, models: dict[str, Any], threads: int = 8) -> None:
    predictor = {
        "type": "python",
        "path": "handler.py",
        "threads_per_process": threads,
        "multi_model_reloading": {"poll_interval": "1s", **models},
    }
    project = write_project(folder, PREDICTOR, "")
    (project / "cortex.yaml").write_text(
        yaml.safe_dump([{"name": name, "kind": "RealtimeAPI", "predictor": predictor}])
    )
    cortex.cortex("deploy", project)


def ask(cortex: Installation, path: str) -> Any:
    reply = cortex.post(path, {})
    assert reply.status == 200, reply
    return reply.json


def contents(cortex: Installation) -> int:
    """Count the models on disk."""
    folder = cortex.home / "models" / "content"
    return sum(not path.name.startswith(".") and path.is_dir() for path in folder.iterdir()) if folder.is_dir() else 0


@contextmanager
def watching(look: Any) -> Iterator[list[int]]:
    """Call `look` all the time while the block runs."""
    ended, seen = threading.Event(), [0]

    def watch() -> None:
        while not ended.wait(0.005):
            seen.append(look())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def test_memory_and_disk_never_hold_more_models_than_allowed(
    cortex: Installation, bucket: Bucket, tmp_path: Path
) -> None:
    for number in range(6):
        put_model(bucket, f"limited/m{number}/1", number)
    models = {"dir": f"{bucket.url}/limited", "cache_size": 2, "disk_cache_size": 3}
    deploy(cortex, tmp_path, "limited", models)
    with watching(lambda: contents(cortex)) as on_disk, ThreadPoolExecutor(8) as pool:
        numbers = [number * 7 % 6 for number in range(120)]
        answers = pool.map(lambda number: ask(cortex, f"/limited?model=m{number}&hold=0.01"), numbers)
        assert list(answers) == numbers
    told = ask(cortex, "/limited")
    assert told["most"] == 2
    assert sum(told["loads"].values()) >= 6
    assert 0 < max(on_disk) <= 3
    cortex.cortex("delete", "limited", "-f")


def test_hundred_first_requests_cause_one_download_and_one_load(
    cortex: Installation, bucket: Bucket, server: FakeGcsServer, tmp_path: Path
) -> None:
    put_model(bucket, "cold/model/1", 1, 20 * MEBIBYTE)
    deploy(cortex, tmp_path, "cold", {"dir": f"{bucket.url}/cold", "cache_size": 1, "disk_cache_size": 1}, threads=16)
    with ThreadPoolExecutor(100) as pool:
        assert list(pool.map(lambda _: ask(cortex, "/cold?model=model"), range(100))) == [1] * 100
    assert ask(cortex, "/cold")["loads"] == {"1": 1}
    downloads = Counter(path for path in server.downloads() if "cold" in path)
    assert set(downloads.values()) == {1}, downloads
    assert len(downloads) == 3
    cortex.cortex("delete", "cold", "-f")


@pytest.mark.long
def test_new_version_of_a_cached_model_fails_no_request(cortex: Installation, bucket: Bucket, tmp_path: Path) -> None:
    put_model(bucket, "cached/a/1", 1)
    put_model(bucket, "cached/b/1", 50)
    deploy(cortex, tmp_path, "cached", {"dir": f"{bucket.url}/cached", "cache_size": 2, "disk_cache_size": 4})
    assert ask(cortex, "/cached?model=b") == 50
    pid = ask(cortex, "/cached")["pid"]
    with cortex.load("/cached?model=a", 300) as summary:
        for number in (2, 10):
            put_model(bucket, f"cached/a/{number}", number)
            wait_until(lambda number=number: ask(cortex, "/cached?model=a") == number, 6)  # type: ignore[misc]
        put_model(bucket, "cached/a/9", 9)
        for name in python_model(10):
            bucket.delete(f"cached/a/10/{name}")
        wait_until(lambda: ask(cortex, "/cached?model=a") == 9, 6)
    assert set(summary["statuses"]) == {"200"}, summary
    assert {json.loads(answer) for answer in summary["answers"]} == {1, 2, 10, 9}
    told = ask(cortex, "/cached")
    assert told["pid"] == pid  # swapped inside the process
    assert told["most"] <= 2
    cortex.cortex("delete", "cached", "-f")


@pytest.mark.long
def test_budget_in_bytes_bounds_the_memory_of_the_process(cortex: Installation, tmp_path: Path) -> None:
    local = LocalBucket(tmp_path / "models")
    for number in range(10):
        put_model(local, f"m{number}", number, 20 * MEBIBYTE)
    deploy(cortex, tmp_path / "project", "budget", {"dir": local.url, "cache_memory": "100Mi"}, threads=2)
    process = psutil.Process(ask(cortex, "/budget")["pid"])
    before = process.memory_info().rss
    with watching(lambda: process.memory_info().rss) as resident, ThreadPoolExecutor(2) as pool:
        numbers = [number * 3 % 10 for number in range(40)]
        assert list(pool.map(lambda number: ask(cortex, f"/budget?model=m{number}"), numbers)) == numbers
    told = ask(cortex, "/budget")
    assert 2 <= told["most"] <= 5
    # A load has the file's content and the sum of it in memory at the same time.
    assert max(resident) < before + 110 * MEBIBYTE + 2 * 20 * MEBIBYTE
    cortex.cortex("delete", "budget", "-f")
