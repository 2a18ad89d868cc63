"""Rules that the loader and the checks of source files share: signatures, and hints for misplaced members.

Pure. The loader passes live functions, `source_checks` passes syntax trees, and both report the same problems.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cortex.predictor.interface import BATCH_KEY, GENERATIONS, Generation, Signature
from cortex.spelling import nearest


class ArgumentKind(Enum):
    """Ways to pass an argument."""

    POSITIONAL_ONLY = "positional-only"
    ORDINARY = "ordinary"
    STAR = "*"
    KEYWORD_ONLY = "keyword-only"
    DOUBLE_STAR = "**"


@dataclass(frozen=True)
class Argument:
    """One declared argument."""

    name: str
    kind: ArgumentKind = ArgumentKind.ORDINARY
    has_default: bool = False
    fastapi_default: str = ""  #: the function of FastAPI that made the default: `Header`, `Depends`, …

    def __str__(self) -> str:
        stars = self.kind.value if self.kind in (ArgumentKind.STAR, ArgumentKind.DOUBLE_STAR) else ""
        return stars + self.name


@dataclass(frozen=True)
class SignatureProblem:
    """A problem of a signature, with its fix."""

    message: str
    fix: str
    argument: int | None = None  #: index of the invalid argument; None if an argument is missing


#: Functions of FastAPI whose results are no defaults here, except those in `_OF_ROUTES` → what to write instead.
_FASTAPI_DEFAULTS = {
    "Query": "remove the default, and read query_params; methods with @cortex.route may have it",
    "Path": 'only methods with @cortex.route("GET", "/path/{name}") may have it',
    "Header": 'remove it, and read headers["{header}"]',
    "Cookie": 'remove it, and read headers["cookie"]',
    "Body": "remove it, and annotate payload with a class",
    "Form": "remove it, and annotate payload with a class that has a field for each part of the form",
    "File": "remove it, and annotate payload with a class that has a field for each part of the form",
    "Depends": "call the function in the method, or once in __init__",
    "Security": "remove it, and set `auth: api_key` in cortex.yaml, or check headers in the method",
}
_OF_ROUTES = frozenset({"Query", "Path"})


def from_function(function: object) -> list[Argument]:
    """Return the arguments of a live function, through `functools.wraps`, including `self`.

    Raises: ValueError, TypeError if Python has no signature for it (some functions written in C).
    """
    kinds = {
        inspect.Parameter.POSITIONAL_ONLY: ArgumentKind.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD: ArgumentKind.ORDINARY,
        inspect.Parameter.VAR_POSITIONAL: ArgumentKind.STAR,
        inspect.Parameter.KEYWORD_ONLY: ArgumentKind.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD: ArgumentKind.DOUBLE_STAR,
    }
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [
        Argument(p.name, kinds[p.kind], p.default is not inspect.Parameter.empty, fastapi_function(p.default))
        for p in parameters
    ]


def fastapi_function(default: object) -> str:
    """Return the name of the function of FastAPI that made a default, or an entry of `Annotated`; empty if none did."""
    cls = type(default)
    return cls.__name__ if cls.__module__ == "fastapi.params" else ""


def find_problems(signature: Signature, arguments: Sequence[Argument], takes_self: bool) -> list[SignatureProblem]:
    """Compare `arguments` with a signature; with `takes_self`, the first one must be `self`."""
    if takes_self and (not arguments or arguments[0].name != "self" or arguments[0].kind is ArgumentKind.STAR):
        return [
            SignatureProblem(
                '"self" must be the first argument', 'put "self" before the others', 0 if arguments else None
            )
        ]
    first = int(takes_self)
    if signature.positional:
        return list(_positional_problems(signature, arguments))
    numbered = list(enumerate(arguments))[first:]
    return [*_unsupported(signature, numbered), *_missing(signature, [argument for _, argument in numbered])]


def _unsupported(signature: Signature, numbered: Sequence[tuple[int, Argument]]) -> Iterator[SignatureProblem]:
    declared = {argument.name for _, argument in numbered}
    for index, argument in numbered:
        name = argument.name
        if argument.kind is ArgumentKind.STAR:
            yield SignatureProblem(f'"*{name}" is not supported', f"name each argument: {_list(signature)}", index)
        elif fix := fix_of_default(argument.fastapi_default, name, signature.fills_defaults):
            yield SignatureProblem(f'"{name}" can\'t be filled by {argument.fastapi_default}() of FastAPI', fix, index)
        elif argument.has_default or argument.kind is ArgumentKind.DOUBLE_STAR:
            continue
        elif name in signature.allowed and argument.kind is ArgumentKind.POSITIONAL_ONLY and not signature.positional:
            yield SignatureProblem(f'"{name}" can\'t be passed by name', 'remove the "/" from the arguments', index)
        elif name in signature.refused:
            yield SignatureProblem(f'"{name}" is not available', signature.refused[name], index)
        elif name not in signature.allowed:
            guess = nearest(name, [allowed for allowed in signature.allowed if allowed not in declared])
            others = f"write ({_list(signature)})" if signature.positional else f"supported: {_list(signature)}"
            fix = f'did you mean "{guess}"?' if guess else f"{others}; any other needs a default"
            yield SignatureProblem(f'"{name}" is not a supported argument', fix, index)


def fix_of_default(function: str, argument: str, is_of_route: bool = True) -> str:
    """Return what to write instead of a default by a function of FastAPI; empty if the default is supported."""
    if is_of_route and function in _OF_ROUTES:
        return ""
    return _FASTAPI_DEFAULTS.get(function, "").replace("{header}", argument.replace("_", "-"))


def _missing(signature: Signature, arguments: Sequence[Argument]) -> Iterator[SignatureProblem]:
    named = {a.name for a in arguments if a.kind not in (ArgumentKind.STAR, ArgumentKind.DOUBLE_STAR)}
    for name in signature.required:
        if name not in named and not _is_misspelt(name, signature, named):
            yield SignatureProblem(f'"{name}" is a required argument, but was not provided', f'add "{name}"')


def _is_misspelt(name: str, signature: Signature, declared: Iterable[str]) -> bool:
    """Return whether a declared name is already reported as a misspelling of `name`: one mistake, one message."""
    unknown = [other for other in declared if other not in signature.allowed and other not in signature.refused]
    return any(nearest(other, signature.allowed) == name for other in unknown)


def _positional_problems(signature: Signature, arguments: Sequence[Argument]) -> Iterator[SignatureProblem]:
    expected = signature.required
    order = f"write ({', '.join(expected)})"
    for index, argument in enumerate(arguments):
        if argument.kind is ArgumentKind.STAR:
            yield SignatureProblem(f'"*{argument.name}" is not supported', order, index)
            return
    passed = [(i, a) for i, a in enumerate(arguments) if not a.has_default and a.kind is not ArgumentKind.DOUBLE_STAR]
    names = [argument.name for _, argument in passed]
    if sorted(names) == sorted(expected) and names != list(expected):
        index = next(i for (i, argument), name in zip(passed, expected, strict=True) if argument.name != name)
        yield SignatureProblem(f"the arguments must be in the order {', '.join(expected)}", order, index)
        return
    ordinary = [a.name for a in arguments if a.kind in (ArgumentKind.ORDINARY, ArgumentKind.POSITIONAL_ONLY)]
    if tuple(ordinary[: len(expected)]) == expected and len(names) <= len(expected):
        return
    unsupported = list(_unsupported(signature, passed))
    yield from unsupported or _missing(signature, arguments)  # an unsupported name already implies the missing one


def _list(signature: Signature) -> str:
    return ", ".join(signature.allowed) or "none"


def declared_names(function: Any, signature: Signature) -> tuple[str, ...]:
    """Return the names that the user's function declares and that Cortex may pass."""
    declared = declared_arguments(function)
    allowed = signature.allowed
    return allowed if declared is None else tuple(a.name for a in declared if a.name in allowed)


