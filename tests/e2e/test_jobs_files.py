"""Jobs over files, from a real S3 endpoint and from folders; results written to both; the unchanged examples."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cortex.storage.client import list_objects, read
from harness.installations.batch_api import BatchApi
from harness.installations.example_cases import BATCH_EXAMPLES, BatchExample
from harness.installations.installation import Installation, installation
from harness.servers.buckets import RemoteBucket, variables
from harness.servers.s3 import SwiftServer

OBJECTS = 120


@pytest.fixture(scope="module")
def bucket(swift: SwiftServer) -> RemoteBucket:
    return RemoteBucket("s3://models", swift)


@pytest.fixture(scope="module")
def cortex(bucket: RemoteBucket) -> Iterator[Installation]:
    with installation(variables([bucket])) as made:
        yield made


@pytest.fixture(scope="module")
def api(cortex: Installation, tmp_path_factory: pytest.TempPathFactory) -> BatchApi:
    return BatchApi.deployed(cortex, tmp_path_factory.mktemp("files"), "files")


@pytest.fixture(scope="module")
def photos(bucket: RemoteBucket) -> list[str]:
    """The keys of objects: pictures in two folders, and other files."""
    keys = [f"photos/{'a' if number % 2 else 'b'}/{number:03}.jpg" for number in range(OBJECTS)]
    keys += ["photos/a/notes.txt", "photos/skip é.jpg", "photos-of-others/1.jpg"]
    for key in keys:
        bucket.put(key, key.encode())
    return keys


def pictures(photos: list[str], place: str) -> list[str]:
    return sorted(f"{place}/{key}" for key in photos if key.startswith("photos/") and key.endswith(".jpg"))


def test_paths_in_a_bucket_are_items(api: BatchApi, bucket: RemoteBucket, photos: list[str]) -> None:
    source = {
        "s3_paths": [f"{bucket.url}/photos/"],
        "includes": ["**.jpg"],
        "excludes": ["**/skip*"],
        "batch_size": 7,
    }
    wanted = [path for path in pictures(photos, bucket.url) if "skip" not in path]
    submission = {"workers": 2, "file_path_lister": source}
    dry = api.post(submission, "?dryRun=true")
    assert dry.status == 200
    *listed, last = dry.body.decode().splitlines()
    assert (sorted(listed), last) == (wanted, "validations passed")
    job = api.accepted(submission)
    assert api.ended(job)["items"]["total"] == len(wanted)
    assert sorted(api.returned(job)) == wanted
    # A prefix is what keys begin with, not a folder.
    job = api.accepted({"workers": 1, "file_path_lister": {"paths": [f"{bucket.url}/photos"], "batch_size": 100}})
    api.ended(job)
    assert sorted(api.returned(job)) == sorted(f"{bucket.url}/{key}" for key in photos)


def test_values_in_files_of_a_bucket_are_items_across_files(api: BatchApi, bucket: RemoteBucket) -> None:
    bucket.put("lines/1.ndjson", b'{"number": 0}\n{"number": 1}\n\n{"number": 2}')
    bucket.put("lines/2.json", b'{"number": 3} {"number": 4}[5, "\xc3\xa9"]\n"6"  7\nnull')
    job = api.accepted({"workers": 1, "delimited_files": {"s3_paths": [f"{bucket.url}/lines/"], "batch_size": 4}})
    assert api.ended(job)["total_batch_count"] == 3
    assert api.returned(job) == [*({"number": number} for number in range(5)), [5, "é"], "6", 7, None]


def test_paths_in_a_folder_are_items(api: BatchApi, tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.ndjson").write_text(f"{number}\n{number + 10}\n")
    prefix = f"{tmp_path}/"
    job = api.accepted({"workers": 1, "delimited_files": {"paths": [prefix], "excludes": ["**/3.*"], "batch_size": 3}})
    api.ended(job)
    assert api.returned(job) == [0, 10, 1, 11, 2, 12, 4, 14]
    job = api.accepted({"workers": 1, "file_path_lister": {"paths": [prefix]}})
    api.ended(job)
    assert api.returned(job) == [f"{tmp_path}/{number}.ndjson" for number in range(5)]


def test_paths_that_the_api_does_not_allow_require_the_token(api: BatchApi) -> None:
    submission = {"workers": 1, "file_path_lister": {"paths": ["/etc/hostname"]}}
    refused = api.post({**submission, "file_path_lister": {"paths": ["/etc/hostname", "s3://private/"]}})
    assert refused.status == 400
    assert '"/etc/hostname" is not open to this endpoint' in refused.json["message"]
    assert "or add it to networking.buckets of the API" in refused.json["message"]
    assert api.post({**submission, "item_list": {"items": [1]}, "output": "/root/x"}, "?dryRun=true").status == 400
    job = api.client.submit_job(api.name, submission)["job_id"]
    api.ended(job)
    assert api.returned(job) == ["/etc/hostname"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"file_path_lister": {"s3_paths": ["s3://models/nothing/"]}}, "no s3 files match search criteria"),
        ({"file_path_lister": {"s3_paths": ["s3://no-such-bucket/"]}}, "no-such-bucket"),
        ({"delimited_files": {"s3_paths": ["s3://models/broken/"]}}, "broken/1.json"),
    ],
    ids=["no file", "no bucket", "no JSON"],
)
def test_unreadable_files_are_reported(api: BatchApi, bucket: RemoteBucket, source: Any, words: str) -> None:
    bucket.put("broken/1.json", b'{"number": 1}\n{"number": \n')
    reply = api.post({"workers": 1, **source})
    if reply.status == 200:
        status = api.ended(reply.json["job_id"], "enqueue_failed")
        assert words in status["message"]
        assert api.noted(reply.json["job_id"]) == []
    else:
        assert reply.status == 400
        assert words in reply.json["message"]


def test_results_are_written_to_a_bucket(api: BatchApi, bucket: RemoteBucket) -> None:
    job = api.submit(list(range(20)), workers=2, batch_size=2, output=f"{bucket.url}/out")
    api.ended(job)
    content = objects(bucket, f"out/{job}")
    assert set(content) == {"part-00000.ndjson", "_SUCCESS"}
    assert [json.loads(line) for line in content["part-00000.ndjson"].splitlines()] == api.results(job)
    assert json.loads(content["_SUCCESS"])["results"] == 10
    refused = api.post({"workers": 1, "item_list": {"items": [1]}, "output": "s3://no-such-bucket/out"})
    assert refused.status == 400
    assert "no-such-bucket" in refused.json["message"]


def objects(bucket: RemoteBucket, key: str) -> dict[str, bytes]:
    """Return the objects below a key, by their relative names."""
    place = f"{bucket.url}/{key}"

    async def content() -> dict[str, bytes]:
        found = await list_objects(place, bucket.environ)
        return {item.name: await read(f"{place}/{item.name}", bucket.environ) for item in found}

    return asyncio.run(content())


def moved(example: BatchExample, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Copy an example as a clone has it, with a folder of the test's own in place of /tmp; return it and its job."""
    project = folder / example.name
    shutil.copytree(example.folder, project, ignore=shutil.ignore_patterns("__pycache__", "models"))
    for name in example.copied:
        (project / name).rename(folder / name)
    for file in (project / "cortex.yaml", project / "job.json"):
        file.write_text(file.read_text().replace("/tmp/", f"{folder}/"))
    return project, json.loads((project / "job.json").read_text())


