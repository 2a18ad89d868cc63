from __future__ import annotations

from datetime import UTC, datetime
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.models.agent.layout import describe_invalid, expected_tree
from cortex.models.agent.listing import MAX_FILES, Listing, ListingAggregate, Prefix, prefixes
from cortex.models.spec import Layout, Model, ModelPath, ModelProblem, ModelSource
from cortex.storage.objects import StoredObject, flaw_of_name, printable
from harness.models.catalogues import catalogue_models

THEN = datetime(2026, 1, 1, tzinfo=UTC)
SAVED_MODEL = ("saved_model.pb", "variables/variables.index", "variables/variables.data-00000-of-00002")


def stored(name: str, content: str = "x", key: str = "") -> StoredObject:
    return StoredObject(key or f"m/{name}", name, len(content), content, THEN, flaw_of_name(name))


def listing(prefix: Prefix, *names: str) -> Listing:
    tally = ListingAggregate(prefix, 1.0)
    is_cut = not tally.add(stored(name) for name in names)
    return tally.listing(is_cut)


def judge(layout: Layout, *names: str) -> tuple[tuple[Model, ...], tuple[ModelProblem, ...]]:
    source = ModelSource(layout, (ModelPath("iris", "s3://b/m/"),))
    [prefix] = prefixes(source)
    return catalogue_models(source, {prefix: listing(prefix, *names)}, 5.0)


def judge_dir(layout: Layout, *names: str) -> tuple[tuple[Model, ...], tuple[ModelProblem, ...]]:
    source = ModelSource(layout, dir="s3://b/m/", signature_key="key")
    [prefix] = prefixes(source)
    return catalogue_models(source, {prefix: listing(prefix, *names)}, 5.0)


def versions(models: tuple[Model, ...]) -> dict[str, list[str]]:
    return {model.name: [version.number for version in model.versions] for model in models}


def below(folder: str, names: tuple[str, ...]) -> list[str]:
    return [f"{folder}/{name}" for name in names]


VALID: list[tuple[Layout, tuple[str, ...]]] = [
    ("python", ("model.pkl",)),
    ("python", ("a/b/c",)),
    ("python", ("5x/model.pkl", "--3/model.pkl", "-/model.pkl", "٣/model.pkl")),  # none of these is a number
    ("tensorflow", SAVED_MODEL),
    ("tensorflow", (*SAVED_MODEL, "fingerprint.pb", "assets/words.txt", "variables/variables.data-00001-of-00002")),
    ("neuron", ("saved_model.pb",)),
    ("neuron", SAVED_MODEL),
    ("onnx", ("model.onnx",)),
    ("onnx", ("net.onnx", "net.onnx.data", "weights.bin", "README.md", "deep/other.onnx")),
]

INVALID: list[tuple[Layout, tuple[str, ...], str]] = [
    ("tensorflow", SAVED_MODEL[1:], "no saved_model.pb"),
    ("tensorflow", ("saved_model.pb",), "no variables/variables.index and no variables/variables.data-00000-of-*"),
    ("tensorflow", (*SAVED_MODEL[:2], "variables/variables.data-00001-of-00002"), "data-00000-of"),
    ("tensorflow", below("export", SAVED_MODEL), "no saved_model.pb and no "),
    ("neuron", ("model.pb",), "no saved_model.pb"),
    ("onnx", ("model.pkl",), "no *.onnx files; must be exactly one"),
    ("onnx", ("a.onnx", "b.onnx"), "2 *.onnx files; must be exactly one"),
]


@pytest.mark.parametrize(("layout", "names"), VALID)
def test_a_valid_model_is_version_1_or_has_versions(layout: Layout, names: tuple[str, ...]) -> None:
    models, problems = judge(layout, *names)
    assert (versions(models), problems) == ({"iris": ["1"]}, ())
    assert models[0].latest.url == "s3://b/m"
    models, problems = judge(layout, *below("9", names), *below("10", names))
    assert (versions(models), problems) == ({"iris": ["9", "10"]}, ())
    assert models[0].latest.url == "s3://b/m/10"
    assert len({version.digest for version in models[0].versions}) == 1


@pytest.mark.parametrize(("layout", "names", "reason"), INVALID)
def test_an_invalid_model_has_a_problem_with_the_reason(layout: Layout, names: tuple[str, ...], reason: str) -> None:
    models, [problem] = judge(layout, *names)
    assert (models, problem.model, problem.version, problem.since) == ((), "iris", None, 5.0)
    assert problem.message.startswith("s3://b/m: ")
    assert reason in problem.message