def declared_arguments(function: Any) -> list[Argument] | None:
    """Return the arguments of a live function; None if Python has no signature for it."""
    try:
        return from_function(function)
    except (TypeError, ValueError):  # written in C: a wrong call raises TypeError
        return None


def find_foreign_class(wanted: Generation, classes: Container[str]) -> tuple[str, str] | None:
    """Return one of `classes` that belongs to another generation, kind or type, and a hint that names it."""
    for other in _others(wanted):
        name = other.class_name or ""
        if name in classes and name != wanted.class_name:
            is_alike = (other.key, other.kind) == (wanted.key, wanted.kind)
            form = f"`type: {other.type}`" if is_alike else other.yaml_form
            return name, f"class {name} belongs to {form}"
    return None


def find_method_of_kind(wanted: Generation, methods: Container[str]) -> tuple[str, str] | None:
    """Return one of `methods` that the same class serves under another kind, and that kind."""
    same_class = (row for row in _others(wanted) if (row.key, row.class_name) == (wanted.key, wanted.class_name))
    of_kinds = {name: row.kind for row in same_class for name in row.methods}
    for name, kind in of_kinds.items():
        if name in methods and name not in wanted.methods:
            return name, kind
    return None


def find_foreign_method(wanted: Generation, methods: Container[str]) -> tuple[str, str] | None:
    """Return one of `methods` that only another generation serves, and a hint that names it."""
    for other in _others(wanted):
        for name in other.methods:
            if other.class_name and name in methods and name not in wanted.methods:
                return name, f"{name} belongs to {other.yaml_form}"
    return None


def _others(wanted: Generation) -> list[Generation]:
    """Return all rows, those of the same kind first: a wrong class is likelier than a wrong kind."""
    return sorted(GENERATIONS.values(), key=lambda row: row.kind != wanted.kind)


_OR_REMOVE = 'or remove "server_side_batching" from the configuration'


def batched_method(generation: Generation) -> str:
    """Return the name of the method that server-side batching calls: the one for POST."""
    return next(name for name, verb in generation.methods.items() if verb == "POST")


def batching_problem(name: str, is_defined: bool, is_streaming: bool) -> tuple[str, str] | None:
    """Return why `server_side_batching` can't use a method, and the fix; None if it can."""
    if not is_defined:
        return (
            f"server_side_batching requires {name}(), which is not defined",
            f"add it, {_OR_REMOVE}",
        )
    if is_streaming:
        fix = f"return a list with one result for each request, {_OR_REMOVE}"
        return f"server_side_batching can't combine calls of {name}(), which streams its responses", fix
    return None


def batch_key_problem(is_plain: bool) -> tuple[str, str] | None:
    """Return why server-side batching can't use the class's `batch_key`, and the fix; None if it can."""
    if is_plain:
        return None
    return f"{BATCH_KEY}() runs on the event loop and must return a key", f"write `def {BATCH_KEY}(self, payload)`"
