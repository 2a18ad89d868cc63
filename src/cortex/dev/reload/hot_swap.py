"""Replace the code of functions in this process by that of changed source files, in place.

Every function object of a changed module gets the code object that Python compiles from the new source. So functions
stay the same objects, wherever references to them are: bound methods, routes of a framework, decorators, closures.
Calls that run already continue with the old code. `source_changes` has decided that this suffices.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from cortex.dev.reload.source_changes import FunctionKey, FunctionNode, ModuleChange, NewProcess, decide, outline

_WRAPPERS: Mapping[str, Callable[[Any], Any]] = {
    "staticmethod": staticmethod,
    "classmethod": classmethod,
    "property": property,
}


class SwapError(Exception):
    """The functions can't be replaced in this process; the message is the reason. Nothing was changed."""


@dataclass(frozen=True)
class ModuleSource:
    """A loaded module with the source that runs, and the source that replaces it; Python decodes bytes itself."""

    module: ModuleType
    path: str  #: as in the code objects of the module
    old: str | bytes
    new: str | bytes


def swap(sources: Mapping[str, ModuleSource], changes: Mapping[str, ModuleChange]) -> None:
    """Apply the changes of all modules. Raises: SwapError; ImportError and the like from imports that were added."""
    prepared = [_Swap(sources[name], change) for name, change in changes.items()]
    live = _live_functions({each.path for each in sources.values()})
    for each in prepared:
        each.prepare(live)
    for each in prepared:
        each.apply()


class _Swap:
    """The replacement of the functions of one module."""

    def __init__(self, source: ModuleSource, change: ModuleChange) -> None:
        self._module = source.module
        self._path = source.path
        self._change = change
        self._old_codes = _codes(compile(source.old, source.path, "exec", dont_inherit=True))
        tree = ast.parse(source.new, source.path)
        self._new_codes = _codes(compile(tree, source.path, "exec", dont_inherit=True))
        self._nodes = outline(tree).functions
        self._is_lazy = any(
            isinstance(each, ast.ImportFrom) and each.module == "__future__" and each.names[0].name == "annotations"
            for each in tree.body
        )
        self._replacements: list[tuple[FunctionType, FunctionKey]] = []

    def prepare(self, live: Mapping[tuple[str, str, int], list[FunctionType]]) -> None:
        """Find the function objects, and run the imports that were added. Raises: SwapError."""
        changed = set(self._change.changed)
        for key, code in self._old_codes.items():
            new = self._new_codes.get(key)
            found = live.get((self._path, code.co_qualname, code.co_firstlineno), [])
            if key in changed and not found:
                raise SwapError(f"{key} is not a plain function any more: something has replaced it")
            if new is None:
                continue
            for function in found:
                if function.__code__.co_freevars != new.co_freevars:
                    if key in changed:
                        raise SwapError(f"{key} refers to other variables around it, such as that of super()")
                    continue
                self._replacements.append((function, key))
        for statement in self._change.imports:
            exec(compile(ast.Module([statement], []), self._path, "exec"), vars(self._module))

    def apply(self) -> None:
        """Replace, add and remove functions."""
        changed = set(self._change.changed)
        for function, key in self._replacements:
            function.__code__ = self._new_codes[key]
            if key in changed:
                self._set_signature(function, self._nodes[key], keeps_defaults=not _is_literal(self._nodes[key]))
        for key in self._change.added:
            owner, name = self._owner(key)
            setattr(owner, name, self._new_function(key, owner))
        for key in self._change.removed:
            owner, name = self._owner(key)
            if name in vars(owner):
                delattr(owner, name)

    def _owner(self, key: FunctionKey) -> tuple[Any, str]:
        *classes, name = key.name.split(".")
        owner: Any = self._module
        for each in classes:
            owner = getattr(owner, each)
        return owner, name

    def _new_function(self, key: FunctionKey, owner: Any) -> Any:
        code, node = self._new_codes[key], self._nodes[key]
        closure = tuple(types.CellType(owner) for _ in code.co_freevars)  # only `__class__`
        function = FunctionType(code, vars(self._module), node.name, None, closure or None)
        function.__qualname__ = key.name
        function.__module__ = self._module.__name__
        self._set_signature(function, node, keeps_defaults=False)
        value: Any = function
        for decorator in reversed(node.decorator_list):
            value = _WRAPPERS[ast.unparse(decorator)](value)
        return value

    def _set_signature(self, function: FunctionType, node: FunctionNode, keeps_defaults: bool) -> None:
        arguments = node.args
        if not keeps_defaults:
            function.__defaults__ = tuple(map(ast.literal_eval, arguments.defaults)) or None
            pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            function.__kwdefaults__ = {
                each.arg: ast.literal_eval(default) for each, default in pairs if default is not None
            } or None
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += filter(None, (arguments.vararg, arguments.kwarg))
        annotations = {each.arg: self._annotation(each.annotation) for each in every if each.annotation is not None}
        if node.returns is not None:
            annotations["return"] = self._annotation(node.returns)
        function.__annotations__ = annotations
        function.__doc__ = ast.get_docstring(node, clean=False)

    def _annotation(self, node: ast.expr) -> Any:
        if self._is_lazy:
            return ast.unparse(node)
        return eval(compile(ast.Expression(node), self._path, "eval"), vars(self._module))


