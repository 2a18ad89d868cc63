"""Replace the code of functions in this process by that of changed source files, in place.

Every function object of a changed module gets the code object that Python compiles from the new source. So functions
stay the same objects, wherever references to them are: bound methods, routes of a framework, decorators, closures.
Calls that run already continue with the old code. `source_changes` has decided that this suffices.
"""

from __future__ import annotations

import ast
import gc
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from types import CodeType, FunctionType, ModuleType
from typing import Any

from cortex.dev.reload.source_changes import FunctionKey, FunctionNode, ModuleChange, is_signature_equal, outline

_WRAPPERS: Mapping[str, Any] = {"staticmethod": staticmethod, "classmethod": classmethod, "property": property}


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
        tree = ast.parse(source.new, source.path)
        self._futures = [each for each in tree.body if getattr(each, "module", "") == "__future__"]
        self._old = _functions(ast.parse(source.old, source.path), source.path)
        self._new = _functions(tree, source.path)
        self._replacements: list[tuple[FunctionType, FunctionKey]] = []

    def prepare(self, live: Mapping[tuple[str, str, int], list[FunctionType]]) -> None:
        """Find the function objects, and run the imports that were added. Raises: SwapError."""
        for key, (_, code) in self._old.items():
            is_changed = key in self._change.changed
            found = live.get((self._path, code.co_qualname, code.co_firstlineno), [])
            if is_changed and not found:
                raise SwapError(f"{key} is not a plain function any more: something has replaced it")
            for function in found if key in self._new else ():
                if function.__code__.co_freevars == self._new[key][1].co_freevars:
                    self._replacements.append((function, key))
                elif is_changed:
                    raise SwapError(f"{key} refers to other variables around it, such as that of super()")
        self._run(self._change.imports, vars(self._module))

    def apply(self) -> None:
        """Replace, add and remove functions."""
        for function, key in self._replacements:
            node, function.__code__ = self._new[key]
            function.__doc__ = ast.get_docstring(node, clean=False)
            if not is_signature_equal(self._old[key][0], node):
                self._set_signature(function, node)
        for key in self._change.added:
            owner, name = self._owner(key)
            setattr(owner, name, self._new_function(key, owner))
        for key in self._change.removed:
            owner, name = self._owner(key)
            if name in vars(owner):
                delattr(owner, name)

    def _owner(self, key: FunctionKey) -> tuple[Any, str]:
        *classes, name = key.name.split(".")
        return reduce(getattr, classes, self._module), name

    def _new_function(self, key: FunctionKey, owner: Any) -> Any:
        node, code = self._new[key]
        closure = tuple(types.CellType(owner) for _ in code.co_freevars)  # only `__class__`
        function = FunctionType(code, vars(self._module), node.name, None, closure or None)
        function.__module__ = self._module.__name__
        self._set_signature(function, node)
        value: Any = function
        for decorator in reversed(node.decorator_list):
            value = _WRAPPERS[ast.unparse(decorator)](value)
        return value

    def _set_signature(self, function: FunctionType, node: FunctionNode) -> None:
        """Set defaults and annotations to those of the definition, which runs for this alone."""
        scratch: dict[str, Any] = {}
        plain = type(node)(**{**vars(node), "decorator_list": [], "body": [ast.Pass()]})
        self._run((ast.fix_missing_locations(plain),), vars(self._module), scratch)
        for name in ("__defaults__", "__kwdefaults__", "__annotations__"):
            setattr(function, name, getattr(scratch[node.name], name))

    def _run(self, statements: tuple[ast.stmt, ...], *namespaces: dict[str, Any]) -> None:
        code = compile(ast.Module([*self._futures, *statements], []), self._path, "exec", dont_inherit=True)
        exec(code, *namespaces)


def _functions(tree: ast.Module, path: str) -> dict[FunctionKey, tuple[FunctionNode, CodeType]]:
    """Return the functions of a module and of its classes with their code objects."""
    module = compile(tree, path, "exec", dont_inherit=True)
    codes = {(code.co_qualname, code.co_firstlineno): code for code in _nested(module)}
    found: dict[FunctionKey, tuple[FunctionNode, CodeType]] = {}
    for key, node in outline(tree).functions.items():
        first_line = min(each.lineno for each in (node, *node.decorator_list))
        found[key] = node, codes[key.name, first_line]
    return found


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def _live_functions(paths: set[str]) -> dict[tuple[str, str, int], list[FunctionType]]:
    """Return all function objects of these files: by path, qualified name, and first line."""
    found: dict[tuple[str, str, int], list[FunctionType]] = {}
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename in paths:
            code = each.__code__
            found.setdefault((code.co_filename, code.co_qualname, code.co_firstlineno), []).append(each)
    return found
