"""The build context on disk: the files of each layer, the locked versions of packages, and the build itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import uv
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from cortex.engine.environment import replica_constraints
from cortex.engine.installer import uv_settings
from cortex.errors import EnvironmentBuildError, ImageBuildError, InputError
from cortex.export.dockerfile import MARK, ImageOptions, compose_file, dockerfile, readme
from cortex.export.environment import CONSTRAINTS, ENVIRONMENT, FILES
from cortex.export.plan import ImageEnvironment, ImagePlan
from cortex.projects.archive import is_executable
from cortex.projects.project import ProjectFiles

_DISTRIBUTION = "cortex-serving"
#: Programs that build images, with their arguments. `HEALTHCHECK` is not part of the OCI format.
_BUILDERS = {
    "docker": ["build"],
    "podman": ["build", "--format", "docker"],
    "buildah": ["build", "--format", "docker", "--layers"],
}
_FOLDERS = ("cortex", "environments", "models", "large-files", "project")


class BuildContext:
    """The folder that `docker build` gets. Files that did not change since the last export are left alone."""

    def __init__(self, folder: Path, project: ProjectFiles, config_file: Path) -> None:
        self._folder = folder
        self._project = project
        self._config_file = config_file
        self._written: set[Path] = set()

    def check(self) -> None:
        """Check that the folder may be written. Raises: InputError."""
        folder = self._folder.resolve()
        own = folder / "Dockerfile"
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--out {self._folder}: is not a folder; choose another path")
        if folder.is_dir() and any(folder.iterdir()) and not _is_ours(own):
            raise InputError(
                f"--out {self._folder}: has files that `cortex export` has not written; choose a new folder"
            )
        if folder.is_relative_to(self._project.root):
            inside = folder.relative_to(self._project.root).parts
            if not any(part.startswith(".") for part in inside):
                raise InputError(
                    f"--out {self._folder}: is in the project, so that later deploys would upload it; "
                    "choose a folder elsewhere, or one whose name starts with a dot"
                )

    def write(self, plan: ImagePlan, options: ImageOptions, wheel: Path | None, locks: Sequence[str]) -> None:
        """Write the files of all layers; `locks` are the locked versions of each environment.

        Raises: InputError if a file can't be read or written.
        """
        try:
            self._write_installation(wheel)
            self._write_environments(plan.environments, locks)
            for number, model in enumerate(plan.models, 1):
                self._write_model(f"models/{number}", model.location, model.files)
            self._copy_project_files("large-files", plan.large_files)
            self._copy_project_files("project", plan.code)
            self._text("compose.yaml", compose_file(plan, options))
            self._text("README.md", readme(plan, options))
            self._text(".dockerignore", ".env\n")
            self._text("Dockerfile", dockerfile(plan, options))
            self._remove_others()
        except OSError as error:
            raise InputError(f"{error.filename or self._folder}: {(error.strerror or str(error)).lower()}") from None

    def lock(self, environment: ImageEnvironment, number: int, environ: Mapping[str, str]) -> str:
        """Return the versions that the installer chooses for the packages of an environment; "" if it chooses none.

        Versions of the last export are kept, if they still fit. Raises: EnvironmentBuildError.
        """
        sources = [environment.pip] if os.path.normpath(environment.pip) in environment.files else []
        if not sources and not environment.model_packages:
            return ""
        with tempfile.TemporaryDirectory() as temporary:
            output, extra, limits = (Path(temporary, name) for name in (CONSTRAINTS, "models.txt", "limits.txt"))
            with suppress(OSError):
                shutil.copyfile(self._folder / "environments" / str(number) / CONSTRAINTS, output)
            extra.write_text("".join(f"{line}\n" for line in environment.model_packages))
            limits.write_text("".join(f"{line}\n" for line in replica_constraints()))
            command = [uv.find_uv_bin(), "pip", "compile", "--quiet", "--color=never", "--no-header", "--no-annotate"]
            command += ["--python", sys.executable, "--constraint", str(limits), "--output-file", str(output)]
            done = subprocess.run(
                [*command, "--", *sources, str(extra)],
                cwd=self._project.root,
                env={**environ, **uv_settings(environ)},
                capture_output=True,
                text=True,
            )
            if done.returncode:
                what = environment.pip if sources else "packages of the models"
                raise EnvironmentBuildError(
                    f"{what}: versions can't be locked\n{done.stderr.strip()}\n"
                    "`--no-lock` exports without locked versions"
                )
            return locked_versions(output.read_text())

    def sizes(self) -> Iterator[tuple[str, int, int]]:
        """Yield each folder of the context, with its number of files and their size in bytes."""
        for name in _FOLDERS:
            numbered = sorted(
                (each for each in self._folder.joinpath(name).glob("*") if each.is_dir()),
                key=lambda each: (len(each.name), each.name),
            )
            for folder in numbered if name in ("environments", "models") else [self._folder / name]:
                files = [path for path in self._written if path.is_relative_to(folder)]
                if files:
                    shown = folder.relative_to(self._folder).as_posix()
                    yield shown, len(files), sum(path.stat().st_size for path in files)

    def _write_installation(self, wheel: Path | None) -> None:
        self._text("cortex/constraints.txt", "".join(f"{line}\n" for line in installed_versions()))
        if wheel is not None:
            self._copy(wheel, self._folder / "cortex/wheels" / wheel.name)

    def _write_environments(self, environments: Sequence[ImageEnvironment], locks: Sequence[str]) -> None:
        for number, (environment, lock) in enumerate(zip(environments, locks, strict=True), 1):
            described = {
                "pip": environment.pip,
                "conda": environment.conda,
                "shell": environment.shell,
                "model_packages": dict(environment.model_packages),
                "variables": dict(environment.variables),
            }
            self._text(f"environments/{number}/{ENVIRONMENT}", json.dumps(described, indent=2) + "\n")
            if lock:
                self._text(f"environments/{number}/{CONSTRAINTS}", lock)
            (self._folder / "environments" / str(number) / FILES).mkdir(exist_ok=True)
            self._copy_project_files(f"environments/{number}/{FILES}", environment.files)

    def _write_model(self, layer: str, location: str, files: Sequence[str]) -> None:
        if files:
            self._copy_project_files(layer, files)
            return
        model = Path(location)
        for path in sorted(model.rglob("*")) if model.is_dir() else [model]:
            if path.is_file():
                self._copy(path, self._folder / layer / path.relative_to("/"))

    def _copy_project_files(self, layer: str, files: Sequence[str]) -> None:
        for name in files:
            source = self._config_file if name == self._config_file.name else self._project.root / name
            self._copy(source, self._folder / layer / name)

    def _copy(self, source: Path, target: Path) -> None:
        self._make_parents(target)
        self._written.add(target)
        now = source.stat()
        with suppress(OSError):
            known = target.stat()
            if (known.st_size, known.st_mtime_ns) == (now.st_size, now.st_mtime_ns):
                return
        shutil.copyfile(source, target)
        target.chmod(0o755 if is_executable(now.st_mode) else 0o644)
        os.utime(target, ns=(now.st_atime_ns, now.st_mtime_ns))

    def _text(self, name: str, text: str) -> None:
        target = self._folder / name
        self._make_parents(target)
        self._written.add(target)
        if not target.is_file() or target.read_text() != text:
            target.write_text(text)
            target.chmod(0o644)

    def _make_parents(self, target: Path) -> None:
        missing = [each for each in target.parents if not each.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)  # the user of the image reads it, whatever the umask here

    def _remove_others(self) -> None:
        """Remove what an earlier export wrote and this one did not."""
        for name in _FOLDERS:
            for path in sorted((self._folder / name).rglob("*"), reverse=True):
                if path.is_dir() and not path.is_symlink():
                    with suppress(OSError):  # not empty
                        if path.name != FILES:
                            path.rmdir()
                elif path not in self._written:
                    path.unlink()


def check_wheel(wheel: Path) -> str:
    """Return the version in the name of a wheel of cortex. Raises: InputError."""
    try:
        name, version, *_ = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename:
        raise InputError(f"--wheel {wheel}: is not a wheel, such as cortex_serving-0.1.0-py3-none-any.whl") from None
    if name != _DISTRIBUTION or not wheel.is_file():
        raise InputError(f"--wheel {wheel}: {'does not exist' if name == _DISTRIBUTION else 'is another package'}")
    return str(version)


def installed_versions() -> list[str]:
    """Return the installed version of each package that cortex requires, directly or not, as constraints."""
    found: dict[str, str] = {}
    pending = [_DISTRIBUTION]
    while pending:
        for text in distribution(pending.pop()).requires or []:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            with suppress(PackageNotFoundError):
                found[name] = f"{name}=={distribution(name).version}"
                pending.append(name)
    return sorted(found.values())


def locked_versions(compiled: str) -> str:
    """Return the lines of a compiled requirements file that pin a version; paths and URLs can't be constraints."""
    pinned = []
    for line in compiled.splitlines():
        with suppress(InvalidRequirement):
            requirement = Requirement(line)
            if requirement.url is None and str(requirement.specifier).startswith("=="):
                pinned.append(f"{line}\n")
    return "".join(pinned)


