"""Where recordings are written: rotation, the limit of their size, disks and buckets that fail."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.errors import StorageError
from cortex.recording import storage
from cortex.recording.exchange import encode_head
from cortex.recording.storage import BucketStorage, FolderStorage, file_bytes, files_to_delete

MAX_BYTES = 64_000
LINE = b"x" * 999 + b"\n"


def head(started: datetime) -> bytes:
    return encode_head(api="iris", started=started)


def sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(folder.iterdir())]


@pytest.mark.parametrize(
    ("files", "limit", "own", "expected"),
    [
        ([("1", 5), ("2", 5), ("3", 5)], 15, None, []),
        ([("1", 5), ("2", 5), ("3", 5)], 14, None, ["1"]),
        ([("2", 5), ("1", 5), ("3", 5)], 5, None, ["1", "2"]),
        ([("1", 5), ("2", 5), ("3", 5)], 5, "1", ["2", "3"]),
        ([("1", 50)], 5, "1", []),
        ([], 0, None, []),
    ],
)
def test_the_oldest_files_make_room(
    files: list[tuple[str, int]], limit: int, own: str | None, expected: list[str]
) -> None:
    assert files_to_delete(files, limit, own) == expected


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(0, 20)), st.integers(0, 60), st.data())
def test_no_more_files_are_deleted_than_necessary(files: dict[str, int], limit: int, data: st.DataObject) -> None:
    own = data.draw(st.sampled_from([None, *files]))
    deleted = files_to_delete(list(files.items()), limit, own)
    kept = {name: size for name, size in files.items() if name not in deleted}
    assert own not in deleted
    assert sum(kept.values()) <= limit or set(kept) <= {own}
    assert deleted == sorted(name for name in files if name != own)[: len(deleted)]
    if deleted:
        assert sum(kept.values()) + files[deleted[-1]] > limit


def test_a_process_begins_another_file_and_deletes_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "TRIM_S", 0.0)
    writer = FolderStorage(tmp_path / "iris", "iris-0-1", head, MAX_BYTES)
    for _ in range(300):
        writer.write(LINE)
        assert sum(sizes(tmp_path / "iris")) <= MAX_BYTES
    writer.close()
    found = sizes(tmp_path / "iris")
    assert sum(found) > MAX_BYTES / 2
    assert max(found) <= file_bytes(MAX_BYTES) + 200
    assert stat.S_IMODE((tmp_path / "iris").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "iris").iterdir()} == {0o600}


def test_a_process_whose_file_was_deleted_begins_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "TRIM_S", 0.0)
    writer = FolderStorage(tmp_path, "iris-0-1", head, MAX_BYTES)
    writer.write(LINE)
    [first] = tmp_path.iterdir()
    first.unlink()
    writer.write(LINE)
    [second] = tmp_path.iterdir()
    assert second.name > first.name
    assert second.read_bytes().endswith(LINE)


def test_a_folder_whose_disk_is_not_mounted_is_not_created(tmp_path: Path) -> None:
    writer = FolderStorage(tmp_path / "disk" / "recordings" / "iris", "iris-0-1", head, MAX_BYTES)
    with pytest.raises(FileNotFoundError):
        writer.write(LINE)
    (tmp_path / "disk").mkdir()
    writer.write(LINE)


def test_a_part_that_did_not_fit_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = FolderStorage(tmp_path, "iris-0-1", head, MAX_BYTES)
    writer.write(LINE)
    [file] = tmp_path.iterdir()
    complete = file.read_bytes()
    write = os.write

    def full_disk(descriptor: int, data: bytes) -> int:
        """Take 10 bytes, and then refuse, as a full disk does."""
        if len(data) < len(LINE):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, bytes(data[:10]))

    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(OSError, match="No space left"):
        writer.write(LINE)
    assert file.read_bytes() == complete


class MemoryBucket:
    """An object store in memory, which fails on demand."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fails = False

    def put(self, name: str, content: bytes) -> None:
        if self.fails:
            raise StorageError("the bucket does not answer")
        self.objects[name] = content

    def sizes(self) -> list[tuple[str, int]]:
        return [(name, len(content)) for name, content in self.objects.items()]

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            del self.objects[name]


def test_objects_of_a_bucket_are_complete_files_within_the_limit() -> None:
    bucket = MemoryBucket()
    writer = BucketStorage(bucket, "iris-0-1", head, MAX_BYTES)
    for _ in range(200):
        writer.write(LINE)
        assert sum(map(len, bucket.objects.values())) <= MAX_BYTES
    writer.close()
    assert len(bucket.objects) > 5
    for content in bucket.objects.values():
        assert content.startswith(b'{"cortex_recording"')
        assert content.endswith(LINE)


def test_an_object_is_written_once_it_is_old_enough() -> None:
    bucket = MemoryBucket()
    writer = BucketStorage(bucket, "iris-0-1", head, MAX_BYTES)
    assert writer.due_s(0.0) is None
    writer.write(LINE)
    due_s = writer.due_s(0.0)
    assert due_s is not None
    writer.flush(due_s - 1)
    assert not bucket.objects
    writer.flush(due_s)
    assert len(bucket.objects) == 1
    assert writer.due_s(due_s) is None


def test_lines_outlive_a_bucket_that_does_not_answer() -> None:
    bucket = MemoryBucket()
    writer = BucketStorage(bucket, "iris-0-1", head, MAX_BYTES)
    bucket.fails = True
    accepted = 0
    for _ in range(50):
        try:
            writer.write(LINE)
            accepted += 1
        except StorageError:
            continue
    assert accepted < 10  # memory is bounded
    bucket.fails = False
    writer.close()
    assert sum(content.count(LINE) for content in bucket.objects.values()) == accepted
