from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_files import examine_text, lines_of

from cortex.config.schema import Api, ModelEntry, Models

CONFIGS = Path(__file__).parent.parent / "fixtures" / "configs"

#: What a complete old file must come to, where it differs from the defaults.
EXPECTED: dict[str, dict[str, Any]] = {
    "0.11.yaml": {
        "deployment": "iris",
        "handler.interface": "functions",
        "handler.model": "s3://my-bucket/iris/model.pth",
        "handler.python_path": "src/",
        "handler.config": {"labels": ["setosa", "versicolor", "virginica"], "threshold": 0.5},
        "networking.endpoint": "/flowers/classify",
        "tracker.key": "label",
        "tracker.model_type": "classification",
        "autoscaling.min_replicas": 2,
        "autoscaling.init_replicas": 3,
        "autoscaling.max_replicas": 5,
        "autoscaling.target_cpu_utilization": 60,
        "compute.cpu": 0.01,
        "compute.mem": 1024**2,
    },
    "0.12.yaml": {
        "deployment": "iris",
        "handler.interface": "predictor",
        "handler.config": {"bucket": "my-bucket"},
        "handler.env": {"STAGE": "prod"},
        "networking.endpoint": "/iris/classifier",
        "tracker.model_type": "regression",
        "autoscaling.target_cpu_utilization": 150,
        "compute.cpu": 0.5,
    },
    "0.15.yaml": {
        "deployment": None,
        "handler.interface": "predictor",
        "handler.processes_per_replica": 2,
        "handler.threads_per_process": 4,
        "networking.endpoint": "/iris",
        "tracker.key": "label",
        "compute.cpu": 0.5,
        "compute.mem": None,
        "autoscaling.init_replicas": 1,
        "autoscaling.target_replica_concurrency": 8.0,
        "autoscaling.upscale_stabilization_period_s": 0.0,
        "autoscaling.max_upscale_factor": 10.0,
        "update_strategy.max_unavailable": "0",
    },
    "0.17.yaml": {"handler.interface": "predictor", "handler.config": {}, "tracker.key": "label"},
    "0.18.yaml": {
        "handler.processes_per_replica": 2,
        "handler.threads_per_process": 3,
        "networking.endpoint": "/iris",
        "autoscaling.target_replica_concurrency": 6.0,
    },
    "0.25.yaml": {
        "handler.interface": "predictor",
        "handler.python_path": "src/",
        "networking.endpoint": "/prices",
        "tracker.model_type": "regression",
        "compute.mem": 512 * 1024**2,
    },
    "0.31.yaml": {"handler.path": "predictor.py", "handler.log_level": "debug", "compute.mem": 1024**3},
    "0.35.yaml": {
        "handler.interface": "handler",
        "handler.config": {"nested": {"a": [1, 2.5, None, True]}},
        "handler.env": {"EMPTY": ""},
        "networking.timeout_s": 1.0,
        "networking.max_body_size": 10 * 1024**2,
        "compute.cpu": None,
        "compute.mem_limit": 4 * 1024**3,
        "compute.node_groups": ["gpu-nodes"],
        "autoscaling.init_replicas": 2,
        "update_strategy.max_surge": "2",
    },
}


def value_at(api: Api, place: str) -> Any:
    value: Any = api
    for part in place.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_a_complete_file_of_each_generation_reads_unmodified(name: str, tmp_path: Path) -> None:
    reading = examine_text(tmp_path, (CONFIGS / name).read_text())
    assert lines_of(reading) == []
    api = reading.apis[0]
    assert {place: value_at(api, place) for place in EXPECTED[name]} == EXPECTED[name]
    assert Api.model_validate(api.model_dump(mode="json")) == api


def test_apis_of_a_deployment_answer_below_its_name(tmp_path: Path) -> None:
    reading = examine_text(tmp_path, (CONFIGS / "0.11.yaml").read_text())
    assert [(api.name, api.deployment, api.networking.endpoint) for api in reading.apis] == [
        ("classifier", "iris", "/flowers/classify"),
        ("regressor", "iris", "/iris/regressor"),
    ]


def test_generations_may_share_a_file(tmp_path: Path) -> None:
    text = (CONFIGS / "0.11.yaml").read_text() + (CONFIGS / "0.35.yaml").read_text()
    reading = examine_text(tmp_path, text)
    assert [(api.handler.interface, api.deployment) for api in reading.apis] == [
        ("functions", "iris"),
        ("functions", "iris"),
        ("handler", None),
    ]


