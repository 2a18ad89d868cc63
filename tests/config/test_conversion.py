from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cortex.config.schema import Api, ModelEntry
from harness.config_files import examine_text, lines_of

CONFIGS = Path(__file__).parent.parent / "fixtures" / "configs"

#: The values of a converted complete file that differ from the defaults.
EXPECTED: dict[str, dict[str, Any]] = {
    "0.9-models.yaml": {
        "deployment": "iris",
        "handler.interface": "older_request_handler",
        "handler.type": "tensorflow",
        "handler.path": "predictor.py",
        "handler.models.path": "s3://my-bucket/iris/1560263532.zip",
        "handler.signature_key": "predict",
        "networking.endpoint": "/iris/tensorflow",
        "autoscaling.target_cpu_utilization": 80,
        "tracker.model_type": "classification",
    },
    "0.11-models.yaml": {
        "deployment": "iris",
        "handler.interface": "request_handler",
        "handler.type": "tensorflow",
        "handler.path": "predictor.py",
        "handler.python_path": "src/",
        "handler.models.path": "s3://my-bucket/iris/tensorflow/",
        "handler.signature_key": "predict",
        "handler.config": {"labels": ["setosa", "versicolor", "virginica"]},
        "networking.endpoint": "/iris/tensorflow",
        "autoscaling.min_replicas": 2,
        "tracker.model_type": "classification",
    },
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


EXPECTED |= {
    "0.12-models.yaml": {
        "handler.type": "tensorflow",
        "handler.models.path": "s3://my-bucket/iris/tensorflow",
        "handler.signature_key": "predict",
        "compute.gpu": 1,
    },
    "0.18-models.yaml": {
        "handler.type": "tensorflow",
        "handler.models.paths": [
            ModelEntry(name="generator", path="s3://my-bucket/generator/", signature_key="generate"),
            ModelEntry(name="sentiment", path="s3://my-bucket/sentiment/"),
        ],
        "handler.signature_key": "predict",
        "compute.inf": 1,
    },
    "0.23-models.yaml": {
        "handler.type": "python",
        "handler.models.path": None,
        "handler.models.cache_size": 1,
        "handler.models.disk_cache_size": 2,
    },
    "0.31-models.yaml": {
        "handler.type": "onnx",
        "handler.models.dir": None,
        "handler.models.cache_size": 1,
        "handler.models.poll_interval_s": 10.0,
    },
    "0.35-models.yaml": {
        "handler.models.dir": "s3://my-bucket/",
        "handler.models.cache_memory": 500 * 1024**2,
        "handler.models.poll_interval_s": 1.0,
    },
}

EXPECTED |= {
    "0.18-batch.yaml": {
        "kind": "BatchAPI",
        "handler.models.paths": [
            ModelEntry(name="generator", path="s3://my-bucket/generator/", signature_key="generate"),
            ModelEntry(name="sentiment", path="s3://my-bucket/sentiment/"),
        ],
        "networking.endpoint": "/batch/text",
        "networking.max_body_size": 10 * 1024**2,
        "networking.max_batch_size": 256_000,
    },
    "0.23-batch.yaml": {
        "kind": "BatchAPI",
        "handler.type": "python",
        "handler.models.paths": [ModelEntry(name="a", path="s3://my-bucket/a")],
        "networking.endpoint": "/prices",
    },
    "0.28-batch.yaml": {
        "handler.interface": "predictor",
        "handler.models.path": "s3://my-bucket/images.onnx",
        "networking.max_body_size": 100 * 1024**2,
        "networking.max_batch_size": 1024**2,
    },
    "0.35-batch.yaml": {
        "kind": "BatchAPI",
        "handler.interface": "handler",
        "handler.models.dir": "s3://my-bucket/models",
        "networking.endpoint": "/iris",
        "networking.max_body_size": 10 * 1024**2,
    },
}


def value_at(api: Api, place: str) -> Any:
    value: Any = api
    for part in place.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_reads_a_complete_file_of_each_generation(name: str, tmp_path: Path) -> None:
    reading = examine_text(tmp_path, (CONFIGS / name).read_text())
    assert lines_of(reading) == []
    api = reading.apis[0]
    assert {place: value_at(api, place) for place in EXPECTED[name]} == EXPECTED[name]
    assert Api.model_validate(api.model_dump(mode="json")) == api


def test_endpoints_of_a_deployment_start_with_its_name(tmp_path: Path) -> None:
    reading = examine_text(tmp_path, (CONFIGS / "0.11.yaml").read_text())
    assert [(api.name, api.deployment, api.networking.endpoint) for api in reading.apis] == [
        ("classifier", "iris", "/flowers/classify"),
        ("regressor", "iris", "/iris/regressor"),
    ]


def test_models_of_a_deployment_may_have_no_code(tmp_path: Path) -> None:
    reading = examine_text(tmp_path, (CONFIGS / "0.11-models.yaml").read_text())
    found = [(api.handler.type, api.handler.path, api.networking.endpoint) for api in reading.apis[1:]]
    assert found == [("onnx", "handler.py", "/iris/onnx"), ("onnx", None, "/iris/without-code")]


def test_the_format_of_a_model_follows_from_its_name_unless_it_is_written(tmp_path: Path) -> None:
    reading = examine_text(tmp_path, (CONFIGS / "0.9-models.yaml").read_text())
    assert [api.handler.type for api in reading.apis] == ["tensorflow", "onnx", "onnx"]


@pytest.mark.parametrize("type_", ["tensorflow", "onnx"])
@pytest.mark.parametrize("section", ["handler", "predictor"])
def test_models_can_be_served_without_code(tmp_path: Path, type_: str, section: str) -> None:
    text = f"- name: iris\n  kind: RealtimeAPI\n  {section}: {{type: {type_}, models: {{path: s3://bucket/iris}}}}\n"
    reading = examine_text(tmp_path, text)
    assert lines_of(reading) == []
    api = reading.apis[0]
    assert api.handler.path is None
    assert Api.read_stored(api.model_dump_json()) == api


def test_a_file_may_mix_generations(tmp_path: Path) -> None:
    text = (CONFIGS / "0.11.yaml").read_text() + (CONFIGS / "0.35.yaml").read_text()
    reading = examine_text(tmp_path, text)
    assert [(api.handler.interface, api.deployment) for api in reading.apis] == [
        ("functions", "iris"),
        ("functions", "iris"),
        ("handler", None),
    ]


@pytest.mark.parametrize("name", ["0.11.yaml", "0.12.yaml", "0.15.yaml", "0.25.yaml"])
def test_older_files_may_use_extensions_of_limits(name: str, tmp_path: Path) -> None:
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
        (  # keys and positions are those of the file, not of the current form
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
def test_mistakes_use_the_keys_of_the_file(text: str, expected: list[str], tmp_path: Path) -> None:
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
        ("autoscaling", "min", 'write "min_replicas"'),
        ("autoscaling", "num_replicas", 'write "min_replicas"'),
        ("", "maxReplicas", 'move it to "autoscaling.max_replicas"'),
        ("", "containerConcurrency", 'move it to "autoscaling.max_replica_concurrency"'),
        ("", "workers", 'move it to "handler.processes_per_replica"'),
        ("", "resources", 'move what is in it to "compute"'),
        ("compute", "limits", 'move what is in it to "compute"'),
        ("compute", "memory", 'write "mem"'),
        ("compute", "num_cpus", 'write "cpu"'),
        ("compute", "cores", 'write "cpu"'),
        ("", "vCPUs", 'move it to "compute.cpu"'),
        ("compute", "ram", 'write "mem"'),
        ("networking", "port",
         "remove it; supported keys: endpoint, timeout, max_body_size, access_log, auth, docs, on_disconnect, "
         "sticky, websocket_idle_timeout, cors, record"),
    ],
)  # fmt: skip
def test_suggests_the_intended_key_for_an_unknown_key(section: str, key: str, fix: str, tmp_path: Path) -> None:
    assert fix_of(section, key, "RealtimeAPI", tmp_path) == fix


