"""What a Python source defines, read from its syntax tree without running it: names, functions, classes, positions."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

from cortex.predictor.signature import Argument, ArgumentKind

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True)
class Binding:
    """One place that gives a name its value; `conditional` if it may not run."""

    node: ast.stmt
    conditional: bool


@dataclass(frozen=True)
class Scope:
    """The names that a module or class body binds, in order; `is_open` if it binds more than can be seen."""

    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    is_open: bool = False

    def functions(self) -> dict[str, FunctionNode]:
        """Return the functions by name, the last definition of each."""
        return {n: b[-1].node for n, b in self.bindings.items() if isinstance(b[-1].node, FunctionNode)}

    def classes(self) -> dict[str, ast.ClassDef]:
        """Return the classes by name, the last definition of each."""
        return {n: b[-1].node for n, b in self.bindings.items() if isinstance(b[-1].node, ast.ClassDef)}


class Source:
    """A parsed source text."""

    def __init__(self, text: str, file: str) -> None:
        """Parse and compile, but never run, `text`. Raises: SyntaxError."""
        text = text.removeprefix("\ufeff")
        self.text = text
        self._lines = re.split(r"\r\n|\r|\n", text)  # as Python does; str.splitlines knows more line ends
        if "\0" in text:
            line = text.count("\n", 0, text.index("\0")) + 1
            raise SyntaxError("the file contains a NUL byte: it is not text", (file, line, 1, None))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's odd escapes are not the operator's to print
            try:
                self.tree = ast.parse(text, file)
                compile(text, file, "exec", dont_inherit=True)  # finds what the parser lets pass: a stray `return`
            except (ValueError, RecursionError, MemoryError) as exc:
                raise SyntaxError(str(exc) or "too deeply nested") from exc
        self.scope = scope_of(self.tree.body)
        self.used_names = set(_used_names(self.tree))

    def position(self, node: ast.expr | ast.stmt | ast.arg) -> tuple[int, int]:
        """Return line and column, both from 1, of a node; of the name where the node defines a function or class."""
        line = self._lines[node.lineno - 1] if node.lineno <= len(self._lines) else ""
        column = len(line.encode()[: node.col_offset].decode(errors="replace"))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            at = line.find(node.name, column + len("def "))
            column = at if at >= 0 else column
        return node.lineno, column + 1


def scope_of(body: list[ast.stmt]) -> Scope:
    """Collect what a body binds, also inside its `if`, `try`, `with` and loops."""
    bindings: dict[str, list[Binding]] = {}
    is_open = False
    for statement, conditional in _statements(body, conditional=False):
        for name in _bound_names(statement):
            if name == "*":
                is_open = True
            else:
                bindings.setdefault(name, []).append(Binding(statement, conditional))
    return Scope(bindings, is_open or _reaches_globals(body))


def arguments_of(function: FunctionNode) -> tuple[list[Argument], list[ast.arg]]:
    """Return the declared arguments and, in the same order, their nodes."""
    declared = function.args
    plain = declared.posonlyargs + declared.args
    optional_from = len(plain) - len(declared.defaults)
    found: list[tuple[Argument, ast.arg]] = []
    for index, node in enumerate(plain):
        kind = ArgumentKind.POSITIONAL_ONLY if index < len(declared.posonlyargs) else ArgumentKind.ORDINARY
        found.append((Argument(node.arg, kind, index >= optional_from), node))
    if declared.vararg:
        found.append((Argument(declared.vararg.arg, ArgumentKind.STAR), declared.vararg))
    for node, default in zip(declared.kwonlyargs, declared.kw_defaults, strict=True):
        found.append((Argument(node.arg, ArgumentKind.KEYWORD_ONLY, default is not None), node))
    if declared.kwarg:
        found.append((Argument(declared.kwarg.arg, ArgumentKind.DOUBLE_STAR), declared.kwarg))
    return [argument for argument, _ in found], [node for _, node in found]


def is_generator(function: FunctionNode) -> bool:
    """Tell whether a function yields."""
    nodes: list[ast.AST] = list(function.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, _SCOPES):
            nodes.extend(ast.iter_child_nodes(node))
    return False


def _statements(body: list[ast.stmt], conditional: bool) -> Iterator[tuple[ast.stmt, bool]]:
    for statement in body:
        yield statement, conditional
        if isinstance(statement, _SCOPES):
            continue
        always = isinstance(statement, ast.With | ast.AsyncWith)
        for block in _blocks(statement):
            yield from _statements(block, conditional or not always)


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list):
            yield block
    for name in ("handlers", "cases"):
        for part in getattr(statement, name, ()):
            yield part.body


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in statement.names)
    elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor | ast.With):
        targets = [statement.target] if hasattr(statement, "target") else getattr(statement, "targets", [])
        if isinstance(statement, ast.With):
            targets = [item.optional_vars for item in statement.items if item.optional_vars]
        for target in targets:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def _reaches_globals(body: list[ast.stmt]) -> bool:
    """Tell whether names may be bound by other means, in which case a missing one is no mistake for sure."""
    names = {"globals", "exec", "setattr", "locals", "vars"}
    for statement in body:
        if isinstance(statement, FunctionNode) and statement.name == "__getattr__":
            return True
        if not isinstance(statement, _SCOPES):
            calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
            if any(isinstance(function, ast.Name) and function.id in names for function in calls):
                return True
    return False


def _used_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
