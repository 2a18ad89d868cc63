"""Save a class object as the source files of a project, without running its code."""

from __future__ import annotations

import ast
import builtins
import inspect
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

_MAIN = "__main__"
_PICKLE_NAME = "handler.pickle"


@dataclass(frozen=True)
class SavedClass:
    """File of a class in the project, and the packages required to load it."""

    path: str
    requirements: tuple[str, ...] = ()


def save_class(target: type | FunctionType, folder: Path, class_name: str) -> SavedClass:
    """Save `target` in `folder` under the name `class_name`. A function becomes the `__call__` of such a class.

    For a class of an imported module, the file is copied. For a class of the main script, only the statements that the
    class depends on are copied, because running the whole script would deploy again. Imported modules next to the file
    are copied as well. A class from a REPL or notebook has no file and is pickled with dill. Raises: ValueError.
    """
    file = _source_file(target)
    if file is None:
        return _pickle(target, folder)
    text = file.read_text()
    tree = ast.parse(text)
    if target.__qualname__ not in {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}:
        what = "class" if isinstance(target, type) else "function"
        raise ValueError(f"the {what} {target.__qualname__} must be at the top level of {file.name}")
    if target.__module__ == _MAIN:
        text = extract(text, target.__name__)
        tree = ast.parse(text)
    if isinstance(target, FunctionType):
        text += f"\n\nclass {class_name}:\n    def __call__(self, config):\n        return {target.__name__}(config)\n"
    elif target.__name__ != class_name:
        text += f"\n\n{class_name} = {target.__name__}\n"
    name = f"{file.stem}.py"
    (folder / name).write_text(text)
    _copy_local_imports(tree, file.parent, folder, {name})
    return SavedClass(name)


def extract(text: str, name: str) -> str:
    """Return a module's text reduced to the statements that `name` depends on. Line numbers stay the same."""
    tree = ast.parse(text)
    wanted: set[str] = {name}
    kept: list[ast.stmt] = []
    left = [node for node in tree.body if not _is_main_guard(node)]
    while fresh := [node for node in left if _is_future(node) or _binds(node) & wanted]:
        kept += fresh
        left = [node for node in left if node not in fresh]
        for node in fresh:
            wanted |= _uses(node)
    lines = text.splitlines()
    keep_lines: set[int] = set()
    for node in kept:
        first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))])
        keep_lines.update(range(first, (node.end_lineno or node.lineno) + 1))
    return "\n".join(line if number in keep_lines else "" for number, line in enumerate(lines, 1)).rstrip() + "\n"


def _source_file(target: type | FunctionType) -> Path | None:
    module = sys.modules.get(target.__module__)
    if module is None or (target.__module__ == _MAIN and not hasattr(module, "__file__")):
        return None
    try:
        file = Path(inspect.getfile(target))
    except (TypeError, OSError):
        return None
    # The file names of notebook cells are temporary or do not exist.
    return file if file.is_file() and file.suffix == ".py" and "ipykernel" not in str(file) else None


def _pickle(target: type | FunctionType, folder: Path) -> SavedClass:
    try:
        import dill  # noqa: PLC0415 - optional dependency for classes without a file
    except ImportError:
        raise ValueError(f"{target.__name__} has no source file; save it in a file or install dill") from None
    with (folder / _PICKLE_NAME).open("wb") as stream:
        dill.dump(target if isinstance(target, type) else _class_of(target), stream, recurse=True)
    return SavedClass(_PICKLE_NAME, (f"dill=={dill.__version__}",))


def _class_of(function: FunctionType) -> type:
    class Task:
        def __call__(self, config: Any) -> Any:
            return function(config)

    return Task


def _copy_local_imports(tree: ast.Module, source: Path, folder: Path, copied: set[str]) -> None:
    """Copy the modules and packages in `source` that the class's file imports, directly or indirectly."""
    for name in sorted(set(_imported(tree)) - {"cortex"}):
        file, package = source / f"{name}.py", source / name
        if file.is_file() and file.name not in copied:
            copied.add(file.name)
            shutil.copyfile(file, folder / file.name)
            _copy_local_imports(ast.parse(file.read_text()), source, folder, copied)
        elif (package / "__init__.py").is_file() and name not in copied:
            copied.add(name)
            shutil.copytree(package, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
            for module in package.rglob("*.py"):
                _copy_local_imports(ast.parse(module.read_text()), source, folder, copied)


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.partition(".")[0]


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in _uses(node.test) and f"'{_MAIN}'" in ast.unparse(node.test)


def _binds(node: ast.stmt) -> set[str]:
    """Return the names that a top-level statement defines in the module."""
    names: set[str] = set()
    for child in _walk_scope(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(child.name)
        elif isinstance(child, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in child.names}
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            names.add(child.id)
    return names


def _walk_scope(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _walk_scope(child)


def _uses(node: ast.AST) -> set[str]:
    names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    # Quoted annotations count as well. A false match only keeps an unneeded statement.
    quoted = {
        child.value for child in ast.walk(node) if isinstance(child, ast.Constant) and isinstance(child.value, str)
    }
    return (names | {text for text in quoted if text.isidentifier()}) - set(dir(builtins))
