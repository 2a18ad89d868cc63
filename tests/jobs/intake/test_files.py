"""Files of a submission: selection, parsing of their values, decompression and errors."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.errors import StorageError, SubmissionError
from cortex.jobs.intake.files import GzipStream, check_output, list_paths, located_batches
from cortex.jobs.spec import DelimitedFiles, FilePathLister, NewBatch
from harness.servers.buckets import Bucket, LocalBucket, all_kinds
from harness.servers.public_bucket import public_bucket
from harness.servers.s3 import SwiftServer

pytestmark = pytest.mark.processes

KINDS = ("s3", "gs", "local")
LIMIT = 256_000
FILES = {
    "in/1.json": b'{"n": 1}\n{"n": 2}\n',
    "in/2.json": b'{\n  "n": 3\n}\n{"n":4}[5]"six"',
    "in/deep/3.json": b"7\n8",
    "in/deep/4.txt": b"not json",
    "in/empty.json": b"",
    "in/tmp/5.json": b"9",
    "inbox/6.json": b"10",
}


@pytest.fixture(autouse=True)
def _without_proxies_and_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def buckets(swift: SwiftServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bucket]]:
    with all_kinds(tmp_path_factory.mktemp("buckets"), swift) as found:
        for bucket in found.values():
            for key, data in FILES.items():
                bucket.put(key, data)
        yield found


def paths(source: FilePathLister, environ: dict[str, str]) -> list[str]:
    async def collect() -> list[str]:
        return [path async for some in list_paths(source, environ) for path in some]

    return asyncio.run(collect())


def batches(source: FilePathLister, environ: dict[str, str], limit: int = LIMIT) -> list[NewBatch]:
    async def collect() -> list[NewBatch]:
        return [batch async for _, some in located_batches(source, environ, limit) for batch in some]

    return asyncio.run(collect())


def payloads(found: list[NewBatch]) -> list[list[object]]:
    assert all(batch.items == len(json.loads(batch.payload)) for batch in found)
    return [json.loads(batch.payload) for batch in found]


SELECTIONS = [
    (["in/"], [], [], ["in/1.json", "in/2.json", "in/deep/3.json", "in/deep/4.txt", "in/empty.json", "in/tmp/5.json"]),
    (["in"], ["**.json"], ["**/in/tmp/**", "**/empty*"], ["in/1.json", "in/2.json", "in/deep/3.json", "inbox/6.json"]),
    (["in/"], ["**/in/*.json"], [], ["in/1.json", "in/2.json", "in/empty.json"]),
    (["in/deep/3.json", "in/1"], [], [], ["in/1.json", "in/deep/3.json"]),
    (["in/de", "in/deep/", "in/deep/3.json", "in/de"], [], [], ["in/deep/3.json", "in/deep/4.txt"]),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prefixes", "includes", "excludes", "expected"), SELECTIONS)
def test_lists_each_selected_file_once(
    buckets: dict[str, Bucket],
    kind: str,
    prefixes: list[str],
    includes: list[str],
    excludes: list[str],
    expected: list[str],
) -> None:
    bucket = buckets[kind]
    source = FilePathLister(tuple(f"{bucket.url}/{key}" for key in prefixes), 1, tuple(includes), tuple(excludes))
    assert sorted(paths(source, bucket.environ)) == [f"{bucket.url}/{key}" for key in expected]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", ["absent/", "in/deep/5", "in/deep/3.json/"])
def test_rejects_a_prefix_without_files(buckets: dict[str, Bucket], kind: str, prefix: str) -> None:
    bucket = buckets[kind]
    with pytest.raises(
        SubmissionError, match="^no files match" if kind == "local" else "^no s3 files match search criteria"
    ):
        paths(FilePathLister((f"{bucket.url}/{prefix}",), 1), bucket.environ)


def test_the_error_of_a_search_without_files_gives_the_reason(buckets: dict[str, Bucket]) -> None:
    def error_of(*prefixes: str, globs: tuple[str, ...] = (), excludes: tuple[str, ...] = ()) -> str:
        searched = tuple(f"s3://models/{prefix}" for prefix in prefixes)
        with pytest.raises(SubmissionError) as caught:
            paths(FilePathLister(searched, 1, globs, excludes), buckets["s3"].environ)
        return str(caught.value).partition("; ")[2]

    whole = "includes and excludes leave none of them; they are compared with the whole path"
    assert error_of("in/", globs=("*.json",)).startswith(
        f"6 begin with one of the paths, s3://models/in/1.json for one, but {whole}"
    )
    assert error_of("in/1", excludes=("**",)).startswith(
        "1 begins with one of the paths, s3://models/in/1.json for one"
    )
    literal = "s3://models/in/*.json is taken literally: globs belong into includes"
    assert error_of("in/*.json") == f"none begins with s3://models/in/*.json; {literal}"
    fix = "correct the path, or list what is there"
    assert error_of("absent/") == f"none begins with s3://models/absent/; {fix}"
    assert error_of("absent/", "b") == f"none begins with s3://models/absent/ or the other path; {fix}"
    assert error_of("absent/", "b", "c") == f"none begins with s3://models/absent/ or one of the 2 other paths; {fix}"


def test_the_error_of_a_local_search_without_files_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(SubmissionError) as caught:
        paths(FilePathLister((f"{tmp_path}/absent/",), 1), {})
    error_of = f"none begins with {tmp_path}/absent/; is it on the operator's machine?"
    assert str(caught.value) == f"no files match search criteria; {error_of}"


def test_paths_are_items_of_batches(buckets: dict[str, Bucket]) -> None:
    bucket = buckets["s3"]
    found = payloads(batches(FilePathLister(("s3://models/in/",), 4, excludes=("**.txt",)), bucket.environ))
    keys = ["in/1.json", "in/2.json", "in/deep/3.json", "in/empty.json", "in/tmp/5.json"]
    assert found == [[f"s3://models/{key}" for key in keys[:4]], [f"s3://models/{keys[4]}"]]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_values_can_span_files(buckets: dict[str, Bucket], kind: str) -> None:
    bucket = buckets[kind]
    source = DelimitedFiles((f"{bucket.url}/in/1", f"{bucket.url}/in/2", f"{bucket.url}/in/deep/3"), 3)
    expected = [[{"n": 1}, {"n": 2}, {"n": 3}], [{"n": 4}, [5], "six"], [7, 8]]
    assert payloads(batches(source, bucket.environ)) == expected


def test_files_without_values_have_no_batches(tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes(b"")
    (tmp_path / "2").write_bytes(b" \n\n")
    assert batches(DelimitedFiles((f"{tmp_path}/",), 3), {}) == []


@pytest.mark.parametrize("kind", KINDS)
def test_rejects_invalid_json_with_its_file_and_position(buckets: dict[str, Bucket], kind: str) -> None:
    bucket = buckets[kind]
    message = f"^{bucket.url}/in/deep/4.txt: invalid JSON at byte 0 \\(not json\\)"
    with pytest.raises(SubmissionError, match=message):
        batches(DelimitedFiles((f"{bucket.url}/in/deep/",), 3), bucket.environ)


def test_finds_values_across_chunks_of_large_files(tmp_path: Path) -> None:
    rows = [{"n": number, "text": "é" * (number % 700)} for number in range(20_000)]
    (tmp_path / "1").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows[:10_000]))
    (tmp_path / "2").write_text("".join(json.dumps(row, ensure_ascii=False) for row in rows[10_000:15_000]))
    (tmp_path / "3").write_text("\n".join(json.dumps(row, ensure_ascii=False, indent=1) for row in rows[15_000:]))
    found = payloads(batches(DelimitedFiles((f"{tmp_path}/",), 7), {}))
    assert [row for batch in found for row in batch] == rows
    assert {len(batch) for batch in found[:-1]} == {7}


def test_reads_gzip_files(tmp_path: Path) -> None:
    numbers = list(range(200_000))
    (tmp_path / "1.json.gz").write_bytes(gzip.compress(b"1\n2\n"))
    (tmp_path / "2").write_bytes(gzip.compress(b"".join(b"%d\n" % number for number in numbers)))
    (tmp_path / "3.json").write_bytes(b"3")
    found = batches(DelimitedFiles((f"{tmp_path}/",), 1000), {})
    assert [item for batch in found for item in json.loads(batch.payload)] == [1, 2, *numbers, 3]
    (tmp_path / "2").write_bytes(gzip.compress(b"1\n" * 1000)[:-4])
    with pytest.raises(SubmissionError, match="/2: its gzip is cut off"):
        batches(DelimitedFiles((f"{tmp_path}/",), 1000), {})


def test_many_small_files_keep_their_order(buckets: dict[str, Bucket]) -> None:
    bucket = buckets["s3"]
    for number in range(100):
        bucket.put(f"many/{number:03}", b"%d\n" % number if number % 10 else b"%d" % number + b" " * 300_000)
    found = payloads(batches(DelimitedFiles((f"{bucket.url}/many/",), 8), bucket.environ))
    assert [item for batch in found for item in batch] == list(range(100))


def test_rejects_a_value_over_the_limit_with_its_position(tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes(b'1\n"' + b"x" * 2000 + b'"\n')
    with pytest.raises(SubmissionError, match="/1: the value has 2,002 bytes .*, which exceeds the limit"):
        batches(DelimitedFiles((f"{tmp_path}/",), 1), {}, 1000)
    (tmp_path / "1").write_bytes(b"[" + b"1,\n" * 1000 + b"1]")
    with pytest.raises(SubmissionError, match="; write the items one after another, not as one list"):
        batches(DelimitedFiles((f"{tmp_path}/",), 1), {}, 1000)


def test_lists_unusual_local_files(tmp_path: Path) -> None:
    (tmp_path / "a\nb.json").write_bytes(b"1")
    (tmp_path / "http:").mkdir()
    (tmp_path / "http:" / "x").write_bytes(b"2")
    (tmp_path / "circle").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    source = DelimitedFiles((f"{tmp_path}/",), 2)
    assert paths(source, {}) == [f"{tmp_path}/a\nb.json", f"{tmp_path}/http:/x"]
    assert payloads(batches(source, {})) == [[1, 2]]
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).write_bytes(b"3")
    with pytest.raises(StorageError, match="its name is not UTF-8; rename it, or exclude it"):
        paths(source, {})


def test_a_key_that_is_no_valid_file_name_is_listed_but_not_read(buckets: dict[str, Bucket]) -> None:
    bucket = buckets["s3"]
    bucket.put("odd//x", b"1")
    source = FilePathLister(("s3://models/odd/",), 1)
    assert paths(source, bucket.environ) == ["s3://models/odd//x"]
    with pytest.raises(StorageError, match="s3://models/odd//x can't be read: no file can have this name; exclude it"):
        paths(DelimitedFiles(source.paths, 1), bucket.environ)
    with pytest.raises(SubmissionError, match="no s3 files match"):
        paths(replace(DelimitedFiles(source.paths, 1), excludes=("**/x",)), bucket.environ)


def test_an_odd_key_or_answer_loses_no_file_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    source = FilePathLister(("s3://models/k/",), 100)
    with public_bucket() as bucket:
        bucket.objects = dict.fromkeys([f"k/{number:05}.txt" for number in range(2500)] + ["k/01500//x.txt"], b"1")
        variables = {"AWS_ENDPOINT_URL_S3": bucket.url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        for name, value in {**variables, "NO_PROXY": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        assert paths(source, dict(os.environ)) == sorted(f"s3://models/{key}" for key in bucket.objects)
        assert sum(batch.items for batch in batches(source, dict(os.environ))) == 2501
        bucket.lists_after = lambda key: b"<html>sign in</html>" if key > "k/0199" else None
        for kind in (FilePathLister, DelimitedFiles):
            with pytest.raises(StorageError, match="s3://models/k/ can't be read: the answer is no listing"):
                batches(kind(source.paths, 100, excludes=("**//*",)), dict(os.environ))


def test_reports_a_missing_bucket(buckets: dict[str, Bucket]) -> None:
    with pytest.raises(StorageError, match="s3://absent/in/: there is no bucket absent"):
        paths(FilePathLister(("s3://absent/in/",), 1), buckets["s3"].environ)


def test_reports_an_unwritable_output(buckets: dict[str, Bucket], tmp_path: Path) -> None:
    asyncio.run(check_output("s3://models/out/", buckets["s3"].environ))
    asyncio.run(check_output(str(tmp_path / "new" / "out"), {}))
    with pytest.raises(SubmissionError, match="^output: s3://absent/out: there is no bucket absent at"):
        asyncio.run(check_output("s3://absent/out", buckets["s3"].environ))


MEASURE = """
import asyncio, resource, sys
from cortex.jobs.intake.files import located_batches
from cortex.jobs.spec import DelimitedFiles

