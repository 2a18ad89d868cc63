"""The plan of an image: what it contains, in layers from the one that rarely changes to the one that often does. Pure.

```text
base image ▸ user ▸ cortex ▸ packages of the project ▸ each model ▸ large files ▸ code and configuration
```

A change of a layer rebuilds it and those after it; registries and machines keep the layers before.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cortex.config.schema import NO_CODE, STORES, Api
from cortex.lifecycle import ApiKind
from cortex.projects.dotenv import DOTENV_NAME
from cortex.projects.project import ProjectFiles

#: A file of the project of this size is not in the layer of the code, which each change of the code replaces.
LARGE_FILE_BYTES = 1024 * 1024
#: A label of Kubernetes has 63 characters; the longest suffix is `-home`.
_MAX_NAME_LENGTH = 50
_MIB = 1024**2
#: What operator, gateway and model agent need besides the replicas.
_OVERHEAD_CPU, _OVERHEAD_MIB = 0.5, 512
#: Memory to reserve for a process without `compute.mem`.
_DEFAULT_PROCESS_MIB = 256


@dataclass(frozen=True)
class ImageEnvironment:
    """Dependencies that one or several APIs of the project have, and the project files that they consist of."""

    pip: str
    conda: str
    shell: str
    model_packages: Mapping[str, str]
    variables: Mapping[str, str]  #: of the script `shell`; empty without one
    files: tuple[str, ...]


@dataclass(frozen=True)
class ModelLayer:
    """A model of the exporting machine: its location, absolute or in the project."""

    location: str
    is_absolute: bool
    files: tuple[str, ...] = ()  #: of the project; empty if `is_absolute`


@dataclass(frozen=True)
class PodResources:
    """The resources that the fewest replicas need, with everything that runs besides."""

    cpu: float
    memory_mib: int
    gpus: int
    memory_limit_mib: int | None = None  #: for the most replicas; None: it is not known


@dataclass(frozen=True)
class ImagePlan:
    """An image of one project."""

    name: str  #: of the service of Compose and of the objects of Kubernetes; letters, digits and dashes
    config_name: str
    environments: tuple[ImageEnvironment, ...]
    models: tuple[ModelLayer, ...]
    large_files: tuple[str, ...]
    code: tuple[str, ...]  #: with the configuration file
    resources: PodResources
    has_dotenv: bool
    keeps_state: bool  #: jobs, keys or statistics are lost with the volume of the home


def plan_image(
    apis: Sequence[Api],
    project: ProjectFiles,
    config_name: str,
    size_of: Callable[[str], int],
    files_of: Callable[[Api], Iterable[str]],
) -> ImagePlan:
    """Plan the image of a project without mistakes.

    `size_of` returns the size of a file in bytes, `files_of` the project files that the environment of an API depends
    on.
    """
    files = [name for name in project.files if name != DOTENV_NAME]
    models = _model_layers(apis, files)
    in_models = {name for model in models for name in model.files}
    rest = [name for name in files if name not in in_models]
    large = tuple(name for name in rest if size_of(name) >= LARGE_FILE_BYTES)
    return ImagePlan(
        name=image_name(project.root.name),
        config_name=config_name,
        environments=_environments(apis, project, files_of),
        models=models,
        large_files=large,
        code=tuple(sorted({*rest, config_name} - set(large))),
        resources=_resources(apis),
        has_dotenv=project.contains(DOTENV_NAME),
        keeps_state=any(map(_keeps_state, apis)),
    )


def image_name(folder_name: str) -> str:
    """Return a name for the image of a project in a folder of this name."""
    words = re.sub(r"[^a-z0-9]+", "-", folder_name.lower()).strip("-")
    if words and not words[0].isalpha():
        words = f"apis-{words}"
    return words[:_MAX_NAME_LENGTH].strip("-") or "apis"


def _environments(
    apis: Sequence[Api], project: ProjectFiles, files_of: Callable[[Api], Iterable[str]]
) -> tuple[ImageEnvironment, ...]:
    found: list[ImageEnvironment] = []
    for api in apis:
        needs = api.handler.dependencies
        files = tuple(files_of(api)) if api.handler is not NO_CODE else ()
        if not files and not needs.model_packages:
            continue
        variables = dict(api.handler.env) if os.path.normpath(needs.shell) in files else {}
        environment = ImageEnvironment(needs.pip, needs.conda, needs.shell, needs.model_packages, variables, files)
        found += [environment] if environment not in found else []
    return tuple(found)


def _model_layers(apis: Sequence[Api], files: Sequence[str]) -> tuple[ModelLayer, ...]:
    layers: list[ModelLayer] = []
    taken: set[str] = set()
    for location in dict.fromkeys(location for api in apis for location in _local_models(api)):
        path = os.path.normpath(location)
        if path.startswith("/"):
            layers.append(ModelLayer(path, True))
            continue
        inside = tuple(name for name in files if name == path or name.startswith(f"{path}/") if name not in taken)
        taken.update(inside)
        layers += [ModelLayer(path, False, inside)] if inside else []
    return tuple(layers)


def _local_models(api: Api) -> list[str]:
    models = api.handler.models
    entries = [models.path, models.dir, *(entry.path for entry in models.paths or ())] if models else []
    return [location for location in (*entries, api.handler.model) if location and not location.startswith(STORES)]


def _resources(apis: Sequence[Api]) -> PodResources:
    """Add up the smallest number of replicas of each API, and one worker of each API that runs jobs."""
    cpu, memory_mib, gpus = _OVERHEAD_CPU, float(_OVERHEAD_MIB), 0
    for api in apis:
        if api.kind is ApiKind.SPLITTER:
            continue
        count = max(1, api.autoscaling.min_replicas) if api.kind.has_replicas else 1
        compute = api.compute
        memory = compute.mem or _DEFAULT_PROCESS_MIB * _MIB * api.handler.processes_per_replica
        cpu += count * (compute.cpu or 0)
        memory_mib += count * memory / _MIB
        gpus += count * compute.gpu
    return PodResources(round(cpu, 3), round(memory_mib), gpus, _memory_limit_mib(apis))


def _memory_limit_mib(apis: Sequence[Api]) -> int | None:
    """Return the memory that the largest number of replicas may use; None if an API does not say it."""
    limit_mib = _OVERHEAD_MIB
    for api in apis:
        if api.kind is ApiKind.SPLITTER:
            continue
        memory = max(api.compute.mem or 0, api.compute.mem_limit or 0)
        is_bounded = api.kind.has_replicas and "max_replicas" in api.autoscaling.model_fields_set
        if not memory or not is_bounded:  # a submission chooses the number of job workers
            return None
        limit_mib += api.autoscaling.max_replicas * -(-memory // _MIB)
    return limit_mib


def _keeps_state(api: Api) -> bool:
    has_jobs = api.kind.runs_jobs or api.kind is ApiKind.ASYNC
    return has_jobs or api.networking.auth != "none" or api.tracker is not None
