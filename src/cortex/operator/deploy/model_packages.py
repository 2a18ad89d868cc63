"""Choose the packages that a deploy adds to an API, because its models need them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.util import find_spec

from cortex.config.schema import Api
from cortex.models.formats.detection import Detection
from cortex.models.formats.packages import PackageConflict, choose_packages
from cortex.models.source import trusts_pickle
from cortex.predictor.clients.builder import SERVER
from cortex.projects.project import ProjectFiles


def packages_of(
    api: Api, detections: Sequence[Detection], project: ProjectFiles
) -> tuple[dict[str, str], list[PackageConflict]]:
    """Return the packages for the models of an API, see `choose_packages`, and the conflicts among them.

    A project with a script or conda packages installs what its models need itself.
    """
    files = api.handler.dependencies
    if project.text(files.shell).strip() or project.text(files.conda).strip():
        return {}, []
    found = [each for each in detections if each.format != "tensorflow" or _runs_tensorflow(api)]
    return choose_packages(found, project.text(files.pip), trusts_pickle(api))


def _runs_tensorflow(api: Api) -> bool:
    """Return whether the processes of an API run SavedModels, instead of TensorFlow Serving or Inferentia's runtime."""
    has_server = shutil.which(SERVER) is not None and find_spec("tensorflow") is None
    return api.handler.tensorflow_serving is None and not api.compute.inf and not has_server
