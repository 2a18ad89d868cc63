from __future__ import annotations

import asyncio
import os
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cortex.errors import StorageError
from cortex.models.agent.listing import (
    Listing,
    ListingAggregate,
    Prefix,
    download_version,
    list_models,
    newest_modification,
    prefixes,
    sample_names,
)
from cortex.models.spec import ModelPath, ModelSource
from cortex.storage.objects import StoredObject
from harness.models.catalogues import catalogue_models
from harness.servers.s3 import PAGE_KEYS, SwiftServer

pytestmark = pytest.mark.processes


class Place:
    """A folder of some storage."""

    def __init__(self, url: str, environ: dict[str, str], swift: SwiftServer | None) -> None:
        self.url, self.environ, self._swift = url, environ, swift

    def put(self, name: str, data: bytes = b"x") -> None:
        if self._swift:
            self._swift.put("models", f"{self.url.removeprefix('s3://models/')}/{name}", data)
        else:
            path = Path(self.url) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def list(self, is_dir: bool = True) -> Listing:
        return asyncio.run(list_models(Prefix(self.url, is_dir), self.environ))

    def versions(self) -> dict[str, list[str]]:
        return {name: sorted(folder.versions) for name, folder in self.list().models.items()}


@pytest.fixture(params=["s3", "local"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return Place(str(tmp_path / "store"), {}, None)
    server: SwiftServer = request.getfixturevalue("swift")
    return Place(f"s3://models/{tmp_path.name}", server.environ, server)


@pytest.fixture
def bucket(swift: SwiftServer, tmp_path: Path) -> Place:
    return Place(f"s3://models/{tmp_path.name}", swift.environ, swift)


def test_models_with_a_common_name_prefix_are_not_mixed_up(place: Place) -> None:
    for name in ("a/1/f", "a/2/f", "a/2/g", "b/f", "beside"):
        place.put(name)
    listing = place.list()
    assert {name: sorted(folder.versions) for name, folder in listing.models.items()} == {"a": ["1", "2"], "b": []}
    content = listing.models["a"].versions["2"]
    assert (content.files, content.size_bytes, content.flaw) == (2, 2, None)
    assert abs(newest_modification(listing) - time.time()) < 60
    [alone] = asyncio.run(list_models(Prefix(f"{place.url}/a"), place.environ)).models.values()
    assert alone.versions == listing.models["a"].versions
    assert place.list().models == listing.models


def test_an_empty_prefix_gives_an_empty_listing(place: Place, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(exist_ok=True)
    listing = place.list()
    assert (listing.models, listing.objects) == ({}, 0)


def test_a_missing_local_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="models does not exist"):
        asyncio.run(list_models(Prefix(str(tmp_path / "models")), {}))


def test_a_digest_changes_with_each_kind_of_change(place: Place) -> None:
    def digest() -> str:
        return place.list().models["m"].versions["1"].digest

    seen = []
    for name, data in (("f", b"x"), ("f", b"y"), ("f", b"longer"), ("deep/f", b"x"), ("g", b"")):
        place.put(f"m/1/{name}", data)
        seen.append(digest())
    assert len(set(seen)) == 5
    assert digest() == seen[-1]


def test_a_single_file_is_a_model(place: Place, tmp_path: Path) -> None:
    place.put("net.onnx", b"weights")
    source = ModelSource("onnx", (ModelPath("net", f"{place.url}/net.onnx"),))
    [prefix] = prefixes(source)
    listing = asyncio.run(list_models(prefix, place.environ))
    [model], problems = catalogue_models(source, {prefix: listing}, 0.0)
    assert problems == ()
    version = model.latest
    asyncio.run(download_version(version.url, version.digest, tmp_path / "out", place.environ))
    assert (tmp_path / "out/net.onnx").read_bytes() == b"weights"


ODD_BUT_FINE = (
    "sp ace",
    "ü",
    "e\u0301",
    "a#b?c%20d+&*",
    "back\\slash",
    "a%2Fb",
    "~{}[]^`|\"<>'$!;=@:,",
    "\U0001f600",
    "..x",
)


def test_unusual_names_are_listed_and_downloaded(place: Place, tmp_path: Path) -> None:
    for name in ODD_BUT_FINE:
        place.put(f"m/1/{name}", name.encode())
        place.put(f"{name}/1/f")
    listing = place.list()
    assert listing.models.keys() == {"m", *ODD_BUT_FINE}
    content = listing.models["m"].versions["1"]
    assert (content.files, content.flaw) == (len(ODD_BUT_FINE), None)
    asyncio.run(download_version(f"{place.url}/m/1", content.digest, tmp_path / "out", place.environ))
    assert {path.name: path.read_bytes().decode() for path in (tmp_path / "out").iterdir()} == {
        name: name for name in ODD_BUT_FINE
    }
    for name in ODD_BUT_FINE:
        found = listing.models[name].versions["1"]
        asyncio.run(download_version(f"{place.url}/{name}/1", found.digest, tmp_path / "each" / name, place.environ))


IMPOSSIBLE = (
    "bad/1/a//b",
    "bad/1/../b",
    "bad/1/./b",
    "bad/1/a\nb",
    "bad/1/\x7f",
    "bad/1/\x01",
    "bad/1/t//",
    f"bad/1/{'l' * 300}",
)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_key_that_is_no_valid_file_name_does_not_hide_others(bucket: Place, tmp_path: Path, name: str) -> None:
    for each in ("a/1/f", name, "bad/1/f", "bad/2/f", "c/f"):
        bucket.put(each)
    listing = bucket.list()
    assert {each: sorted(folder.versions) for each, folder in listing.models.items()} == {
        "a": ["1"],
        "bad": ["1", "2"],
        "c": [],
    }
    bad = listing.models["bad"].versions
    assert bad["1"].flaw
    assert bad["2"].flaw is None
    with pytest.raises(StorageError, match="can't be downloaded"):
        asyncio.run(download_version(f"{bucket.url}/bad/1", bad["1"].digest, tmp_path / "out", bucket.environ))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["/x", "../1/x", "./x", "a\nb/1/x", "/", "//"])
def test_an_unusual_key_beside_the_models_hides_none(bucket: Place, name: str) -> None:
    for each in ("a/1/f", name, "c/f"):
        bucket.put(each)
    assert {"a": ["1"], "c": []}.items() <= bucket.versions().items()


def test_a_listing_of_several_pages_with_unusual_keys_is_complete(bucket: Place, swift: SwiftServer) -> None:
    environ, url = bucket.environ, bucket.url
    names = [f"m{number:03}/1/f{file}" for number in range(30) for file in range(10)]
    assert len(names) > 2 * PAGE_KEYS
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(bucket.put, (*names, "m010/1/a//b", "m020/1/c\nd", "m029/2/e//f")))
    listing = asyncio.run(list_models(Prefix(url, is_dir=True), environ))
    assert listing.objects == len(names) + 3
    assert [name for name, folder in listing.models.items() if folder.versions["1"].flaw] == ["m010", "m020"]
    assert {folder.versions["1"].files for folder in listing.models.values()} == {10, 11}


