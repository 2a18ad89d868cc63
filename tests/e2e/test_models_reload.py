"""Models change while 150 requests a second come in: the version that answers, and that no request fails."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.installations.installation import Installation, installation, served, write_project
from harness.models.model_makers import MAKERS, python_model
from harness.servers.buckets import Bucket, all_kinds, variables
from harness.servers.s3 import SwiftServer
from harness.wait import wait_until

RATE = 150
POLL_S = 1.0
#: Within two polls of being complete, and what it takes to start a process that loads it, on a busy machine.
SERVED_WITHIN_S = 2 * POLL_S + 3

#: Its models are two files that belong together, and what to do when they are loaded.
PREDICTOR = """
    import json, os, pathlib, time

    class PythonPredictor:
        def __init__(self, config, python_client):
            self.client = python_client
            self.loading = pathlib.Path(config["loading"])

        def load_model(self, model_path):
            folder = pathlib.Path(model_path)
            numbers = [json.loads((folder / name).read_text())["number"] for name in ("first.json", "second.json")]
            do = (folder / "do.txt").read_text() if (folder / "do.txt").exists() else ""
            (self.loading / str(numbers[0])).write_text(str(os.getpid()))
            if do == "dawdle":
                time.sleep(1.5)
            return numbers

        def predict(self, payload, query_params):
            try:
                return self.client.get_model(*query_params.values())
            except Exception as error:
                if not query_params:
                    raise
                return {"error": str(error)}
"""
CONFIG = """
    - name: NAME
      kind: RealtimeAPI
      predictor:
        type: python
        path: handler.py
        multi_model_reloading:
          FORM: URL
          poll_interval: 1s
        config:
          loading: LOADING
      autoscaling:
        min_replicas: REPLICAS