async def count():
    source = DelimitedFiles((sys.argv[1],), 100)
    return sum([sum(batch.items for batch in some) async for _, some in located_batches(source, {}, 256_000)])

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(asyncio.run(count()), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_splits_a_large_file_with_bounded_memory(tmp_path: Path) -> None:
    row = json.dumps({"text": "x" * 80, "numbers": [1, 2, 3]}).encode() + b"\n"
    (tmp_path / "large").write_bytes(row * 1_500_000)
    measured = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path / "large")], check=True, capture_output=True)
    count, grown_bytes = map(int, measured.stdout.split())
    assert count == 1_500_000
    assert grown_bytes < 80_000_000


def test_follows_links_and_reports_unreadable_folders(tmp_path: Path) -> None:
    bucket = LocalBucket(tmp_path / "in")
    bucket.put("1", b"1")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    assert paths(FilePathLister((f"{tmp_path}/link/",), 1), {}) == [f"{tmp_path}/link/1"]


def test_links_out_of_an_upload_folder_are_neither_listed_nor_read_nor_written(tmp_path: Path) -> None:
    LocalBucket(tmp_path / "secret").put("1", b"1")
    LocalBucket(tmp_path / "in").put("2", b"2")
    (tmp_path / "in/inner").symlink_to("2")
    folders = [str(tmp_path / "other"), f"{tmp_path}/in"]

    async def listed(*excludes: str) -> list[str]:
        source = FilePathLister((f"{tmp_path}/in/",), 1, excludes=excludes)
        return [path async for found in list_paths(source, {}, folders) for path in found]

    async def read(path: str) -> list[int]:
        found = located_batches(DelimitedFiles((path,), 9), {}, 1000, folders)
        return [item async for _, some in found for batch in some for item in json.loads(batch.payload)]

    assert asyncio.run(read(f"{tmp_path}/in/")) == [2, 2]
    (tmp_path / "in/link").symlink_to("../secret")
    for path in (f"{tmp_path}/in/", f"{tmp_path}/in/link/", f"{tmp_path}/in/link/1"):
        with pytest.raises(StorageError, match="/in/link.*: a link leads out of the folder"):
            asyncio.run(read(path))
    with pytest.raises(StorageError, match="/in/link can't be read: a link leads out of the folder; exclude it"):
        asyncio.run(listed())
    assert asyncio.run(listed("**/link")) == [f"{tmp_path}/in/2", f"{tmp_path}/in/inner"]
    for output in ("in/link", "in/link/out"):
        with pytest.raises(SubmissionError, match="^output: .*: a link leads out of the folder"):
            asyncio.run(check_output(f"{tmp_path}/{output}", {}, folders))
    assert [path.name for path in (tmp_path / "secret").rglob("*")] == ["1"]
    asyncio.run(check_output(f"{tmp_path}/in/out", {}, folders))


