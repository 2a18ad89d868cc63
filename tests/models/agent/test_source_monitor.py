"""Debounce of listings, the choice of the catalogue to publish, and the saved catalogues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.models.agent.listing import Listing, ListingAggregate, Prefix, prefixes
from cortex.models.agent.source_monitor import (
    LastCatalogues,
    PrefixState,
    SourceState,
    available_pins,
    debounce,
    find_version,
    pinned_catalogue,
    published_catalogue,
    relist_delay_s,
    required_versions,
    retained_digests,
)
from cortex.models.spec import Catalogue, Model, ModelPath, ModelProblem, ModelSource, Pin, Version
from cortex.storage.objects import StoredObject

DIR = ModelSource("python", dir="s3://b/m", poll_interval_s=10)
ONNX = ModelSource("onnx", dir="s3://b/m", poll_interval_s=10)
PATH = ModelSource("python", (ModelPath("iris", "s3://b/m"),), poll_interval_s=10)
PATHS = ModelSource("python", (ModelPath("a", "s3://b/a"), ModelPath("b", "s3://b/b")), poll_interval_s=10)
LONG_AGO = 1_000_000.0
NOW = 2_000_000.0

#: Name of a file → its content.
Files = Mapping[str, str]


def listing(prefix: Prefix, files: Files, at: float, modified_at: float = LONG_AGO) -> Listing:
    tally = ListingAggregate(prefix, at)
    modified = datetime.fromtimestamp(modified_at, UTC)
    tally.add(
        StoredObject(f"m/{name}", name, int(bool(content)), content, modified, None) for name, content in files.items()
    )
    return tally.listing(False)


def passes(
    source: ModelSource,
    *seen: Files | None,
    modified_at: float = LONG_AGO,
    first: SourceState | None = None,
    saved: Catalogue | None = None,
) -> list[SourceState]:
    """Return the state after each listing; None is one that failed. `first` is the state before."""
    states, state = [], first or SourceState()
    [prefix] = prefixes(source)
    begun_at = max((each.taken_at for each in state.prefixes.values()), default=NOW - 10) + 10
    for number, files in enumerate(seen):
        found = {} if files is None else {prefix: listing(prefix, files, begun_at + 10 * number, modified_at)}
        state = debounce(state, source, found, saved)
        states.append(state)
    return states


def shown(catalogue: Catalogue | None) -> dict[str, str] | None:
    """Return version → the digest's beginning; None is no catalogue."""
    if catalogue is None:
        return None
    return {f"{model.name}/{version.number}": version.digest for model, version in catalogue.versions()}


def digests(source: ModelSource, files: Files) -> dict[str, str]:
    [state] = passes(source, files)
    return shown(state.confirmed) or {}


A, B = {"m/1/f": "one"}, {"m/1/f": "two"}
BOTH = {**A, "m/2/f": "new"}


def test_old_content_is_confirmed_by_the_first_listing() -> None:
    [state] = passes(DIR, A)
    assert list(shown(state.confirmed) or {}) == ["m/1"]
    assert state.candidate is None
    assert relist_delay_s(state, DIR) is None


def test_new_content_is_confirmed_by_a_quick_second_listing() -> None:
    first, second = passes(DIR, A, A, modified_at=NOW - 19)
    assert (first.confirmed, shown(first.candidate)) == (None, digests(DIR, A))
    assert relist_delay_s(first, DIR) == 1.0
    assert (shown(second.confirmed), second.candidate) == (digests(DIR, A), None)
    assert relist_delay_s(second, DIR) is None


def test_nothing_is_confirmed_while_the_only_model_is_still_uploaded() -> None:
    first, second, third = passes(PATH, {"f": "1"}, {"f": "1", "g": "1"}, {"f": "1", "g": "1"}, modified_at=NOW)
    assert [first.confirmed, second.confirmed] == [None, None]
    assert relist_delay_s(second, PATH) == 1.0
    assert shown(third.confirmed) == digests(PATH, {"f": "1", "g": "1"})


