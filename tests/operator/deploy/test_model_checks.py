from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from cortex.engine.devices import Inventory
from cortex.errors import ConfigError, Diagnostic
from cortex.operator.deploy import model_checks
from cortex.operator.deploy.diagnose import Machine, diagnose
from cortex.projects.project import ProjectFiles
from harness.ports import free_port

PREDICTORS = {
    "python": ("PythonPredictor", "python_client", "multi_model_reloading"),
    "tensorflow": ("TensorFlowPredictor", "tensorflow_client", "models"),
    "onnx": ("ONNXPredictor", "onnx_client", "models"),
}


class Project:
    """A folder with a configuration and models."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "cortex.yaml").touch()
        self.config = ""

    def add(self, type_: str, models: str, name: str = "iris", extra: str = "") -> None:
        kind, client, section = PREDICTORS[type_]
        code = f"class {kind}:\n    def __init__(self, {client}, config): pass\n    def predict(self, payload): pass\n"
        code += "    def load_model(self, model_path): return model_path\n" if type_ == "python" else ""
        (self.root / f"{type_}.py").write_text(code)
        predictor = f"    type: {type_}\n    path: {type_}.py\n    {section}:\n      {models}\n{extra}"
        self.config += f"- name: {name}\n  kind: RealtimeAPI\n  predictor:\n{predictor}"
        (self.root / "cortex.yaml").write_text(self.config)

    def files(self, *paths: str) -> None:
        for path in paths:
            file = self.root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("x")

    def problems(
        self, environ: Mapping[str, str] | None = None, devices: Inventory | None = None
    ) -> tuple[Diagnostic, ...]:
        try:
            diagnose(self.root / "cortex.yaml", "cortex.yaml", (), Machine(environ or os.environ, devices))
        except ConfigError as error:
            return error.diagnostics
        return ()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


SAVED_MODEL = ("saved_model.pb", "variables/variables.index", "variables/variables.data-00000-of-00001")


def test_valid_models_of_every_form_are_no_problem(project: Project) -> None:
    project.files(*(f"tf/{name}" for name in SAVED_MODEL), "dir/a/1/model.onnx", "dir/b/model.onnx", "python/1/x")
    project.add("tensorflow", "path: tf")
    project.add("onnx", "dir: dir", "two")
    project.add("python", "paths: [{name: m, path: python}]", "three")
    assert project.problems() == ()


def test_what_is_beside_versions_and_models_is_no_problem(project: Project) -> None:
    project.files("m/1/model.onnx", "m/.DS_Store", "m/2.tmp/model.onnx", "m/README.md", "m/_SUCCESS")
    project.files("dir/a/1/model.onnx", "dir/a/lost+found/x", "dir/b.tmp/x", "dir/.c/x", "dir/README.md")
    project.add("onnx", "path: m")
    project.add("onnx", "dir: dir", "two")
    assert project.problems() == ()


def test_an_invalid_model_is_shown_beside_what_was_expected_where_it_is_written(project: Project) -> None:
    project.files("models/iris/1/saved_model.pb", "models/iris/1/notes.txt")
    project.add("tensorflow", "path: models/iris")
    (problem,) = project.problems()
    assert (problem.line, problem.column) == (7, 13)
    text = str(problem)
    assert text.startswith("cortex.yaml:7:13: iris.predictor.models.path: models/iris/1: no variables/variables.index")
    assert "\n    ├── saved_model.pb\n" in text
    assert "\n    1/notes.txt\n    1/saved_model.pb" in text
    assert str(project.root) not in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_each_invalid_model_of_each_api_is_reported_at_once_with_all_other_mistakes(project: Project) -> None:
    project.files(
        "a/model.onnx", "a/other.onnx", "dir/good/model.onnx", "dir/bad/x.txt", "dir/worse/1/x", "dir/worse/y"
    )
    project.add("onnx", "paths: [{name: a, path: a}, {name: gone, path: gone}]")
    project.add("onnx", "dir: dir", "two", "    threads_per_process: 0\n")
    found = [(problem.path, problem.message.partition("\n")[0]) for problem in project.problems()]
    assert [path for path, _ in found] == [
        "iris.predictor.models.paths[0].path",
        "iris.predictor.models.paths[1].path",
        "two.predictor.models.dir",
        "two.predictor.models.dir",
        "two.predictor.threads_per_process",
    ]
    assert "2 *.onnx files" in found[0][1]
    assert "does not exist" in found[1][1]
    assert {message.split(":")[0].split(" ")[0] for _, message in found[2:4]} == {"dir/bad", "dir/worse/1"}


def test_at_most_fifty_paths_are_shown(project: Project) -> None:
    project.files(*(f"m/{number:03}.txt" for number in range(80)))
    project.add("onnx", "path: m")
    (problem,) = project.problems()
    assert problem.message.count(".txt") <= 52


def test_a_folder_of_many_invalid_models_is_summed_up(project: Project) -> None:
    project.files(*(f"dir/m{number}/x" for number in range(20)))
    project.add("onnx", "dir: dir")
    problems = project.problems()
    assert len(problems) == 6
    assert any("15 more models" in problem.message for problem in problems)


def test_reports_a_dir_without_models(project: Project) -> None:
    project.files("dir/model.onnx")
    project.add("onnx", "dir: dir")
    (problem,) = project.problems()
    assert problem.message.startswith("dir contains no model folders")


def test_reports_an_unreachable_store_in_one_line(project: Project) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    project.add("onnx", "path: s3://bucket/iris")
    project.add("onnx", "dir: s3://bucket/iris", "two")
    keys = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "x"}
    problems = project.problems(keys)
    assert len(problems) == 2
    assert all(problem.message.endswith("can't be reached") for problem in problems)


def test_reports_a_store_that_never_answers(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "_SAMPLE_TIMEOUT_S", 0.3)
    project.add("onnx", "path: s3://bucket/iris")
    apis = diagnose(project.root / "cortex.yaml", "cortex.yaml").apis
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        keys = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        ((_, violation),) = model_checks.inspect_models(apis, project.root, keys).violations
    assert violation.message == f"s3://bucket/iris: {endpoint[7:]} did not answer within 0.3 s"


def test_a_location_too_large_to_list_in_time_counts_as_valid(project: Project) -> None:
    project.files(*(f"dir/m{number}/x" for number in range(20)))
    project.add("onnx", "dir: dir")
    apis = diagnose(project.root / "cortex.yaml", "cortex.yaml").apis
    inspection = model_checks.inspect_models(apis, project.root, {}, timeout_s=0)
    assert inspection.violations == []


def test_models_of_an_external_tensorflow_serving_are_not_checked(project: Project) -> None:
    project.add("tensorflow", "path: s3://far/away", extra="    tensorflow_serving: host:8500\n")
    assert project.problems({}) == ()


def test_without_a_machine_only_the_project_is_checked(project: Project) -> None:
    project.add("onnx", "path: s3://bucket/iris")
    assert diagnose(project.root / "cortex.yaml", "cortex.yaml").project == ProjectFiles.scan(
        project.root, "cortex.yaml"
    )


@pytest.mark.parametrize(
    ("compute", "devices", "message"),
    [
        ("gpu: 1", Inventory(why_no_gpus="nvidia-smi is not on PATH"), "no NVIDIA GPU (nvidia-smi is not on PATH)"),
        ("gpu: 3", Inventory(("a", "b")), "2 GPUs"),
        ("inf: 1", Inventory(), "no Inferentia chip (no /dev/neuron0)"),
        ("cpu: 5", Inventory(cores=4.0), "4 cores"),
    ],
)
def test_reports_devices_that_the_machine_lacks_at_their_place_in_the_file(
    project: Project, compute: str, devices: Inventory, message: str
) -> None:
    project.files("m/1/x")
    project.add("python", "path: m", extra=f"  compute: {{{compute}}}\n")
    (problem,) = project.problems(devices=devices)
    assert (problem.line, problem.column) == (8, 18)
    assert problem.message == f"{compute[-1]}: this machine has {message}"
    assert project.problems(devices=Inventory(("a", "b", "c"), (0,), cores=5.0)) == ()
    assert project.problems(devices=None) == ()


def test_reports_memory_that_the_machine_can_never_have(project: Project) -> None:
    project.files("m/1/x")
    project.add("python", "path: m", extra="  compute: {mem: 5000Gi}\n")
    (problem,) = project.problems(devices=Inventory(cores=4.0, memory_bytes=8 * 1024**3))
    assert (problem.line, problem.column) == (8, 18)
    assert (problem.message, problem.fix) == (
        "5000.0 GiB: this machine has 8.0 GiB of memory",
        "lower it, or deploy to another machine",
    )


def test_the_format_of_a_model_without_code_is_detected_before_a_deploy(project: Project, tmp_path: Path) -> None:
    pickled = tmp_path / "elsewhere" / "iris.pkl"
    pickled.parent.mkdir()
    pickled.write_bytes(pickle.dumps(print))
    (project.root / "own.pkl").write_bytes(pickled.read_bytes())
    project.files("notes.txt")
    for index, path in enumerate(("notes.txt", pickled, "own.pkl")):
        project.config += (
            f"- name: api-{index}\n  kind: RealtimeAPI\n  handler:\n    type: model\n    models: {{path: {path}}}\n"
        )
    (project.root / "cortex.yaml").write_text(project.config)
    unknown, untrusted = project.problems()  # pickles of the project need no trust: its code runs anyway
    assert (unknown.line, "is not a model that cortex knows" in unknown.message) == (5, True)
    assert (untrusted.line, "write `trust: pickle` if you trust it" in untrusted.message) == (10, True)