def decompress(*pieces: bytes) -> bytes:
    stream = GzipStream("s3://b/x.json.gz")
    return b"".join(plain for piece in pieces for plain in stream.feed(piece)) + b"".join(stream.end())


@given(
    content=st.lists(st.binary(max_size=2000), min_size=1, max_size=3),
    is_gzip=st.booleans(),
    size=st.integers(1, 300),
    zeros=st.integers(0, 3),
)
def test_decompresses_gzip_members_in_chunks_of_any_size(
    content: list[bytes], is_gzip: bool, size: int, zeros: int
) -> None:
    plain = b"".join(content)
    data = b"".join(map(gzip.compress, content)) + b"\0" * zeros if is_gzip else b"[" + plain
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    assert decompress(*pieces) == (plain if is_gzip else data)


@pytest.mark.parametrize("data", [b"", b"\x1f", b"1", b"{}\n"])
def test_short_uncompressed_files_are_unchanged(data: bytes) -> None:
    assert decompress(data) == data


def test_decompressed_chunks_are_limited_in_size() -> None:
    pieces = list(GzipStream("x").feed(gzip.compress(b"0" * 50_000_000)))
    assert sum(map(len, pieces)) == 50_000_000
    assert max(map(len, pieces)) <= 1024 * 1024


def test_rejects_truncated_or_damaged_gzip() -> None:
    packed = gzip.compress(b"1\n" * 1000)
    with pytest.raises(SubmissionError, match="s3://b/x.json.gz: its gzip is cut off"):
        decompress(packed[:-9])
    with pytest.raises(SubmissionError, match="s3://b/x.json.gz: its gzip is damaged"):
        decompress(packed[:-8] + b"\0" * 8)