def test_an_empty_source_is_confirmed_at_once() -> None:
    [state] = passes(PATH, {})
    assert state.confirmed is not None
    assert (state.confirmed.models, len(state.confirmed.problems)) == ((), 1)


CHANGES = {
    "a new version": (A, BOTH),
    "a version updated in place": (A, B),
    "the latest version removed": (BOTH, A),
    "a model removed": ({**A, "n/f": "x"}, A),
    "a model added": (A, {**A, "n/f": "x"}),
    "from one version to several": ({"m/f": "x"}, {"m/1/f": "x", "m/2/f": "y"}),
    "from several versions to one": ({"m/3/f": "x", "m/2/f": "y"}, {"m/f": "x"}),
    "everything but another model removed": ({**BOTH, "n/f": "x"}, {"n/f": "x"}),
}


@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_a_candidate_first_and_confirmed_by_the_next_listing(before: Files, after: Files) -> None:
    was, seen_once, seen_twice = passes(DIR, before, after, after)
    assert shown(was.confirmed) == shown(seen_once.confirmed) == digests(DIR, before)
    assert shown(seen_once.candidate) == digests(DIR, after)
    assert (shown(seen_twice.confirmed), seen_twice.candidate) == (digests(DIR, after), None)


@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES)
def test_a_reverted_change_is_never_confirmed(before: Files, after: Files) -> None:
    states = passes(DIR, before, after, before, before)
    assert all(shown(state.confirmed) == digests(DIR, before) for state in states)
    assert states[-1].candidate is None


@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES)
def test_a_failed_listing_changes_nothing(before: Files, after: Files) -> None:
    states = passes(DIR, before, None, after, None, None, after)
    assert states[1] == states[0]
    assert states[4] == states[3] == states[2]
    assert shown(states[-1].confirmed) == digests(DIR, after)


def test_the_same_listing_processed_twice_does_not_confirm() -> None:
    [prefix] = prefixes(DIR)
    state = debounce(SourceState(), DIR, {prefix: listing(prefix, A, NOW)})
    new = listing(prefix, BOTH, NOW + 10)
    once = debounce(state, DIR, {prefix: new})
    assert debounce(once, DIR, {prefix: new}) == once


def test_a_version_that_becomes_invalid_stays_served_with_a_problem() -> None:
    good, broken = {"m/1/a.onnx": "1"}, {"m/1/a.onnx": "1", "m/1/b.onnx": "1"}
    *_, last = passes(ONNX, good, broken, broken, broken)
    assert shown(last.confirmed) == digests(ONNX, good)
    assert last.candidate is None
    assert last.confirmed is not None
    [problem] = last.confirmed.problems
    assert problem.message == "s3://b/m/m/1: 2 *.onnx files; must be exactly one"
    assert problem.since == NOW + 10
    *_, gone = passes(ONNX, {**good, "n/a.onnx": "1"}, broken, {"n/a.onnx": "1"}, {"n/a.onnx": "1"})
    assert shown(gone.confirmed) == digests(ONNX, {"n/a.onnx": "1"})


LOST = {
    "an empty folder": (BOTH, {}),
    "all versions of a path": ({"1/f": "x", "2/f": "y"}, {}),
    "a stray file beside the versions is left": ({**BOTH, "m/.DS_Store": "s"}, {"m/.DS_Store": "s"}),
    "a file beside the versions is left": ({**BOTH, "m/README.md": "s"}, {"m/README.md": "s"}),
    "an empty file below the mount point": (BOTH, {"m/NOT_MOUNTED": ""}),
    "folders with incomplete uploads": (BOTH, {"m/1/f.tmp": "", "m.part/1/f": "x"}),
    "other files beside the models": (BOTH, {"README.md": "x"}),
}


