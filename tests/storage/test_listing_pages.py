from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cortex.errors import StorageError
from cortex.storage.client import list_objects
from cortex.storage.listing import page_address, read_page, signing
from cortex.storage.objects import flaw_of_name
from harness.servers.buckets import start_gcs
from harness.servers.public_bucket import PublicBucket, public_bucket

pytestmark = pytest.mark.processes

QUERY = "?prefix=d%2F&marker=d%2Fa+b&max-keys=1000&encoding-type=url&x-id="
EMULATOR = {"service_account_key": '{"gcs_base_url": "http://127.0.0.1:1"}'}


@pytest.mark.parametrize(
    ("scheme", "config", "address"),
    [
        ("s3", {"region": "eu-west-1"}, "https://s3.eu-west-1.amazonaws.com/b"),
        ("s3", {"region": "x", "endpoint": "http://127.0.0.1:1/"}, "http://127.0.0.1:1/b"),
        ("s3", {"endpoint": "http://b.host", "virtual_hosted_style_request": "true"}, "http://b.host/"),
        ("gs", {}, "https://storage.googleapis.com/b"),
        ("gs", EMULATOR, "http://127.0.0.1:1/b"),
    ],
)
def test_the_page_address_is_that_of_the_bucket(scheme: str, config: Mapping[str, str], address: str) -> None:
    assert page_address(scheme, "b", config, "d/", "d/a b") == address + QUERY


def test_public_buckets_and_emulators_need_no_signature() -> None:
    assert signing("s3", {"skip_signature": "true"}, "address") is None
    assert signing("gs", {"skip_signature": "true"}, "address") is None
    assert signing("gs", EMULATOR, "address") is None
    assert signing("gs", {}, "address") == {"base_url": "address"}
    assert signing("s3", {"region": "x"}, "address") == {
        "region": "x",
        "endpoint": "address",
        "virtual_hosted_style_request": "true",
    }


def page(key: str, is_encoded: bool, is_truncated: bool) -> bytes:
    kind = "<EncodingType>url</EncodingType>" if is_encoded else ""
    return (
        f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{kind}'
        f"<IsTruncated>{str(is_truncated).lower()}</IsTruncated><Contents><Key>{key}</Key>"
        f'<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"tag"</ETag><Size>3</Size></Contents>'
        f"</ListBucketResult>"
    ).encode()


