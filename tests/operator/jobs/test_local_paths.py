"""Local paths that untrusted callers may name."""

from __future__ import annotations

import pytest

from cortex.jobs.spec import DelimitedFiles, FilePathLister, ItemList, JobOptions, Submission
from cortex.operator.jobs.service import disallowed_paths


def disallowed(*paths: str, folders: tuple[str, ...] = (), output: str | None = None) -> list[str]:
    source = FilePathLister(paths, 1) if paths else ItemList([1], 1)
    return list(disallowed_paths(Submission(source, JobOptions(workers=1, output=output)), folders))


@pytest.mark.parametrize("path", ["s3://bucket/data", "gs://bucket/etc/", "/data/images", "/data/", "/data/a/b.json"])
def test_allows_buckets_and_paths_below_an_allowed_folder(path: str) -> None:
    assert disallowed(path, folders=("/data",)) == []
    assert disallowed(path, output=path, folders=("/data",)) == []


@pytest.mark.parametrize("path", ["/etc/passwd", "/database/x", "/dat", "/"])
def test_rejects_other_local_paths(path: str) -> None:
    (message,) = disallowed(path, folders=("/data",))
    assert message == (
        f'file_path_lister: the local path "{path}" is not open to this endpoint; '
        "use `cortex submit`, or add its folder to networking.local_paths of the API"
    )
    assert len(disallowed(path, output=path)) == 2


def test_an_allowed_folder_itself_needs_a_trailing_slash() -> None:
    (message,) = disallowed("/data", folders=("/data",))
    assert message.endswith('write "/data/"')


def test_the_root_folder_allows_all_paths() -> None:
    assert disallowed("/etc/passwd", folders=("/",)) == []


def test_the_error_names_the_section() -> None:
    source = DelimitedFiles(("/etc/passwd",), 1)
    (message,) = disallowed_paths(Submission(source, JobOptions(workers=1)), ())
    assert message.startswith("delimited_files: ")