@pytest.mark.parametrize(("before", "after"), LOST.values(), ids=LOST)
@pytest.mark.parametrize("modified_at", [0.0, NOW + 5], ids=["old", "new"])
def test_a_source_that_loses_everything_changes_nothing_also_after_a_restart(
    before: Files, after: Files, modified_at: float
) -> None:
    source = DIR if any(name.startswith("m/") for name in before) else PATH
    [served] = passes(source, before)
    states = passes(source, after, after, after, first=served, modified_at=modified_at)
    states += passes(source, after, after, after, saved=served.confirmed, modified_at=modified_at)
    assert [shown(state.confirmed) for state in states] == [digests(source, before)] * 6
    assert [state.candidate for state in states] == [None] * 6
    for state in states:
        assert state.confirmed is not None
        assert "put the files back" in state.confirmed.problems[0].message
    again = passes(source, before, before, first=states[-1])
    assert all(shown(state.confirmed) == digests(source, before) for state in again)
    assert again[-1].confirmed is not None
    assert not any("put the files back" in problem.message for problem in again[-1].confirmed.problems)
    [added] = passes(source, {**after, **{name.replace("1/", "7/"): "new" for name in before}}, first=again[-1])[-1:]
    assert "7" in {key.rpartition("/")[2] for key in shown(added.candidate) or {}}


def test_one_of_several_paths_that_loses_everything_stays_as_it_was() -> None:
    a, b = prefixes(PATHS)
    state = debounce(SourceState(), PATHS, {each: listing(each, {"1/f": "x"}, NOW) for each in (a, b)})
    served = shown(state.confirmed)
    for number in range(1, 4):
        files = {a: {}, b: {"1/f": "x"}}
        found = {each: listing(each, files[each], NOW + 10 * number) for each in files}
        state = debounce(state, PATHS, found)
        assert shown(state.confirmed) == served == {"a/1": ANY, "b/1": ANY}
    assert state.confirmed is not None
    [problem] = state.confirmed.problems
    assert (problem.model, problem.since) == ("a", NOW + 10)


def test_files_that_come_back_one_after_another_lose_no_version() -> None:
    states = passes(DIR, BOTH, {}, {}, A, BOTH, BOTH)
    assert [shown(state.confirmed) for state in states] == [digests(DIR, BOTH)] * 6


def test_a_version_that_is_invalid_after_a_restart_stays_as_it_was_saved() -> None:
    good = {"m/1/a.onnx": "1", "m/2/a.onnx": "2"}
    [served] = passes(ONNX, good)
    broken = {**good, "m/2/b.onnx": "3"}
    states = passes(ONNX, broken, broken, saved=served.confirmed)
    assert [shown(state.confirmed) for state in states] == [digests(ONNX, good)] * 2


def test_a_model_that_was_removed_during_a_restart_is_gone() -> None:
    [served] = passes(DIR, {**A, "n/f": "x"})
    assert shown(passes(DIR, A, saved=served.confirmed)[-1].confirmed) == digests(DIR, A)


def test_a_migration_to_versions_serves_them_once_they_are_complete() -> None:
    single, versioned = {"m/a": "1"}, {"m/1/a": "1", "m/2/a": "2"}
    states = passes(DIR, single, {**single, **versioned}, {**single, **versioned}, versioned, versioned)
    assert [shown(state.confirmed) for state in states[:2]] == [digests(DIR, single)] * 2
    assert [shown(state.confirmed) for state in states[2:]] == [digests(DIR, versioned)] * 3
    assert states[4].confirmed is not None
    assert [version.url for version in states[4].confirmed.models[0].versions] == ["s3://b/m/m/1", "s3://b/m/m/2"]


