"""The packages that models need, beside those of the user's requirements.txt.

A deploy chooses them (`choose_packages`), and they become part of the revision: as a map from a line of requirements
to the specifier of the versions that do as well, such as `scikit-learn==1.9.1` → `==1.9.*`. Each machine then installs
those that it lacks (`packages_to_install`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from cortex.models.formats.detection import Detection
from cortex.models.formats.requirements import ModelRequirement, alternatives, is_installed, with_minimum_versions
from cortex.projects.requirements import NamedRequirement, named_requirements

#: What MLflow folders that nobody trusts may have installed: installing a package can run its code.
_WELL_KNOWN = re.compile(
    "cloudpickle|joblib|lightgbm|mlflow(-skinny)?|numpy|onnx|onnxruntime|pandas|psutil|pyarrow|scikit-learn|scipy|skops|"
    "threadpoolctl|xgboost(-cpu)?"
)


@dataclass(frozen=True)
class PackageConflict:
    """Requirements that no environment meets."""

    message: str
    fix: str
    written: NamedRequirement | None = None  #: the user's line; None: two models contradict each other


def choose_packages(
    detections: Iterable[Detection], requirements_txt: str, is_trusted: bool
) -> tuple[dict[str, str], list[PackageConflict]]:
    """Return the packages for the models of one API, and the conflicts among them and with the user's lines.

    A package that the user's `requirements_txt` pins to a version that loads the models is left out.
    `is_trusted` is whether the files of the models may run code.
    """
    named = named_requirements(requirements_txt)
    packages: dict[str, str] = {}
    conflicts: list[PackageConflict] = []
    for found in _by_package(detections, is_trusted).values():
        newest = max(found, key=lambda need: _pinned(Requirement(need.requirement.line)) or Version("0"))
        if conflict := _conflict_of_models(newest, found):
            conflicts.append(conflict)
            continue
        chosen = newest.requirement
        user = next((named[name] for name in alternatives(chosen.package) if name in named), None)
        if user is None:
            packages[chosen.line] = chosen.accepts
        elif conflict := _conflict_with_user(newest, user):
            conflicts.append(conflict)
        elif _pinned(user.requirement) is None and canonicalize_name(user.requirement.name) == chosen.package:
            packages[_compatible_line(chosen, user.requirement)] = chosen.accepts
    return packages, conflicts


def packages_to_install(packages: Mapping[str, str], requirements_txt: str) -> tuple[str, ...]:
    """Return the lines of the packages that are not installed here, or that the user's lines would install as well.

    Both lines must then apply, or the newest version would be installed.
    """
    named = named_requirements(requirements_txt) if packages else {}
    lines = []
    for line, accepts in packages.items():
        package = Requirement(line).name
        is_named = any(name in named for name in alternatives(package))
        if is_named or not is_installed(ModelRequirement(package, line, accepts)):
            lines.append(line)
    return tuple(lines)


@dataclass(frozen=True)
class _Need:
    """A requirement, and the model that has it."""

    requirement: ModelRequirement
    model: str

    @property
    def sentence(self) -> str:
        return f"{self.model} needs {self.requirement.line}" + (
            f" ({self.requirement.reason})" if self.requirement.reason else ""
        )


def _by_package(detections: Iterable[Detection], is_trusted: bool) -> dict[str, list[_Need]]:
    found: dict[str, list[_Need]] = {}
    for detection in detections:
        for requirement in detection.requirements if is_trusted else with_minimum_versions(detection.requirements):
            if detection.format != "mlflow" or is_trusted or _WELL_KNOWN.fullmatch(requirement.package):
                found.setdefault(requirement.package, []).append(_Need(requirement, detection.name))
    return found


def _conflict_of_models(newest: _Need, needs: Iterable[_Need]) -> PackageConflict | None:
    version = _pinned(Requirement(newest.requirement.line))
    for need in needs:
        if version is not None and not _accepts(need.requirement.accepts, version):
            fix = f"save both with one version of {newest.requirement.package}, or deploy them as two APIs"
            return PackageConflict(f"{newest.sentence}, and {need.sentence}", fix)
    return None


def _conflict_with_user(need: _Need, user: NamedRequirement) -> PackageConflict | None:
    version = _pinned(user.requirement)
    if version is None or _accepts(need.requirement.accepts, version):
        return None
    message = f"{user.requirement} can't load {need.model}: {need.requirement.reason}"
    return PackageConflict(message, f"write {need.requirement.line}", user)


def _compatible_line(chosen: ModelRequirement, user: Requirement) -> str:
    """Return the line of the model, or one with all versions that load it if the user's line excludes the first."""
    version = _pinned(Requirement(chosen.line))
    if version is None or user.specifier.contains(version, prereleases=True):
        return chosen.line
    return chosen.package + chosen.accepts


def _accepts(specifier: str, version: Version) -> bool:
    return SpecifierSet(specifier).contains(version, prereleases=True)


def _pinned(requirement: Requirement) -> Version | None:
    """Return the only version that a requirement allows; None if there are several."""
    try:
        return next((Version(each.version) for each in requirement.specifier if each.operator in ("==", "===")), None)
    except InvalidVersion:  # 1.9.*
        return None
