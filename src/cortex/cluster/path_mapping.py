"""Turns a spec whose paths are those of the operator's home into one for a node's home. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from cortex.home import Home
from cortex.models.spec import ModelSource
from cortex.replica.spec import ReplicaSpec


def homes(source: Home, target: Home) -> dict[str, str]:
    """Return the folders of one home by those of the other, for `rebase`; the inverse is `homes(target, source)`."""
    names = ("projects_dir", "environments_dir", "models_dir", "logs_dir", "replicas_dir", "sockets_dir", "metrics_dir")
    return {str(getattr(source, name)): str(getattr(target, name)) for name in names}


def rebase(spec: ReplicaSpec, folders: Mapping[str, str]) -> ReplicaSpec:
    """Return the spec with each path below one of `folders` below that folder's counterpart; others stay."""

    def moved(path: str) -> str:
        return _moved(path, folders)

    return replace(
        spec,
        project_dir=moved(spec.project_dir),
        python=moved(spec.python),
        run_dir=moved(spec.run_dir),
        sockets=tuple(map(moved, spec.sockets)),
        control_socket=moved(spec.control_socket),
        log_path=moved(spec.log_path),
        model_path=spec.model_path and moved(spec.model_path),
        models=_models(spec.models, folders) if spec.models else None,
        model_agent_socket=spec.model_agent_socket and moved(spec.model_agent_socket),
        jobs_socket=spec.jobs_socket and moved(spec.jobs_socket),
        metrics_dir=moved(spec.metrics_dir),
    )


def _models(models: ModelSource, folders: Mapping[str, str]) -> ModelSource:
    paths = tuple(replace(path, url=_moved(path.url, folders)) for path in models.paths)
    changed: dict[str, Any] = {"paths": paths, "dir": models.dir and _moved(models.dir, folders)}
    return replace(models, **changed)


def _moved(path: str, folders: Mapping[str, str]) -> str:
    for source, target in folders.items():
        if path == source or path.startswith(f"{source}/"):
            return str(PurePosixPath(target) / path[len(source) :].lstrip("/"))
    return path
