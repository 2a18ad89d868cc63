"""The arguments that a request to an API needs, read from the user's file without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cortex.lifecycle import ApiKind
from cortex.predictor.checks.source_checks import FunctionNode, Source, scope_of
from cortex.predictor.interface import GENERATIONS, Generation

#: Names of the argument for the body.
_PAYLOADS = frozenset({"payload", "sample"})
_QUERY = "query_params"


@dataclass(frozen=True)
class RequestArguments:
    """The verb of a method, and the parts of a request that it reads."""

    verb: str  #: of HTTP
    payload_keys: tuple[str, ...] | None  #: the keys that `payload["key"]` reads, in order; None: it reads no body
    query_keys: tuple[str, ...] = ()  #: likewise, of the query parameters


def request_arguments(text: str, interface: str, type_: str, has_models: bool, kind: str) -> RequestArguments | None:
    """Return what the first serving method of a file reads; None if it is not plainly defined there."""
    generation = GENERATIONS[kind, interface, type_, has_models]
    functions = _functions(text, generation)
    serving = generation.select_serving(functions.__contains__)
    for name, verb in serving.items():
        function = functions[name]
        arguments = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        payload = next(iter(arguments & _PAYLOADS), None)
        return RequestArguments(
            verb if kind == ApiKind.REALTIME else "POST",
            None if payload is None else _keys_read(function, payload),
            _keys_read(function, _QUERY) if _QUERY in arguments else (),
        )
    return None


def is_inference_only(text: str, interface: str, type_: str, has_models: bool, kind: str) -> bool:
    """Return whether the class plainly answers the Open Inference Protocol, and nothing else at its endpoint."""
    generation = GENERATIONS[kind, interface, type_, has_models]
    is_defined = _functions(text, generation).__contains__
    return not generation.select_serving(is_defined) and generation.is_inference_only(is_defined)


def _functions(text: str, generation: Generation) -> Mapping[str, FunctionNode]:
    """Return the functions of the class, or of a module without one."""
    try:
        scope = Source(text, "").scope
    except SyntaxError:
        return {}
    if generation.class_name is None:
        return scope.functions()
    node = scope.classes().get(generation.class_name)
    return {} if node is None else scope_of(node.body).functions()


def _keys_read(function: FunctionNode, name: str) -> tuple[str, ...]:
    """Return the keys of all `name["key"]` in a function, in order."""
    return tuple(dict.fromkeys(key for _, _, key in sorted(_subscripts(function, name))))


def _subscripts(function: FunctionNode, name: str) -> Iterator[tuple[int, int, str]]:
    for node in ast.walk(function):
        match node:
            case ast.Subscript(value=ast.Name(id=found), slice=ast.Constant(value=str(key)), ctx=ast.Load()):
                if found == name:
                    yield node.lineno, node.col_offset, key