def test_empty_marker_objects_of_folders_are_ignored(bucket: Place, tmp_path: Path) -> None:
    for name in ("m/", "m/1/", "m/1/f", "m/1/variables/", "m/1/variables/v", "m/2/", "n/"):
        bucket.put(name, b"x" if name[-1] in "fv" else b"")
    listing = bucket.list()
    assert {name: sorted(folder.versions) for name, folder in listing.models.items()} == {"m": ["1"]}
    content = listing.models["m"].versions["1"]
    assert content.files == 2
    bucket.put("m/1/empty/", b"")
    content = bucket.list().models["m"].versions["1"]
    asyncio.run(download_version(f"{bucket.url}/m/1", content.digest, tmp_path / "out", bucket.environ))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "out/f",
        "out/variables/v",
    ]


def test_a_version_that_changed_since_its_listing_is_not_downloaded(place: Place, tmp_path: Path) -> None:
    place.put("m/1/f")
    content = place.list().models["m"].versions["1"]
    place.put("m/1/g")
    with pytest.raises(StorageError, match="/m/1 changed before it was downloaded"):
        asyncio.run(download_version(f"{place.url}/m/1", content.digest, tmp_path / "out", place.environ))
    with pytest.raises(StorageError, match="/m/7 was removed before it was downloaded"):
        asyncio.run(download_version(f"{place.url}/m/7", content.digest, tmp_path / "out", place.environ))
    assert not (tmp_path / "out").exists()


def test_sample_names_returns_the_first_names(place: Place) -> None:
    for number in range(60):
        place.put(f"m/{number:02}")
    assert asyncio.run(sample_names(f"{place.url}/m", place.environ)) == [f"{number:02}" for number in range(50)]
    assert asyncio.run(sample_names(f"{place.url}/m/07", place.environ)) == ["07"]


