"""Environments of projects: virtual environments layered on the installation, cached by what they are built from.

The installation itself may contain environments, such as those of an image (`export/environment.py`). Others are built
in the home. A project without dependencies runs on the interpreter of the installation.
`prepare_revision` collects what a replica is started from: its interpreter, its variables, and its model.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import distribution, requires
from pathlib import Path
from typing import Protocol

import uv
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cortex.engine.installer import Installer, InstallerFailedError, uv_settings
from cortex.engine.local import replica_environ
from cortex.engine.log_writer import STDOUT, LogWriter
from cortex.errors import EnvironmentBuildError, StorageError
from cortex.home import Home
from cortex.models.formats.packages import packages_to_install
from cortex.processes.filelock import locked
from cortex.projects.dotenv import read_dotenv
from cortex.state.revision import Revision
from cortex.worker.spec import ENVIRONMENT_COMPILED, ENVIRONMENT_COMPLETE, Setup, StartFailure

#: What replica processes import besides the standard library; a project's own versions must satisfy these.
REPLICA_REQUIREMENTS = (
    "a2wsgi", "httptools", "obstore", "orjson", "packaging", "psutil", "pydantic", "python-multipart", "pyyaml",
    "starlette", "uvloop", "wsproto",
)  # fmt: skip

_DISTRIBUTION = "cortex-serving"
#: File in a project's environment that names the folders of the installation, whose packages come after its own.
LAYER_FILE = "cortex_installation.pth"
#: Incremented when environments are built differently, so that older ones are not reused.
_FORMAT = 1
_CONDA_TOOLS = ("micromamba", "mamba", "conda")
_CHECK = "import cortex.worker.spec, httptools, orjson, starlette.requests, uvloop, pydantic"
_WORD = re.compile(r"[\w./+-]+")
#: Its environments belong to the installation, and are never written after they were built.
INSTALLED = Home(Path(sys.prefix))
#: Variables of the machine that would make installers install elsewhere.
_LEFT_OUT = frozenset({"PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"})


class DependencyFiles(Protocol):
    """Paths of dependency files, relative to the project, any of which may be missing; and packages of models."""

    @property
    def pip(self) -> str: ...
    @property
    def conda(self) -> str: ...
    @property
    def shell(self) -> str: ...
    @property
    def model_packages(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Prepared:
    """Everything that a replica of a revision is started with."""

    python: str
    env: Mapping[str, str]
    model_path: str | None = None


def preparation_failure(message: str, error: Exception) -> StartFailure:
    """Return the failure of a replica that can't be prepared because of `error`, which `message` describes."""
    is_build = isinstance(error, EnvironmentBuildError)
    return StartFailure(message, summary="its environment can't be installed" if is_build else "")


