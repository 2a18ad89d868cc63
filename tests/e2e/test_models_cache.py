"""The limits of caches of models in a real API.

Simultaneous requests, new versions and budgets in bytes are in `tests/models/`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.installations.installation import Installation, installation, write_project
from harness.models.model_makers import python_model
from harness.servers.buckets import BUCKET, Bucket, RemoteBucket, start_gcs
from harness.servers.gcs import FakeGcsServer

#: Its models count themselves: how many there are at once, and how often each was loaded.
PREDICTOR = """
    import collections, json, os, pathlib, threading, time

    class Model:
        alive, most, loads, lock = 0, 0, collections.Counter(), threading.Lock()

        def __init__(self, folder):
            with Model.lock:
                Model.alive += 1
                Model.most = max(Model.most, Model.alive)
            self.number = json.loads((folder / "first.json").read_text())["number"]
            Model.loads[str(self.number)] += 1
            time.sleep(0.05)

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


def put_model(bucket: Bucket, key: str, number: int) -> None:
    for name, data in python_model(number).items():
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
