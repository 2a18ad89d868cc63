"""Import the user's file, match it with its generation's row, construct it and bind its methods.

It runs in every replica: standard library only at import. It must not know HTTP, nor parse or encode anything.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from cortex.errors import UserError
from cortex.predictor.frames import format_user_traceback, user_code
from cortex.predictor.importing import import_user_file
from cortex.predictor.interface import FOREIGN_CLASSES, FOREIGN_METHODS, GENERATIONS, Generation, Signature
from cortex.predictor.signature import Argument, find_problems, from_function, nearest

__all__ = [
    "BoundMethod",
    "BoundPredictor",
    "Kind",
    "LoadSpec",
    "format_user_traceback",
    "load",
    "result_kind",
    "split_callback",
]

Kind = Literal["sync", "async", "generator", "async_generator"]
Call = Callable[[Any, Any, Any], Any]
AfterCall = Callable[[Any, Any, Any, Any], Any]


class LoadSpec(Protocol):
    """What the loader reads of a replica's spec."""

    @property
    def api(self) -> str: ...
    @property
    def interface(self) -> str: ...
    @property
    def project_dir(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def python_path(self) -> str | None: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def model_path(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class BoundMethod:
    """One serving method, ready to be called with everything a request has; it passes on what the user named."""

    name: str
    arguments: tuple[str, ...]
    needs_payload: bool
    needs_query_params: bool
    needs_headers: bool
    kind: Kind
    call: Call  #: (payload, query_params, headers) → what the user's method returned
    after: AfterCall | None = None  #: (response, payload, query_params, headers), once the answer is on its way
    after_is_async: bool = False


@dataclass(frozen=True, slots=True)
class BoundPredictor:
    """The user's object, constructed; `methods` by HTTP verb in upper case."""

    generation: Generation
    file: str
    methods: Mapping[str, BoundMethod]

    def describe(self) -> dict[str, Any]:
        """Say how to call it, as JSON for a GET that no method answers."""
        return {
            "message": self.generation.summary,
            "interface": self.generation.key,
            "methods": {
                verb: {"name": method.name, "arguments": list(method.arguments)}
                for verb, method in self.methods.items()
            },
        }


def load(spec: LoadSpec) -> BoundPredictor:
    """Import and construct the user's code; the caller has made the project the working directory.

    Raises: UserError with the user's frames, or with `file:line`, what is wrong with a signature and its fix.
    """
    generation = GENERATIONS[spec.interface]
    with user_code(f"while {spec.path} was being imported"):
        module = import_user_file(Path(spec.project_dir), spec.path, spec.python_path)
    target: Any = module if generation.class_name is None else _find_class(module, generation.class_name, spec.path)
    found = {name: verb for name, verb in generation.methods.items() if callable(getattr(target, name, None))}
    _check_members(target, generation, found, spec.path)
    config = copy.deepcopy(spec.config)
    if generation.class_name is None:
        _initialize(target, generation, spec.model_path, config)
        methods = {verb: _bind_function(getattr(target, name), name, config) for name, verb in found.items()}
    else:
        instance = _construct(target, generation, _constructor_values(spec, config))
        methods = {verb: _bind_method(instance, name, generation) for name, verb in found.items()}
    return BoundPredictor(generation, spec.path, methods)


def split_callback(result: Any, interface: str) -> tuple[Any, Callable[[], Any] | None]:
    """Split `(result, callback)` where the generation answers that way; any other value is a result."""
    if type(result) is tuple and len(result) == 2 and callable(result[1]) and GENERATIONS[interface].returns_callback:
        return result
    return result, None


def result_kind(result: Any) -> Kind:
    """Tell what a method that looked synchronous returned: a value, or something to await or iterate.

    Decorators hide the nature of a function, and a plain method may return a generator that it made.
    """
    if inspect.isgenerator(result):
        return "generator"
    if inspect.isasyncgen(result):
        return "async_generator"
    return "async" if inspect.isawaitable(result) else "sync"


def _find_class(module: ModuleType, name: str, file: str) -> type:
    target = getattr(module, name, None)
    if inspect.isclass(target):
        return target
    if target is not None:
        raise UserError(f"{file}: {name} must be a class, but is a {type(target).__name__}")
    classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
    foreign = next((key for key in classes if key in FOREIGN_CLASSES), None)
    other = next((g for g in GENERATIONS.values() if g.class_name in classes), None)
    if foreign:
        fix = FOREIGN_CLASSES[foreign]
    elif other:
        fix = f"class {other.class_name} belongs to {other.yaml_form}"
    else:
        guess = nearest(name, classes)
        fix = f'did you mean class {guess}? rename it to "{name}"' if guess else "define it"
    raise UserError(f"{file}: class {name} is not defined; {fix}")


def _check_members(target: Any, generation: Generation, found: Mapping[str, str], file: str) -> None:
    where = f"{file}: " + (f"class {generation.class_name}: " if generation.class_name else "")
    if not found:
        wanted = " or ".join(f"{name}()" for name in generation.methods)
        other = next((kind for name, kind in FOREIGN_METHODS.items() if hasattr(target, name)), None)
        fix = f"; it is written for `kind: {other}`" if other else ""
        raise UserError(f"{where}{wanted} is not defined{fix}")
    if generation.constructor_required or hasattr(target, generation.constructor):
        _check_signature(target, generation.constructor, generation.constructor_signature, generation, file)
    for name in found:
        _check_signature(target, name, generation.method_signature, generation, file)
    for name, signature in generation.hooks.items():
        if hasattr(target, name):
            _check_signature(target, name, signature, generation, file)


def _check_signature(target: Any, name: str, signature: Signature, generation: Generation, file: str) -> None:
    function = getattr(target, name)
    if function is object.__init__:
        raise UserError(f"{file}: class {target.__name__}: __init__(self, config) is not defined; add it")
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


def _arguments(function: Any) -> list[Argument] | None:
    try:
        return from_function(function)
    except (TypeError, ValueError):  # written in C: it will say itself what it misses
        return None


def _names(function: Any, signature: Signature) -> tuple[str, ...]:
    """Return the names that the user's function declares and that we may pass."""
    declared = _arguments(function)
    allowed = signature.allowed
    return allowed if declared is None else tuple(a.name for a in declared if a.name in allowed)


def _initialize(module: Any, generation: Generation, model_path: str | None, metadata: dict[str, Any]) -> None:
    init = getattr(module, generation.constructor, None)
    if init is not None:
        with user_code(f"by {generation.constructor}()"):
            init(model_path, metadata)


def _constructor_values(spec: LoadSpec, config: dict[str, Any]) -> dict[str, Any]:
    section = {"type": "python", "path": spec.path, "python_path": spec.python_path, "config": config}
    api_spec = {"name": spec.api, "kind": "RealtimeAPI", "predictor": section}
    return {"config": config, "api_spec": api_spec, "job_spec": None}


def _construct(target: type, generation: Generation, values: Mapping[str, Any]) -> object:
    names = _names(target.__init__, generation.constructor_signature)  # type: ignore[misc]
    with user_code(f"by {target.__name__}.__init__()"):
        return target(**{name: values[name] for name in names if name in values})


def _bind_function(function: Any, name: str, metadata: dict[str, Any]) -> BoundMethod:
    return BoundMethod(
        name=name,
        arguments=("sample", "metadata"),
        needs_payload=True,
        needs_query_params=False,
        needs_headers=False,
        kind=_kind(function),
        call=lambda payload, query_params, headers: function(payload, metadata),
    )


def _bind_method(instance: object, name: str, generation: Generation) -> BoundMethod:
    method = getattr(instance, name)
    names = _names(method, generation.method_signature)
    after = getattr(instance, generation.after_hook, None) if generation.after_hook else None
    after_names: tuple[str, ...] = ()
    if after is not None and generation.after_hook is not None:
        after_names = _names(after, generation.hooks[generation.after_hook])
    # The hook sees the request too, so what only the hook names must be parsed as well.
    needed = {*names, *after_names}
    return BoundMethod(
        name=name,
        arguments=names,
        needs_payload="payload" in needed,
        needs_query_params="query_params" in needed,
        needs_headers="headers" in needed,
        kind=_kind(method),
        call=_bind_arguments(method, names),
        after=_bind_after(after, after_names) if after is not None else None,
        after_is_async=after is not None and _kind(after) == "async",
    )


def _bind_arguments(f: Any, names: tuple[str, ...]) -> Call:
    """Build the cheapest call that passes just `names`: chosen once, nothing is looked at per call."""
    if "batch_id" in names:  # belongs to jobs; a realtime request has none
        f = functools.partial(f, batch_id=None)
    calls: dict[tuple[bool, bool, bool], Call] = {
        (False, False, False): lambda p, q, h: f(),
        (True, False, False): lambda p, q, h: f(payload=p),
        (False, True, False): lambda p, q, h: f(query_params=q),
        (False, False, True): lambda p, q, h: f(headers=h),
        (True, True, False): lambda p, q, h: f(payload=p, query_params=q),
        (True, False, True): lambda p, q, h: f(payload=p, headers=h),
        (False, True, True): lambda p, q, h: f(query_params=q, headers=h),
        (True, True, True): lambda p, q, h: f(payload=p, query_params=q, headers=h),
    }
    return calls["payload" in names, "query_params" in names, "headers" in names]


def _bind_after(hook: Any, names: tuple[str, ...]) -> AfterCall:
    def after(response: Any, payload: Any, query_params: Any, headers: Any) -> Any:
        values = {"response": response, "payload": payload, "query_params": query_params, "headers": headers}
        return hook(**{name: values[name] for name in names})

    return after


def _kind(function: Any) -> Kind:
    if not (inspect.isroutine(function) or isinstance(function, functools.partial)):
        function = type(function).__call__.__get__(function)  # an object with `__call__`
    if inspect.isasyncgenfunction(function):
        return "async_generator"
    if inspect.isgeneratorfunction(function):
        return "generator"
    return "async" if inspect.iscoroutinefunction(function) else "sync"
