"""Environments of projects: virtual environments layered on the installation, cached by what they are made from.

Knows nothing of APIs and replicas. A project that asks for nothing runs on the installation's own interpreter.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import distribution, requires
from pathlib import Path
from typing import Protocol

import uv
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cortex.engine.installer import Installer, InstallerFailedError, uv_settings
from cortex.errors import EnvironmentBuildError
from cortex.home import Home
from cortex.processes.filelock import locked

#: What replica processes import besides the standard library; a project must not bring versions they can't use.
REPLICA_REQUIREMENTS = ("httptools", "orjson", "python-multipart", "starlette", "uvloop")

_DISTRIBUTION = "cortex-serving"
#: Changes when environments are made in another way, so that older ones are not used.
_FORMAT = 1
_CONDA_TOOLS = ("micromamba", "mamba", "conda")
_COMPLETE = "complete.json"
_CHECK = "import cortex.replica.spec, httptools, orjson, starlette.requests, uvloop"
_WORD = re.compile(r"[\w./+-]+")
#: Of the machine's environment, what would lead installers elsewhere.
_LEFT_OUT = frozenset({"PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"})


class DependencyFiles(Protocol):
    """Paths, relative to the project, of the files that say what to install; any of them may not exist."""

    @property
    def pip(self) -> str: ...
    @property
    def conda(self) -> str: ...
    @property
    def shell(self) -> str: ...


@dataclass(frozen=True)
class PreparedEnvironment:
    """An interpreter that has what a project asked for, and all that replicas need."""

    python: str
    bin_dir: str
    key: str  #: name of its folder; empty for the installation itself

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables under which the programs of this environment are found first."""
        found = {"PATH": os.pathsep.join([self.bin_dir, environ.get("PATH", os.defpath)])}
        if self.key:
            found["VIRTUAL_ENV"] = str(Path(self.bin_dir).parent)
        return found


async def prepare(
    home: Home,
    project_dir: Path,
    dependencies: DependencyFiles,
    environ: Mapping[str, str],
    variables: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> PreparedEnvironment:
    """Return the environment of a project; build it if no project had the same before.

    `environ` is the machine's environment, `variables` are the project's own. `on_line` is given the installers'
    output as it comes. Two builds of the same environment never run at once, not even those of two operators; a
    failed or cancelled one leaves only its log. Raises: EnvironmentBuildError.
    """
    wanted = _Wanted.of(project_dir, dependencies)
    if wanted.is_nothing:
        return PreparedEnvironment(sys.executable, str(Path(sys.executable).parent), "")
    variables = variables or {}
    key = await asyncio.to_thread(_key, project_dir, wanted, variables)
    folder = home.environments_dir / key
    found = PreparedEnvironment(str(folder / "env/bin/python"), str(folder / "env/bin"), key)
    if _is_complete(folder):
        return found
    async with locked(home.environments_dir / f"{key}.lock") as lock:
        if not _is_complete(folder):
            build = _Build(folder, project_dir, wanted, found)
            await build.run({**environ}, {**variables}, lock, on_line)
    return found


@dataclass(frozen=True)
class _Wanted:
    """The files that are there, relative to the project; None where there is none."""

    pip: str | None
    conda: str | None
    shell: str | None

    @classmethod
    def of(cls, project_dir: Path, files: DependencyFiles) -> _Wanted:
        return cls(
            *(name if _says_something(project_dir / name) else None for name in (files.pip, files.conda, files.shell))
        )

    @property
    def is_nothing(self) -> bool:
        return not (self.pip or self.conda or self.shell)

    @property
    def files(self) -> list[str]:
        return [name for name in (self.shell, self.conda, self.pip) if name]


def _says_something(file: Path) -> bool:
    try:
        lines = file.read_text(errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    return any(line.strip() and not line.lstrip().startswith("#") for line in lines)


def _key(project_dir: Path, wanted: _Wanted, variables: Mapping[str, str]) -> str:
    """Hash all that an environment depends on. A script may use variables; the other files hardly can."""
    contents: dict[str, str] = {}
    for name in wanted.files:
        _add_content(project_dir, Path(name), contents)
    identity = [
        _FORMAT,
        [wanted.shell, wanted.conda, wanted.pip],
        sorted(contents.items()),
        sorted(variables.items()) if wanted.shell else [],
        sys.version,
        _installation_paths(),
        distribution(_DISTRIBUTION).version,
        replica_constraints(),
    ]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]


def _add_content(project_dir: Path, name: Path, contents: dict[str, str]) -> None:
    """Add a file, and whatever of the project its words name (`-r more.txt`, `./package`), to the contents."""
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
    """Return the versions that the packages of replicas, and what those need, may have beside a project's own."""
    allowed: dict[str, set[str]] = {}
    pending = [_DISTRIBUTION]
    while pending:
        parent = pending.pop()
        for text in requires(parent) or []:
            requirement = Requirement(text)
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
    """Return the folders that hold the installation's packages, its own and those it needs."""
    own = str(Path(str(distribution(_DISTRIBUTION).locate_file(""))).resolve())
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), own]
    return list(dict.fromkeys(paths))


