"""Compare the arguments that a user's function declares with those that its generation allows.

Pure: the loader feeds it from live functions, the source checker from syntax trees, so both say the same.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from cortex.predictor.interface import Signature


class ArgumentKind(Enum):
    """How an argument may be passed."""

    POSITIONAL_ONLY = "positional-only"
    ORDINARY = "ordinary"
    STAR = "*"
    KEYWORD_ONLY = "keyword-only"
    DOUBLE_STAR = "**"


@dataclass(frozen=True)
class Argument:
    """One argument as declared."""

    name: str
    kind: ArgumentKind = ArgumentKind.ORDINARY
    has_default: bool = False

    def __str__(self) -> str:
        stars = self.kind.value if self.kind in (ArgumentKind.STAR, ArgumentKind.DOUBLE_STAR) else ""
        return stars + self.name


@dataclass(frozen=True)
class Problem:
    """What is wrong with a signature; `argument` is the index of the guilty one, None if one is missing."""

    message: str
    fix: str
    argument: int | None = None


def nearest(name: str, candidates: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the candidate that `name` is most likely a misspelling of."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=likeness)
    return by_lower[found[0]] if found else None


def from_function(function: object) -> list[Argument]:
    """Read the arguments of a live function, through `functools.wraps`, `self` included.

    Raises: ValueError, TypeError where Python knows no signature (some functions written in C).
    """
    kinds = {
        inspect.Parameter.POSITIONAL_ONLY: ArgumentKind.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD: ArgumentKind.ORDINARY,
        inspect.Parameter.VAR_POSITIONAL: ArgumentKind.STAR,
        inspect.Parameter.KEYWORD_ONLY: ArgumentKind.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD: ArgumentKind.DOUBLE_STAR,
    }
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [Argument(p.name, kinds[p.kind], p.default is not inspect.Parameter.empty) for p in parameters]


def find_problems(signature: Signature, arguments: Sequence[Argument], takes_self: bool) -> list[Problem]:
    """Return what is wrong with `arguments`; `takes_self` says that the first must be `self`."""
    if takes_self and (not arguments or arguments[0].name != "self" or arguments[0].kind is ArgumentKind.STAR):
        return [Problem('"self" must be the first argument', 'put "self" before the others', 0 if arguments else None)]
    first = int(takes_self)
    if signature.positional:
        return list(_positional_problems(signature, arguments))
    numbered = list(enumerate(arguments))[first:]
    return [*_unsupported(signature, numbered), *_missing(signature, [argument for _, argument in numbered])]


def _unsupported(signature: Signature, numbered: Sequence[tuple[int, Argument]]) -> Iterator[Problem]:
    declared = {argument.name for _, argument in numbered}
    for index, argument in numbered:
        name = argument.name
        if argument.kind is ArgumentKind.STAR:
            yield Problem(f'"*{name}" is not supported', f"name each argument: {_list(signature)}", index)
        elif argument.has_default or argument.kind is ArgumentKind.DOUBLE_STAR:
            continue
        elif name in signature.allowed and argument.kind is ArgumentKind.POSITIONAL_ONLY and not signature.positional:
            yield Problem(f'"{name}" can\'t be passed by name', 'remove the "/" from the arguments', index)
        elif name in signature.refused:
            yield Problem(f'"{name}" is not available', signature.refused[name], index)
        elif name not in signature.allowed:
            guess = nearest(name, [allowed for allowed in signature.allowed if allowed not in declared])
            others = f"write ({_list(signature)})" if signature.positional else f"supported: {_list(signature)}"
            fix = f'did you mean "{guess}"?' if guess else f"{others}; any other needs a default"
            yield Problem(f'"{name}" is not a supported argument', fix, index)


def _missing(signature: Signature, arguments: Sequence[Argument]) -> Iterator[Problem]:
    named = {a.name for a in arguments if a.kind not in (ArgumentKind.STAR, ArgumentKind.DOUBLE_STAR)}
    for name in signature.required:
        if name not in named and not _is_misspelt(name, signature, named):
            yield Problem(f'"{name}" is a required argument, but was not provided', f'add "{name}"')


def _is_misspelt(name: str, signature: Signature, declared: Iterable[str]) -> bool:
    """Tell whether one of the names declared is reported as a misspelling of `name`: one mistake, one message."""
    unknown = [other for other in declared if other not in signature.allowed and other not in signature.refused]
    return any(nearest(other, signature.allowed) == name for other in unknown)


def _positional_problems(signature: Signature, arguments: Sequence[Argument]) -> Iterator[Problem]:
    expected = signature.required
    order = f"write ({', '.join(expected)})"
    for index, argument in enumerate(arguments):
        if argument.kind is ArgumentKind.STAR:
            yield Problem(f'"*{argument.name}" is not supported', order, index)
            return
    passed = [(i, a) for i, a in enumerate(arguments) if not a.has_default and a.kind is not ArgumentKind.DOUBLE_STAR]
    names = [argument.name for _, argument in passed]
    if sorted(names) == sorted(expected) and names != list(expected):
        index = next(i for (i, argument), name in zip(passed, expected, strict=True) if argument.name != name)
        yield Problem(f"the arguments must be in the order {', '.join(expected)}", order, index)
        return
    ordinary = [a.name for a in arguments if a.kind in (ArgumentKind.ORDINARY, ArgumentKind.POSITIONAL_ONLY)]
    if tuple(ordinary[: len(expected)]) == expected and len(names) <= len(expected):
        return
    unsupported = list(_unsupported(signature, passed))
    yield from unsupported or _missing(signature, arguments)  # a wrong name says what is missing, too


def _list(signature: Signature) -> str:
    return ", ".join(signature.allowed) or "none"