@pytest.mark.parametrize("name", ["0.11.yaml", "0.12.yaml", "0.15.yaml", "0.25.yaml"])
def test_our_own_bounds_are_open_to_old_files(name: str, tmp_path: Path) -> None:
    text = (CONFIGS / name).read_text().rstrip()
    first_api = text.split("\n\n- kind: api\n  name: regressor")[0]
    if "networking:" in first_api:
        first_api = first_api.replace("  networking:\n", "  networking:\n    timeout: 2s\n")
    else:
        first_api += "\n  networking:\n    timeout: 2s\n"
    reading = examine_text(tmp_path, first_api)
    assert lines_of(reading) == []
    assert reading.apis[0].networking.timeout_s == 2.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (  # names and places are those of the file, not of the current form
            "- kind: deployment\n  name: d\n- kind: api\n  name: a\n  predictor:\n    path: predictor.py\n"
            "    metadata: 5\n  compute:\n    max_replicas: 0\n",
            [
                "7:15: a.predictor.metadata: 5: invalid type (expected a map)",
                "9:19: a.compute.max_replicas: must be greater than 0 (got 0)",
            ],
        ),
        (
            "- name: a\n  predictor:\n    type: python\n    path: predictor.py\n  autoscaling:\n"
            "    threads_per_worker: 0\n  tracker:\n    key: 1\n",
            [
                "6:25: a.autoscaling.threads_per_worker: must be greater than or equal to 1 (got 0)",
                "7:3: a.tracker.model_type: must be defined",
                "8:10: a.tracker.key: 1: invalid type (expected a string)",
            ],
        ),
        (
            "- name: a\n  kind: RealtimeAPI\n  predictor:\n    type: python\n",
            ["3:3: a.predictor.path: must be defined"],
        ),
        ("- name: a\n  kind: RealtimeAPI\n  predictor:\n", ["3:13: a.predictor: cannot be null"]),
        ("- name: a\n", ["1:3: a.handler: must be defined", "1:3: a.kind: must be defined"]),
        ("- name: a\n  kind: 5\n  handler: x\n", ["2:9: a.kind: 5: invalid type (expected a string)"]),
    ],
)
def test_mistakes_are_told_in_the_words_of_the_file(text: str, expected: list[str], tmp_path: Path) -> None:
    found = lines_of(examine_text(tmp_path, text))
    assert found[: len(expected)] == expected


@pytest.mark.parametrize(
    ("section", "key", "fix"),
    [
        ("", "metadata", 'move it to "handler.config"'),
        ("", "endpoint", 'move it to "networking.endpoint"'),
        ("", "path", 'move it to "handler.path"'),
        ("compute", "min_replicas", 'move it to "autoscaling.min_replicas"'),
        ("autoscaling", "workers_per_replica", 'move it to "handler.processes_per_replica"'),
        ("autoscaling", "windows", 'did you mean "window"?'),
        ("networking", "port", "remove it; there can be: endpoint, timeout, max_body_size"),
    ],
)
def test_an_unknown_key_comes_with_the_key_that_was_meant(section: str, key: str, fix: str, tmp_path: Path) -> None:
    line = f"  {section}:\n    {key}: 1\n" if section else f"  {key}: 1\n"
    code = "    type: python\n" + ("" if key == "path" else "    path: handler.py\n")
    text = f"- name: a\n  kind: RealtimeAPI\n  handler:\n{code}{line}"
    (problem, *_) = [p for p in examine_text(tmp_path, text).problems if p.message == f'key "{key}" is not supported']
    assert problem.fix == fix


def test_a_misspelt_section_is_read_as_the_one_that_was_meant(tmp_path: Path) -> None:
    text = "- name: a\n  kind: RealtimeAPI\n  predicter:\n    type: python\n    path: nothing.py\n"
    assert lines_of(examine_text(tmp_path, text)) == [
        '3:3: a.predicter: key "predicter" is not supported',
        '5:11: a.predicter.path: "nothing.py": file does not exist',
    ]


@pytest.mark.parametrize("kind", ["BatchAPI", "AsyncAPI", "TaskAPI", "TrafficSplitter", "batchapi"])
def test_a_kind_not_served_yet_is_one_mistake(kind: str, tmp_path: Path) -> None:
    reading = examine_text(tmp_path, f"- name: a\n  kind: {kind}\n  definition: {{}}\n  apis: []\n  handler: 5\n")
    (problem,) = reading.problems
    assert (problem.line, problem.column) == (2, 9)
    assert "this version of cortex serves RealtimeAPIs only" in problem.message