def build_image(folder: Path, tag: str, environ: Mapping[str, str]) -> str:
    """Build the image of a context with the first usable builder, and return that builder's name.

    The builder's output goes to standard error. Raises: InputError if there is none; ImageBuildError.
    """
    builder = next((name for name in _BUILDERS if _is_usable(name, environ)), None)
    if builder is None:
        names = ", ".join(_BUILDERS)
        raise InputError(f"--build requires one of {names}, with its daemon running; or build {folder} elsewhere")
    command = [builder, *_BUILDERS[builder], "--tag", tag, str(folder)]
    done = subprocess.run(command, env=dict(environ), stdout=sys.stderr.fileno())
    if done.returncode:
        raise ImageBuildError(f"the image was not built: {builder} ended with exit code {done.returncode}")
    return builder


def _is_usable(builder: str, environ: Mapping[str, str]) -> bool:
    """Return whether a builder is installed; of docker also whether its daemon answers."""
    program = shutil.which(builder, path=environ.get("PATH", os.defpath))
    if program is None or builder != "docker":
        return program is not None
    return subprocess.run([program, "version"], env=dict(environ), capture_output=True).returncode == 0


def _is_ours(file: Path) -> bool:
    try:
        with file.open() as content:
            return content.readline().startswith(MARK)
    except (OSError, UnicodeDecodeError):
        return False