def _is_complete(folder: Path) -> bool:
    return (folder / _COMPLETE).is_file() and (folder / "env/bin/python").exists()


@dataclass(frozen=True)
class _Build:
    """Makes one environment where it will stay: conda's can't be moved. A last file marks it as complete."""

    folder: Path
    project_dir: Path
    wanted: _Wanted
    target: PreparedEnvironment
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
        await asyncio.to_thread(self._clear)
        try:
            with self.log_file.open("wb", buffering=0) as log:
                installer = Installer(self.project_dir, base, log, lock, on_line)
                await self._create(installer)
                await self._install(installer)
                await self._step(installer, "the new environment", [self.target.python, "-I", "-c", _CHECK])
            (self.folder / _COMPLETE).write_text(json.dumps({"files": self.wanted.files}))
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
            raise

    def _clear(self) -> None:
        # What a killed build has left.
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700, parents=True)

    async def _create(self, installer: Installer) -> None:
        prefix = self.folder / "env"
        if self.wanted.conda:
            python = f"python={sys.version_info.major}.{sys.version_info.minor}"
            command = [*self._conda(installer, "create"), python, "pip"]
        else:
            # Scripts call pip: it has to be the environment's own, or it would install elsewhere.
            seed = ["--seed"] if self.wanted.shell else []
            command = [uv.find_uv_bin(), "venv", "--color=never", "--python", sys.executable, *seed, str(prefix)]
        await self._step(installer, self.wanted.conda or "the environment", command)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        # The environment's own packages come first, the installation's after them, those installed editable too.
        layer = "; ".join(["import site", *(f"site.addsitedir({path!r})" for path in _installation_paths())])
        (prefix / "lib" / version / "site-packages" / "cortex_installation.pth").write_text(f"{layer}\n")
        (self.folder / "constraints.txt").write_text("".join(f"{line}\n" for line in self.constraints))

    async def _install(self, installer: Installer) -> None:
        if self.wanted.shell:
            await self._step(installer, self.wanted.shell, ["bash", "-e", self.wanted.shell])
        if self.wanted.conda:
            await self._step(
                installer, self.wanted.conda, [*self._conda(installer, "install"), "--file", self.wanted.conda]
            )
        if self.wanted.pip:
            command = [uv.find_uv_bin(), "pip", "install", "--color=never", "--python", self.target.python]
            command += ["--compile-bytecode", "--constraint", str(self.folder / "constraints.txt")]
            await self._step(installer, self.wanted.pip, [*command, "--requirement", self.wanted.pip])

    def _conda(self, installer: Installer, action: str) -> list[str]:
        path = installer.environ.get("PATH")
        tool = next((found for name in _CONDA_TOOLS if (found := shutil.which(name, path=path))), None)
        if tool is None:
            raise EnvironmentBuildError(
                f"{self.wanted.conda}: needs micromamba, mamba or conda on the operator's PATH; "
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
        if clashing and what == self.wanted.pip:
            parts.append(f"cortex itself needs {', '.join(clashing)}: allow such a version")
        return "\n".join([*parts, f"the whole output is in {self.log_file}"])
