"""What callers without a token may name."""

from __future__ import annotations

import pytest

from cortex.jobs.spec import DelimitedFiles, FilePathLister, ItemList, JobOptions, Submission
from cortex.operator.jobs.service import disallowed_paths


def disallowed(*paths: str, folders: tuple[str, ...] = (), output: str | None = None) -> list[str]:
    source = FilePathLister(paths, 1) if paths else ItemList([1], 1)
    return list(disallowed_paths(Submission(source, JobOptions(workers=1, output=output)), folders))


@pytest.mark.parametrize("path", ["s3://bucket/data", "gs://bucket/etc/", "/data/images", "/data/", "/data/a/b.json"])
def test_buckets_and_what_is_below_an_open_folder_may_be_named(path: str) -> None:
    assert disallowed(path, folders=("/data",)) == []
    assert disallowed(path, output=path, folders=("/data",)) == []


@pytest.mark.parametrize("path", ["/etc/passwd", "/database/x", "/dat", "/"])
def test_other_local_paths_are_refused(path: str) -> None:
    (message,) = disallowed(path, folders=("/data",))
    assert message == (
        f'file_path_lister: the local path "{path}" is not open to this endpoint; '
        "use `cortex submit`, or add its folder to networking.local_paths of the API"
    )
    assert len(disallowed(path, output=path)) == 2


def test_an_open_folder_itself_is_named_with_its_slash_for_paths_are_prefixes() -> None:
    (message,) = disallowed("/data", folders=("/data",))
    assert message.endswith('write "/data/"')


def test_the_whole_disk_can_be_opened() -> None:
    assert disallowed("/etc/passwd", folders=("/",)) == []


def test_the_section_is_named() -> None:
    source = DelimitedFiles(("/etc/passwd",), 1)
    (message,) = disallowed_paths(Submission(source, JobOptions(workers=1)), ())
    assert message.startswith("delimited_files: ")
