"""Places that untrusted callers may name: local paths, buckets, hosts of webhooks."""

from __future__ import annotations

import pytest

from cortex.config.schema import Networking
from cortex.jobs.spec import DelimitedFiles, FilePathLister, ItemList, JobOptions, Submission, TaskCall
from cortex.operator.jobs.service import disallowed_places

ADD_FOLDER = "use `cortex submit`, or add its folder to networking.local_paths of the API"
ADD_BUCKET = "use `cortex submit`, or add it to networking.buckets of the API"


def disallowed(*paths: str, output: str | None = None, webhook: str | None = None, **allowed: list[str]) -> list[str]:
    source = FilePathLister(paths, 1) if paths else ItemList([1], 1)
    options = JobOptions(workers=1, output=output, webhook=webhook)
    networking = Networking.model_validate({"endpoint": "/a", **allowed})
    return list(disallowed_places(Submission(source, options), networking))


@pytest.mark.parametrize(
    "path", ["/data/images", "/data/", "/data/a/b.json", "s3://b/", "s3://b/any", "gs://c/in/", "gs://c/in/2.json"]
)
def test_allows_what_is_below_an_allowed_folder_or_bucket(path: str) -> None:
    allowed = {"local_paths": ["/data"], "buckets": ["s3://b/", "gs://c/in"]}
    assert disallowed(path, **allowed) == []
    assert disallowed(path, output=path, **allowed) == []


@pytest.mark.parametrize("path", ["/etc/passwd", "/database/x", "/dat", "/"])
def test_rejects_other_local_paths(path: str) -> None:
    (message,) = disallowed(path, local_paths=["/data"], buckets=["s3://b"])
    assert message == f'file_path_lister: the local path "{path}" is not open to this endpoint; {ADD_FOLDER}'
    assert len(disallowed(path, output=path)) == 2


@pytest.mark.parametrize(
    "path",
    [
        *("s3://private/", "s3://private", "gs://b/x", "s3://bb/x", "s3://b/input/x", "s3://b/i", "s3://b"),
        *("s3://b/in/../private/", "s3://b/in/./../x", "s3://b/in/.."),
    ],
)
def test_rejects_other_buckets_and_folders_in_them(path: str) -> None:
    (message,) = disallowed(path, local_paths=["/"], buckets=["s3://b/in", "gs://c"])
    assert message == f'file_path_lister: the bucket path "{path}" is not open to this endpoint; {ADD_BUCKET}'
    assert [text.partition(":")[0] for text in disallowed(path, output=path)] == ["file_path_lister", "output"]


@pytest.mark.parametrize("place", ["/data", "s3://b/in"])
def test_an_allowed_folder_itself_needs_a_trailing_slash(place: str) -> None:
    (message,) = disallowed(place, local_paths=["/data"], buckets=["s3://b/in"])
    assert message.endswith(f'write "{place}/"')


def test_the_root_folder_allows_all_paths() -> None:
    assert disallowed("/etc/passwd", local_paths=["/"]) == []


def test_the_error_names_the_section() -> None:
    source = DelimitedFiles(("/etc/passwd",), 1)
    (message,) = disallowed_places(Submission(source, JobOptions(workers=1)), Networking(endpoint="/a"))
    assert message.startswith("delimited_files: ")


def test_webhooks_reach_public_and_allowed_hosts() -> None:
    assert disallowed(webhook="https://hooks.example.org/x") == []
    assert disallowed(webhook="http://127.0.0.1:9/x", webhook_hosts=["127.0.0.1"]) == []
    (message,) = disallowed(webhook="http://127.0.0.1:9/s3cret")
    fix = "use `cortex submit`, or add it to networking.webhook_hosts of the API"
    assert message == f'webhook: the host "127.0.0.1" is not public, and not open to this endpoint; {fix}'
    task = Submission(TaskCall(), JobOptions(workers=1, webhook="http://localhost/"))
    assert len(list(disallowed_places(task, Networking(endpoint="/a")))) == 1
