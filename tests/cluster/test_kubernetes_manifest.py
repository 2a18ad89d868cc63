"""The manifest for Kubernetes: references resolve, versions agree, and no pod has privileges."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
MANIFEST = ROOT / "examples" / "kubernetes" / "cortex.yaml"
API_VERSIONS = {
    "Namespace": "v1",
    "Secret": "v1",
    "PersistentVolumeClaim": "v1",
    "Service": "v1",
    "Deployment": "apps/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "RayCluster": "ray.io/v1",
}
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all(MANIFEST.read_text()))


def the(kind: str, name: str = "") -> dict[str, Any]:
    [found] = [d for d in DOCUMENTS if d["kind"] == kind and (not name or d["metadata"]["name"] == name)]
    return found


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    ray = the("RayCluster")["spec"]
    yield "head", ray["headGroupSpec"]["template"]["spec"]
    for group in ray["workerGroupSpecs"]:
        yield group["groupName"], group["template"]["spec"]
    yield "operator", the("Deployment")["spec"]["template"]["spec"]


each_pod = pytest.mark.parametrize("pod", [pod for _, pod in pods()], ids=[name for name, _ in pods()])


def environ(container: dict[str, Any]) -> dict[str, Any]:
    names = [variable["name"] for variable in container["env"]]
    assert len(names) == len(set(names))
    return {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in container["env"]}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: f"{d['kind']}-{d['metadata']['name']}")
def test_each_document_has_its_api_version_and_namespace(document: dict[str, Any]) -> None:
    assert document["apiVersion"] == API_VERSIONS[document["kind"]]
    namespace = document["metadata"].get("namespace")
    assert namespace == (None if document["kind"] == "Namespace" else the("Namespace")["metadata"]["name"])


def test_no_key_is_given_twice() -> None:
    def check(node: yaml.Node) -> None:
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), node.start_mark
            for _, value in node.value:
                check(value)
        elif isinstance(node, yaml.SequenceNode):
            for value in node.value:
                check(value)

    for node in yaml.compose_all(MANIFEST.read_text(), yaml.SafeLoader):
        check(node)


@each_pod
def test_pods_run_without_privileges(pod: dict[str, Any]) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in pod["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]


@each_pod
def test_every_reference_in_a_pod_resolves(pod: dict[str, Any]) -> None:
    secret = the("Secret")
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    for container in pod["containers"]:
        assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes.keys()
        for value in environ(container).values():
            if isinstance(value, dict) and "secretKeyRef" in value:
                assert value["secretKeyRef"]["name"] == secret["metadata"]["name"]
                assert value["secretKeyRef"]["key"] in secret["stringData"]
    for volume in volumes.values():
        claim = volume.get("persistentVolumeClaim")
        assert claim is None or claim["claimName"] == the("PersistentVolumeClaim")["metadata"]["name"]


def test_all_pods_of_ray_use_the_same_token_and_image() -> None:
    accesses = [environ(pod["containers"][0]) for _, pod in pods()]
    accesses.append(environ(the("RayCluster")["spec"]["autoscalerOptions"]))
    token = {"secretKeyRef": {"name": "cortex-secrets", "key": "ray-token"}}
    assert all(access["RAY_AUTH_MODE"] == "token" and access["RAY_AUTH_TOKEN"] == token for access in accesses)
    built = re.search(r"--build-arg VERSION=([0-9.]+) --tag (\S+)", (ROOT / "docs/howto/kuberay.md").read_text())
    assert built, "the page says how its image is built"
    assert {pod["containers"][0]["image"] for _, pod in pods()} == {built[2]} == {f"CHANGE-ME/cortex:{built[1]}"}


def test_pods_have_the_user_and_the_programs_of_the_image() -> None:
    image = (ROOT / "deploy/docker/Dockerfile").read_text()
    default = re.search(r"^ARG EXTRAS=(.*)$", image, re.MULTILINE)
    assert default and default[1].split(",") == ["ray", "postgresql"]
    for _, pod in pods():
        user = pod["securityContext"]
        assert f"\nUSER {user['runAsUser']}:{user['runAsGroup']}\n" in image


@pytest.mark.heavy
def test_the_manifest_is_valid_by_the_schemas_of_kubernetes() -> None:
    import kubernetes_validate

    for document in DOCUMENTS:
        if document["kind"] != "RayCluster":  # not a kind of Kubernetes itself
            kubernetes_validate.validate(document, "1.28", strict=True)


def test_ray_has_the_tested_version_and_autoscaling() -> None:
    ray = the("RayCluster")["spec"]
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and ray["rayVersion"] == pinned[1]
    assert ray["enableInTreeAutoscaling"] is True
    assert ray["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", "no replica runs beside the head"
    for group in ray["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        # KubeRay hands the text to a shell: JSON in quotes, with those inside it escaped.
        assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {group["groupName"]: 1}


def test_the_operator_has_all_addresses() -> None:
    container = the("Deployment")["spec"]["template"]["spec"]["containers"][0]
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in container["args"])
    assert flags["engine"] == "ray"
    assert flags["ray-address"] == f"ray://{the('RayCluster')['metadata']['name']}-head-svc:10001"
    assert flags["advertise"] == "$(POD_IP)"
    assert "database" not in flags, "it has a password, and command lines can be read"
    key = environ(container)["CORTEX_DATABASE"]["secretKeyRef"]["key"]
    assert the("Secret")["stringData"][key].startswith("postgresql://")
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    assert ports == {"gateway": flags["gateway-port"], "operator": flags["operator-port"], "nodes": flags["node-port"]}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {environ(container)["CORTEX_HOME"]}


def test_services_select_the_operator() -> None:
    labels = the("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert the("Deployment")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for name in ("cortex", "cortex-operator"):
        service = the("Service", name)["spec"]
        assert service["selector"].items() <= labels.items()
        assert service["ports"][0]["targetPort"] in ("gateway", "operator")


def test_only_gateway_and_operator_are_reachable_from_outside() -> None:
    [inside, outside] = the("NetworkPolicy")["spec"]["ingress"]
    assert inside == {"from": [{"podSelector": {}}]}
    assert outside == {"ports": [{"port": "gateway"}, {"port": "operator"}]}
