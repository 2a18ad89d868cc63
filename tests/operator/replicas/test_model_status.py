from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cortex.models.spec import ModelProblem
from cortex.operator.replicas.status import as_metadata, describe_models
from cortex.worker.spec import ModelsStatus, ReplicaStatus, ServedVersion
from harness.replicas.fleet import replica


def served(
    version: str, digest: str = "a", at: float = 100.0, latest: bool = False, loaded: bool = True
) -> ServedVersion:
    return ServedVersion("iris", version, digest, at, latest, loaded)


def telling(*versions: ServedVersion, problems: tuple[ModelProblem, ...] = (), loading: bool = False) -> ReplicaStatus:
    models = ModelsStatus(versions, len(versions), problems, loading)
    return replace(replica("a").status, models=models)


def test_returns_none_without_models() -> None:
    assert describe_models([replica("a").status]) is None
    assert describe_models([]) is None


def test_versions_are_in_the_order_of_their_numbers_and_the_highest_is_the_latest() -> None:
    view = describe_models([telling(served("10", latest=True), served("9", loaded=False))])
    assert view is not None
    assert [(row["version"], row["is_latest"], row["loaded"]) for row in view["versions"]] == [
        ("9", False, 0),
        ("10", True, 1),
    ]


def test_counts_the_replicas_that_have_the_new_version_during_a_reload() -> None:
    old = telling(served("1", latest=True), loading=True)
    new = telling(served("1"), served("2", latest=True))
    view = describe_models([old, new, new])
    assert view is not None
    one, two = view["versions"]
    assert (view["replicas"], view["reloading"]) == (3, 1)
    assert (one["served"], one["latest"], one["is_latest"]) == (3, 1, False)
    assert (two["served"], two["latest"], two["is_latest"]) == (2, 2, True)


def test_counts_the_newest_contents_of_a_version_that_was_changed_in_place() -> None:
    view = describe_models([telling(served("1", "old", 100)), telling(served("1", "new", 200))])
    assert view is not None
    (row,) = view["versions"]
    assert (row["served"], row["loaded"], row["edited_at"]) == (1, 1, "1970-01-01T00:03:20+00:00")


def test_reports_a_problem_of_several_replicas_once_with_its_first_time() -> None:
    first = ModelProblem("iris", "3", "no saved_model.pb", 200.0, "more")
    others = [replace(first, since=100.0, detail=""), ModelProblem("", None, "the model agent is away", 0.0)]
    view = describe_models([telling(problems=(first,)), telling(problems=tuple(others))])
    assert view is not None
    assert [(item["model"], item["version"], item["replicas"], item["since"]) for item in view["problems"]] == [
        ("iris", "3", 2, "1970-01-01T00:01:40+00:00"),
        ("", None, 1, None),
    ]
    assert view["problems"][0]["detail"] == "more"


def test_legacy_metadata_has_versions_and_timestamps_of_each_model() -> None:
    view = describe_models([telling(served("1"), served("2", at=200.9, latest=True))])
    assert view is not None
    assert as_metadata(view) == {"iris": {"versions": ["1", "2"], "timestamps": [100, 200]}}


versions = st.builds(
    ServedVersion,
    st.sampled_from(["a", "b"]),
    st.integers(0, 30).map(str),
    st.sampled_from("xy"),
    st.floats(0, 1e9),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(st.lists(versions, max_size=6, unique_by=lambda v: (v.model, v.version)).map(tuple), max_size=4))
def test_no_count_exceeds_the_number_of_replicas(told: list[tuple[ServedVersion, ...]]) -> None:
    view = describe_models([telling(*each) for each in told])
    if view is None:
        assert not told
        return
    for row in view["versions"]:
        assert 0 <= row["loaded"] <= row["served"] <= view["replicas"] == len(told)
        assert 0 <= row["latest"] <= view["replicas"]
    for model in ("a", "b"):
        assert sum(row["is_latest"] for row in view["versions"] if row["model"] == model) <= 1
