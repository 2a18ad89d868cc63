"""Bring the user's file into the process: a `.py` module under a name that others can import, or a `.pickle`.

The only module that unpickles: the file is the user's own code, deployed by them, and it runs in replicas only.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from cortex.errors import UserError

_FALLBACK_PREFIX = "cortex_user_"


def import_user_file(project: Path, path: str, python_path: str | None) -> ModuleType:
    """Import `path` of the project, with the project and `python_path` on `sys.path`, in this order.

    A module gets the name under which the user's other files import it, so that there is one copy of it, relative
    imports work and pickles of its classes load. Raises what the user's code raises.
    """
    roots = [project, *([project / python_path] if python_path else [])]
    roots = [root.resolve() for root in roots]
    _extend_sys_path(roots)
    file = (project / path).resolve()
    if not file.is_file():
        raise UserError(f"{path}: file does not exist in the project")
    if file.suffix == ".pickle":
        return _unpickle(file)
    for name in _module_names(file, roots):
        if _resolves_to(name, file):
            return importlib.import_module(name)
    return _import_alone(_FALLBACK_PREFIX + re.sub(r"\W", "_", file.stem), file)


def _extend_sys_path(roots: list[Path]) -> None:
    wanted = [str(root) for root in roots]
    sys.path[:] = wanted + [entry for entry in sys.path if entry not in wanted]
    importlib.invalidate_caches()


def _module_names(file: Path, roots: list[Path]) -> list[str]:
    """Return the names under which `sys.path` may know the file, the shortest (deepest root) first."""
    names = []
    for root in reversed(roots):
        if file.suffix == ".py" and file.is_relative_to(root):
            parts = file.relative_to(root).with_suffix("").parts
            if all(part.isidentifier() for part in parts):
                names.append(".".join(parts))
    return names


def _resolves_to(name: str, file: Path) -> bool:
    """Tell whether `import name` means this file: an installed or already imported module may have taken the name."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and name.startswith(exc.name):  # a parent is another module, which has no such child
            return False
        raise  # the user's own package misses something
    except ValueError:  # the name is taken by a module without a spec, such as __main__
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file


def _import_alone(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{file.name}: is not a Python file; name it .py or .pickle")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickles look the module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _unpickle(file: Path) -> ModuleType:
    """Load a dill pickle: a class, or a dictionary of names, as the clients wrote them."""
    try:
        import dill  # noqa: PLC0415 - optional, and owned by this module
    except ModuleNotFoundError as exc:
        raise UserError(f"{file.name}: reading a .pickle needs dill; add dill to requirements.txt") from exc
    with file.open("rb") as stream:
        content: Any = dill.load(stream)  # noqa: S301 - the user's own code, as a .py would be
    module = ModuleType(_FALLBACK_PREFIX + re.sub(r"\W", "_", file.stem))
    if isinstance(content, dict) and all(isinstance(key, str) for key in content):
        vars(module).update(content)
    elif inspect.isclass(content):
        setattr(module, content.__name__, content)
    else:
        raise UserError(f"{file.name}: must hold a class or a dictionary of functions, not a {type(content).__name__}")
    return module
