"""The page about typed payloads: its class serves all four kinds, with the responses that the page shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.installations.installation import Installation
from harness.models.user_project import user_project
from harness.wait import wait_until

PAGE = Path(__file__).parent.parent.parent / "docs" / "howto" / "typed-payloads.md"
FLOWER = {"sepal_length": 5.1, "petal_length": 1.4}
SETOSA = {"species": "setosa", "score": 0.9}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def flowers(cortex: Installation, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("flowers")
    (folder / "flowers.py").write_text(blocks("python")[0])
    (folder / "cortex.yaml").write_text(blocks("yaml")[0])
    cortex.cortex("deploy", "-y", folder / "cortex.yaml")
    return cortex


def ended(installation: Installation, api: str, submission: Any) -> dict[str, Any]:
    job = installation.post(f"/{api}", submission).json["job_id"]

    def over() -> Any:
        found = installation.post(f"/{api}?jobID={job}", method="GET").json["job_status"]
        return found if found["end_time"] else None

    return {**wait_until(over, 40), "job_id": job}


def results(installation: Installation, api: str, job: str) -> list[Any]:
    shown = installation.cortex("get", api, job, "--results").stdout
    return [json.loads(line)["result"] for line in shown.splitlines()]


def test_a_realtime_api_answers_as_the_page_says(flowers: Installation) -> None:
    sent = json.dumps(FLOWER).encode()
    assert flowers.post("/iris", body=sent, content_type="application/x-www-form-urlencoded").json == SETOSA
    wrong = flowers.post("/iris", {"sepal_length": -1})
    assert wrong.status == 422
    shown = json.loads(blocks("json")[0])
    assert wrong.json | {"request_id": ""} == shown | {"request_id": ""}
    refused = flowers.post("/iris", {"sepal_length": 1, "petal_length": 2})
    assert (refused.status, refused.json["detail"]) == (422, "no flower has petals longer than its sepals")


def test_an_async_api_validates_workloads(flowers: Installation) -> None:
    names = [
        flowers.post("/iris-async", payload).json["id"]
        for payload in (FLOWER, {"sepal_length": "long"}, {"sepal_length": 1, "petal_length": 2})
    ]
    good, wrong, refused = [flowers.post(f"/iris-async/{name}?wait=20", method="GET").json for name in names]
    assert (good["status"], good["result"]) == ("completed", SETOSA)
    assert wrong["status"] == refused["status"] == "failed"
    assert wrong["error"].startswith("payload.sepal_length: Input should be a valid number, unable to parse string")
    assert refused["error"] == "422: no flower has petals longer than its sepals"
    assert "Traceback" not in flowers.cortex("logs", "iris-async").stdout


def test_a_batch_api_validates_items(flowers: Installation) -> None:
    items = [FLOWER, {"sepal_length": 1}, FLOWER]
    options = {"max_attempts": 1, "isolate_failures": True}
    job = ended(flowers, "iris-batch", {"workers": 1, "item_list": {"items": items, "batch_size": 3}, **options})
    assert job["status"] == "completed_with_failures"
    assert [item for batch in results(flowers, "iris-batch", job["job_id"]) for item in batch] == [SETOSA, SETOSA]
    letters = flowers.cortex("get", "iris-batch", job["job_id"], "--dead-letters").stdout
    assert "payload[0].petal_length: Field required" in letters


def test_a_task_uses_the_same_classes(flowers: Installation) -> None:
    job = ended(flowers, "iris-task", {})
    assert job["status"] == "succeeded"
    assert results(flowers, "iris-task", job["job_id"]) == [{"species": "setosa"}]


def test_the_other_examples_of_the_page_are_typed(tmp_path: Path) -> None:
    for text in blocks("python")[1:]:
        with user_project(tmp_path) as project:
            (method,) = project.load("handler", text).methods.values()
            assert method.payload_type is not None
            assert method.signature.payload is not None
            assert method.signature.payload.is_typed
