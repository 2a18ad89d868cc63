"""The manifest that `cortex export --kubernetes` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cortex.export.kubernetes import manifest
from harness.exported_projects import planned, realtime

ASYNC = realtime("queue").replace("RealtimeAPI", "AsyncAPI")
GPU = realtime("gpu", rest="  compute: {cpu: 1, mem: 2Gi, gpu: 1}\n  autoscaling: {max_replicas: 2}\n")
PROJECTS = {
    "stateless": {"cortex.yaml": realtime()},
    "stateful": {"cortex.yaml": realtime() + ASYNC, ".env": "A=1\n"},
    "gpu": {"cortex.yaml": GPU},
}


def documents(folder: Path, project: str) -> dict[str, Any]:
    text = manifest(planned(folder / project, PROJECTS[project]), "example.com/shop:1")
    assert not any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text))
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def container(document: dict[str, Any]) -> dict[str, Any]:
    [found] = document["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("project", PROJECTS)
def test_references_within_the_manifest_resolve(tmp_path: Path, project: str) -> None:
    found = documents(tmp_path, project)
    pod = found["Deployment"]["spec"]["template"]

    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == pod["metadata"]["labels"]
    ports = {port["name"] for port in container(found["Deployment"])["ports"]}
    assert {port["targetPort"] for port in found["Service"]["spec"]["ports"]} <= ports
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container(found["Deployment"])["volumeMounts"]} == volumes
    claims = [
        each["persistentVolumeClaim"]["claimName"]
        for each in pod["spec"]["volumes"]
        if len(each) == 2 and "persistentVolumeClaim" in each
    ]
    assert claims == ([found["PersistentVolumeClaim"]["metadata"]["name"]] if project == "stateful" else [])


@pytest.mark.parametrize("project", PROJECTS)
def test_pods_have_no_privileges_and_write_only_to_volumes(tmp_path: Path, project: str) -> None:
    deployment = documents(tmp_path, project)["Deployment"]
    own = container(deployment)["securityContext"]

    assert deployment["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
    assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
    assert own["capabilities"] == {"drop": ["ALL"]}
    paths = {mount["mountPath"] for mount in container(deployment)["volumeMounts"]}
    assert paths == {"/var/lib/cortex", "/tmp", "/dev/shm"}


def test_an_update_without_state_never_stops_the_old_pod_first(tmp_path: Path) -> None:
    strategy = documents(tmp_path, "stateless")["Deployment"]["spec"]["strategy"]

    assert strategy["rollingUpdate"]["maxUnavailable"] == 0


def test_pods_with_jobs_share_no_volume(tmp_path: Path) -> None:
    assert documents(tmp_path, "stateful")["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}


def test_pods_are_ready_if_their_apis_are(tmp_path: Path) -> None:
    found = container(documents(tmp_path, "stateless")["Deployment"])

    assert found["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert found["livenessProbe"]["httpGet"]["path"] == "/livez"  # not readiness: a restart makes no model load faster


def test_pods_have_time_to_drain(tmp_path: Path) -> None:
    pod = documents(tmp_path, "stateless")["Deployment"]["spec"]["template"]["spec"]
    delay_s = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])

    assert pod["terminationGracePeriodSeconds"] == delay_s + 40


def test_gpus_are_requested_and_limited(tmp_path: Path) -> None:
    resources = container(documents(tmp_path, "gpu")["Deployment"])["resources"]

    assert resources == {
        "requests": {"cpu": "1500m", "memory": "2560Mi", "nvidia.com/gpu": "1"},
        "limits": {"memory": "4608Mi", "nvidia.com/gpu": "1"},
    }


def test_variables_of_dotenv_come_from_a_secret(tmp_path: Path) -> None:
    source = container(documents(tmp_path, "stateful")["Deployment"])["envFrom"]

    assert source == [{"secretRef": {"name": "stateful-env", "optional": True}}]


@pytest.mark.heavy
@pytest.mark.parametrize("project", PROJECTS)
def test_the_manifest_is_valid_by_the_schemas_of_kubernetes(tmp_path: Path, project: str) -> None:
    import kubernetes_validate

    text = manifest(planned(tmp_path / project, PROJECTS[project]), "example.com/shop:1")

    for document in yaml.safe_load_all(text):
        for version in ("1.28", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(document, version, strict=True)