def test_a_slow_upload_has_no_candidate_after_three_changes_until_it_is_stable() -> None:
    growing = [{**A, "m/2/f": f"{number}", "n/f": "x"} for number in range(6)]
    states = passes(DIR, A, *growing, growing[-1])
    has_version_2 = ["m/2" in (shown(state.candidate) or {}) for state in states]
    assert has_version_2 == [False, True, True, True, False, False, False, False]
    confirmed = [sorted(shown(state.confirmed) or {}) for state in states]
    assert confirmed == [["m/1"]] * 2 + [["m/1", "n/1"]] * 5 + [["m/1", "m/2", "n/1"]]
    # Other versions are not delayed, and a problem explains the delay.
    assert states[6].confirmed is not None
    [problem] = states[6].confirmed.problems
    assert (problem.model, problem.version, problem.since) == ("m", "2", NOW + 20)
    assert "still change" in problem.message
    assert states[7].confirmed is not None
    assert states[7].confirmed.problems == ()
    # Once it has rested, the next change has its candidates again.
    *_, again = passes(DIR, A, *growing, growing[-1], BOTH)
    assert shown(again.candidate) == digests(DIR, BOTH)


def test_nothing_is_confirmed_before_each_prefix_was_listed() -> None:
    one, other = prefixes(PATHS)
    state = debounce(SourceState(), PATHS, {one: listing(one, {"f": "1"}, NOW)})
    assert (state.confirmed, state.candidate) == (None, None)
    state = debounce(state, PATHS, {other: listing(other, {"f": "2"}, NOW)})
    assert list(shown(state.confirmed) or {}) == ["a/1", "b/1"]
    # From then on, one that fails doesn't hold up the other.
    for number in (1, 2):
        state = debounce(state, PATHS, {one: listing(one, {"f": "3"}, NOW + number)})
    assert state.confirmed is not None
    assert state.confirmed.models[0].latest.digest != state.confirmed.models[1].latest.digest


def test_two_names_may_have_the_same_path() -> None:
    source = ModelSource("python", (ModelPath("a", "s3://b/m", "x"), ModelPath("b", "s3://b/m/", "y")))
    [state] = passes(source, {"f": "1"})
    assert state.confirmed is not None
    assert [(model.name, model.signature_key) for model in state.confirmed.models] == [("a", "x"), ("b", "y")]


FILES = st.dictionaries(
    st.sampled_from(["m/1/f", "m/1/g", "m/2/f", "m/f", "n/f", "n/7/f", "n/07/f"]), st.sampled_from("xy"), max_size=5
)
HISTORY = st.lists(st.none() | FILES, max_size=8)


def valid(files: Files) -> set[tuple[str, str, str]]:
    [state] = passes(DIR, files)
    assert state.confirmed is not None
    return {(model.name, version.number, version.digest) for model, version in state.confirmed.versions()}


def contents(catalogue: Catalogue | None) -> set[tuple[str, str, str]]:
    found = () if catalogue is None else catalogue.versions()
    return {(model.name, version.number, version.digest) for model, version in found}


@given(HISTORY, st.booleans())
def test_confirmed_content_was_in_two_successive_listings(history: list[Files | None], is_new: bool) -> None:
    states = passes(DIR, *history, modified_at=NOW + 1000 if is_new else LONG_AGO)
    listed = [valid(files) for files in history if files is not None]
    twice = {key for one, other in zip(listed, listed[1:], strict=False) for key in one & other}
    at_once = set() if is_new or not listed else listed[0]
    for state in states:
        assert contents(state.confirmed) <= twice | at_once
        # The newest is a candidate only as it was listed, or as it was served before.
        assert contents(state.candidate) <= set().union(twice, at_once, *listed)
    if len(listed) >= 2 and states[-1].confirmed is not None:
        assert listed[-1] & listed[-2] <= contents(states[-1].confirmed)


@given(HISTORY, FILES)
def test_stable_content_is_confirmed_after_two_listings(history: list[Files | None], files: Files) -> None:
    state = passes(DIR, *history, files, files, modified_at=NOW + 1000)[-1]
    assert state.confirmed is not None
    remains = {each.model for each in state.confirmed.problems if "none of the folders of versions" in each.message}
    assert contents(state.confirmed) >= {item for item in valid(files) if item[0] not in remains}
    assert state.candidate is None
    kept = {(name, number) for name, number, _ in contents(state.confirmed) - valid(files)}
    broken = {(each.model, each.version) for each in state.confirmed.problems}
    is_lost = not valid(files) and ("", None) in broken
    assert is_lost or all((name, number) in broken or (name, None) in broken for name, number in kept)


