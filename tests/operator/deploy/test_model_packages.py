"""The packages that follow from the models of a project become part of its APIs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cortex.config.schema import Api
from cortex.engine.environment import setup_of
from cortex.errors import ConfigError
from cortex.operator.deploy import model_checks
from cortex.operator.deploy.deployer import revision_of
from cortex.operator.deploy.diagnose import Diagnosis, Machine, diagnose
from cortex.state.revision import Revision
from cortex.worker.spec import ReplicaSpec, Setup
from harness.models.model_makers import onnx_model
from harness.replicas.specs import replica_spec
from harness.servers.public_bucket import public_bucket

pytestmark = pytest.mark.processes

XGBOOST_9 = '{"learner":{},"version":[9,8,7]}'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "model.json").write_text(XGBOOST_9)
    (tmp_path / "cortex.yaml").write_text(
        "- name: tree\n  kind: RealtimeAPI\n  handler:\n    type: model\n    models: {path: model.json}\n"
    )
    return tmp_path


def diagnosis_of(project: Path) -> Diagnosis:
    return diagnose(project / "cortex.yaml", "cortex.yaml", (), Machine(os.environ))


def packages_of(api: Api) -> dict[str, str]:
    return api.handler.dependencies.model_packages


def test_a_model_pins_its_packages(project: Path) -> None:
    found = diagnosis_of(project)
    assert packages_of(found.apis[0]) == {"xgboost==9.8.7": ">=9.8"}
    assert found.installs == {"tree": ("xgboost==9.8.7",)}


def test_replicas_receive_the_packages_and_older_nodes_no_new_field(project: Path) -> None:
    target = Revision("r", diagnosis_of(project).apis[0], "hash")
    setup = setup_of(target)
    assert setup.model_packages == {"xgboost==9.8.7": ">=9.8"}
    replica = replica_spec(setup=setup)
    assert ReplicaSpec.from_json(replica.to_json()).setup == setup
    plain = replica_spec(setup=Setup("p", "", "", "", {}))
    assert "model_packages" not in plain.to_json()


def test_another_model_is_another_revision_and_installed_packages_do_not_matter(project: Path) -> None:
    api = diagnosis_of(project).apis[0]
    (project / "model.json").write_text(XGBOOST_9.replace("9,8,7", "1,0,0"))
    older = diagnosis_of(project).apis[0]
    assert packages_of(older) == {"xgboost==1.0.0": ">=1.0"}
    assert diagnosis_of(project).installs == {"tree": ()}, "a newer version is installed"
    assert revision_of(api, "p", "n") != revision_of(older, "p", "n")


def test_a_pinned_version_that_cannot_load_the_model_is_an_error_at_its_line(project: Path) -> None:
    (project / "requirements.txt").write_text("numpy\nxgboost==3.0.0\n")
    with pytest.raises(ConfigError) as caught:
        diagnosis_of(project)
    assert str(caught.value) == (
        "requirements.txt:2:1: xgboost==3.0.0 can't load model.json: it was saved by XGBoost 9.8.7 "
        "(write xgboost==9.8.7)"
    )


def test_a_project_with_a_script_installs_what_its_models_need_itself(project: Path) -> None:
    (project / "dependencies.sh").write_text("pip install xgboost\n")
    assert packages_of(diagnosis_of(project).apis[0]) == {}


def test_classes_and_request_handlers_of_onnx_models_get_its_runtime(project: Path) -> None:
    (project / "m.onnx").write_bytes(onnx_model(10)["model.onnx"])
    (project / "cortex.yaml").write_text(
        "- kind: deployment\n  name: d\n- kind: api\n  name: iris\n  onnx:\n    model: m.onnx\n"
    )
    ((line, accepts),) = packages_of(diagnosis_of(project).apis[0]).items()
    assert line.startswith("onnxruntime>=")
    assert accepts.startswith(">=")


def test_a_pickle_in_a_folder_of_models_needs_trust(project: Path, tmp_path: Path) -> None:
    outside = project.parent / f"{project.name}-models" / "a"
    outside.mkdir(parents=True)
    (outside / "m.pkl").write_bytes(b"\x80\x04K\x01.")
    text = (project / "cortex.yaml").read_text().replace("path: model.json", f"dir: {outside.parent}")
    (project / "cortex.yaml").write_text(text)
    with pytest.raises(ConfigError, match="write `trust: pickle` if you trust it"):
        diagnosis_of(project)


S3_API = "- name: tree\n  kind: RealtimeAPI\n  handler:\n    type: model\n    models: {path: s3://models/tree}\n"


def test_the_newest_version_in_a_bucket_decides(tmp_path: Path) -> None:
    (tmp_path / "cortex.yaml").write_text(S3_API)
    with public_bucket() as bucket:
        bucket.objects["tree/9/model.json"] = XGBOOST_9.replace("9,8,7", "1,0,0").encode()
        bucket.objects["tree/10/model.json"] = XGBOOST_9.encode()
        machine = Machine({"AWS_ENDPOINT_URL": bucket.url, "HOME": str(tmp_path / "home")})
        found = diagnose(tmp_path / "cortex.yaml", "cortex.yaml", (), machine)
        assert found.installs == {"tree": ("xgboost==9.8.7",)}
        bucket.objects["tree/11/model.pkl"] = b"\x80\x04K\x01."
        with pytest.raises(ConfigError) as caught:
            diagnose(tmp_path / "cortex.yaml", "cortex.yaml", (), machine)
    assert "cortex.yaml:5:20: tree.handler.models.path: model.pkl is a pickle" in str(caught.value)
    assert "write `trust: pickle` if you trust it" in str(caught.value)


def test_a_damaged_model_in_a_bucket_is_called_by_its_url(tmp_path: Path) -> None:
    (tmp_path / "cortex.yaml").write_text(S3_API)
    with public_bucket() as bucket:
        bucket.objects["tree/a.txt"] = b"hello"
        bucket.objects["tree/b.txt"] = b"hello"
        machine = Machine({"AWS_ENDPOINT_URL": bucket.url, "HOME": str(tmp_path / "home")})
        with pytest.raises(ConfigError, match=r"s3://models/tree has no model; it has a\.txt, b\.txt"):
            diagnose(tmp_path / "cortex.yaml", "cortex.yaml", (), machine)
        bucket.objects.clear()
        bucket.objects["tree"] = b"hello"
        with pytest.raises(ConfigError, match="path: s3://models/tree is not a model that cortex knows"):
            diagnose(tmp_path / "cortex.yaml", "cortex.yaml", (), machine)


def test_the_format_of_files_that_are_too_large_to_download_is_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_checks, "_MAX_DOWNLOAD_BYTES", 10)
    (tmp_path / "cortex.yaml").write_text(S3_API)
    with public_bucket() as bucket:
        bucket.objects["tree/model.json"] = XGBOOST_9.encode()
        machine = Machine({"AWS_ENDPOINT_URL": bucket.url, "HOME": str(tmp_path / "home")})
        assert diagnose(tmp_path / "cortex.yaml", "cortex.yaml", (), machine).installs == {}
