from __future__ import annotations

from pathlib import Path

from cortex.engine.environment import Prepared
from cortex.home import Home
from cortex.models.spec import DEFAULT_MODEL, ModelPath
from cortex.operator.revisions.replica_specs import replica_spec
from cortex.worker.spec import _OLDER_LIMITS, ReplicaSpec, RequestLimits
from harness.replicas.fleet import api, deployed

PREPARED = Prepared("python", {"KEY": "value"})


def spec_of(tmp_path: Path, handler: dict[str, object] | None = None, **sections: object) -> ReplicaSpec:
    base = {"interface": "predictor", "type": "python", "path": "predictor.py", **(handler or {})}
    return replica_spec(Home(tmp_path), deployed(spec=api(handler=base, **sections)), PREPARED)


def test_an_api_without_models_needs_no_model_agent(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert (spec.models, spec.model_agent_socket, spec.type, spec.gpu, spec.inf) == (None, None, "python", 0, 0)


def test_resolves_model_paths_in_the_project_folder(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, {"type": "onnx", "models": {"path": "models/iris"}})
    assert spec.models is not None
    assert spec.models.paths == (ModelPath(DEFAULT_MODEL, str(tmp_path / "projects/project-of-r1/models/iris")),)
    assert spec.model_agent_socket == str(Home(tmp_path).model_agent_socket)
    assert spec.type == "onnx"


def test_the_spec_contains_the_compute_of_the_api(tmp_path: Path) -> None:
    handler = {"type": "tensorflow", "models": {"dir": "s3://bucket/models"}, "tensorflow_serving": "localhost:8500"}
    spec = spec_of(tmp_path, handler, compute={"gpu": 2})
    assert (spec.gpu, spec.gpu_ids, spec.tensorflow_serving) == (2, (), "localhost:8500")


def test_models_of_another_server_need_no_model_agent(tmp_path: Path) -> None:
    handler = {"type": "tensorflow", "models": {"path": "s3://bucket/iris"}, "tensorflow_serving": "localhost:8500"}
    spec = spec_of(tmp_path, handler)
    assert spec.models is not None
    assert spec.model_agent_socket is None


def test_a_command_gets_its_arguments_and_its_endpoint(tmp_path: Path) -> None:
    handler = {"interface": "handler", "type": "command", "path": None, "command": ["node", "server.js"]}
    spec = spec_of(tmp_path, handler, networking={"endpoint": "/own"}, readiness="/health")
    assert (spec.path, spec.command, spec.endpoint) == ("", ("node", "server.js"), "/own")
    assert (spec.readiness, spec.strip_prefix, spec.start_timeout_s) == ("/health", True, 600.0)
    assert spec_of(tmp_path).command == ()


def test_specs_of_older_versions_lack_limits_that_have_a_default() -> None:
    first = {"timeout_s", "max_body_bytes"}  #: all versions have written these
    assert set(_OLDER_LIMITS) == set(RequestLimits.__dataclass_fields__) - first
