from __future__ import annotations

from cortex.models.source_monitor import find_version, published_catalogue, required_versions, retained_digests
from cortex.models.spec import Catalogue, Model, ModelProblem, ModelSource, Version

SOURCE = ModelSource("python", dir="/models")
CACHED = ModelSource("python", dir="/models", cache_size=1, disk_cache_size=1)


def model(name: str, *digests: str) -> Model:
    return Model(name, tuple(Version(str(number), digest, 1, 0.0) for number, digest in enumerate(digests, 1)))


NEWEST = Catalogue((model("a", "a1", "a2"), model("b", "b1")))


def test_latest_versions_are_needed_and_kept_without_caching() -> None:
    assert required_versions(SOURCE, NEWEST, None).keys() == {"a2", "b1"}
    assert retained_digests(SOURCE, NEWEST, None) == {"a2", "b1"}


def test_nothing_is_needed_and_all_may_stay_with_caching() -> None:
    assert required_versions(CACHED, NEWEST) == {}
    assert retained_digests(CACHED, NEWEST) == {"a1", "a2", "b1"}
    assert published_catalogue(CACHED, NEWEST, None, {}, {}) == NEWEST


def test_what_is_on_disk_is_announced_with_its_path() -> None:
    told = published_catalogue(SOURCE, NEWEST, None, {"a2": "/disk/a2", "b1": "/disk/b1"}, {})
    assert [version.path for _, version in told.versions()] == [None, "/disk/a2", "/disk/b1"]


def test_what_is_not_on_disk_stays_as_it_was_or_is_left_out() -> None:
    before = published_catalogue(SOURCE, Catalogue((model("a", "a1"),)), None, {"a1": "/disk/a1"}, {})
    assert published_catalogue(SOURCE, NEWEST, before, {}, {}).models == before.models


def test_a_download_that_failed_is_a_problem_of_its_model() -> None:
    failures = {"b1": ModelProblem("", None, "can't be downloaded", 5.0), "other": ModelProblem("", None, "no", 5.0)}
    told = published_catalogue(SOURCE, NEWEST, None, {"a2": "/disk/a2"}, failures)
    assert [each.name for each in told.models] == ["a"]
    assert told.problems == (ModelProblem("b", "1", "can't be downloaded", 5.0),)


def test_a_version_is_found_by_its_content_only() -> None:
    assert find_version("a", "2", "a2", None, NEWEST) == NEWEST.models[0].latest
    assert find_version("a", "2", "a1", None, NEWEST) is None
