"""Decide how changed source code takes effect in a process that runs the old code. Pure.

The model stays loaded if only functions and methods changed, and none that ran while the process was loading:

    change                                                          effect
    -----------------------------------------------------------     --------------------------------------------------
    comments, formatting, docstrings                                the functions are replaced, for their line numbers
    the body of a function or method                                replaced
    its arguments, annotations, literal defaults; a new method      replaced; the methods of the API are bound again
    imports that are added to a module                              run, then the functions are replaced
    `__init__`, or what it or module-level code refers to by name   new process
    module-level code, attributes and bases of classes              new process
    decorators other than those of `_KEEPING_FUNCTIONS`             new process

References are compared by name alone, so a new process may start without need, but an object never keeps a state that
the new code would not have given it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

#: Functions that the platform calls while a process loads.
_RUN_AT_START = frozenset({"load_model", "init"})
#: Methods of a class that run when its name is called, or when it is the base of another class.
_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__class_getitem__"})
#: Decorators that keep the function itself. Others may have compiled or cached it.
_KEEPING_FUNCTIONS = {
    *("staticmethod", "classmethod", "property", "getter", "setter", "deleter"),
    *("abstractmethod", "final", "overload", "override", "wraps", "contextmanager", "asynccontextmanager"),
    *("no_grad", "inference_mode"),
    *("delete", "get", "head", "options", "patch", "post", "put", "api_route", "route", "websocket"),
    *("exception_handler", "middleware", "on_event"),
}
#: Of these, those with which a function can be added to a class.
BUILT_IN_DECORATORS = frozenset({"staticmethod", "classmethod", "property"})


class FunctionKey(NamedTuple):
    """A function or method of a module: its qualified name, and which of those with the same name it is."""

    name: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.name}()"


@dataclass(frozen=True)
class ModuleChange:
    """Functions of one module to replace, add and remove."""

    changed: tuple[FunctionKey, ...] = ()  #: functions whose behaviour has changed
    added: tuple[FunctionKey, ...] = ()
    removed: tuple[FunctionKey, ...] = ()
    imports: tuple[ast.stmt, ...] = ()  #: to run first
    changes_signatures: bool = False  #: methods have to be bound again

    @property
    def names(self) -> list[str]:
        """Return the names of all functions, for display."""
        return [str(key) for key in (*self.changed, *self.added, *self.removed)]


@dataclass(frozen=True)
class NewProcess:
    """The change takes effect in a new process only."""

    reason: str


class _Refusal(Exception):
    """A change needs a new process; the message is the reason."""


class Outline(NamedTuple):
    """The functions of a module and its classes, and the rest of it."""

    functions: Mapping[FunctionKey, FunctionNode]  #: but for those inside of `if`, `try`, a loop or `with`
    rest: Sequence[ast.stmt]  #: everything else; classes without their functions


def decide(
    old: Mapping[str, str | bytes], new: Mapping[str, str | bytes], class_name: str | None
) -> Mapping[str, ModuleChange] | NewProcess:
    """Compare the sources of all loaded modules of a project, by path. Both have the same paths.

    `class_name` is that of the API; None if it has functions or an application. Raises: SyntaxError.
    """
    after = {path: outline(ast.parse(text, path)) for path, text in new.items()}
    before = {path: outline(ast.parse(text, path)) for path, text in old.items() if text != new[path]}
    # What is removed now has run at the start, too.
    used = _names_used_at_start([*after.values(), *before.values()], class_name)
    try:
        return {path: _compare(path, each, after[path], used) for path, each in before.items()}
    except _Refusal as reason:
        return NewProcess(str(reason))


def outline(module: ast.Module) -> Outline:
    """Separate the functions of a module and of its classes from the rest of it."""
    functions: dict[FunctionKey, FunctionNode] = {}
    counts: Counter[str] = Counter()

    def read(body: Sequence[ast.stmt], prefix: str) -> list[ast.stmt]:
        rest: list[ast.stmt] = []
        for statement in _without_docstring(body):
            if isinstance(statement, ast.ClassDef):
                inner = read(statement.body, f"{prefix}{statement.name}.")
                rest.append(ast.ClassDef(**{**vars(statement), "body": inner}))
            elif isinstance(statement, FunctionNode):
                name = f"{prefix}{statement.name}"
                functions[FunctionKey(name, counts[name])] = statement
                counts[name] += 1
            else:
                rest.append(statement)
        return rest

    return Outline(functions, read(module.body, ""))


def _names_used_at_start(outlines: Sequence[Outline], class_name: str | None) -> frozenset[str]:
    """Return every name to which module-level code and constructors refer, directly or through functions."""
    functions: dict[str, list[FunctionNode]] = {}  #: by the name that runs them
    pending = set(_RUN_AT_START) | ({class_name} if class_name is not None else set())
    for each in outlines:
        pending |= _names(each.rest)
        for key, node in each.functions.items():
            *classes, name = key.name.split(".")
            for runs in (name, *(classes[-1:] if name in _CONSTRUCTORS else ())):
                functions.setdefault(runs, []).append(node)
            pending |= _names([*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)])
    used: set[str] = set()
    while pending:
        name = pending.pop()
        used.add(name)
        for node in functions.get(name, ()):
            pending |= _names(node.body) - used
    return frozenset(used)


def _names(nodes: Sequence[ast.AST]) -> set[str]:
    found = [each for node in nodes for each in ast.walk(node)]
    names = {each.id for each in found if isinstance(each, ast.Name)}
    return names | {each.attr for each in found if isinstance(each, ast.Attribute)}


def _runs_at_start(key: FunctionKey, used: frozenset[str]) -> bool:
    *classes, name = key.name.split(".")
    return name in used or (name in _CONSTRUCTORS and bool(classes) and classes[-1] in used)


def _compare(path: str, old: Outline, new: Outline, used: frozenset[str]) -> ModuleChange:
    imports = _added_imports(path, old.rest, new.rest)
    added = sorted(new.functions.keys() - old.functions.keys())
    removed = sorted(old.functions.keys() - new.functions.keys())
    changed: list[FunctionKey] = []
    has_new_signatures = bool(added or removed)
    for key in [*sorted(old.functions.keys() & new.functions.keys()), *added]:
        node = new.functions[key]
        before = old.functions.get(key)
        if before is not None and _is_equal(before, node):
            continue
        problem = _addition_problem(key, node) if before is None else _replacement_problem(key, before, node)
        if getattr(node, "type_params", None):
            problem = f"{key} has type parameters"
        elif problem is None and _runs_at_start(key, used):
            problem = f"{key}{'' if before else ', which was added,'} runs while the process loads"
        if problem is not None:
            raise _Refusal(f"{path}:{node.lineno}: {problem}")
        if before is not None:
            changed.append(key)
            has_new_signatures |= not is_signature_equal(before, node) or _is_generator(before) != _is_generator(node)
    for key in removed:
        if "." not in key.name or _runs_at_start(key, used):
            raise _Refusal(f"{path}: {key} was removed")
    return ModuleChange(tuple(changed), tuple(added), tuple(removed), imports, has_new_signatures)


def _added_imports(path: str, old: Sequence[ast.stmt], new: Sequence[ast.stmt]) -> tuple[ast.stmt, ...]:
    """Return the imports that were added to module-level code, which must otherwise be equal. Raises: _Refusal."""
    remaining = list(map(ast.dump, old))
    imports: list[ast.stmt] = []
    for statement in new:
        if remaining and ast.dump(statement) == remaining[0]:
            remaining.pop(0)
        elif isinstance(statement, ast.Import | ast.ImportFrom) and getattr(statement, "module", "") != "__future__":
            imports.append(statement)
        elif ast.dump(statement) not in remaining:
            what = f"class {statement.name}" if isinstance(statement, ast.ClassDef) else "module-level code"
            raise _Refusal(f"{path}:{statement.lineno}: {what} changed")
    if remaining:
        raise _Refusal(f"{path}: module-level code was removed")
    return tuple(imports)


def _is_equal(old: FunctionNode, new: FunctionNode) -> bool:
    has_equal_head = is_signature_equal(old, new) and _dump(old.decorator_list) == _dump(new.decorator_list)
    return has_equal_head and _dump(_without_docstring(old.body)) == _dump(_without_docstring(new.body))


def is_signature_equal(old: FunctionNode, new: FunctionNode) -> bool:
    """Return whether a function has the same arguments, defaults and annotations as before."""
    return type(old) is type(new) and _dump([old.args, old.returns]) == _dump([new.args, new.returns])


def _replacement_problem(key: FunctionKey, old: FunctionNode, new: FunctionNode) -> str | None:
    """Return why a changed function can't be replaced; None if it can."""
    if _dump(old.decorator_list) != _dump(new.decorator_list):
        return f"the decorators of {key} changed"
    other = next((each for each in new.decorator_list if _name_of(each) not in _KEEPING_FUNCTIONS), None)
    if other is not None:
        return f"{key} is decorated by {ast.unparse(other)}, which may have a copy of it"
    if is_signature_equal(old, new):
        return None
    if not BUILT_IN_DECORATORS.issuperset(map(_name_of, new.decorator_list)):
        return f"the arguments of {key} changed, which its decorator may have read"
    return None if _has_literal_defaults(new) else f"the arguments of {key} changed, and a default is not a literal"


def _addition_problem(key: FunctionKey, node: FunctionNode) -> str | None:
    """Return why a function can't be added to a process; None if it can."""
    name = key.name.rpartition(".")[2]
    if key.number or (name.startswith("__") and not name.endswith("__")):  # the name of an attribute is another
        return f"{key} was added"
    decorators = set(map(_name_of, node.decorator_list))
    if not decorators <= BUILT_IN_DECORATORS or ("." not in key.name and decorators):
        return f"{key}, which was added, has a decorator"
    return None if _has_literal_defaults(node) else f"{key}, which was added, has a default that is not a literal"


def _name_of(decorator: ast.expr) -> str:
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    return decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")


def _has_literal_defaults(node: FunctionNode) -> bool:
    try:
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            ast.literal_eval(default)
    except (ValueError, TypeError, SyntaxError):
        return False
    return True


def _without_docstring(body: Sequence[ast.stmt]) -> Sequence[ast.stmt]:
    match body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            return rest
    return body


def _is_generator(node: FunctionNode) -> bool:
    """Return whether it may be a generator: a function inside of it may be the one."""
    return any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(node))


def _dump(nodes: Sequence[ast.AST | None]) -> list[str]:
    return ["" if node is None else ast.dump(node) for node in nodes]
