"""The examples on a real Ray cluster of three nodes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.cluster.cluster_installation import OPERATOR, OnRay
from harness.cluster.shared_cluster import Surroundings
from harness.installations.example_cases import (
    ASYNC_EXAMPLES,
    BATCH_EXAMPLES,
    EXAMPLES,
    EXAMPLES_DIR,
    MODEL_EXAMPLES,
    BatchExample,
    near,
    with_what_is_installed,
)
from harness.installations.installation import served, write_project
from harness.wait import wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("cached_packages"),
]
REGRESSION = next(example for example in MODEL_EXAMPLES if example.name == "sklearn-live-reload")
LOCAL_MODELS = [example for example in MODEL_EXAMPLES if example is not REGRESSION]


def copied(name: str, folder: Path, elsewhere: Callable[[str], str] = lambda line: line) -> Path:
    """Copy an example; `elsewhere` replaces lines of its cortex.yaml."""
    project = folder / name
    shutil.copytree(EXAMPLES_DIR / name, project, ignore=shutil.ignore_patterns("__pycache__", "models"))
    config = project / "cortex.yaml"
    config.write_text("".join(f"{elsewhere(line)}\n" for line in config.read_text().splitlines()))
    return project


def make_model(project: Path, environ: dict[str, str], *destination: str) -> None:
    command = [sys.executable, "make_model.py", *destination]
    done = subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_examples_of_serving_answer_their_samples(on_ray: OnRay) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda example: on_ray.cortex.cortex("deploy", example.folder, timeout_s=300), EXAMPLES))
    for example in EXAMPLES:
        reply = on_ray.cortex.post(example.endpoint, body=example.sample_bytes, content_type=example.content_type)
        assert reply.status == 200, reply
        if isinstance(example.answer, str) and example.name != "iris-functions":
            assert reply.body.decode().startswith(example.answer)
        else:
            assert reply.json == example.answer
    for example in EXAMPLES:
        on_ray.cortex.cortex("delete", example.api, "-f")


def test_examples_with_models_in_the_project_answer(on_ray: OnRay, tmp_path: Path) -> None:
    for example in LOCAL_MODELS:
        project = copied(example.name, tmp_path)
        if "tensorflow" in example.name:
            with_what_is_installed(project)
        make_model(project, {**os.environ})
        on_ray.cortex.cortex("deploy", project, timeout_s=300)
        for query, answer in example.answers.items():
            reply = on_ray.cortex.post(f"/{example.name}{query}", example.sample)
            assert (reply.status, reply.body and reply.json) == (200, near(answer)), query
        on_ray.cortex.cortex("delete", example.name, "-f")


def test_a_newer_model_in_a_bucket_is_served_without_a_deploy(
    on_ray: OnRay, surroundings: Surroundings, tmp_path: Path
) -> None:
    if surroundings.bucket is None:
        pytest.skip("Swift is not installed: scripts/test-services")
    models, environ = f"{surroundings.bucket.url}/{REGRESSION.name}", {**os.environ, **surroundings.environ}
    project = copied(REGRESSION.name, tmp_path, lambda line: line.replace("/tmp/cortex-diabetes", models))
    make_model(project, environ, models)
    on_ray.cortex.cortex("deploy", project, timeout_s=300)
    assert on_ray.cortex.post(f"/{REGRESSION.name}", REGRESSION.sample).json == near(REGRESSION.answers[""])
    make_model(project, environ, models)
    newer = near({"progression": 192.7, "patients": 200})
    wait_until(lambda: on_ray.cortex.post(f"/{REGRESSION.name}", REGRESSION.sample).json == newer, 30)
    on_ray.cortex.cortex("delete", REGRESSION.name, "-f")


@pytest.mark.parametrize("example", BATCH_EXAMPLES, ids=lambda example: example.name)
def test_batch_example_runs_as_in_its_readme(on_ray: OnRay, example: BatchExample, tmp_path: Path) -> None:
    cortex = on_ray.cortex
    project = copied(example.name, tmp_path, lambda line: line.replace("/tmp/", f"{tmp_path}/"))
    for name in example.copied:
        (project / name).rename(tmp_path / name)
    job_file = project / "job.json"
    job_file.write_text(job_file.read_text().replace("/tmp/", f"{tmp_path}/"))
    if (project / "make_model.py").exists():
        make_model(project, {**os.environ})
    cortex.cortex("deploy", project, timeout_s=300)
    done = cortex.cortex("submit", example.name, job_file, "--watch", timeout_s=300)
    (job,) = [each["job_status"]["job_id"] for each in on_ray.client.list_jobs(example.name)]
    assert job in done.stdout
    expected = json.loads(json.dumps(example.results).replace("/tmp/", f"{tmp_path}/"))
    assert [line["result"] for line in on_ray.client.job_results(example.name, job)] == expected
    if example.name == "batch-sum":
        assert json.loads((tmp_path / "batch-sum" / job / "sum.json").read_text()) == example.shown
    cortex.cortex("delete", example.name, "-f")


def test_async_example_returns_its_result(on_ray: OnRay) -> None:
    [example] = ASYNC_EXAMPLES
    on_ray.cortex.cortex("deploy", example.folder, timeout_s=300)
    body = (example.folder / example.sample).read_bytes()
    reply = on_ray.cortex.post(f"/{example.name}", body=body, content_type=example.content_type)
    told = on_ray.cortex.post(f"/{example.name}/{reply.json['id']}?wait=20", method="GET").json
    assert (told["status"], told["result"]) == ("completed", example.result)
    on_ray.cortex.cortex("delete", example.name, "-f")


def test_task_example_reports(on_ray: OnRay, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "large").write_bytes(bytes(3000))
    project = copied("task-disk-report", tmp_path, lambda line: line.replace(" /tmp", f" {tmp_path}/files"))
    on_ray.cortex.cortex("deploy", project)
    on_ray.cortex.cortex("submit", "task-disk-report", "--watch", timeout_s=300)
    [job] = [each["job_status"]["job_id"] for each in on_ray.client.list_jobs("task-disk-report")]
    [line] = on_ray.client.job_results("task-disk-report", job)
    assert line["result"]["largest"] == [["large", 3000]]
    on_ray.cortex.cortex("delete", "task-disk-report", "-f")


LOOKED_AT = """
    import os, time

    class PythonPredictor:
        def __init__(self, config):
            self.memory = []

        def predict(self, payload):
            print("asked for", payload["label"], flush=True)
            if payload.get("eat"):
                self.memory.append(b"x" * payload["eat"])
            return {"label": payload["label"], "pid": os.getpid()}
