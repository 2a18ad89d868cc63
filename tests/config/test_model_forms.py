from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cortex.config.generations import GENERATIONS
from cortex.config.schema import Api, ModelEntry, ModelsConfig
from harness.config_files import examine_text, lines_of


def with_models(form: str, type_: str, body: str) -> str:
    """Write an API of a generation with the given lines for its models."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    if form == "class":
        head = "- kind: deployment\n  name: d\n- kind: api\n  name: a\n  predictor:\n"
    elif form == "handler":
        head = "- name: a\n  kind: RealtimeAPI\n  handler:\n"
    elif form == "batch handler":
        head = "- name: a\n  kind: BatchAPI\n  handler:\n"
    else:
        kinds = {"kindless": "", "sync": "SyncAPI", "predictor": "RealtimeAPI", "batch": "BatchAPI"}
        kind = f"  kind: {kinds[form]}\n" if kinds[form] else ""
        head = f"- name: a\n{kind}  predictor:\n"
    return f"{head}    type: {type_}\n    path: predictor.py\n{lines}"


ONE = ModelsConfig(path="s3://b/m")
SEVERAL = ModelsConfig(
    paths=[
        ModelEntry(name="a", path="s3://b/a", signature_key="k"),
        ModelEntry(name="b", path="s3://b/b"),
    ]
)
LIST = "- name: a\n  {key}: s3://b/a\n  signature_key: k\n- name: b\n  {key}: s3://b/b"


def indented(text: str, spaces: int) -> str:
    return "".join(f"{' ' * spaces}{line}\n" for line in text.splitlines())


FORMS = [
    # One model.
    ("class", "tensorflow", "model: s3://b/m", ONE),
    ("class", "onnx", "model: s3://b/m", ONE),
    ("kindless", "tensorflow", "model: s3://b/m", ONE),
    ("kindless", "onnx", "model_path: s3://b/m", ONE),
    ("sync", "tensorflow", "model_path: s3://b/m", ONE),
    ("predictor", "tensorflow", "model_path: s3://b/m", ONE),
    ("predictor", "python", "model_path: s3://b/m", ONE),
    ("predictor", "onnx", "models: {path: s3://b/m}", ONE),
    ("predictor", "python", "multi_model_reloading: {path: s3://b/m}", ONE),
    ("handler", "tensorflow", "models: {path: s3://b/m}", ONE),
    ("handler", "onnx", "models: {path: s3://b/m}", ONE),
    ("handler", "python", "multi_model_reloading: {path: s3://b/m}", ONE),
    ("class", "onnx", "model: s3://b/m\nmodels: {poll_interval: 2s}", ModelsConfig(path="s3://b/m", poll_interval_s=2)),
    ("kindless", "onnx", "model: s3://b/m\nmodels: {poll_interval: 2s}",
     ModelsConfig(path="s3://b/m", poll_interval_s=2)),
    ("predictor", "python", "model_path: s3://b/m\nmodels: {cache_memory: 1Mi}",
     ModelsConfig(path="s3://b/m", cache_memory=2**20)),
    # Several, as a list.
    ("kindless", "tensorflow", "models:\n" + LIST.format(key="model"), SEVERAL),
    ("sync", "tensorflow", "models:\n" + LIST.format(key="model_path"), SEVERAL),
    ("predictor", "tensorflow", "models:\n" + LIST.format(key="model_path"), SEVERAL),
    ("predictor", "tensorflow", "models:\n" + indented(LIST.format(key="path"), 2), SEVERAL),
    # Several, in a map.
    ("predictor", "tensorflow", "models:\n  paths:\n" + indented(LIST.format(key="model_path"), 4), SEVERAL),
    ("predictor", "tensorflow", "models:\n  paths:\n" + indented(LIST.format(key="path"), 4), SEVERAL),
    ("handler", "tensorflow", "models:\n  paths:\n" + indented(LIST.format(key="path"), 4), SEVERAL),
    # A folder of models.
    ("predictor", "python", "models: {dir: s3://b/}", ModelsConfig(dir="s3://b/")),
    ("predictor", "python", "models: {dir: s3://b/, cache_size: 1, disk_cache_size: 2}",
     ModelsConfig(dir="s3://b/", cache_size=1, disk_cache_size=2)),
    ("predictor", "python", "models: {paths: [{name: a, model_path: s3://b/a}]}",
     ModelsConfig(paths=[ModelEntry(name="a", path="s3://b/a")])),
    ("handler", "python", "multi_model_reloading: {dir: s3://b/, cache_memory: 500Mi, poll_interval: 1s}",
     ModelsConfig(dir="s3://b/", cache_memory=500 * 1024**2, poll_interval_s=1)),
    ("handler", "python", "multi_model_reloading: null", None),
]  # fmt: skip


@pytest.mark.parametrize(("form", "type_", "body", "models"), FORMS)
def test_converts_every_form_of_models_to_the_current_one(
    form: str, type_: str, body: str, models: ModelsConfig | None, tmp_path: Path
) -> None:
    reading = examine_text(tmp_path, with_models(form, type_, body))
    assert lines_of(reading) == []
    (api,) = reading.apis
    assert (api.handler.type, api.handler.models) == (type_, models)
    assert Api.model_validate(api.model_dump(mode="json")) == api


@pytest.mark.parametrize("form", ["class", "kindless", "sync", "predictor", "handler"])
def test_a_signature_key_may_be_beside_or_inside_models(form: str, tmp_path: Path) -> None:
    models = "model: s3://b/m" if form in ("class", "kindless", "sync") else "models: {path: s3://b/m}"
    body = f"{models}\nsignature_key: predict\ntensorflow_serving: local"
    reading = examine_text(tmp_path, with_models(form, "tensorflow", body))
    assert lines_of(reading) == []
    handler = reading.apis[0].handler
    assert (handler.signature_key, handler.tensorflow_serving, handler.models) == ("predict", "local", ONE)


def test_ignores_an_image_for_tensorflow_serving(tmp_path: Path) -> None:
    body = "models: {path: s3://b/m}\ntensorflow_serving_image: mine:1"
    for form in ("predictor", "handler"):
        assert lines_of(examine_text(tmp_path, with_models(form, "tensorflow", body))) == []


def test_module_functions_load_their_model_themselves(tmp_path: Path) -> None:
    text = "- kind: deployment\n  name: d\n- kind: api\n  name: a\n  predictor:\n    path: predictor.py\n"
    reading = examine_text(tmp_path, text + "    model: s3://b/m\n")
    assert (reading.apis[0].handler.model, reading.apis[0].handler.models) == ("s3://b/m", None)


@pytest.mark.parametrize(
    ("form", "type_", "body"),
    [
        ("handler", "python", "models: {dir: s3://b/}"),
        ("predictor", "python", "models: {path: s3://b/m}"),
        ("predictor", "python", "models: {paths: [{name: a, path: s3://b/a}]}"),
        ("predictor", "onnx", "multi_model_reloading: {dir: s3://b/}"),
        ("handler", "tensorflow", "multi_model_reloading: {dir: s3://b/}"),
    ],
)
def test_reports_models_in_the_section_of_another_type_once(form: str, type_: str, body: str, tmp_path: Path) -> None:
    (problem,) = examine_text(tmp_path, with_models(form, type_, body)).problems
    right = "multi_model_reloading" if type_ == "python" else "models"
    assert problem.message.endswith(f'is not supported with type "{type_}"')
    assert problem.fix == f'did you mean "{right}"?'


def test_mistakes_in_models_leave_the_code_readable(tmp_path: Path) -> None:
    for models in ("models: 5", "models: {paths: [5]}", "models: {path: 'https://x/y', poll_interval: 0s}"):
        reading = examine_text(tmp_path, with_models("handler", "onnx", models))
        assert [api.handler.models is not None for api in reading.readable] == [True]


WRITTEN = {written.rpartition(".")[2] for generation in GENERATIONS for written in generation.fields}
KEYS = st.sampled_from(sorted(WRITTEN - {"path", "type"}) + ["models", "multi_model_reloading", "pathes", "unknown"])
INNER_KEYS = st.sampled_from(
    [*sorted(ModelsConfig.model_fields), "poll_interval", "name", "model", "model_path", "pathes"]
)
LEAVES = st.sampled_from([
    None, 1, 0, -1, True, 1.5, "", "x", "s3://b/m", "500Mi", "2s", "https://x/y", "~/x", "/tmp", "../x",
    "{handler.path}",
])  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(INNER_KEYS, inner, max_size=4),
    max_leaves=15,
)


@given(
    form=st.sampled_from(["class", "kindless", "sync", "predictor", "handler", "batch", "batch handler"]),
    type_=st.sampled_from(["python", "tensorflow", "onnx"]),
    keys=st.dictionaries(KEYS, VALUES, min_size=1, max_size=4),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_of_models_is_converted_or_rejected(
    form: str, type_: str, keys: dict[str, object], tmp_path: Path
) -> None:
    body = "\n".join(f"{key}: {json.dumps(value)}" for key, value in keys.items())
    reading = examine_text(tmp_path, with_models(form, type_, body))
    assert bool(reading.problems) != bool(reading.apis)
    for problem in reading.problems:
        assert problem.fix
        assert problem.line >= 1 and problem.column >= 1
        # No message of pydantic reaches a user.
        assert not any(words in problem.message for words in ("Input should", "Extra inputs", "Field required"))
