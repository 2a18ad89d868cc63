"""The packages that a model needs, as its files state them, and whether the installed ones can load it."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from cortex.errors import ModelFormatError

#: Packages that provide the same module; the first one is written into requirement lines.
_ALTERNATIVES = {
    "xgboost": ("xgboost", "xgboost-cpu"),
    "tensorflow-cpu": ("tensorflow-cpu", "tensorflow"),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml"),
    "mlflow": ("mlflow", "mlflow-skinny"),
}
_RELEASE = re.compile(r"\d{1,9}(\.\d{1,9}){0,3}")


@dataclass(frozen=True, slots=True)
class ModelRequirement:
    """A package that a model needs."""

    package: str
    line: str  #: for requirements.txt: pinned if the model states a version
    accepts: str = ""  #: specifier of the installed versions that load the model, such as `==1.9.*`
    reason: str = ""  #: why: "it was saved by scikit-learn 1.9.1"


#: Older versions construct types of a file that nobody has trusted (CVE-2025-54412, CVE-2025-54413).
SKOPS = ModelRequirement("skops", "skops>=0.13", ">=0.13", "only skops 0.13 and newer refuses unsafe files reliably")


#: Packages with known holes that a file can reach → the first version without them. Older ones load only models that
#: somebody trusts. ONNX Runtime and onnx read data from outside of the folder (onnx: CVE-2024-27318), LightGBM's parser
#: overflows (CVE-2024-43598), and operations of TensorFlow write beyond their tensors (CVE-2023-25668 and others).
_MINIMUM_VERSIONS = {"onnxruntime": "1.24", "onnx": "1.16", "lightgbm": "4.6", "tensorflow-cpu": "2.12"}


def with_minimum_versions(requirements: Iterable[ModelRequirement]) -> tuple[ModelRequirement, ...]:
    """Return requirements that exclude versions with known holes, for models that nobody trusts."""
    return tuple(map(_with_minimum_version, requirements))


def _with_minimum_version(requirement: ModelRequirement) -> ModelRequirement:
    minimum = next(
        (_MINIMUM_VERSIONS[name] for name in _MINIMUM_VERSIONS if requirement.package in alternatives(name)), ""
    )
    if not minimum:
        return requirement
    from packaging.requirements import Requirement  # noqa: PLC0415 - not needed by workers without models

    accepts = _newer_than(minimum, requirement.accepts)
    if accepts == requirement.accepts:
        return requirement
    reason = f"only {requirement.package} {minimum} and newer is safe with models that nobody trusts"
    line = requirement.package + _newer_than(minimum, str(Requirement(requirement.line).specifier))
    return ModelRequirement(requirement.package, line, accepts, reason)


def _newer_than(minimum: str, specifier: str) -> str:
    """Return a specifier without versions below a minimum; clauses about such versions only are left out."""
    from packaging.specifiers import SpecifierSet  # noqa: PLC0415 - as above
    from packaging.version import Version  # noqa: PLC0415 - as above

    newer = [each for each in SpecifierSet(specifier) if Version(each.version.removesuffix(".*")) >= Version(minimum)]
    if any(each.operator in ("==", "===", ">=", ">", "~=") for each in newer):
        return specifier
    return ",".join([f">={minimum}", *sorted(str(each) for each in newer if each.version != minimum)])


def saved_by(package: str, version: str, title: str = "") -> ModelRequirement:
    """Return the requirement of a format that only the same minor version reads reliably, such as pickles."""
    if not _RELEASE.fullmatch(version):
        return ModelRequirement(package, package)
    major, minor = (*version.split("."), "0")[:2]
    reason = f"it was saved by {title or package} {version}"
    return ModelRequirement(package, f"{package}=={version}", f"=={major}.{minor}.*", reason)


def saved_by_older(package: str, version: str, title: str = "") -> ModelRequirement:
    """Return the requirement of a format that the same and all later minor versions read, such as XGBoost's JSON."""
    same = saved_by(package, version, title)
    return replace(same, accepts=same.accepts.removesuffix(".*").replace("==", ">="))


def tensorflow_requirement(version: str) -> ModelRequirement:
    """Return the requirement of a SavedModel; TensorFlow reads those of its own and older major versions."""
    found = saved_by_older("tensorflow-cpu", version, "TensorFlow")
    return ModelRequirement(
        found.package, found.line, f">={version.split('.')[0]}" if found.accepts else "", found.reason
    )


def required_by_file(text: str) -> tuple[ModelRequirement, ...]:
    """Return the requirements of an MLflow model's requirements.txt; options and URLs are ignored."""
    from packaging.requirements import InvalidRequirement, Requirement  # noqa: PLC0415 - only for MLflow
    from packaging.utils import canonicalize_name  # noqa: PLC0415

    found = []
    for raw in text.splitlines():
        line = raw.partition("#")[0].strip()
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.url or (requirement.marker and not requirement.marker.evaluate()):
            continue
        pins = [each.version for each in requirement.specifier if each.operator == "=="]
        if len(pins) == 1 and _RELEASE.fullmatch(pins[0]):
            accepts = saved_by(requirement.name, pins[0]).accepts
        else:
            accepts = str(requirement.specifier)
        found.append(
            ModelRequirement(canonicalize_name(requirement.name), line, accepts, f"its requirements.txt has {line}")
        )
    return tuple(found)


def check_installed(
    requirements: Iterable[ModelRequirement], label: str, version_of: Callable[[str], str | None] | None = None
) -> None:
    """Check that the installed packages can load a model, which messages call `label`.

    `version_of` returns the version of an installed package, None if it is not installed.
    Raises: ModelFormatError with the lines to write into requirements.txt.
    """
    problems = []
    lines = []
    for requirement in requirements:
        if problem := _problem(requirement, version_of or installed_version):
            problems.append(problem)
            lines.append(requirement.line)
    if problems:
        raise ModelFormatError(
            f"{label} can't be loaded here: {'; '.join(problems)}; write into requirements.txt: {', '.join(lines)}"
        )


def alternatives(package: str) -> tuple[str, ...]:
    """Return the packages that provide the same module as a package, itself included."""
    return _ALTERNATIVES.get(package, (package,))


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or of one that provides the same module; None without any."""
    for name in alternatives(package):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_installed(requirement: ModelRequirement) -> bool:
    """Return whether an installed package meets a requirement."""
    return _problem(requirement, installed_version) is None


def _problem(requirement: ModelRequirement, version_of: Callable[[str], str | None]) -> str | None:
    from packaging.specifiers import SpecifierSet  # noqa: PLC0415 - not needed by workers without models

    installed = version_of(requirement.package)
    if installed is None:
        return f"{requirement.package} is not installed"
    if requirement.accepts and not SpecifierSet(requirement.accepts).contains(installed, prereleases=True):
        return f"{requirement.reason}, but {requirement.package} {installed} is installed"
    return None