"""
LOOKED_AT_CONFIG = """
    - name: looked-at
      kind: RealtimeAPI
      predictor: {type: python, path: handler.py}
      monitoring: {key: label, model_type: classification}
      compute: {cpu: 0.2, mem: 200Mi}
      autoscaling: {min_replicas: 3, max_replicas: 3}
"""


def test_logs_metrics_and_predictions_of_replicas_on_nodes_are_collected(on_ray: OnRay, tmp_path: Path) -> None:
    cortex = on_ray.cortex
    cortex.cortex("deploy", write_project(tmp_path, LOOKED_AT, LOOKED_AT_CONFIG), timeout_s=300)
    on_ray.live("looked-at", 3)
    ids = [cortex.post("/looked-at", {"label": f"flower-{number % 2}"}).headers for number in range(30)]
    request_id = ids[0]["x-cortex-request-id"]

    def printed() -> bool:
        return cortex.cortex("logs", "looked-at").stdout.count("asked for") == 30

    wait_until(printed, 20, "all lines of all nodes are there")

    def classes() -> Any:
        return (cortex.get("looked-at")["tracker"] or {}).get("classes")

    wait_until(lambda: classes() == {"flower-0": 15, "flower-1": 15}, 20, "all predictions of all nodes are there")
    assert "asked for flower-0" in cortex.cortex("logs", "looked-at", "--request", request_id).stdout
    before = {each["id"] for each in on_ray.replicas("looked-at")}
    cortex.cortex("refresh", "looked-at")
    on_ray.live("looked-at", 3, but=before)
    cortex.cortex("delete", "looked-at", "-f")
    wait_until(lambda: not any(on_ray.supervisors(node, "looked-at") for node in on_ray.cluster.nodes), 20)


VERSIONED = """
    class Handler:
        def __init__(self, config):
            self.version = config["version"]

        def handle_post(self, payload):
            return {{"version": self.version}}
"""
VERSIONED_CONFIG = """
    - name: versioned
      kind: RealtimeAPI
      handler: {{type: python, path: handler.py, config: {{version: {version}}}}}
      compute: {{cpu: 0.5}}
      autoscaling: {{min_replicas: {replicas}, init_replicas: {replicas}, max_replicas: 3}}
"""


def deploy_version(on_ray: OnRay, folder: Path, version: int, replicas: int) -> None:
    config = VERSIONED_CONFIG.format(version=version, replicas=replicas)
    on_ray.cortex.cortex("deploy", write_project(folder, VERSIONED.format(), config), timeout_s=300)


def test_no_request_fails_during_an_update_and_a_restart_of_the_operator(on_ray: OnRay, tmp_path: Path) -> None:
    deploy_version(on_ray, tmp_path, 1, 2)
    with on_ray.cortex.load("/versioned", 100) as load:
        deploy_version(on_ray, tmp_path, 2, 2)
        on_ray.cortex.cortex("refresh", "versioned")
        on_ray.kill(on_ray.cluster.head, OPERATOR)
        on_ray.cortex.up()
    assert set(load["statuses"]) == {"200"}, load["failures"]
    assert set(load["answers"]) == {'{"version":1}', '{"version":2}'}
    on_ray.cortex.cortex("delete", "versioned", "-f")


def test_an_api_without_replicas_gets_one_with_its_first_request(on_ray: OnRay, tmp_path: Path) -> None:
    deploy_version(on_ray, tmp_path, 3, 0)
    assert served(on_ray.cortex, "/versioned", {}).json == {"version": 3}
    on_ray.cortex.cortex("delete", "versioned", "-f")
