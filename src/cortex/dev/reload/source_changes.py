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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

#: Functions that the platform calls while a process loads.
_RUN_AT_START = frozenset({"load_model", "init"})
#: Methods of a class that run when its name is called, or when it is the base of another class.
_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__class_getitem__"})
#: Decorators that keep the function itself. Others may have compiled or cached it.
_KEEPING_FUNCTIONS = frozenset(
    {
        *("staticmethod", "classmethod", "property", "getter", "setter", "deleter"),
        *("abstractmethod", "final", "overload", "override", "wraps", "contextmanager", "asynccontextmanager"),
        *("no_grad", "inference_mode"),
        *("delete", "get", "head", "options", "patch", "post", "put", "api_route", "route", "websocket"),
        *("exception_handler", "middleware", "on_event"),
    }
)
#: Of these, those with which a function can be added to a class.
BUILT_IN_DECORATORS = frozenset({"staticmethod", "classmethod", "property"})


@dataclass(frozen=True, order=True)
class FunctionKey:
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


@dataclass(frozen=True)
class Outline:
    """A module without the bodies of its functions."""

    functions: Mapping[FunctionKey, FunctionNode]
    conditional: frozenset[FunctionKey]  #: defined inside of `if`, `try`, a loop or `with`
    rest: tuple[ast.stmt, ...]  #: everything else; classes without their functions


def decide(
    old: Mapping[str, str | bytes], new: Mapping[str, str | bytes], class_name: str | None
) -> Mapping[str, ModuleChange] | NewProcess:
    """Compare the sources of all loaded modules of a project, by path. Both have the same paths.

    `class_name` is that of the API; None if it has functions or an application. Raises: SyntaxError.
    """
    new_outlines = {path: outline(ast.parse(text, path)) for path, text in new.items()}
    old_outlines = {path: outline(ast.parse(text, path)) for path, text in old.items() if text != new[path]}
    used = _names_used_at_start([*new_outlines.values()], class_name)
    # What is removed now has run at the start, too.
    used |= _names_used_at_start([old_outlines.get(path, new_outlines[path]) for path in new], class_name)
    changes: dict[str, ModuleChange] = {}
    for path, before in old_outlines.items():
        found = _compare(path, before, new_outlines[path], used)
        if isinstance(found, NewProcess):
            return found
        changes[path] = found
    return changes


# Outlines.


def outline(module: ast.Module) -> Outline:
    """Separate the functions of a module and of its classes from the rest of it."""
    found = _Functions()
    rest = found.read(module.body, "", is_conditional=False)
    return Outline(found.functions, frozenset(found.conditional), tuple(rest))