@dataclass(frozen=True)
class PreparedEnvironment:
    """An interpreter with the dependencies of a project and of replicas."""

    python: str
    bin_dir: str
    key: str  #: name of its folder; empty for the installation itself

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables that put the programs of this environment first on PATH."""
        found = {"PATH": os.pathsep.join([self.bin_dir, environ.get("PATH", os.defpath)])}
        if self.key:
            found["VIRTUAL_ENV"] = str(Path(self.bin_dir).parent)
        return found


async def prepare_revision(home: Home, environ: Mapping[str, str], revision: Revision) -> Prepared:
    """Build the environment of a revision and fetch its model. The output of installers goes to the API's logs.

    Raises: EnvironmentBuildError, StorageError, ConfigError.
    """
    log = LogWriter(install_log(home, revision.spec.name, revision.hash))
    try:
        return await prepare_setup(home, environ, setup_of(revision), lambda line: log.line(0, STDOUT, line))
    finally:
        log.close()


async def prepare_setup(
    home: Home, environ: Mapping[str, str], setup: Setup, on_line: Callable[[str], None]
) -> Prepared:
    """Build the environment of an unpacked project and fetch its model; `on_line` receives the output of installers.

    Raises: EnvironmentBuildError, StorageError, ConfigError; InputError if other users could change the environment.
    """
    home.check()
    inherited = replica_environ(environ)
    project = home.projects_dir / setup.project_hash
    # `.env` is read last and wins, as it did where a shell sourced it after the container's own variables.
    dotenv = await asyncio.to_thread(read_dotenv, project, {**inherited, **setup.env})
    variables = {**setup.env, **dotenv}
    environment = await prepare_environment(home, project, setup, inherited, variables, on_line)
    model_path = str(await _model(home, project, setup.model, inherited)) if setup.model else None
    return Prepared(environment.python, {**environment.variables(inherited), **variables}, model_path)


def setup_of(revision: Revision) -> Setup:
    """Return what every machine must prepare before it can run replicas of a revision."""
    handler = revision.spec.handler
    files = handler.dependencies
    paths = files.pip, files.conda, files.shell
    return Setup(revision.project_hash, *paths, handler.env, handler.model, files.model_packages)


def install_log(home: Home, api: str, revision: str) -> Path:
    """Return the file for the output of installers, among the logs of the API."""
    return home.logs_dir / api / f"{api}-{revision[:8]}-install.log"


async def _model(home: Home, project: Path, model: str, environ: Mapping[str, str]) -> Path:
    from cortex.storage.client import fetch, is_remote  # noqa: PLC0415 - obstore takes 6 MB, which few operators need

    if is_remote(model):
        return await fetch(model, home.models_dir, environ)
    path = project / Path(model).expanduser()
    if not path.exists():
        raise StorageError(f"model {model}: no such file or folder")
    return path


async def prepare_environment(
    home: Home,
    project_dir: Path,
    dependencies: DependencyFiles,
    environ: Mapping[str, str],
    variables: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] = lambda line: None,
    installed: Home = INSTALLED,
    pins: Sequence[str] = (),
) -> PreparedEnvironment:
    """Return the environment of a project; build it unless a project with the same dependencies was built before.

    `environ` is the environment of the machine, `variables` are those of the project. `on_line` receives the output
    of installers line by line. `pins` are constraints for them, such as `numpy==2.4.6`. One environment is never built
    twice at once, not even by two operators. A failed or cancelled build leaves only its log. Packages are compiled
    by the first replica once it is ready, except in `installed`, whose environments replicas cannot write.
    Raises: EnvironmentBuildError.
    """
    files = _Files.of(project_dir, dependencies)
    if not files.names and not files.packages:
        return PreparedEnvironment(sys.executable, str(Path(sys.executable).parent), "")
    variables = variables or {}
    contents = await asyncio.to_thread(_contents, project_dir, files)
    key = _key(contents, files, variables)
    folder = next(
        (each for known in (installed, home) if _is_complete(each := known.environments_dir / key)),
        home.environments_dir / key,
    )
    environment = PreparedEnvironment(str(folder / "env/bin/python"), str(folder / "env/bin"), key)
    if _is_complete(folder):
        return environment
    async with locked(home.environments_dir / f"{key}.lock") as lock:
        if not _is_complete(folder):
            names_project_files = len(contents) > len(files.names)
            compiles = home.path == installed.path
            build = _Build(
                folder, project_dir, files, environment, dependencies.pip, names_project_files, pins, compiles
            )
            await build.run({**environ}, {**variables}, lock, on_line)
    return environment


def dependency_files(project_dir: Path, dependencies: DependencyFiles) -> list[str]:
    """Return the project files that an environment depends on, those that the dependency files name included."""
    return sorted(_contents(project_dir, _Files.of(project_dir, dependencies)))


@dataclass(frozen=True)
class _Files:
    """The dependency files that a project has, relative to the project; None for those it lacks."""

    pip: str | None
    conda: str | None
    shell: str | None
    packages: tuple[str, ...] = ()  #: lines of requirements that follow from the models

    @classmethod
    def of(cls, project_dir: Path, files: DependencyFiles) -> _Files:
        paths = (files.pip, files.conda, files.shell)
        pip, conda, shell = (path if _has_content(project_dir / path) else None for path in paths)
        text = (project_dir / pip).read_text(errors="replace") if pip else ""
        return cls(pip, conda, shell, packages_to_install(files.model_packages, text))

    @property
    def names(self) -> list[str]:
        return [name for name in (self.shell, self.conda, self.pip) if name]


def _has_content(file: Path) -> bool:
    try:
        lines = file.read_text(errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    return any(line.strip() and not line.lstrip().startswith("#") for line in lines)


def _contents(project_dir: Path, files: _Files) -> dict[str, str]:
    """Return the hash of each project file that an environment depends on."""
    contents: dict[str, str] = {}
    for name in files.names:
        _add_content(project_dir, Path(name), contents)
    return contents


def _key(contents: Mapping[str, str], files: _Files, variables: Mapping[str, str]) -> str:
    """Hash everything that an environment depends on. Only scripts can use variables."""
    identity = [
        _FORMAT,
        [files.shell, files.conda, files.pip],
        sorted(contents.items()),
        sorted(variables.items()) if files.shell else [],
        sys.version,
        _installation_paths(),
        distribution(_DISTRIBUTION).version,
        replica_constraints(),
        *([files.packages] if files.packages else []),
    ]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]


def _add_content(project_dir: Path, name: Path, contents: dict[str, str]) -> None:
    """Add a file, and the project files that its words name (`-r more.txt`, `./package`), to the contents."""
    normal = os.path.normpath(name)
    path = project_dir / normal
    if normal in contents or normal.startswith("..") or not path.is_file():
        return
    data = path.read_bytes()
    contents[normal] = hashlib.sha256(data).hexdigest()
    if path.suffix not in (".txt", ".sh", ".in"):
        return
    for word in set(_WORD.findall(data.decode(errors="replace"))):
        base = Path(normal).parent if path.suffix != ".sh" else Path()
        for candidate in {base / word, Path(word)}:
            for file in _files_at(project_dir, candidate):
                _add_content(project_dir, file, contents)


def _files_at(project_dir: Path, name: Path) -> Iterator[Path]:
    path = project_dir / name
    if name.is_absolute() or ".." in name.parts:
        return
    if path.is_file():
        yield name
    elif path.is_dir():
        yield from (file.relative_to(project_dir) for file in path.rglob("*") if file.is_file())


def replica_constraints() -> list[str]:
    """Return the version constraints of the packages of replicas and of their dependencies, for installers."""
    allowed: dict[str, set[str]] = {}
    pending = [_DISTRIBUTION]
    while pending:
        parent = pending.pop()
        needed = [Requirement(text) for text in requires(parent) or []]
        if parent != _DISTRIBUTION and any(part.operator == "==" for each in needed for part in each.specifier):
            continue  # as pydantic pins its core: the project's own version comes with others
        for requirement in needed:
            name = canonicalize_name(requirement.name)
            is_ours = parent != _DISTRIBUTION or name in REPLICA_REQUIREMENTS
            if not is_ours or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            if name not in allowed:
                pending.append(name)
            allowed.setdefault(name, set()).add(str(requirement.specifier))
    return sorted(
        name + ",".join(sorted(filter(None, versions))) for name, versions in allowed.items() if any(versions)
    )


def _installation_paths() -> list[str]:
    """Return the folders that contain the packages of the installation."""
    own = str(Path(str(distribution(_DISTRIBUTION).locate_file(""))).resolve())
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), own]
    return list(dict.fromkeys(paths))


def _is_complete(folder: Path) -> bool:
    return (folder / ENVIRONMENT_COMPLETE).is_file() and (folder / "env/bin/python").exists()


@dataclass(frozen=True)
class _Build:
    """Builds one environment in its final folder, as conda can't move one. A last file marks it as complete."""

    folder: Path
    project_dir: Path
    files: _Files
    target: PreparedEnvironment
    pip_file: str  #: the project's requirements.txt, which it may lack
    names_project_files: bool  #: in the dependency files, such as `./package` or `-r more.txt`
    pins: Sequence[str]  #: constraints besides those of replicas
    compiles: bool  #: before the environment is complete; it takes longer than the installation
    constraints: list[str] = field(default_factory=replica_constraints)

    @property
    def log_file(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    async def run(
        self, environ: dict[str, str], variables: dict[str, str], lock: int, on_line: Callable[[str], None]
    ) -> None:
        base = {key: value for key, value in environ.items() if key not in _LEFT_OUT}
        base |= uv_settings(base) | variables
        base |= self.target.variables(base)
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)  # a killed build leaves files
        self.folder.mkdir(mode=0o700, parents=True)
        try:
            with self.log_file.open("wb", buffering=0) as log:
                installer = Installer(self.project_dir, base, log, lock, on_line)
                await self._create(installer)
                await self._install(installer)
                await self._step(installer, "the new environment", [self.target.python, "-I", "-c", _CHECK])
            if self.compiles:
                (self.folder / ENVIRONMENT_COMPILED).touch()
            (self.folder / ENVIRONMENT_COMPLETE).write_text(json.dumps({"files": self.files.names}))
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
            raise

    async def _create(self, installer: Installer) -> None:
        prefix = self.folder / "env"
        if self.files.conda:
            python = f"python={sys.version_info.major}.{sys.version_info.minor}"
            command = [*self._conda(installer, "create"), python, "pip"]
        else:
            # Scripts call pip: without one in the environment, the installation's would install elsewhere.
            seed = ["--seed"] if self.files.shell else []
            command = [uv.find_uv_bin(), "venv", "--color=never", "--python", sys.executable, *seed, str(prefix)]
        await self._step(installer, self.files.conda or "the environment", command)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        # The packages of the environment come first, then those of the installation, editable ones included.
        layer = "; ".join(["import site", *(f"site.addsitedir({path!r})" for path in _installation_paths())])
        (prefix / "lib" / version / "site-packages" / LAYER_FILE).write_text(f"{layer}\n")
        lines = (*self.constraints, *self.pins)
        (self.folder / "constraints.txt").write_text("".join(f"{line}\n" for line in lines))

    async def _install(self, installer: Installer) -> None:
        if self.files.shell:
            await self._step(installer, self.files.shell, ["bash", "-e", self.files.shell])
        if self.files.conda:
            await self._step(
                installer, self.files.conda, [*self._conda(installer, "install"), "--file", self.files.conda]
            )
        if self.files.pip or self.files.packages:
            command = [uv.find_uv_bin(), "pip", "install", "--color=never", "--python", self.target.python]
            command += ["--constraint", str(self.folder / "constraints.txt")]
            if self.compiles:
                command.append("--compile-bytecode")
            if self.names_project_files:
                project = self.folder / "project"
                # Builds of packages write into their folders, and editable packages stay there.
                copy = Path(await asyncio.to_thread(shutil.copytree, self.project_dir, project, symlinks=True))
                installer = replace(installer, folder=copy)
            if self.files.pip:
                command += ["--requirement", self.files.pip]
            await self._step(installer, self._packages, [*command, *self.files.packages])

    @property
    def _packages(self) -> str:
        """The packages that uv installs, for messages."""
        models = f"packages of the models ({', '.join(self.files.packages)})" if self.files.packages else ""
        return " and ".join(filter(None, [self.files.pip, models]))

    def _conda(self, installer: Installer, action: str) -> list[str]:
        path = installer.environ.get("PATH")
        tool = next((found for name in _CONDA_TOOLS if (found := shutil.which(name, path=path))), None)
        if tool is None:
            raise EnvironmentBuildError(
                f"{self.files.conda}: needs micromamba, mamba or conda on the operator's PATH; "
                "install one, or list the packages in requirements.txt, and deploy again"
            )
        return [tool, action, "--yes", "--prefix", str(self.folder / "env"), "--channel", "conda-forge"]

    async def _step(self, installer: Installer, what: str, command: list[str]) -> None:
        try:
            await installer.run(command)
        except OSError as error:
            raise EnvironmentBuildError(f"{what}: {command[0]} can't be run: {error.strerror}") from error
        except InstallerFailedError as error:
            raise EnvironmentBuildError(self._explain(what, error)) from error

    def _explain(self, what: str, error: InstallerFailedError) -> str:
        lines = [line for line in error.tail if line and not line.startswith("Using Python ")]
        words = set(re.split(r"[^\w.-]+", "\n".join(lines).lower()))
        clashing = [line for line in self.constraints if re.split(r"[^\w.-]", line)[0] in words]
        parts = [f"{what}: can't be installed ({error})", *lines]
        if clashing and what == self._packages:
            parts.append(f"cortex itself needs {', '.join(clashing)}: allow such a version")
        if self.files.packages and what == self._packages:
            parts.append(f"to choose another version for the models, write it into {self.pip_file}")
        return "\n".join([*parts, f"the whole output is in {self.log_file}"])
