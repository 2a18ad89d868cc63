from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.models.spec import Catalogue, Model, ModelProblem, Version
from cortex.supervisor.models.model_rollout import (
    LoadedVersion,
    changed,
    find_extra_versions,
    missing_model,
    needs_new_process,
    servable,
)


def catalogue(**models: dict[int, str]) -> Catalogue:
    """Write `iris={1: "a", 2: "b"}` for a model of two versions with these contents."""
    return Catalogue(
        tuple(
            Model(name, tuple(Version(str(number), digest, 1, 0.0) for number, digest in sorted(versions.items())))
            for name, versions in sorted(models.items())
        )
    )


def contents(value: Catalogue) -> dict[str, dict[int, str]]:
    return {model.name: {version.order: version.digest for version in model.versions} for model in value.models}


@pytest.mark.parametrize(
    ("target", "bad", "serving", "expected"),
    [
        ({"m": {1: "a"}}, [], None, {"m": {1: "a"}}),
        ({"m": {1: "a", 2: "b"}}, [("m", "b")], None, {"m": {1: "a"}}),
        ({"m": {1: "b"}}, [("m", "b")], {"m": {1: "a"}}, {"m": {1: "a"}}),
        ({"m": {1: "b"}}, [("m", "b")], None, {}),
        ({"m": {1: "b"}}, [("m", "b")], {"m": {1: "b"}}, {}),
        ({"m": {1: "b"}, "n": {1: "b"}}, [("m", "b")], None, {"n": {1: "b"}}),
        ({"m": {2: "b"}}, [("m", "b")], {"m": {1: "a"}}, {"m": {1: "a"}}),
        ({}, [], {"m": {1: "a"}}, {}),
    ],
    ids=[
        "all is well",
        "a bad latest version leaves the one before it",
        "bad content in place leaves what is served",
        "nothing is left of a model that never worked",
        "bad content is not kept because it was to be served",
        "other models are not affected",
        "a model whose only version is bad stays as it is served",
        "a model that is gone is gone",
    ],
)
def test_servable(target: dict, bad: list, serving: dict | None, expected: dict) -> None:
    before = catalogue(**serving) if serving is not None else None
    assert contents(servable(catalogue(**target), bad, before)) == expected


def test_another_version_does_not_stand_in_for_a_pinned_one() -> None:
    (model,) = catalogue(m={1: "a", 2: "b", 3: "c"}).models
    pinned = Catalogue((replace(model, pinned="2"),))
    assert servable(pinned, [("m", "c")], None).models[0].latest.digest == "b"
    assert servable(pinned, [("m", "b")], None).models == ()


@pytest.mark.parametrize(
    ("serving", "target", "loaded", "expected"),
    [
        ({"m": {1: "a"}}, {"m": {1: "a"}}, [("m", "1", "a")], False),
        ({"m": {1: "a"}}, {"m": {1: "a", 2: "b"}}, [("m", "1", "a")], True),
        ({"m": {9: "a"}}, {"m": {9: "a", 10: "b"}}, [("m", "9", "a")], True),
        ({"m": {2: "a"}}, {"m": {1: "b", 2: "a"}}, [("m", "2", "a")], False),
        ({"m": {1: "b", 2: "a"}}, {"m": {2: "a"}}, [("m", "2", "a")], False),
        ({"m": {1: "b", 2: "a"}}, {"m": {1: "b"}}, [("m", "2", "a")], True),
        ({"m": {1: "a"}}, {"m": {1: "b"}}, [("m", "1", "a")], True),
        ({"m": {1: "x", 2: "a"}}, {"m": {1: "y", 2: "a"}}, [("m", "2", "a")], False),
        ({"m": {1: "x", 2: "a"}}, {"m": {1: "y", 2: "a"}}, [("m", "2", "a"), ("m", "1", "x")], True),
        ({"m": {1: "a"}}, {"m": {1: "a"}, "n": {1: "a"}}, [("m", "1", "a")], True),
        ({"m": {1: "a"}, "n": {1: "a"}}, {"m": {1: "a"}}, [("m", "1", "a"), ("n", "1", "a")], False),
    ],
    ids=[
        "nothing changed",
        "a new latest version",
        "versions are numbers",
        "an older version came",
        "an older version went",
        "the latest version went",
        "the latest version changed in place",
        "an older version changed that nobody asked for",
        "an older version changed that is loaded",
        "a new model",
        "a model went",
    ],
)
def test_needs_new_process(serving: dict, target: dict, loaded: list, expected: bool) -> None:
    held = [LoadedVersion(*version) for version in loaded]
    assert needs_new_process(catalogue(**serving), catalogue(**target), held) is expected


def test_a_new_signature_key_needs_a_new_process() -> None:
    version = Version("1", "a", 1, 0.0)
    before = Catalogue((Model("m", (version,), "one"),))
    after = Catalogue((Model("m", (version,), "two"),))
    assert needs_new_process(before, after, [])


def test_changed_names_the_latest_versions_that_are_new() -> None:
    serving = catalogue(a={1: "x"}, b={1: "x"})
    target = catalogue(a={1: "x", 2: "y"}, b={1: "x"}, c={3: "z"})
    assert changed(serving, target) == [("a", "2", "y"), ("c", "3", "z")]
    assert changed(None, serving) == [("a", "1", "x"), ("b", "1", "x")]


def test_versions_requested_by_calls_are_loaded_again_while_they_exist() -> None:
    target = catalogue(m={1: "a", 2: "b", 3: "c"})
    assert find_extra_versions([("m", "3"), ("m", "2"), ("m", "9"), ("n", "1")], target) == (("m", "2"), ("m", "3"))


def test_missing_model_returns_the_reason() -> None:
    broken = Catalogue((), (ModelProblem("m", None, "there is no saved_model.pb", 0.0),))
    assert missing_model(broken, ["m"]) == "there is no saved_model.pb"
    assert missing_model(Catalogue(()), ["m"]) is not None
    assert missing_model(broken, []) == "there is no saved_model.pb"
    assert missing_model(catalogue(m={1: "a"}), ["m", "n"]) is None
    assert missing_model(Catalogue(()), []) == "the model path has no valid model"


_CATALOGUES = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.dictionaries(st.integers(1, 3), st.sampled_from(["x", "y", "z"]), min_size=1),
).map(lambda models: catalogue(**models))


@given(_CATALOGUES, st.none() | _CATALOGUES, st.sets(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"))))
def test_servable_catalogues_contain_no_bad_content(target: Catalogue, serving: Catalogue | None, bad: set) -> None:
    result = servable(target, bad, serving)
    assert {(model.name, model.latest.digest) for model in result.models}.isdisjoint(bad)
    assert result.by_name.keys() <= target.by_name.keys()


@given(_CATALOGUES)
def test_a_process_that_loaded_all_latest_versions_is_good_for_its_own_catalogue(target: Catalogue) -> None:
    loaded = [LoadedVersion(model.name, model.latest.number, model.latest.digest) for model in target.models]
    assert not needs_new_process(target, target, loaded)