class _Functions:
    def __init__(self) -> None:
        self.functions: dict[FunctionKey, FunctionNode] = {}
        self.conditional: set[FunctionKey] = set()
        self._counts: Counter[str] = Counter()

    def read(self, body: Sequence[ast.stmt], prefix: str, is_conditional: bool) -> list[ast.stmt]:
        """Collect the functions of a body; return its other statements."""
        rest: list[ast.stmt] = []
        for number, statement in enumerate(body):
            match statement:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    name = f"{prefix}{statement.name}"
                    key = FunctionKey(name, self._counts[name])
                    self._counts[name] += 1
                    self.functions[key] = statement
                    if is_conditional:
                        self.conditional.add(key)
                case ast.ClassDef():
                    inner = self.read(statement.body, f"{prefix}{statement.name}.", is_conditional)
                    shown = ast.ClassDef(**{**dict(ast.iter_fields(statement)), "body": inner})
                    rest.append(ast.copy_location(shown, statement))
                case ast.Expr(value=ast.Constant(value=str())) if number == 0:
                    pass  # a docstring
                case _:
                    for child in _bodies(statement):
                        self.read(child, prefix, is_conditional=True)
                    rest.append(statement)
        return rest


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the bodies of a compound statement."""
    for name in ("body", "orelse", "finalbody"):
        yield from [inner] if (inner := getattr(statement, name, None)) else []
    for handler in getattr(statement, "handlers", ()):
        yield handler.body
    for case in getattr(statement, "cases", ()):
        yield case.body


# What ran while the process was loading.


def _names_used_at_start(outlines: Sequence[Outline], class_name: str | None) -> frozenset[str]:
    """Return every name to which module-level code and constructors refer, directly or through functions."""
    functions: dict[str, list[FunctionNode]] = {}
    constructors: dict[str, list[FunctionNode]] = {}
    pending: set[str] = set(_RUN_AT_START)
    for each in outlines:
        for statement in each.rest:
            pending |= _names(statement)
        for key, node in each.functions.items():
            *classes, name = key.name.split(".")
            functions.setdefault(name, []).append(node)
            if classes and name in _CONSTRUCTORS:
                constructors.setdefault(classes[-1], []).append(node)
            for expression in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
                pending |= _names(expression)
    if class_name is not None:
        pending.add(class_name)
    used: set[str] = set()
    while pending:
        name = pending.pop()
        if name in used:
            continue
        used.add(name)
        for node in (*functions.get(name, ()), *constructors.get(name, ())):
            for statement in node.body:
                pending |= _names(statement) - used
    return frozenset(used)


def _names(node: ast.AST) -> set[str]:
    found: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.Attribute):
            found.add(each.attr)
    return found


def _runs_at_start(key: FunctionKey, used: frozenset[str]) -> bool:
    *classes, name = key.name.split(".")
    return name in used or (name in _CONSTRUCTORS and bool(classes) and classes[-1] in used)


# Comparison.


@dataclass
class _Comparison:
    changed: list[FunctionKey] = field(default_factory=list)
    changes_signatures: bool = False


def _compare(path: str, old: Outline, new: Outline, used: frozenset[str]) -> ModuleChange | NewProcess:
    imports = _compare_rest(path, old.rest, new.rest)
    if isinstance(imports, NewProcess):
        return imports
    found = _Comparison()
    for key in sorted(old.functions.keys() & new.functions.keys()):
        reason = _compare_function(key, old.functions[key], new.functions[key], found)
        if reason is None and key in found.changed and _runs_at_start(key, used):
            reason = f"{key} runs while the process loads"
        if reason is not None:
            return NewProcess(f"{path}:{new.functions[key].lineno}: {reason}")
    added = sorted(new.functions.keys() - old.functions.keys())
    removed = sorted(old.functions.keys() - new.functions.keys())
    for key in added:
        if reason := _addition_problem(key, new, used):
            return NewProcess(f"{path}:{new.functions[key].lineno}: {reason}")
    for key in removed:
        if key in old.conditional or "." not in key.name or _runs_at_start(key, used):
            return NewProcess(f"{path}: {key} was removed")
    signatures = found.changes_signatures or bool(added or removed)
    return ModuleChange(tuple(found.changed), tuple(added), tuple(removed), tuple(imports), signatures)


def _compare_rest(path: str, old: Sequence[ast.stmt], new: Sequence[ast.stmt]) -> list[ast.stmt] | NewProcess:
    """Return the imports that were added to module-level code, which must otherwise be equal."""
    remaining = list(map(ast.dump, old))
    imports: list[ast.stmt] = []
    for statement in new:
        if remaining and ast.dump(statement) == remaining[0]:
            remaining.pop(0)
        elif isinstance(statement, ast.Import | ast.ImportFrom) and getattr(statement, "module", "") != "__future__":
            imports.append(statement)
        elif ast.dump(statement) in remaining:
            return NewProcess(f"{path}: module-level code was removed")
        else:
            what = f"class {statement.name}" if isinstance(statement, ast.ClassDef) else "module-level code"
            return NewProcess(f"{path}:{statement.lineno}: {what} changed")
    return NewProcess(f"{path}: module-level code was removed") if remaining else imports


def _compare_function(key: FunctionKey, old: FunctionNode, new: FunctionNode, found: _Comparison) -> str | None:
    """Add a function to what has changed; return why it can't be replaced."""
    if _dump_all(old.decorator_list) != _dump_all(new.decorator_list):
        return f"the decorators of {key} changed"
    is_signature_equal = type(old) is type(new) and ast.dump(old.args) == ast.dump(new.args)
    is_signature_equal = is_signature_equal and _dump_all([old.returns]) == _dump_all([new.returns])
    if is_signature_equal and _dump_all(_without_docstring(old)) == _dump_all(_without_docstring(new)):
        return None
    if other := _foreign_decorator(new):
        return f"{key} is decorated by {other}, which may have a copy of it"
    if (
        not is_signature_equal
        and new.decorator_list
        and not set(map(_name_of, new.decorator_list)) <= BUILT_IN_DECORATORS
    ):
        return f"the arguments of {key} changed, which its decorator may have read"
    if not is_signature_equal and not _has_literal_defaults(new) and _defaults(old) != _defaults(new):
        return f"the default of an argument of {key} changed, and is not a literal"
    if getattr(new, "type_params", None):
        return f"{key} has type parameters"
    found.changed.append(key)
    found.changes_signatures |= not is_signature_equal or _is_generator(old) != _is_generator(new)
    return None


def _addition_problem(key: FunctionKey, new: Outline, used: frozenset[str]) -> str | None:
    """Return why a function can't be added to a process; None if it can."""
    node = new.functions[key]
    if key in new.conditional or getattr(node, "type_params", None) or key.number:
        return f"{key} was added"
    if _runs_at_start(key, used):
        return f"{key}, which was added, runs while the process loads"
    decorators = set(map(_name_of, node.decorator_list))
    if not decorators <= BUILT_IN_DECORATORS or ("." not in key.name and decorators):
        return f"{key}, which was added, has a decorator"
    return None if _has_literal_defaults(node) else f"{key}, which was added, has a default that is not a literal"


def _foreign_decorator(node: FunctionNode) -> str | None:
    return next((ast.unparse(each) for each in node.decorator_list if _name_of(each) not in _KEEPING_FUNCTIONS), None)


def _name_of(decorator: ast.expr) -> str:
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    if isinstance(decorator, ast.Attribute):
        return decorator.attr
    return decorator.id if isinstance(decorator, ast.Name) else ""


def _defaults(node: FunctionNode) -> str:
    return _dump_all([*node.args.defaults, *node.args.kw_defaults])


def _has_literal_defaults(node: FunctionNode) -> bool:
    for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
        try:
            ast.literal_eval(default)
        except (ValueError, TypeError, SyntaxError):
            return False
    return True


def _without_docstring(node: FunctionNode) -> Sequence[ast.stmt]:
    match node.body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            return rest or [ast.Pass()]
    return node.body


def _is_generator(node: FunctionNode) -> bool:
    pending: list[ast.AST] = list(node.body)
    while pending:
        each = pending.pop()
        if isinstance(each, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            pending += ast.iter_child_nodes(each)
    return False


def _dump_all(nodes: Sequence[ast.AST | None]) -> str:
    return "\n".join("" if node is None else ast.dump(node) for node in nodes)