def test_links_are_followed_but_not_in_circles_and_not_out_of_the_prefix(tmp_path: Path) -> None:
    for name in ("elsewhere/f", "store/m/1/f", "store/n/1/f"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "store/m/1/link").symlink_to(tmp_path / "store/n/1/f")
    (tmp_path / "store/o").symlink_to("m")
    (tmp_path / "store/p").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "store/m/2").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "store/m/1/nothing").symlink_to(tmp_path / "none")
    (tmp_path / "store/n/1/circle").symlink_to(tmp_path / "store")
    os.mkfifo(tmp_path / "store/m/1/pipe")
    listing = asyncio.run(list_models(Prefix(str(tmp_path / "store"), is_dir=True), {}))
    m, n = listing.models["m"].versions["1"], listing.models["n"].versions["1"]
    assert (m.files, m.flaw, n.flaw) == (2, None, "n/1/circle/: it is a link to one of its parent folders")
    assert listing.models["o"].versions["1"].digest == m.digest
    flaws = [content.flaw for content in (listing.models["m"].versions["2"], listing.models["p"].rest) if content]
    assert flaws == ["m/2/: a link leads out of the folder", "p/: a link leads out of the folder"]
    root = str(tmp_path / "store")
    asyncio.run(download_version(f"{root}/m/1", m.digest, tmp_path / "out", {}, root))
    files = {path: path.is_symlink() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files == {tmp_path / "out/f": False, tmp_path / "out/link": False}


def test_a_file_nested_too_deep_is_a_flaw(place: Place) -> None:
    place.put(f"m/1/{'d/' * 250}f")
    place.put("m/2/f")
    versions = place.list().models["m"].versions
    assert "more than 200 folders deep" in str(versions["1"].flaw)
    assert versions["2"].flaw is None


def test_a_key_that_is_a_file_and_a_folder_is_not_downloaded(bucket: Place, tmp_path: Path) -> None:
    bucket.put("m/1/a")
    bucket.put("m/1/a/b")
    content = bucket.list().models["m"].versions["1"]
    with pytest.raises(StorageError, match="m/1/a.* is both a file and a folder"):
        asyncio.run(download_version(f"{bucket.url}/m/1", content.digest, tmp_path / "out", bucket.environ))


@pytest.mark.parametrize("name", [b"\xff\xfe", b"a\nb", b"\x01"])
def test_an_invalid_local_name_invalidates_its_version_only(tmp_path: Path, name: bytes) -> None:
    for each in ("m/1/f", "m/2/f"):
        (tmp_path / each).parent.mkdir(parents=True)
        (tmp_path / each).write_text("x")
    Path(os.fsdecode(os.fsencode(tmp_path / "m/1/") + b"/" + name)).write_text("x")
    source = ModelSource("python", dir=str(tmp_path))
    [prefix] = prefixes(source)
    [model], [problem] = catalogue_models(source, {prefix: asyncio.run(list_models(prefix, {}))}, 0.0)
    assert ([version.number for version in model.versions], problem.version) == (["2"], "1")
    assert "no file can have this name" in problem.message
    problem.message.encode()


def test_a_file_that_changes_during_the_copy_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    file = tmp_path / "m/1/f"
    file.write_text("one")

    def copy_while_it_grows(source: object, target: object) -> None:
        with file.open("a") as more:
            more.write("more")

    monkeypatch.setattr("cortex.storage.local_files.shutil.copyfileobj", copy_while_it_grows)
    content = asyncio.run(list_models(Prefix(str(tmp_path), is_dir=True), {})).models["m"].versions["1"]
    with pytest.raises(StorageError, match="m/1/f changed while it was read; try again"):
        asyncio.run(download_version(str(tmp_path / "m/1"), content.digest, tmp_path / "out/x", {}))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_removed_during_the_listing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    real = os.open

    def open_file(path: str, flags: int, **options: int | None) -> int:
        if str(path).endswith("m/1"):
            Path(path).rmdir()
        return real(path, flags, **options)

    monkeypatch.setattr("cortex.storage.local_files.os.open", open_file)
    with pytest.raises(StorageError, match="m/1 was removed while it was listed"):
        asyncio.run(list_models(Prefix(str(tmp_path), is_dir=True), {}))


def test_memory_grows_with_versions_and_not_with_keys() -> None:
    then = datetime(2026, 1, 1, tzinfo=UTC)
    tally = ListingAggregate(Prefix("s3://b/m", is_dir=True), 0.0)
    longest_s = 0.0
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for batch in range(30):
        names = [f"model-{batch % 5}/{batch % 10}/part-{batch}-{number:04}.bin" for number in range(1000)]
        objects = [StoredObject(name, name, 1, f"{number}", then, None) for number, name in enumerate(names)]
        started_at = time.thread_time()
        assert tally.add(objects)
        longest_s = max(longest_s, time.thread_time() - started_at)
    del names, objects
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert tally.objects == 30_000
    assert grown < 100_000  # by models and versions, not by keys
    assert longest_s < 0.5