@pytest.mark.parametrize(
    ("section", "key", "fix"),
    [
        ("compute", "min_replicas", "remove it; supported keys: cpu, mem, gpu, inf, node_groups, mem_limit"),
        ("", "autoscalings", "remove it; supported keys: name, kind, handler, networking, compute, schedule"),
        ("", "max_batch_size", 'move it to "networking.max_batch_size"'),
        ("networking", "timeouts",
         "remove it; supported keys: endpoint, max_body_size, access_log, auth, docs, cors, max_batch_size, "
         "max_stored_size, local_paths, buckets, webhook_hosts"),
        ("networking", "max_batches_size", 'did you mean "max_batch_size"?'),
    ],
)  # fmt: skip
def test_never_suggests_a_key_that_the_kind_does_not_support(section: str, key: str, fix: str, tmp_path: Path) -> None:
    assert fix_of(section, key, "BatchAPI", tmp_path) == fix


def fix_of(section: str, key: str, kind: str, folder: Path) -> str:
    """Return the fix for an unknown key."""
    line = f"  {section}:\n    {key}: 1\n" if section else f"  {key}: 1\n"
    code = "    type: python\n" + ("" if key == "path" else "    path: handler.py\n")
    text = f"- name: a\n  kind: {kind}\n  handler:\n{code}{line}"
    (problem, *_) = [p for p in examine_text(folder, text).problems if p.message == f'key "{key}" is not supported']
    return problem.fix