"""


@pytest.fixture(scope="module")
def buckets(swift: SwiftServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bucket]]:
    with all_kinds(tmp_path_factory.mktemp("buckets"), swift) as made:
        yield made


@pytest.fixture(scope="module")
def cortex(buckets: dict[str, Bucket]) -> Iterator[Installation]:
    with installation(variables(buckets.values())) as made:
        yield made


class Api:
    """An API with its models in a bucket, and operations on the models."""

    def __init__(self, cortex: Installation, folder: Path, name: str, bucket: Bucket) -> None:
        self.cortex, self.folder, self.name, self.bucket = cortex, folder, name, bucket
        self.loading = folder / "loading"

    def deploy(self, form: str = "path", replicas: int = 1) -> None:
        self.loading.mkdir(exist_ok=True)
        values = {"NAME": self.name, "FORM": form, "URL": f"{self.bucket.url}/{self.name}"}
        config = CONFIG
        for word, value in {**values, "LOADING": str(self.loading), "REPLICAS": str(replicas)}.items():
            config = config.replace(word, value)
        self.cortex.cortex("deploy", write_project(self.folder, PREDICTOR, config))

    def put(self, version: str, number: int, **files: bytes) -> None:
        """Upload a version: its two files, and others."""
        for name, data in files.items():
            self.bucket.put(f"{self.name}/{version}/{name.replace('_', '.')}", data)
        for name, data in python_model(number).items():
            self.bucket.put(f"{self.name}/{version}/{name}", data)

    def put_file(self, path: str, number: int) -> None:
        self.bucket.put(f"{self.name}/{path}", json.dumps({"number": number}).encode())

    def delete(self, version: str, *others: str) -> None:
        for name in ("first.json", "second.json", *others):
            self.bucket.delete(f"{self.name}/{version}/{name}")

    def number(self, query: str = "") -> Any:
        """Return the response of the API."""
        reply = self.cortex.post(f"/{self.name}{query}", {})
        return reply.json[0] if reply.status == 200 and isinstance(reply.json, list) else reply.json

    def wait_for(self, number: int, timeout_s: float = SERVED_WITHIN_S) -> None:
        self.wait(lambda: self.number() == number, timeout_s, f"{self.name} answers with {number}")

    def wait(self, is_so: Callable[[], bool], timeout_s: float = SERVED_WITHIN_S, message: str = "") -> None:
        """Wait; the message of a failure contains the output of `cortex get`."""
        try:
            wait_until(is_so, timeout_s, message)
        except AssertionError as error:
            error.add_note(self.shown())
            raise

    def shown(self) -> str:
        """Return the output of `cortex get`."""
        forms = [self.cortex.cortex("get", self.name, *form, check=False) for form in ((), ("-o", "json"))]
        return "".join(form.stdout + form.stderr for form in forms)

    def wait_for_problem(self, version: str | None, words: str) -> None:
        """Wait until the client and `cortex get` report such a problem with this version, or with the model."""
        name = "models" if version is None else f"version {version}"
        client = self.cortex.client  # a command takes longer

        def both() -> bool:
            problems = client.get_api(self.name)["models"]["problems"]
            if not any(problem["version"] == version and words in json.dumps(problem) for problem in problems):
                return False
            text = self.cortex.cortex("get", self.name).stdout
            return f"problem with {name}" in text and words in text

        self.wait(both, message=f"cortex get has a problem with {name}: {words}")


@pytest.fixture
def api(
    cortex: Installation, buckets: dict[str, Bucket], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Api]:
    """An API that is named after its test, and deleted after it."""
    name, bucket = getattr(request, "param", (request.node.name.split("[")[0].replace("_", "-")[5:30].strip("-"), "s3"))
    made = Api(cortex, tmp_path, name, buckets[bucket])
    yield made
    cortex.cortex("delete", name, "-f", check=False)


def all_answered(summary: dict[str, Any]) -> set[int]:
    """Check that no request failed and none was answered by two versions; return the numbers that answered."""
    assert set(summary["statuses"]) == {"200"}, summary
    answers = [json.loads(answer) for answer in summary["answers"]]
    assert all(first == second for first, second in answers), answers
    return {first for first, _ in answers}


def pause(seconds: float) -> None:
    """Pause between two steps of an upload."""
    threading.Event().wait(seconds)


@pytest.mark.parametrize(
    "api",
    [("uploads", "s3"), pytest.param(("uploads", "local"), marks=pytest.mark.long)],
    indirect=True,
    ids=["s3", "local"],
)
def test_uploads_of_all_kinds_fail_no_request(api: Api) -> None:
    api.put("9", 9)
    api.deploy()
    assert api.number() == 9
    with api.cortex.load(f"/{api.name}", RATE) as summary:
        # Copied one by one; 10 is newer than 9, though not in alphabetical order.
        api.put_file("10/first.json", 10)
        pause(0.6 * POLL_S)
        api.put_file("10/second.json", 10)
        api.wait_for(10)

        # Truncated, and its uploader killed; then sent again.
        api.put_file("11/first.json", 11)
        api.bucket.put(f"{api.name}/11/second.json", b'{"numb')
        api.wait_for_problem("11", "JSONDecodeError")
        assert api.number() == 10
        api.put_file("11/second.json", 11)
        api.wait_for(11)

        # The uploader is killed before the last file: never complete, never served.
        api.put_file("12/first.json", 12)
        api.wait_for_problem("12", "second.json")
        assert api.number() == 11
        api.delete("12")
        api.wait(lambda: "second.json" not in api.shown())

        api.delete("11")
        api.wait_for(10)

        # In place, one file after the other.
        api.put_file("10/second.json", 110)
        pause(0.3 * POLL_S)
        api.put_file("10/first.json", 110)
        api.wait_for(110)
    assert all_answered(summary) == {9, 10, 11, 110}


@pytest.mark.parametrize(
    "api",
    [pytest.param(("folder", "gs"), marks=pytest.mark.long), ("folder", "local")],
    indirect=True,
    ids=["gs", "local"],
)
def test_models_of_a_folder_are_added_and_removed(api: Api) -> None:
    api.put("a/1", 1)
    api.put("b/7", 7)
    api.deploy("dir")
    with api.cortex.load(f"/{api.name}?model=a", RATE) as summary:
        assert api.number("?model=b") == 7
        api.put("c", 3)  # without versions
        api.wait(lambda: api.number("?model=c") == 3)
        assert "'nobody' model wasn't found" in api.number("?model=nobody")["error"]
        api.delete("b/7")
        api.wait(lambda: "'b' model" in str(api.number("?model=b")), message="b is gone")
        # Single becomes versioned: another structure of its folder.
        api.delete("c")
        api.put("c/4", 4)
        api.wait(lambda: api.number("?model=c&version=4") == 4)
    assert all_answered(summary) == {1}


@pytest.mark.long
def test_kills_of_model_agent_and_operator_during_a_reload_fail_no_request(api: Api) -> None:
    api.put("1", 1)
    api.deploy()
    with api.cortex.load(f"/{api.name}", RATE) as summary:
        api.put("2", 2, do_txt=b"dawdle")
        wait_until((api.loading / "2").exists, SERVED_WITHIN_S, "version 2 is being loaded")
        kill(model_agent(api.cortex))
        api.wait_for(2, 15)
        api.put("3", 3, do_txt=b"dawdle")
        wait_until((api.loading / "3").exists, 15, "version 3 is being loaded")
        kill(api.cortex.status()["operator"]["pid"])
        api.wait_for(3)
        api.cortex.up()
        api.put("4", 4)
        api.wait_for(4, 15)
    assert all_answered(summary) == {1, 2, 3, 4}


@pytest.mark.parametrize("kind", ["onnx", pytest.param("tensorflow", marks=pytest.mark.long)])
def test_other_kinds_are_reloaded_without_a_failed_request(
    kind: str, cortex: Installation, buckets: dict[str, Bucket], tmp_path: Path
) -> None:
    bucket = buckets["local"]
    put_files(bucket, f"{kind}/1", kind, 1)
    client = f"{kind}_client"
    call = (
        "self.client.predict([payload['x']])[0]"
        if kind == "onnx"
        else "self.client.predict({'x': [payload['x']]})['y']"
    )
    source = f"""
        class {"ONNX" if kind == "onnx" else "TensorFlow"}Predictor:
            def __init__(self, config, {client}):
                self.client = {client}

            def predict(self, payload):
                return {call}
    """
    config = f"""
        - name: {kind}
          kind: RealtimeAPI
          predictor:
            type: {kind}
            path: handler.py
            models:
              path: {bucket.url}/{kind}
              poll_interval: 1s
    """
    cortex.cortex("deploy", write_project(tmp_path, source, config))
    assert served(cortex, f"/{kind}", {"x": 1}).json == [2.0]
    with cortex.load(f"/{kind}", RATE) as summary:
        put_files(bucket, f"{kind}/2", kind, 2)
        wait_until(lambda: cortex.post(f"/{kind}", {"x": 1}).json == [3.0], 60)
    assert set(summary["statuses"]) == {"200"}, summary
    assert set(summary["answers"]) == {"[2.0]", "[3.0]"}
    cortex.cortex("delete", kind, "-f")


def put_files(bucket: Bucket, key: str, kind: str, number: int) -> None:
    for name, data in MAKERS[kind](number).items():
        bucket.put(f"{key}/{name}", data)


def model_agent(cortex: Installation) -> int:
    """Find the process."""
    wanted = {"cortex.models.agent.agent", str(cortex.home)}
    [pid] = [
        process.pid for process in psutil.process_iter(["cmdline"]) if wanted <= set(process.info["cmdline"] or ())
    ]
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
