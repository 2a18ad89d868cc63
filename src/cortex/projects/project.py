"""Project folders: the scan for files, `.cortexignore`, the content hash and the archive."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import zipfile
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from cortex.errors import ConfigError, Diagnostic, InputError
from cortex.projects.archive import (
    IGNORE_NAME,
    MAX_PROJECT_BYTES,
    MAX_PROJECT_FILES,
    chunks,
    hash_entry,
    is_executable,
    name_problem,
    too_big,
    too_many,
)
from cortex.projects.dotenv import DOTENV_NAME
from cortex.projects.ignore_file import IgnoreFile, Pattern, parse_pattern

_CONFIG_NAME = "cortex.yaml"
_BYTECODE_SUFFIXES = (".pyc", ".pyo", ".pyd")
_EPOCH = (1980, 1, 1, 0, 0, 0)

_IGNORE_FIX = f"remove it or list it in {IGNORE_NAME}"


@dataclass(frozen=True)
class ProjectFiles:
    """The files of a project folder that are deployed.

    `files` are relative, with forward slashes, sorted. Symbolic links inside the folder are followed; the target is
    stored under the link's name.
    """

    root: Path
    files: tuple[str, ...]

    @classmethod
    def scan(cls, root: Path, config_name: str | None) -> ProjectFiles:
        """List the files of the project in `root`, except the configuration file `config_name`, which is deployed.

        Raises: InputError if `root` cannot be a project; ConfigError with every file that cannot be deployed.
        """
        resolved = root.expanduser().resolve()
        if not resolved.is_dir():
            raise InputError(f"{root}: is not a folder; pass the folder that contains {_CONFIG_NAME}")
        if resolved in (Path(resolved.anchor), Path.home().resolve()):
            what = "the root of the file system" if resolved == Path(resolved.anchor) else "your home folder"
            raise InputError(
                f"{root}: {what} can't be a project; move {_CONFIG_NAME} and its files into a folder of their own"
            )
        scan = _Scan(resolved, config_name, _read_ignore_file(resolved))
        scan.run()
        if scan.diagnostics:
            raise ConfigError(scan.diagnostics)
        return cls(resolved, tuple(sorted(scan.files)))

    def contains(self, path: str) -> bool:
        """Return True if `path`, relative to the root, is a file of the project."""
        normal = os.path.normpath(path)
        index = bisect_left(self.files, normal)
        return index < len(self.files) and self.files[index] == normal

    def text(self, path: str) -> str:
        """Return the content of a file; "" if the project has no such file."""
        return (self.root / path).read_text(errors="replace") if self.contains(path) else ""

    def has_folder(self, path: str) -> bool:
        """Return True if `path`, relative to the root, is a folder that contains files of the project."""
        normal = os.path.normpath(path)
        if normal == ".":
            return True
        index = bisect_left(self.files, f"{normal}/")
        return index < len(self.files) and self.files[index].startswith(f"{normal}/")


def content_hash(project: ProjectFiles) -> str:
    """Return the hex SHA-256 of names, execute permissions and contents, equal to `archive_hash` of its archive."""
    digest = hashlib.sha256()
    for name in project.files:
        with _open(project, name) as file:
            hash_entry(digest, name, is_executable(os.fstat(file.fileno()).st_mode), file)
    return digest.hexdigest()


def pack(project: ProjectFiles) -> bytes:
    """Pack the project into a zip file whose bytes depend only on names, execute permissions and contents.

    Raises: InputError if a file was removed, cannot be read or grew beyond the limit since the scan.
    """
    buffer = io.BytesIO()
    total = 0
    with zipfile.ZipFile(buffer, "w") as packed:
        for name in project.files:
            with _open(project, name) as file:
                entry = zipfile.ZipInfo(name, _EPOCH)
                entry.create_system = 3  # Unix on every platform, because the permissions below are Unix permissions
                entry.compress_type = zipfile.ZIP_DEFLATED
                executable = is_executable(os.fstat(file.fileno()).st_mode)
                entry.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
                # Level 1: archives mostly travel over loopback, where packing takes longer than sending.
                entry._compresslevel = 1  # type: ignore[attr-defined]
                with packed.open(entry, "w") as target:
                    for chunk in chunks(file):
                        total += len(chunk)
                        if total > MAX_PROJECT_BYTES:
                            raise InputError(too_big())
                        target.write(chunk)
    return buffer.getvalue()


def _read_ignore_file(root: Path) -> IgnoreFile:
    file = root / IGNORE_NAME
    try:
        lines = file.read_bytes().decode("utf-8-sig").split("\n") if file.is_file() else []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Diagnostic(IGNORE_NAME, 0, 0, "", f"can't be read: {error}")]) from None
    patterns: list[Pattern] = []
    bad = []
    for number, line in enumerate(lines, 1):
        try:
            pattern = parse_pattern(line.removesuffix("\r"))
        except ValueError as error:
            bad.append(Diagnostic(IGNORE_NAME, number, 1, "", f"{line!r} matches no file: {error}"))
        else:
            patterns += [pattern] if pattern else []
    if bad:
        raise ConfigError(bad)
    return IgnoreFile(patterns)


@dataclass
class _Scan:
    """One walk through a project folder that collects every problem."""

    root: Path
    config_name: str | None
    ignored: IgnoreFile
    files: list[str] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    size_bytes: int = 0
    _sizes: Counter[str] = field(default_factory=Counter)
    _counts: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        self._folder(self.root, "", (self.root,))
        # `.env` is included even if it matches `.cortexignore`, as in the original.
        dotenv = self.root / DOTENV_NAME
        if not dotenv.is_dir() and (dotenv.exists() or dotenv.is_symlink()):
            self._entry(dotenv, DOTENV_NAME, (self.root,))

    def _folder(self, folder: Path, prefix: str, parents: tuple[Path, ...]) -> None:
        try:
            names = sorted(entry.name for entry in folder.iterdir())
        except OSError as error:
            return self._reject(prefix.rstrip("/"), f"can't be read: {error.strerror}", _IGNORE_FIX)
        for name in names:
            if not _is_always_excluded(name):
                self._entry(folder / name, prefix + name, parents)
        return None

    def _entry(self, path: Path, relative: str, parents: tuple[Path, ...]) -> None:
        try:
            status = path.lstat()
        except OSError:
            return None  # removed since the folder was listed
        is_link = stat.S_ISLNK(status.st_mode)
        is_folder = path.is_dir() if is_link else stat.S_ISDIR(status.st_mode)
        if self._is_ignored(relative, is_folder):
            return None
        if problem := name_problem(relative):
            return self._reject(relative, problem, "rename or move it")
        if is_link and not self._is_followed(path, relative, parents):
            return None
        if is_folder:
            return self._folder(path, f"{relative}/", (*parents, path.resolve()))
        return self._file(path, relative)

    def _is_ignored(self, relative: str, is_folder: bool) -> bool:
        if relative == DOTENV_NAME:
            return False
        if not is_folder and relative == self.config_name:
            return True
        return self.ignored.excludes(relative, is_folder)

    def _is_followed(self, path: Path, relative: str, parents: tuple[Path, ...]) -> bool:
        try:
            target = path.resolve(strict=True)
        except (OSError, RuntimeError):
            self._reject(relative, "is a link to a file that does not exist", _IGNORE_FIX)
            return False
        if not target.is_relative_to(self.root):
            fix = f"copy {target} into the project, or list the link in {IGNORE_NAME}"
            self._reject(relative, "is a link that leaves the project folder", fix)
            return False
        if target in parents:
            self._reject(relative, "is a link to one of its parent folders", _IGNORE_FIX)
            return False
        return True

    def _file(self, path: Path, relative: str) -> None:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return self._reject(relative, "is neither a file nor a folder", _IGNORE_FIX)
        if not os.access(path, os.R_OK):
            return self._reject(relative, "can't be read: Permission denied", _IGNORE_FIX)
        self.files.append(relative)
        self.size_bytes += status.st_size
        top = relative.partition("/")[0]
        self._sizes[top] += status.st_size
        self._counts[top] += 1
        if self.size_bytes > MAX_PROJECT_BYTES:
            raise InputError(f"{self.root}: {too_big(self._sizes.most_common(1)[0][0])}")
        if len(self.files) > MAX_PROJECT_FILES:
            raise InputError(f"{self.root}: {too_many(self._counts.most_common(1)[0][0])}")
        return None

    def _reject(self, relative: str, message: str, fix: str) -> None:
        shown = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in relative)
        self.diagnostics.append(Diagnostic(shown or ".", 0, 0, "", message, fix))


def _is_always_excluded(name: str) -> bool:
    return name.startswith((".", "cortex-debug-")) or name == "__pycache__" or name.lower().endswith(_BYTECODE_SUFFIXES)


def _open(project: ProjectFiles, name: str) -> IO[bytes]:
    try:
        return (project.root / name).open("rb")
    except OSError as error:
        raise InputError(f"{name}: can't be read: {error.strerror}; try again") from error
