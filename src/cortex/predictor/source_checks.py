"""Check a live class or module of the user's against its generation's row: what is defined, and how it is declared."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import MethodWrapperType, ModuleType
from typing import Any

from cortex.errors import UserError
from cortex.predictor.interface import Generation, Signature
from cortex.predictor.misplaced_members import find_foreign_class, find_method_of_kind
from cortex.predictor.signature import Argument, find_problems, from_function, nearest


def find_class(module: ModuleType, generation: Generation, file: str) -> type:
    """Return the class that the generation wants. Raises: UserError."""
    name = generation.class_name or ""
    target = getattr(module, name, None)
    if inspect.isclass(target):
        return target
    if target is not None:
        raise UserError(f"{file}: {name} must be a class, but is a {type(target).__name__}")
    classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
    if foreign := find_foreign_class(generation, classes):
        fix = foreign[1]
    else:
        guess = nearest(name, classes)
        fix = f'did you mean class {guess}? rename it to "{name}"' if guess else "define it"
    raise UserError(f"{file}: class {name} is not defined; {fix}")


def is_defined(target: Any, name: str) -> bool:
    """Tell whether a class or module has a function; what calls the class itself is none of its methods."""
    function = getattr(target, name, None)
    return callable(function) and not isinstance(function, MethodWrapperType)


def check_members(target: Any, generation: Generation, found: Mapping[str, str], file: str) -> None:
    """Check what `target` defines and how; `found` are its serving methods. Raises: UserError."""
    where = f"{file}: " + (f"class {generation.class_name}: " if generation.class_name else "")
    if not found:
        wanted = " or ".join(f"{name}()" for name in generation.methods)
        other = find_method_of_kind(generation, dir(target))
        fix = f"; it is written for `kind: {other[1]}`" if other else ""
        raise UserError(f"{where}{wanted} is not defined{fix}")
    if generation.constructor_required or hasattr(target, generation.constructor):
        _check_signature(target, generation.constructor, generation.constructor_signature, generation, file)
    for name in found:
        _check_signature(target, name, generation.method_signature, generation, file)
    for name, signature in generation.hooks.items():
        if name in generation.required_hooks and not callable(getattr(target, name, None)):
            raise UserError(f"{where}{name}({', '.join(('self', *signature.required))}) is not defined; add it")
        if hasattr(target, name):
            _check_signature(target, name, signature, generation, file)


def _check_signature(target: Any, name: str, signature: Signature, generation: Generation, file: str) -> None:
    function = getattr(target, name)
    if function is object.__init__:
        if not generation.constructor_required:
            return
        shown = ", ".join(("self", *signature.required))
        raise UserError(f"{file}: class {target.__name__}: __init__({shown}) is not defined; add it")
    declared = _arguments(function)
    if declared is None:
        return
    static = inspect.getattr_static(target, name)
    # A partial has `__get__` from Python 3.13 on, but binds nothing before 3.14.
    never_bound = isinstance(static, staticmethod | classmethod | functools.partial)
    is_bound_later = hasattr(type(static), "__get__") and not never_bound
    problems = find_problems(signature, declared, takes_self=generation.class_name is not None and is_bound_later)
    if not problems:
        return
    code = getattr(inspect.unwrap(function), "__code__", None)
    where = f"{file}:{code.co_firstlineno}: " if code else f"{file}: "
    if generation.class_name:
        where += f"class {generation.class_name}: "
    noun = "method" if generation.class_name else "function"
    shown = f'{where}invalid signature for {noun} "{name}({", ".join(map(str, declared))})"'
    raise UserError("\n".join(f"{shown}: {problem.message}; {problem.fix}" for problem in problems))


def declared_names(function: Any, signature: Signature) -> tuple[str, ...]:
    """Return the names that the user's function declares and that we may pass."""
    declared = _arguments(function)
    allowed = signature.allowed
    return allowed if declared is None else tuple(a.name for a in declared if a.name in allowed)


def _arguments(function: Any) -> list[Argument] | None:
    try:
        return from_function(function)
    except (TypeError, ValueError):  # written in C: it will say itself what it misses
        return None
