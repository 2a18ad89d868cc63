"""Build the `ModelSource` of an API from its configuration. Pure.

Separate from `spec`, which workers and supervisors import, because it imports the configuration schema.
"""

from __future__ import annotations

import os.path
from dataclasses import asdict
from pathlib import Path

from cortex.config.schema import LOCAL_SERVING, STORES, Api, ModelsConfig
from cortex.models.spec import DEFAULT_MODEL, Layout, ModelPath, ModelSource, Pin


def model_source(api: Api, project_dir: Path | None) -> ModelSource | None:
    """Return the model source of an API; None if it has no models.

    Relative paths are resolved against `project_dir`, the unpacked project, if there is one.
    """
    models, handler = api.handler.models, api.handler
    if models is None:
        return None
    default_key = models.signature_key or handler.signature_key
    return ModelSource(
        layout=_layout(api),
        paths=_paths(models, default_key, project_dir),
        dir=None if models.dir is None else _location(models.dir, project_dir),
        signature_key=default_key,
        poll_interval_s=models.poll_interval_s,
        is_live=api.kind == "RealtimeAPI" and not (api.compute.inf and handler.processes_per_replica > 1),
        cache_size=models.cache_size,
        disk_cache_size=models.disk_cache_size,
        cache_memory_bytes=models.cache_memory,
        pins=tuple(Pin(**asdict(each)) for each in models.pinned),
    )


def loads_models(api: Api) -> bool:
    """Return whether replicas of an API load its models; an external TensorFlow Serving server loads its own."""
    return api.handler.models is not None and api.handler.tensorflow_serving in (None, LOCAL_SERVING)


def trusts_pickle(api: Api) -> bool:
    """Return whether pickles among the models may be loaded: the user says so, or they are part of the project."""
    models = api.handler.models
    if models is None or models.trust is not None:
        return models is not None
    locations = [models.path, models.dir, *(entry.path for entry in models.paths or ())]
    return not any(location.startswith(("/", *STORES)) for location in locations if location is not None)


def _layout(api: Api) -> Layout:
    if api.handler.type == "tensorflow":
        return "neuron" if api.compute.inf else "tensorflow"
    return "onnx" if api.handler.type == "onnx" else "python"


def _paths(models: ModelsConfig, default_key: str | None, project_dir: Path | None) -> tuple[ModelPath, ...]:
    if models.path is not None:
        return (ModelPath(DEFAULT_MODEL, _location(models.path, project_dir), default_key),)
    return tuple(
        ModelPath(entry.name, _location(entry.path, project_dir), entry.signature_key or default_key)
        for entry in models.paths or ()
    )


def _location(written: str, project_dir: Path | None) -> str:
    """Normalize a location, so that APIs with the same prefix share its listings."""
    if written.startswith(STORES):
        scheme, _, rest = written.partition("://")
        return f"{scheme}://{rest.strip('/')}"
    return os.path.normpath(written if project_dir is None else project_dir / written)
