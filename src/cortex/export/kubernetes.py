"""The manifest of an image for Kubernetes: a Deployment, a Service, and a volume if the APIs keep state. Pure."""

from __future__ import annotations

from typing import Any

import yaml

from cortex.export.dockerfile import GATEWAY_PORT, HOME, OPERATOR_PORT, STOP_S, USER_ID
from cortex.export.plan import ImagePlan

#: Time in which services stop sending new connections to a pod that ends.
_DEREGISTRATION_S = 5
_SCALING = """\
# Written by `cortex export --kubernetes`. Scaling: this pod is one machine. cortex starts and stops replicas in it,
# between min_replicas and max_replicas of each API. Set the requests and limits of the pod to what these replicas may
# use. Add no HorizontalPodAutoscaler: two autoscalers of one load work against each other."""
_STATELESS = """
# Each further pod (spec.replicas) serves on its own; the service distributes connections to them."""
_STATEFUL = """
# These APIs keep jobs, keys or statistics in the volume, which one pod at a time may use: leave spec.replicas at 1. An
# update stops the pod before it starts the next one."""
_FURTHER = """
# For replicas on several machines, run the image on a Ray cluster: docs/howto/kuberay.md of cortex.
"""


def manifest(plan: ImagePlan, tag: str) -> str:
    """Return the manifest as YAML."""
    documents: list[dict[str, Any]] = [_deployment(plan, tag), _service(plan)]
    if plan.keeps_state:
        documents.insert(0, _claim(plan))
    notes = _SCALING + (_STATEFUL if plan.keeps_state else _STATELESS) + _FURTHER
    if plan.has_dotenv:
        secret = f"{plan.name}-env"
        command = f"kubectl create secret generic {secret} --from-env-file=.env"
        notes += f"# Variables of .env, in lines of NAME=value without quotes: {command}\n"
    return notes + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes labels that occur several times in full, not as anchors and aliases, which nobody expects there."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _deployment(plan: ImagePlan, tag: str) -> dict[str, Any]:
    # Two pods can't use one volume at once. Without one, the old pod serves until the new one is ready.
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(plan),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"} if plan.keeps_state else rolling,
            "selector": {"matchLabels": _labels(plan)},
            "template": {"metadata": {"labels": _labels(plan)}, "spec": _pod(plan, tag)},
        },
    }


def _pod(plan: ImagePlan, tag: str) -> dict[str, Any]:
    home = {"persistentVolumeClaim": {"claimName": f"{plan.name}-home"}} if plan.keeps_state else {"emptyDir": {}}
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": STOP_S + _DEREGISTRATION_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(plan, tag)],
        "volumes": [
            {"name": "home", **home},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        ],
    }


def _container(plan: ImagePlan, tag: str) -> dict[str, Any]:
    needs = plan.resources
    gpus = {"nvidia.com/gpu": str(needs.gpus)} if needs.gpus else {}
    limits = {**({"memory": f"{needs.memory_limit_mib}Mi"} if needs.memory_limit_mib else {}), **gpus}
    requests = {"cpu": f"{round(needs.cpu * 1000)}m", "memory": f"{needs.memory_mib}Mi"}
    environment = (
        {"envFrom": [{"secretRef": {"name": f"{plan.name}-env", "optional": True}}]} if plan.has_dotenv else {}
    )
    live = {"httpGet": {"path": "/livez", "port": "http"}, "periodSeconds": 5}
    return {
        "name": plan.name,
        "image": tag,
        **environment,
        "ports": [
            {"name": "http", "containerPort": GATEWAY_PORT},
            # Metrics, the dashboard and commands, with a token. It is no port of the service, which others may reach.
            {"name": "operator", "containerPort": OPERATOR_PORT},
        ],
        # The APIs themselves, not only the gateway.
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "http"}, "periodSeconds": 5, "timeoutSeconds": 5},
        "startupProbe": {**live, "failureThreshold": 60},
        "livenessProbe": {**live, "periodSeconds": 10, "failureThreshold": 6},
        # Before SIGTERM, so that services send no new connections to a gateway that accepts none.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_DEREGISTRATION_S)]}}},
        "resources": {"requests": {**requests, **gpus}, **({"limits": limits} if limits else {})},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "home", "mountPath": HOME},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }


def _service(plan: ImagePlan) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(plan),
        "spec": {
            "selector": _labels(plan),
            "ports": [{"name": "http", "port": GATEWAY_PORT, "targetPort": "http"}],
        },
    }


def _claim(plan: ImagePlan) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{plan.name}-home", "labels": _labels(plan)},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}},
    }


def _metadata(plan: ImagePlan) -> dict[str, Any]:
    return {"name": plan.name, "labels": _labels(plan)}


def _labels(plan: ImagePlan) -> dict[str, str]:
    return {"app.kubernetes.io/name": plan.name}