@pytest.mark.parametrize(("layout", "names", "reason"), INVALID)
def test_an_invalid_version_does_not_affect_the_others(layout: Layout, names: tuple[str, ...], reason: str) -> None:
    good = next(names for each, names in VALID if each == layout)
    models, [problem] = judge(layout, *below("1", good), *below("2", names), *below("3", good))
    assert versions(models) == {"iris": ["1", "3"]}
    assert (problem.model, problem.version) == ("iris", "2")
    assert problem.message.startswith("s3://b/m/2: ")
    assert reason in problem.message


def test_an_empty_prefix_is_a_problem() -> None:
    assert judge("python") == ((), (ModelProblem("iris", None, "there is no model at s3://b/m", 5.0),))


def test_a_dir_without_folders_is_a_problem() -> None:
    models, problems = judge_dir("python", "readme.txt")
    assert (models, problems) == ((), (ModelProblem("", None, "there is no model at s3://b/m", 5.0),))


@pytest.mark.parametrize("other", [".DS_Store", "_SUCCESS", "2.tmp/model.pkl", "lost+found/x", "README.md", "v3/f"])
def test_what_is_beside_versions_is_ignored_with_a_note(other: str) -> None:
    [model], [note] = judge("python", "1/model.pkl", other, "3/model.pkl")
    assert [version.number for version in model.versions] == ["1", "3"]
    name = other.partition("/")[0]
    assert note.message == f"s3://b/m: {name} is ignored: a version is a folder whose name is an integer"


@pytest.mark.parametrize("name", ["iris.tmp", ".iris", "iris~", "_temporary", "lost+found", "iris.PART"])
def test_a_model_folder_with_the_name_of_an_incomplete_upload_is_ignored_with_a_note(name: str) -> None:
    [model], [note] = judge_dir("python", "good/1/f", f"{name}/1/f")
    assert model.name == "good"
    assert note.message.startswith(f"s3://b/m/{name} is ignored: its name is that of")


def test_hidden_and_incomplete_files_alone_are_no_model() -> None:
    assert judge("python", "2/.DS_Store", "2/model.pkl.part")[1][0].message == "s3://b/m/2: no file except .DS_Store"
    assert judge("python", "2/.DS_Store", "2/model.pkl")[1] == ()


def test_a_file_with_a_numeric_name_is_not_a_version() -> None:
    models, problems = judge("python", "5")
    assert (versions(models), problems) == ({"iris": ["1"]}, ())


def test_version_numbers_may_be_long_and_have_leading_zeros_but_must_differ() -> None:
    long = "9" * 200
    models, problems = judge("python", "007/a", f"{long}/a")
    assert (versions(models), problems) == ({"iris": ["7", long]}, ())
    assert models[0].versions[0].url == "s3://b/m/007"
    models, [problem] = judge("python", "007/a", "7/a", "8/a")
    assert versions(models) == {"iris": ["8"]}
    assert (problem.version, problem.message) == ("7", "s3://b/m has the same version twice: 007 and 7")


def test_versions_may_be_negative() -> None:
    models, problems = judge("python", "-2/a", "-10/a", "1/a")
    assert (versions(models), problems) == ({"iris": ["-10", "-2", "1"]}, ())


def test_a_path_may_be_an_onnx_file() -> None:
    source = ModelSource("onnx", (ModelPath("iris", "s3://b/net.onnx"),))
    [prefix] = prefixes(source)
    tally = ListingAggregate(prefix, 1.0)
    tally.add([stored("", key="net.onnx")])
    models, problems = catalogue_models(source, {prefix: tally.listing(False)}, 5.0)
    assert (versions(models), problems) == ({"iris": ["1"]}, ())
    assert models[0].latest.url == "s3://b/net.onnx"


def test_each_folder_of_a_dir_is_a_model() -> None:
    models, [problem] = judge_dir("onnx", "b/1/m.onnx", "b/2/m.onnx", "a/m.onnx", "broken/m.txt", "beside.onnx")
    assert versions(models) == {"a": ["1"], "b": ["1", "2"]}
    assert [model.signature_key for model in models] == ["key", "key"]
    assert [model.latest.url for model in models] == ["s3://b/m/a", "s3://b/m/b/2"]
    assert (problem.model, problem.version) == ("broken", None)


