"""Annotations of payloads that can't be resolved when a replica starts, found without running the file."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from cortex.errors import Diagnostic
from cortex.predictor.checks.route_checks import RouteNames
from cortex.predictor.checks.source_checks import FunctionNode, Scope, Source, arguments_of, scope_of
from cortex.predictor.interface import GENERATIONS
from cortex.spelling import nearest

#: Subscripts whose strings are values, not names of types.
_VALUES = frozenset({"Literal"})
_METADATA = frozenset({"Annotated"})


def check_annotations(
    text: str, file: str, interface: str, type_: str = "python", has_models: bool = False, kind: str = "RealtimeAPI"
) -> list[Diagnostic]:
    """Return a mistake for each name in the annotation of a payload that does not exist at run time."""
    generation = GENERATIONS.get((kind, interface, type_, has_models))
    if generation is None or not generation.is_typed or generation.class_name is None:
        return []
    try:
        source = Source(text, file)
    except SyntaxError:
        return []  # `check_source` reports it
    node = source.scope.classes().get(generation.class_name)
    if node is None or source.scope.is_open:
        return []
    members = scope_of(node.body)
    functions = members.functions()
    known = {*dir(builtins), *source.scope.bindings, *members.bindings}
    type_only = _names_for_type_checkers(source)
    found = []
    routed = [each.function.name for each in RouteNames(source.scope).decorators(members)]
    for name in dict.fromkeys([*generation.select_serving(functions.__contains__), *routed]):
        for annotation in _payload_annotations(functions[name], source.scope):
            line, column = source.position(annotation)
            for missing in _names(annotation):
                if missing in type_only:
                    message = f'"{missing}" in the annotation of payload is imported only for type checkers'
                    fix = "import it outside of `if TYPE_CHECKING:`"
                elif missing not in known:
                    message = f'"{missing}" in the annotation of payload is not defined'
                    guess = nearest(missing, [*source.scope.bindings, *members.bindings])
                    fix = f"did you mean {guess}?" if guess else "import or define it"
                else:
                    continue
                found.append(Diagnostic(file, line, column, "", f"{name}(): {message}", fix))
    return found


def _payload_annotations(function: FunctionNode, module: Scope) -> Iterator[ast.expr]:
    for argument in arguments_of(function, module)[1]:
        if argument.arg == "payload" and argument.annotation is not None:
            yield argument.annotation


def _names_for_type_checkers(source: Source) -> set[str]:
    """Return the names that the file binds only below `if TYPE_CHECKING:`."""
    names: dict[str, int] = {}
    for statement in source.tree.body:
        if isinstance(statement, ast.If) and _is_type_checking(statement.test):
            for name, bindings in scope_of(statement.body).bindings.items():
                names[name] = names.get(name, 0) + len(bindings)
    scope: Scope = source.scope
    return {name for name, count in names.items() if count == len(scope.bindings[name])}


def _is_type_checking(test: ast.expr) -> bool:
    return (test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")) == "TYPE_CHECKING"


def _names(annotation: ast.expr) -> Iterator[str]:
    """Yield the names in an annotation, also those in strings that are types."""
    match annotation:
        case ast.Name(id=name):
            yield name
        case ast.Constant(value=str(text)):
            try:
                yield from _names(ast.parse(text.strip(), mode="eval").body)
            except (SyntaxError, ValueError, RecursionError):
                return  # any text: the replica reports why it is of no use
        case ast.Subscript(value=base, slice=inner):
            yield from _names(base)
            name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
            if name in _METADATA and isinstance(inner, ast.Tuple) and inner.elts:
                yield from _names(inner.elts[0])
            elif name not in _VALUES:
                yield from _names(inner)
        case ast.Attribute(value=base):
            yield from _names(base)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _names(part)
        case ast.BinOp(left=left, right=right):
            yield from _names(left)
            yield from _names(right)