def test_decodes_keys_by_their_encoding() -> None:
    for key, is_encoded, expected in (("d/a+b%0A", True, "d/a b\n"), ("d/a+b%0A", False, "d/a+b%0A")):
        found = read_page(page(key, is_encoded, False), "d/")
        assert [(item.key, item.name, item.size_bytes, item.etag) for item in found.objects] == [
            (expected, expected[2:], 3, "tag")
        ]
        assert found.last_key is None
    assert read_page(page("d/x/", True, True), "d/").last_key == "d/x/"
    with pytest.raises(ValueError, match="not valid XML"):
        read_page(b"<html>", "d/")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"<html/>", "is no listing, but has the element html; check the endpoint"),
        (b"<ListAllMyBucketsResult xmlns='x'/>", "has the element ListAllMyBucketsResult"),
        (b"<Error><Code>SlowDown</Code></Error>", "has the element Error"),
        (b"<ListBucketResult><Contents><Key>a</Key></Contents></ListBucketResult>", "without its key, time or size"),
        (b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>", "does not begin after this one"),
        (page("d/a", False, True), "does not begin after this one"),
    ],
)
def test_refuses_an_answer_that_is_no_page_of_a_listing(answer: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_page(answer, "d/", "d/a")


ODD_KEYS = [
    f"k/{name}" for name in ("a//b", "a/./b", "a/../b", "a\tb", "a\rb", "a\x01b", "a\nb", "a%2Fb", "a+b", "größe")
]


@pytest.fixture(params=["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PublicBucket]:
    """A store that requires signatures, named by the real environment of this process."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with public_bucket() as server:
        other = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"} if request.param == "AWS_ENDPOINT_URL_S3" else {}
        key = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "NO_PROXY": "127.0.0.1"}
        for name, value in {**other, request.param: server.url, **key}.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.parametrize("odd", [[key] for key in ODD_KEYS] + [ODD_KEYS], ids=repr)
def test_odd_keys_hide_no_others_whatever_names_the_endpoint(bucket: PublicBucket, odd: list[str]) -> None:
    keys = [f"k/{number:03}" for number in range(250)] + odd + [f"k/z{number:03}" for number in range(250)]
    bucket.objects, bucket.page_size = dict.fromkeys(keys, b"x"), 100
    found = asyncio.run(list_objects("s3://models/k", os.environ))
    assert [item.key for item in found] == sorted(keys)
    assert {item.key for item in found if item.flaw} == {key for key in odd if flaw_of_name(key)}


@pytest.mark.parametrize(
    "answer", [b"<html><body>sign in</body></html>", b"<Error><Code>SlowDown</Code></Error>", b"{}"]
)
@pytest.mark.parametrize("after", ["", "k/00999", "k/01999"])
def test_an_answer_that_is_no_listing_is_an_error_and_no_end(bucket: PublicBucket, answer: bytes, after: str) -> None:
    bucket.objects = {f"k/{number:05}": b"x" for number in range(2500)}
    assert len(asyncio.run(list_objects("s3://models/k", os.environ))) == 2500
    bucket.lists_after = lambda key: answer if key == after else None
    with pytest.raises(StorageError, match=r"s3://models/k can't be read: "):
        asyncio.run(list_objects("s3://models/k", os.environ))
    with pytest.raises(StorageError, match=r"gs://models/k can't be read: "):
        asyncio.run(list_objects("gs://models/k", {**os.environ, "STORAGE_EMULATOR_HOST": bucket.url}))


@pytest.mark.parametrize("odd", ["k/a//b", f"k/a//{'b' * 900}"])
def test_a_failure_to_list_odd_keys_names_why_both_attempts_failed(bucket: PublicBucket, odd: str) -> None:
    bucket.objects = {odd: b"x"}
    answers = iter([None, b"<Error><Code>SlowDown</Code></Error>"])
    bucket.lists_after = lambda key: next(answers)
    with pytest.raises(
        StorageError, match='invalid path: Path "k/a//b.*; listing it .* failed, too: .* has the element Error'
    ):
        asyncio.run(list_objects("s3://models/k", os.environ))


def test_a_listing_with_one_page_is_one_request(bucket: PublicBucket) -> None:
    bucket.objects = {f"k/{number:03}": b"x" for number in range(999)}
    seen: list[str] = []
    bucket.lists_after = lambda key: seen.append(key)
    assert len(asyncio.run(list_objects("s3://models/k", os.environ))) == 999
    assert seen == [""]


@pytest.mark.parametrize("name", ["", "a", "a/b", ".a", "..a/b..", "a b", "é" * 127, "a\\b"])
def test_accepts_common_names(name: str) -> None:
    assert flaw_of_name(name) is None


@pytest.mark.parametrize(
    "name",
    ["/", "/a", "a/", "a//b", ".", "..", "a/..", "./a", "a\0", "a\nb", "\x7f", "\udcff", "é" * 128, "a/" * 201 + "a"],
)
def test_reports_names_that_no_file_can_have(name: str) -> None:
    assert flaw_of_name(name)


def test_an_invalid_key_hides_no_others_at_google(tmp_path: Path) -> None:
    server = start_gcs(tmp_path)
    try:
        for key in ("d/a", "d/a//b", "d/c d+e"):
            server.put("models", key, b"x")
        found = asyncio.run(list_objects("gs://models/d", {**os.environ, **server.environ}))
    finally:
        server.stop()
    assert [(item.name, bool(item.flaw)) for item in found] == [("a", False), ("a//b", True), ("c d+e", False)]