@given(HISTORY)
def test_a_catalogue_is_sorted_and_crosses_processes(history: list[Files | None]) -> None:
    for state in passes(DIR, *history):
        if state.confirmed is not None:
            assert Catalogue.from_json(state.confirmed.to_json()) == state.confirmed
            names = [model.name for model in state.confirmed.models]
            assert names == sorted(set(names))
            for model in state.confirmed.models:
                assert isinstance(model, Model)
                orders = [version.order for version in model.versions]
                assert orders == sorted(set(orders))
                assert all(isinstance(version, Version) and version.url for version in model.versions)


SOURCE = ModelSource("python", dir="/models")
CACHED = ModelSource("python", dir="/models", cache_size=1, disk_cache_size=1)


def model(name: str, *digests: str) -> Model:
    return Model(name, tuple(Version(str(number), digest, 1, 0.0) for number, digest in enumerate(digests, 1)))


NEWEST = Catalogue((model("a", "a1", "a2"), model("b", "b1")))


def test_without_caching_latest_versions_are_required_and_retained() -> None:
    assert required_versions(SOURCE, NEWEST, None).keys() == {"a2", "b1"}
    assert retained_digests(SOURCE, NEWEST, None) == {"a2", "b1"}


def test_with_caching_nothing_is_required_and_all_versions_are_retained() -> None:
    assert required_versions(CACHED, NEWEST) == {}
    assert retained_digests(CACHED, NEWEST) == {"a1", "a2", "b1"}
    assert published_catalogue(CACHED, NEWEST, None, {}, {}) == NEWEST


def test_versions_on_disk_are_published_with_their_path() -> None:
    told = published_catalogue(SOURCE, NEWEST, None, {"a2": "/disk/a2", "b1": "/disk/b1"}, {})
    assert [version.path for _, version in told.versions()] == [None, "/disk/a2", "/disk/b1"]


def test_models_not_on_disk_stay_as_published_before_or_are_left_out() -> None:
    before = published_catalogue(SOURCE, Catalogue((model("a", "a1"),)), None, {"a1": "/disk/a1"}, {})
    assert published_catalogue(SOURCE, NEWEST, before, {}, {}).models == before.models


def test_a_failed_download_is_a_problem_of_its_model() -> None:
    failures = {"b1": ModelProblem("", None, "can't be downloaded", 5.0), "other": ModelProblem("", None, "no", 5.0)}
    told = published_catalogue(SOURCE, NEWEST, None, {"a2": "/disk/a2"}, failures)
    assert [each.name for each in told.models] == ["a"]
    assert told.problems == (ModelProblem("b", "1", "can't be downloaded", 5.0),)


ONE = ModelSource("python", (ModelPath("m", "s3://b/m", "key"),), pins=(Pin("m", "2", "b", 7, 1.0),))


@pytest.mark.parametrize(
    ("listed", "on_disk", "latest", "versions"),
    [
        ("1a 2b 3c", "", "2b", "1a 2b 3c"),
        ("1a 2x 3c", "b", "2b", "1a 2b 3c"),
        ("1a 3c", "b", "2b", "1a 2b 3c"),
        ("", "b", "2b", "2b"),
        ("1a 3c", "", "3c", "1a 3c"),
        ("1a 2x", "", "2x", "1a 2x"),
    ],
    ids=[
        "in the bucket",
        "overwritten, and on disk",
        "deleted, and on disk",
        "the only one, deleted, and on disk",
        "deleted everywhere",
        "overwritten, and not on disk",
    ],
)
def test_a_pinned_version_is_the_latest(listed: str, on_disk: str, latest: str, versions: str) -> None:
    found = tuple(Version(each[0], each[1], 1, 0.0) for each in listed.split())
    catalogue = Catalogue((Model("m", found, "key"),) if found else ())
    by_key = {("m", each.number): each for each in found}
    state = SourceState({"m": PrefixState(NOW, True, by_key, by_key, frozenset(), {}, ())})
    pinned = pinned_catalogue(ONE, catalogue, available_pins(ONE, state, set(on_disk)))
    (model,) = pinned.models
    assert (model.latest.number + model.latest.digest, model.signature_key) == (latest, "key")
    assert " ".join(each.number + each.digest for each in model.versions) == versions
    assert [each.version for each in pinned.problems] == ([] if latest == "2b" else ["2"])
    published = published_catalogue(ONE, pinned, None, {model.latest.digest: "/disk"}, {})
    assert [each.digest for _, each in published.versions() if each.path] == [model.latest.digest]
    assert Catalogue.from_json(published.to_json()) == published