@pytest.mark.parametrize(
    "example",
    [pytest.param(each, marks=[pytest.mark.long] if "onnx" in each.name else []) for each in BATCH_EXAMPLES],
    ids=lambda example: example.name,
)
def test_example_runs_as_its_readme_says(cortex: Installation, example: BatchExample, tmp_path: Path) -> None:
    project, _ = moved(example, tmp_path)
    if (project / "make_model.py").exists():
        subprocess.run([sys.executable, "make_model.py"], cwd=project, env=cortex.environ, check=True, timeout=100)
    cortex.cortex("deploy", project, timeout_s=110)
    done = cortex.cortex("submit", example.name, project / "job.json", "--watch", timeout_s=110)
    api = BatchApi(cortex, example.name, tmp_path)
    (job,) = [each["job_status"]["job_id"] for each in api.client.list_jobs(example.name)]
    assert job in done.stdout
    expected = json.loads(json.dumps(example.results).replace("/tmp/", f"{tmp_path}/"))
    assert [line["result"] for line in api.results(job)] == expected
    if example.name == "batch-sum":
        assert json.loads((tmp_path / "batch-sum" / job / "sum.json").read_text()) == example.shown
    if example.name == "batch-digit-classifier":
        written = [json.loads(path.read_text()) for path in (tmp_path / "digit-results" / job).iterdir()]
        assert sorted(written, key=str) == expected
    cortex.cortex("delete", example.name, "-f")


def test_digits_are_read_from_a_bucket_and_written_to_it(
    cortex: Installation, bucket: RemoteBucket, tmp_path: Path
) -> None:
    example = next(example for example in BATCH_EXAMPLES if example.name == "batch-digit-classifier")
    project, submission = moved(example, tmp_path)
    for picture in (tmp_path / "digits").iterdir():
        bucket.put(f"digits/{picture.name}", picture.read_bytes())
    bucket.put("digits/07b.png", b"no picture")
    submission["file_path_lister"] = {
        **{key: value for key, value in submission["file_path_lister"].items() if key != "paths"},
        "s3_paths": [f"{bucket.url}/digits/"],
    }
    cortex.cortex("deploy", project, timeout_s=110)
    api = BatchApi(cortex, example.name, tmp_path)
    submission |= {"config": {"results": f"{bucket.url}/digit-results"}, "max_attempts": 1}
    job = api.client.submit_job(api.name, submission)["job_id"]
    status = api.ended(job, "completed_with_failures")
    assert status["items"] == {"total": 21, "succeeded": 20, "failed": 1}
    (letter,) = api.dead_letters(job)
    assert letter["payload"] == [f"{bucket.url}/digits/07b.png"]
    found = [line for data in objects(bucket, f"digit-results/{job}").values() for line in json.loads(data)]
    digits = [digit for result in example.results for digit in (line["digit"] for line in result)]
    expected = [(f"{bucket.url}/digits/{number:02}.png", digit) for number, digit in enumerate(digits)]
    assert sorted((line["file"], line["digit"]) for line in found) == expected