def with_models(form: str, type_: str, body: str) -> str:
    """Write an API of a generation with lines that say what its models are."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    if form == "class":
        head = "- kind: deployment\n  name: d\n- kind: api\n  name: a\n  predictor:\n"
    elif form == "handler":
        head = "- name: a\n  kind: RealtimeAPI\n  handler:\n"
    else:
        kind = {"kindless": "", "sync": "  kind: SyncAPI\n", "predictor": "  kind: RealtimeAPI\n"}[form]
        head = f"- name: a\n{kind}  predictor:\n"
    return f"{head}    type: {type_}\n    path: predictor.py\n{lines}"


ONE = Models(path="s3://b/m")
SEVERAL = Models(
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
    # Several, as a list.
    ("kindless", "tensorflow", "models:\n" + LIST.format(key="model"), SEVERAL),
    ("sync", "tensorflow", "models:\n" + LIST.format(key="model_path"), SEVERAL),
    ("predictor", "tensorflow", "models:\n" + LIST.format(key="model_path"), SEVERAL),
    ("predictor", "tensorflow", "models:\n" + indented(LIST.format(key="path"), 2), SEVERAL),
    # Several, in a map.
    ("predictor", "tensorflow", "models:\n  paths:\n" + indented(LIST.format(key="model_path"), 4), SEVERAL),
    ("predictor", "tensorflow", "models:\n  paths:\n" + indented(LIST.format(key="path"), 4), SEVERAL),
    ("handler", "tensorflow", "models:\n  paths:\n" + indented(LIST.format(key="path"), 4), SEVERAL),
    # A folder of them.
    ("predictor", "python", "models: {dir: s3://b/}", Models(dir="s3://b/")),
    ("predictor", "python", "models: {dir: s3://b/, cache_size: 1, disk_cache_size: 2}",
     Models(dir="s3://b/", cache_size=1, disk_cache_size=2)),
    ("predictor", "python", "models: {paths: [{name: a, model_path: s3://b/a}]}",
     Models(paths=[ModelEntry(name="a", path="s3://b/a")])),
    ("handler", "python", "multi_model_reloading: {dir: s3://b/, cache_memory: 500Mi, poll_interval: 1s}",
     Models(dir="s3://b/", cache_memory=500 * 1024**2, poll_interval_s=1)),
    ("handler", "python", "multi_model_reloading: null", None),
]  # fmt: skip


@pytest.mark.parametrize(("form", "type_", "body", "models"), FORMS)
def test_every_form_of_models_comes_to_the_current_one(
    form: str, type_: str, body: str, models: Models | None, tmp_path: Path
) -> None:
    reading = examine_text(tmp_path, with_models(form, type_, body))
    assert lines_of(reading) == []
    (api,) = reading.apis
    assert (api.handler.type, api.handler.models) == (type_, models)
    assert Api.model_validate(api.model_dump(mode="json")) == api


@pytest.mark.parametrize("form", ["class", "kindless", "sync", "predictor", "handler"])
def test_a_signature_key_stands_beside_the_models_or_in_them(form: str, tmp_path: Path) -> None:
    models = "model: s3://b/m" if form in ("class", "kindless", "sync") else "models: {path: s3://b/m}"
    body = f"{models}\nsignature_key: predict\ntensorflow_serving: local"
    reading = examine_text(tmp_path, with_models(form, "tensorflow", body))
    assert lines_of(reading) == []
    handler = reading.apis[0].handler
    assert (handler.signature_key, handler.tensorflow_serving, handler.models) == ("predict", "local", ONE)


def test_an_image_for_tensorflow_serving_means_nothing_here(tmp_path: Path) -> None:
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
def test_models_in_the_section_of_another_type_are_one_mistake(
    form: str, type_: str, body: str, tmp_path: Path
) -> None:
    (problem,) = examine_text(tmp_path, with_models(form, type_, body)).problems
    right = "multi_model_reloading" if type_ == "python" else "models"
    assert problem.message.endswith(f'is not supported with type "{type_}"')
    assert problem.fix == f'did you mean "{right}"?'


def test_what_is_wrong_with_models_leaves_the_code_readable(tmp_path: Path) -> None:
    for models in ("models: 5", "models: {paths: [5]}", "models: {path: 'https://x/y', poll_interval: 0s}"):
        reading = examine_text(tmp_path, with_models("handler", "onnx", models))
        assert [api.handler.models is not None for api in reading.readable] == [True]