def test_a_pinned_version_is_available_once_one_listing_has_it() -> None:
    old, seen_once = passes(PATH, {"1/f": "one"}, {"1/f": "one", "2/f": "two"})
    digest = digests(PATH, {"2/f": "two"})["iris/2"]
    pinned, other = (replace(PATH, pins=(Pin("iris", "2", each, 1, 0.0),)) for each in (digest, "other"))
    assert available_pins(pinned, old, ()) == available_pins(other, seen_once, ()) == {}
    [version] = available_pins(pinned, seen_once, ()).values()
    assert (version.number, version.url) == ("2", "s3://b/m/2")


def test_a_version_is_found_by_its_content_only() -> None:
    assert find_version("a", "2", "a2", None, NEWEST) == NEWEST.models[0].latest
    assert find_version("a", "2", "a1", None, NEWEST) is None


SAVED_SOURCE = ModelSource("python", dir="s3://bucket/models")
CATALOGUE = Catalogue((Model("iris", (Version("1", "aa", 5, 1.5, "/there"),)),))


def test_the_saved_catalogue_is_loaded_without_its_problems(tmp_path: Path) -> None:
    remembered = LastCatalogues(tmp_path / "known")
    remembered.save("iris", SAVED_SOURCE, Catalogue(()))
    remembered.save("iris", SAVED_SOURCE, replace(CATALOGUE, problems=(ModelProblem("iris", None, "bad", 1.0),)))
    assert LastCatalogues(tmp_path / "known").load("iris", SAVED_SOURCE) == CATALOGUE


def test_each_api_and_source_has_its_own_saved_catalogue(tmp_path: Path) -> None:
    remembered = LastCatalogues(tmp_path)
    remembered.save("iris", SAVED_SOURCE, CATALOGUE)
    assert remembered.load("wine", SAVED_SOURCE) is None
    assert remembered.load("iris", replace(SAVED_SOURCE, poll_interval_s=1.0)) is None


def test_an_unreadable_saved_catalogue_is_ignored(tmp_path: Path) -> None:
    remembered = LastCatalogues(tmp_path)
    remembered.save("iris", SAVED_SOURCE, CATALOGUE)
    for file in tmp_path.iterdir():
        file.write_bytes(b"{")
    assert remembered.load("iris", SAVED_SOURCE) is None


def test_catalogues_are_kept_for_watched_sources_and_deployed_apis_without_replicas(tmp_path: Path) -> None:
    saved = LastCatalogues(tmp_path)
    other = replace(SAVED_SOURCE, poll_interval_s=1.0)
    for api, source in (("iris", SAVED_SOURCE), ("iris", other), ("idle", SAVED_SOURCE), ("gone", SAVED_SOURCE)):
        saved.save(api, source, CATALOGUE)
    (tmp_path / "unreadable.json").write_bytes(b"{")
    assert saved.keep_only({("iris", SAVED_SOURCE)}, {"iris", "idle"}) == {"idle": frozenset({"aa"})}
    assert len(list(tmp_path.iterdir())) == 2
    assert saved.load("iris", SAVED_SOURCE) == saved.load("idle", SAVED_SOURCE) == CATALOGUE
    assert saved.keep_only((), ()) == {}
    assert list(tmp_path.iterdir()) == []