def test_reads_a_misspelt_section_as_the_intended_one(tmp_path: Path) -> None:
    text = "- name: a\n  kind: RealtimeAPI\n  predicter:\n    type: python\n    path: nothing.py\n"
    assert lines_of(examine_text(tmp_path, text)) == [
        '3:3: a.predicter: key "predicter" is not supported',
        '5:11: a.predicter.path: "nothing.py": file does not exist',
    ]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            "    path: handler.py\n    num_replicas: 2\n  autoscaling: {num_replicas: 2, minReplicas: 1}\n",
            [
                '6:5: a.handler.num_replicas: key "num_replicas" is not supported '
                '(move it to "autoscaling.min_replicas")',
                '7:17: a.autoscaling.num_replicas: key "num_replicas" is not supported '
                '(remove it: it duplicates "handler.num_replicas")',
                '7:34: a.autoscaling.minReplicas: key "minReplicas" is not supported '
                '(remove it: it duplicates "handler.num_replicas")',
            ],
        ),
        (
            "    path: handler.py\n  compute: {gpus: 1, gpu: 1}\n",
            ['6:13: a.compute.gpus: key "gpus" is not supported (remove it: it duplicates "compute.gpu")'],
        ),
        (
            "    path: handler.py\n  path: handler.py\n  networkings: {timeout: 1s}\n  networking: {timeout: 1s}\n",
            [
                '6:3: a.path: key "path" is not supported (remove it: it duplicates "handler.path")',
                '7:3: a.networkings: key "networkings" is not supported (did you mean "networking"?)',
            ],
        ),
        (
            "    import_path: handler:Handler\n",
            [
                '3:3: a.handler.path: must be defined (write "path: handler.py")',
                '5:5: a.handler.import_path: key "import_path" is not supported (remove it; supported keys: type, …)',
            ],
        ),
    ],
    ids=["keys for one field", "the right key", "a section", "a key without a counterpart"],
)  # fmt: skip
def test_one_mistake_in_a_key_is_one_message(keys: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "handler.py").touch()
    found = examine_text(tmp_path, "- name: a\n  kind: RealtimeAPI\n  handler:\n    type: python\n" + keys)
    assert [re.sub("(type), .*", r"\1, …)", str(p)).removeprefix("cortex.yaml:") for p in found.problems] == expected