@pytest.mark.parametrize("name", ["1/a//b", "1/../b", "1/./b", "1/a\nb", f"1/{'é' * 128}", "1/a/"])
def test_a_key_that_is_no_valid_file_name_invalidates_its_version_only(name: str) -> None:
    models, [problem] = judge_dir("python", "m/1/ok", f"m/{name}", "m/2/ok", "n/ok")
    assert versions(models) == {"m": ["2"], "n": ["1"]}
    assert (problem.model, problem.version) == ("m", "1")
    assert printable(f"m/{name}") in problem.message
    assert "\n" not in problem.message


@pytest.mark.parametrize("name", ["", "..", ".", "a\tb"])
def test_a_folder_with_an_invalid_model_name_is_a_problem(name: str) -> None:
    models, [problem] = judge_dir("python", f"{name}/1/a", "ok/a")
    assert versions(models) == {"ok": ["1"]}
    assert "is not a valid model name" in problem.message


@pytest.mark.heavy
def test_too_many_files_are_a_problem_of_their_version() -> None:
    models, [problem] = judge("python", "1/a", *(f"2/{number}" for number in range(MAX_FILES + 1)))
    assert versions(models) == {"iris": ["1"]}
    assert problem.message == "s3://b/m/2: more than 100,000 files"


def test_too_many_models_are_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortex.models.agent.listing.MAX_MODELS", 3)
    models, [problem] = judge_dir("python", "a/x", "b/x", "c/x", "d/x")
    assert versions(models) == {"a": ["1"], "b": ["1"], "c": ["1"]}
    assert (problem.model, problem.version) == ("", None)
    assert "more than 100,000 models and versions" in problem.message


@pytest.mark.parametrize("layout", get_args(Layout))
def test_the_expected_tree_is_drawn_alone_and_with_versions(layout: Layout) -> None:
    tree = expected_tree(layout)
    assert tree.count("path/\n") == 2
    assert "├── 1/" in tree
    assert "└── 2/" in tree


def test_an_invalid_model_is_described_with_the_expected_tree() -> None:
    text = describe_invalid("tensorflow", [f"file{number}\n" for number in range(60)])
    assert "└── variables/\n    ├── variables.index\n    └── variables.data-00000-of-00001" in text
    assert text.count("file") == 50
    assert "file0\\n\nfile1\\n" in text
    assert "(nothing)" in describe_invalid("python", [])


NAMES = st.text(st.sampled_from("1a/.x \n"), max_size=8)


@given(st.lists(st.tuples(NAMES, st.integers(0, 2), st.sampled_from("pq")), max_size=8), st.randoms())
def test_arbitrary_names_are_accepted_in_any_order(files: list[tuple[str, int, str]], random: st.DrawFn) -> None:
    objects = [StoredObject(f"m/{name}", name, size, tag, THEN, flaw_of_name(name)) for name, size, tag in files]
    shuffled = list(objects)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for prefix in (Prefix("s3://b/m"), Prefix("s3://b/m", is_dir=True)):
        one, other = ListingAggregate(prefix, 1.0), ListingAggregate(prefix, 1.0)
        one.add(objects)
        other.add(shuffled)
        first, second = one.listing(False), other.listing(False)
        assert {name: folder.versions.keys() for name, folder in first.models.items()} == {
            name: folder.versions.keys() for name, folder in second.models.items()
        }
        for name, folder in first.models.items():
            for number, content in folder.versions.items():
                assert content.digest == second.models[name].versions[number].digest


@given(
    st.dictionaries(NAMES, st.tuples(st.integers(0, 2), st.sampled_from("pq")), max_size=4),
    st.dictionaries(NAMES, st.tuples(st.integers(0, 2), st.sampled_from("pq")), max_size=4),
)
def test_digests_are_equal_if_and_only_if_the_files_are(
    one: dict[str, tuple[int, str]], other: dict[str, tuple[int, str]]
) -> None:
    def digest(files: dict[str, tuple[int, str]]) -> str | None:
        tally = ListingAggregate(Prefix("s3://b/m"), 1.0)
        tally.add(
            StoredObject(f"m/1/{name}", f"1/{name}", size, tag, THEN, None) for name, (size, tag) in files.items()
        )
        folder = tally.listing(False).models.get("")
        return folder.versions["1"].digest if folder else None

    assert (digest(one) == digest(other)) == (one == other)