def _codes(module: CodeType) -> dict[FunctionKey, CodeType]:
    """Return the code objects of the functions of a module and of its classes, in the order of the source."""
    counts: Counter[str] = Counter()
    found: dict[FunctionKey, CodeType] = {}
    for code in _nested(module):
        found[FunctionKey(code.co_qualname, counts[code.co_qualname])] = code
        counts[code.co_qualname] += 1
    return found


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if not isinstance(constant, CodeType) or constant.co_name.startswith("<"):
            continue
        if constant.co_flags & inspect.CO_OPTIMIZED:  # the body of a function, not of a class
            yield constant
        else:
            yield from _nested(constant)


def _live_functions(paths: set[str]) -> dict[tuple[str, str, int], list[FunctionType]]:
    """Return all function objects of these files: by path, qualified name, and first line."""
    found: dict[tuple[str, str, int], list[FunctionType]] = {}
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename in paths:
            code = each.__code__
            found.setdefault((code.co_filename, code.co_qualname, code.co_firstlineno), []).append(each)
    return found


def _is_literal(node: FunctionNode) -> bool:
    try:
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            ast.literal_eval(default)
    except (ValueError, TypeError):
        return False
    return True


class ProjectSources:
    """The modules of a project that this process has loaded, with the sources that they run; and its other files.

    `update` and `swap` are for one thread at a time.
    """

    def __init__(self, folder: str) -> None:
        self._prefix = folder.rstrip("/") + "/"
        self._sources: dict[str, bytes] = {}  #: by path relative to the project
        self._executed: dict[str, bytes] = {}  #: likewise, of modules that have run since the last `update`
        self._data: set[str] = set()
        self._written: set[str] = set()
        self._count = 0
        self._is_recording = False
        sys.addaudithook(self._audit)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the files of the project that are read, such as models; not those that are written as well.

        Otherwise each start of a process that writes such a file would be a reason for the next.
        """
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def update(self) -> bool:
        """Add the modules that were loaded since the last call; return whether there are any."""
        if len(sys.modules) == self._count:
            return False
        self._count = len(sys.modules)
        new = self._modules().keys() - self._sources.keys()
        for path in new:
            self._sources[path] = self._executed[path] if path in self._executed else self._read(path)
        self._executed.clear()
        return bool(new)

    def describe(self) -> dict[str, list[str]]:
        """Return the paths of all modules, and of all other files that were read while they were recorded."""
        return {"modules": sorted(self._sources), "data": sorted(self._data - self._written - self._sources.keys())}

    def swap(self, class_name: str | None) -> tuple[list[str], bool] | NewProcess:
        """Replace the functions that have changed on disk; return their names, and whether a signature changed.

        `class_name` is that of the API. Raises: SwapError, SyntaxError, OSError; what annotations and imports raise.
        """
        self.update()
        try:
            new = {path: self._read(path) for path in self._sources}
        except FileNotFoundError as error:
            return NewProcess(f"{error.filename.removeprefix(self._prefix)} was removed")
        changes = decide(self._sources, new, class_name)
        if isinstance(changes, NewProcess):
            return changes
        modules = self._modules()
        sources = {
            path: ModuleSource(modules[path], str(modules[path].__file__), self._sources[path], new[path])
            for path in changes
        }
        swap(sources, changes)
        self._sources = new
        names = [name for change in changes.values() for name in change.names]
        return names, any(change.changes_signatures for change in changes.values())

    def _read(self, path: str) -> bytes:
        return Path(self._prefix + path).read_bytes()

    def _modules(self) -> dict[str, ModuleType]:
        found: dict[str, ModuleType] = {}
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file.startswith(self._prefix) and self._is_own(file):
                found[file.removeprefix(self._prefix)] = module
        return found

    def _is_own(self, file: str) -> bool:
        """Return whether a file is source code of the user, and not of an environment inside of the project."""
        return file.endswith(".py") and "/site-packages/" not in file

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "exec":
            self._record_source(arguments[0])
        elif event == "open" and self._is_recording and isinstance(arguments[0], str | bytes):
            self._record_data(arguments)

    def _record_source(self, code: CodeType) -> None:
        """Keep the source of a module that begins to run: its file may change while it loads a model."""
        file = code.co_filename
        if code.co_name != "<module>" or not file.startswith(self._prefix) or not self._is_own(file):
            return
        path = file.removeprefix(self._prefix)
        if path not in self._sources:
            with contextlib.suppress(OSError):
                self._executed[path] = self._read(path)

    def _record_data(self, arguments: tuple[Any, ...]) -> None:
        path, mode = os.path.abspath(os.fsdecode(arguments[0])), arguments[1]  # noqa: PTH100 - no symbolic links
        is_read = not isinstance(mode, str) or not set(mode) & set("wax+")
        if path.startswith(self._prefix) and not path.endswith((".py", ".pyc")):
            (self._data if is_read else self._written).add(path.removeprefix(self._prefix))
