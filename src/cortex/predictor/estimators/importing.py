"""Modules that MLflow models bring along: a process has one module of each name, so those of two models may not differ.

mlflow puts the folder of a model's code on `sys.path`. Whichever model imports a name first decides what all others
get, also when they import it in the middle of a request. Python can't separate them, so the second model is refused.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cortex.errors import ModelFormatError
from cortex.models.loader import LoadRequest

T = TypeVar("T")
_SUFFIXES = frozenset({".py", ".pyc", ".so"})


@dataclass(frozen=True, slots=True)
class _Owner:
    request: LoadRequest
    digest: str  #: of the files of the module


#: The modules of all models that were loaded into this process, by name. Loads run one at a time.
_owners: dict[str, _Owner] = {}


def load_with_modules(request: LoadRequest, folders: Iterable[Path], load: Callable[[], T]) -> T:
    """Load a model whose code is in `folders`, and in those that it adds to `sys.path` while it is loaded.

    Raises: ModelFormatError if one of its modules differs from that of another model, or what `load` raises.
    """
    before, root = list(sys.path), Path(request.path).resolve()
    claimed: list[str] = []
    try:
        _claim(request, folders, claimed)
        model = load()
        added = [Path(each).resolve() for each in sys.path if each not in before]
        _claim(request, [each for each in added if each.is_relative_to(root)], claimed)
    except BaseException:
        sys.path[:] = before
        # Forget the modules of a model that could not be loaded, so that a repaired one can be.
        for name in claimed:
            del _owners[name]
            for module in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
                del sys.modules[module]
        importlib.invalidate_caches()
        raise
    return model


def _claim(request: LoadRequest, folders: Iterable[Path], claimed: list[str]) -> None:
    for folder in folders:
        for name, files in _modules_in(folder):
            digest, owner = _digest(files), _owners.get(name)
            if owner is None and name in sys.modules and digest != (found := _imported(name))[1]:
                raise ModelFormatError(
                    f"{request.label} has the module {name}, but this process has imported another {name} already, "
                    f"from {found[0]}; rename the module"
                )
            if owner is not None and owner.digest != digest:
                raise ModelFormatError(_difference(request, owner.request, name))
            if owner is None:
                _owners[name] = _Owner(request, digest)
                claimed.append(name)


def _difference(request: LoadRequest, other: LoadRequest, name: str) -> str:
    fix = "rename it in one of them, or deploy them as two APIs"
    if request.model == other.model:
        fix = "`cortex refresh` loads the newest version in a new process"
    return (
        f"{request.label} and {other.label} have different modules named {name}, and a Python process can have only "
        f"one; {fix}"
    )


def _modules_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names that can be imported from a folder, and the file or folder of each."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = path.name.partition(".")[0]
        is_module = path.suffix in _SUFFIXES if path.is_file() else any(_files(path))
        if name.isidentifier() and is_module and name != "__pycache__":
            yield name, path


def _imported(name: str) -> tuple[str, str]:
    """Return the place of an imported module, and the digest of its files."""
    module = sys.modules[name]
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if file is None:
        return "Python itself", ""
    path = Path(file)
    return file, _digest(path.parent if path.name == "__init__.py" else path)


def _files(folder: Path) -> Iterator[Path]:
    return (each for each in sorted(folder.rglob("*")) if each.suffix in _SUFFIXES and each.is_file())


def _digest(path: Path) -> str:
    """Return a digest of a module's files, without those that Python compiled."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else [each for each in sorted(path.rglob("*")) if each.is_file()]
    for file in files:
        if "__pycache__" not in file.parts:
            digest.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
