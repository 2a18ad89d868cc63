"""Check the user's Python file without running it: syntax, class, methods and signatures.

`check_source` reads the syntax tree. Where the source is ambiguous (imported or decorated definitions, unknown base
classes), it reports nothing: the loader makes the same checks on the live class when a replica starts.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec

import cortex
from cortex.errors import Diagnostic
from cortex.lifecycle import ApiKind
from cortex.predictor.applications import ATTRIBUTE
from cortex.predictor.checks.route_checks import RouteDecorator, RouteNames, name_of, names_of
from cortex.predictor.interface import BATCH_KEY, GENERATIONS, Generation, Signature, for_grpc
from cortex.predictor.interface_rules import (
    Argument,
    ArgumentKind,
    batch_key_problem,
    batched_method,
    batching_problem,
    find_foreign_class,
    find_foreign_method,
    find_method_of_kind,
    find_problems,
)
from cortex.predictor.routes import repeated, unsupported
from cortex.spelling import nearest

#: Methods that some kind of API serves; they are never reported as misspellings.
_SERVING = frozenset(name for row in GENERATIONS.values() for name in row.methods)
#: Similarity from which a name counts as a misspelling, although it may be a method of the user's own.
_LIKELY_MISSPELLING = 0.7
#: Classes of applications → the `type` that serves them.
_APPLICATIONS = {
    **dict.fromkeys(("FastAPI", "Starlette", "Litestar", "Quart", "Sanic"), "asgi"),
    **dict.fromkeys(("Flask", "Bottle"), "wsgi"),
}
_NEWLINE = r"\r\n|\r|\n"  #: as in Python; str.splitlines splits at more characters
#: Longer files hold data rather than code. No other thread runs for seconds while they are parsed.
MAX_SOURCE_LENGTH = 256 * 1024


def check_source(
    text: str,
    file: str,
    interface: str,
    type_: str = "python",
    has_models: bool = False,
    kind: str = "RealtimeAPI",
    batches: bool = False,
    has_application: bool = False,
    rpcs: Sequence[str] | None = None,
) -> list[Diagnostic]:
    """Return the mistakes in a `.py` file that can be found without running it.

    `file` is the name in messages; `batches` means that the API uses server-side batching; `rpcs` are those of the
    service of a gRPC API. With `has_application`, the module has an application instead of a class.
    """
    generation = GENERATIONS.get((kind, interface, type_, has_models))
    if generation is None:  # a type that this kind or section does not support, which its own rule reports
        return []
    if len(text) > MAX_SOURCE_LENGTH:
        return []
    if rpcs is not None:
        generation = for_grpc(generation, rpcs)
    try:
        source = Source(text, file)
    except SyntaxError as exc:
        line = exc.lineno or 0
        column = max(exc.offset or 1, 1) if line else 0
        return [Diagnostic(file, line, column, "", f"{type(exc).__name__}: {exc.msg}", "correct the Python syntax")]
    checker = _Checker(source, file, generation, batches)
    names = list(checker.check_package_names())
    if names or has_application:  # what else is wrong may follow from them
        return sorted(names)
    found = checker.check_functions() if generation.class_name is None else checker.check_class(generation.class_name)
    return sorted(found)


def find_undecodable_byte(data: bytes, file: str) -> Diagnostic | None:
    """Return the first byte of a source file that is not text in UTF-8, or in the encoding that its coding line names.

    Not every Python refuses such a byte in a comment: see `is_parsable`.
    """
    ascii_data = re.sub(rb"[\x80-\xff]", b"", data)  # tokenize refuses such a byte before the coding line
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(ascii_data).readline)
        data.decode(encoding)
    except UnicodeDecodeError as error:
        lines = re.split(_NEWLINE, data[: error.start].decode(errors="replace"))
        message = f"is not {encoding.upper()} text (byte 0x{data[error.start]:02x})"
        fix = "save the file as UTF-8, or name its encoding in the first line: # -*- coding: latin-1 -*-"
        return Diagnostic(file, len(lines), len(lines[-1]) + 1, "", message, fix)
    except (SyntaxError, LookupError, UnicodeError):  # no encoding of text, which the import reports
        pass
    return None


def is_parsable(data: bytes) -> bool:
    """Return whether this Python can import a file, as far as its syntax and its encoding are concerned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(data)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


def find_missing_application(text: str, file: str, name: str) -> tuple[str, str] | None:
    """Return what is wrong with the name of an application in a source file, and the fix; None if it is defined."""
    try:
        scope = Source(text, file).scope
    except SyntaxError:  # `check_source` reports it
        return None
    if name in scope.bindings or scope.is_open:
        return None
    guess = nearest(name, scope.bindings)
    fix = f'did you mean "app: {guess}"?' if guess else "define it at the top level of the file"
    return f"{file} does not define {name}", fix


def class_routes(text: str, class_name: str) -> list[RouteDecorator]:
    """Return the routes that a class in a source file plainly has: its own, and those of bases in the same file."""
    try:
        source = Source(text, "")
    except SyntaxError:
        return []
    node = source.scope.classes().get(class_name)
    return [] if node is None else RouteNames(source.scope).decorators(members_of(source.scope, node)[0])


class _Checker:
    """Check one source against one generation."""

    def __init__(self, source: Source, file: str, generation: Generation, batches: bool) -> None:
        self._source = source
        self._file = file
        self._generation = generation
        self._batches = batches
        self._scope = source.scope
        self._routes = RouteNames(source.scope)

    def check_package_names(self) -> Iterator[Diagnostic]:
        """Check the names that the module uses from the package `cortex`."""
        for node, name in _package_names(self._source.tree):
            if name not in cortex.__all__ and not _is_submodule(name):
                guess = nearest(name, cortex.__all__)
                fix = f'did you mean "{guess}"?' if guess else f"its names are {', '.join(sorted(cortex.__all__))}"
                yield self._at(node, f"the package cortex has no name {name}", fix)

    def check_functions(self) -> Iterator[Diagnostic]:
        """Check a module that defines functions."""
        generation = self._generation
        yield from self._check_routes(self._routes.decorators(self._scope))
        for name in generation.methods:
            if name not in self._scope.bindings and not self._scope.is_open:
                yield self._missing_function(name)
            yield from self._check_member(self._scope, name, generation.method_signature)
        optional = {generation.constructor: generation.constructor_signature, **generation.hooks}
        for name, signature in optional.items():
            yield from self._check_member(self._scope, name, signature)
            yield from self._check_misspelling(self._scope, name)

    def check_class(self, name: str) -> Iterator[Diagnostic]:
        """Check the class `name`."""
        bindings = self._scope.bindings.get(name, [])
        if not bindings:
            if not self._scope.is_open:
                yield self._missing_class(name)
            return
        if not all(isinstance(binding.node, ast.ClassDef) for binding in bindings):
            return  # assigned or imported: its members are not visible here
        if any(binding.conditional for binding in bindings):
            return
        node, *others = [binding.node for binding in bindings]
        if others:
            message = f"class {name} is defined twice, first on line {node.lineno}"
            yield self._at(others[0], message, "keep one of the two")
        elif isinstance(node, ast.ClassDef) and not node.decorator_list and not node.keywords:
            yield from self._check_members(node)

    def _check_members(self, node: ast.ClassDef) -> Iterator[Diagnostic]:
        generation = self._generation
        scope, is_complete = members_of(self._scope, node)
        constructor = generation.constructor
        if constructor not in scope.bindings and is_complete and generation.constructor_required:
            at = self._guess(constructor, scope)
            fix = _rename(at, constructor) if at else "add it"
            shown = ", ".join(("self", *generation.constructor_signature.required))
            yield self._at_name(scope, at, node, f"{self._of_class}__init__({shown}) is not defined", fix)
        serving = generation.select_serving(scope.bindings.__contains__)
        routes = self._routes.decorators(scope)
        yield from self._check_routes(routes)
        if generation.has_application:
            if is_complete and ATTRIBUTE not in scope.bindings and not _sets_attribute(node, ATTRIBUTE):
                fix = f"set self.{ATTRIBUTE} in __init__, or define a method {ATTRIBUTE}(self) that returns it"
                yield self._at(node, f"{self._of_class}{ATTRIBUTE} is not defined", fix)
            yield from self._check_member(scope, ATTRIBUTE, Signature())
        elif generation.is_grpc:
            missing = [name for name in generation.methods if name not in serving] if is_complete else []
            yield from (self._missing_rpc(name, scope, node) for name in missing)
        elif is_complete and not (serving or routes or generation.is_inference_only(scope.bindings.__contains__)):
            yield self._missing_method(scope, node)
        elif is_complete:  # otherwise it may override a method of an unknown base
            unused = () if self._batches else (BATCH_KEY,)
            for name in sorted({*generation.methods, *generation.hooks} - generation.required_hooks - {*unused}):
                yield from self._check_misspelling(scope, name)
        if is_complete:
            yield from self._missing_hooks(scope, node)
        if is_complete and serving and self._batches:
            yield from self._check_batched(scope, node)
        yield from self._check_member(scope, constructor, generation.constructor_signature)
        for name in serving:
            yield from self._check_member(scope, name, generation.method_signature)
            for each in self._plain_definitions(scope, name)[-1:]:
                if generation.kind == ApiKind.ASYNC and is_generator(each):
                    message = f"{self._of_class}{name}() yields, but the result of a workload must be a dict"
                    yield self._at(each, message, "return one dict")
        for name, signature in generation.hooks.items():
            yield from self._check_member(scope, name, signature)

    def _check_routes(self, decorators: list[RouteDecorator]) -> Iterator[Diagnostic]:
        """Check the routes of a class, or that there are none."""
        if problem := unsupported(self._generation):
            for each in decorators:
                yield self._at(each.node, f"{self._of_class}{problem[0]}", problem[1])
            return
        for each in decorators:
            if each.error is not None:
                yield self._at(each.node, f"{self._of_class}{each.error.message}", each.error.fix)
            elif each.route is not None and not self._has_unknown_decorator(each.function):
                yield from self._check_signature(each.function, each.route.signature(self._generation))
        routes = [(each, each.route) for each in decorators if each.route is not None]
        for index, first in repeated((each.function.name, route) for each, route in routes):
            each, route = routes[index]
            lines = [other.function.lineno for other, same in routes[:index] if same.key == route.key]
            message = f"{self._of_class}{route} is the route of {first} on line {lines[0]}, too"
            yield self._at(each.node, message, "change one of the two")

    def _check_member(self, scope: Scope, name: str, signature: Signature) -> Iterator[Diagnostic]:
        """Check one function, if it is plainly defined."""
        nodes = self._plain_definitions(scope, name)
        if not nodes:
            return
        if name == self._generation.constructor and isinstance(nodes[-1], ast.AsyncFunctionDef):
            yield self._at(
                nodes[-1], f"{self._of_class}{name}() is async", f"write `def {name}`: no event loop runs yet"
            )
        for other in nodes[1:]:
            message = f"{self._of_class}{self._noun} {name} is defined twice, first on line {nodes[0].lineno}"
            yield self._at(other, message, "keep one of the two")
        yield from self._check_signature(nodes[-1], signature)

    def _plain_definitions(self, scope: Scope, name: str) -> list[FunctionNode]:
        """Return the definitions of a function; none unless all are unconditional, under decorators that we know."""
        bindings = scope.bindings.get(name, [])
        nodes = [each.node for each in bindings if isinstance(each.node, FunctionNode) and not each.conditional]
        is_plain = len(nodes) == len(bindings) and not any(map(self._has_unknown_decorator, nodes))
        return nodes if is_plain else []

    def _check_signature(self, function: FunctionNode, signature: Signature) -> Iterator[Diagnostic]:
        arguments, nodes = arguments_of(function, self._scope)
        takes_self = self._generation.class_name is not None
        shown = f"{function.name}({', '.join(map(str, arguments))})"
        decorators = {decorator.id for decorator in function.decorator_list if isinstance(decorator, ast.Name)}
        if "classmethod" in decorators:
            arguments, nodes = arguments[1:], nodes[1:]
        if decorators:
            takes_self = False
        for problem in find_problems(signature, arguments, takes_self):
            message = f'{self._of_class}invalid signature for {self._noun} "{shown}": {problem.message}'
            at = function if problem.argument is None else nodes[problem.argument]
            yield self._at(at, message, problem.fix)

    def _missing_function(self, name: str) -> Diagnostic:
        message = f"function {name}({', '.join(self._generation.method_signature.required)}) is not defined"
        classes = self._scope.classes()
        if foreign := find_foreign_class(self._generation, classes):
            return self._at(classes[foreign[0]], message, foreign[1])
        guess = nearest(name, self._scope.functions())
        fix = _rename(guess, name) if guess else "define it at the top level of the file"
        return self._at_name(self._scope, guess, None, message, fix)

    def _application(self) -> tuple[str, str, ast.stmt] | None:
        """Return the variable or factory of an application, the type that serves it, and its statement."""
        for name, bindings in self._scope.bindings.items():
            node = bindings[-1].node
            if type_ := _type_of_application(node, self._scope):
                return name, type_, node
        return None

    def _missing_class(self, name: str) -> Diagnostic:
        message = f"class {name} is not defined"
        classes = self._scope.classes()
        if foreign := find_foreign_class(self._generation, classes):
            return self._at(classes[foreign[0]], message, foreign[1])
        if self._generation.has_application and "app" in self._scope.bindings:
            return Diagnostic(
                self._file, 0, 0, "", message, 'write "app: app" in cortex.yaml to serve app of this file'
            )
        if application := self._application():
            app, type_, node = application
            fix = f'write "type: {type_}" and "app: {app}" in cortex.yaml to serve {app} of this file'
            return self._at(node, message, fix)
        if service := self._bentoml_service(name, classes):
            return self._at(service[0], message, service[1])
        guess = nearest(name, classes) or self._class_that_serves(classes)
        if guess:
            return self._at(classes[guess], message, _rename(guess, name))
        method = next(iter(self._generation.methods), None)
        for other, class_node in classes.items():
            foreign = find_foreign_method(self._generation, scope_of(class_node.body).functions())
            if foreign and method is not None:
                fix = f"{_rename(other, name)}; {foreign[1]}: name it {method}"
                return self._at(class_node, message, fix)
        functions = GENERATIONS["RealtimeAPI", "functions", "python", False]
        for function, node in self._scope.functions().items():
            if function in functions.methods and method is not None:
                shown = ", ".join(("self", *(self._generation.method_signature.required or ("payload",))))
                older = f"functions of the module belong to {functions.yaml_form}, an older form"
                return self._at(node, message, f"define it with {method}({shown}); {older}")
        return Diagnostic(self._file, 0, 0, "", message, "define it at the top level of the file")

    def _bentoml_service(self, name: str, classes: Mapping[str, ast.ClassDef]) -> tuple[ast.ClassDef, str] | None:
        """Return a class that is a service of BentoML, and how to make it the class `name`."""
        services, apis = (names_of(self._scope, "bentoml", function) for function in ("service", "api"))
        method = next(iter(self._generation.methods), None)
        for other, node in classes.items():
            service = next((name_of(each) for each in node.decorator_list if name_of(each) in services), None)
            if service is None:
                continue
            fix = f"{_rename(other, name)}, and remove @{service}"
            decorators = (
                (function.name, name_of(decorator))
                for function in scope_of(node.body).functions().values()
                for decorator in function.decorator_list
            )
            for function, decorator in decorators:
                if decorator in apis and method is not None:
                    return node, f"{fix}; {function} belongs to BentoML: name it {method}, and remove @{decorator}"
            return node, fix
        return None

    def _class_that_serves(self, classes: Mapping[str, ast.ClassDef]) -> str | None:
        for name, node in classes.items():
            if any(method in scope_of(node.body).bindings for method in self._generation.methods):
                return name
        return None

    def _missing_method(self, scope: Scope, node: ast.ClassDef) -> Diagnostic:
        generation = self._generation
        shown = ", ".join(("self", *(generation.method_signature.required or ("payload",))))
        wanted = " or ".join(f"{name}({shown})" for name in list(generation.methods)[:2])
        message = f"{self._of_class}{wanted} is not defined"
        functions = scope.functions()
        if generation.key == "handler" and generation.kind == "RealtimeAPI" and _sets_attribute(node, ATTRIBUTE):
            return self._at(node, message, "self.app belongs to `type: asgi`")
        if found := find_method_of_kind(generation, functions):
            return self._at(functions[found[0]], message, f"{found[0]} belongs to `kind: {found[1]}`")
        if foreign := find_foreign_method(generation, functions):
            fix = f"{foreign[1]}; name it {next(iter(generation.methods))}"
            return self._at(functions[foreign[0]], message, fix)
        guesses = [
            self._guess(name, scope) or nearest(name, functions, _LIKELY_MISSPELLING) for name in generation.methods
        ]
        guess = next(filter(None, guesses), None)
        fix = _rename(guess, nearest(guess, generation.methods) or "") if guess else "add it"
        return self._at_name(scope, guess, node, message, fix)

    def _missing_rpc(self, method: str, scope: Scope, node: ast.ClassDef) -> Diagnostic:
        rpc = self._generation.methods[method]
        message = f"{self._of_class}{method}(self, payload) is not defined, which answers {rpc} of the service"
        guess = self._guess(method, scope) or nearest(method, scope.functions(), _LIKELY_MISSPELLING)
        fix = _rename(guess, method) if guess else "add it"
        return self._at_name(scope, guess, node, message, fix)

    def _missing_hooks(self, scope: Scope, node: ast.ClassDef) -> Iterator[Diagnostic]:
        for name in sorted(self._generation.required_hooks):
            if name not in scope.bindings:
                arguments = ", ".join(("self", *self._generation.hooks[name].required))
                guess = self._guess(name, scope)
                fix = _rename(guess, name) if guess else "add it: it loads a model from the files at a path"
                yield self._at_name(scope, guess, node, f"{self._of_class}{name}({arguments}) is not defined", fix)

    def _check_batched(self, scope: Scope, node: ast.ClassDef) -> Iterator[Diagnostic]:
        """Check that the class has a method that can process several requests in one call, and its `batch_key`."""
        for binding in scope.bindings.get(BATCH_KEY, []):
            if isinstance(binding.node, FunctionNode) and not self._has_unknown_decorator(binding.node):
                is_plain = isinstance(binding.node, ast.FunctionDef) and not is_generator(binding.node)
                if found := batch_key_problem(is_plain):
                    yield self._at(binding.node, self._of_class + found[0], found[1])
        name = batched_method(self._generation)
        if name not in scope.bindings and self._generation.inference_method in scope.bindings:
            return  # its requests are joined along their first axis
        bindings = scope.bindings.get(name, [])
        at = next((binding.node for binding in bindings if isinstance(binding.node, FunctionNode)), None)
        is_known = at is not None and len(bindings) == 1 and not self._has_unknown_decorator(at)
        is_streaming = at is not None and is_known and is_generator(at)
        problem = batching_problem(name, bool(bindings), is_streaming)
        if problem is not None and (bindings or self._guess(name, scope) is None):  # a misspelling has been reported
            yield self._at(at or node, self._of_class + problem[0], problem[1])

    def _check_misspelling(self, scope: Scope, name: str) -> Iterator[Diagnostic]:
        """Report an unused function whose name is similar to `name`, if `name` is not defined."""
        if name in scope.bindings:
            return
        guess = self._guess(name, scope)
        if guess is not None and guess not in self._source.used_names:
            node = scope.functions()[guess]
            yield self._at(node, f"{self._of_class}{self._noun} {guess} is never called", _rename(guess, name))

    def _guess(self, name: str, scope: Scope) -> str | None:
        """Return the function that is probably a misspelling of `name`; a shared `handle_` prefix is ignored."""
        generation = self._generation
        known = {generation.constructor, *generation.hooks, *_SERVING}
        prefix = "handle_" if name.startswith("handle_") else ""
        known |= {each.function.name for each in self._routes.decorators(scope)}
        candidates = {n.removeprefix(prefix): n for n in scope.functions() if n not in known and n.startswith(prefix)}
        guess = nearest(name.removeprefix(prefix), candidates, _LIKELY_MISSPELLING)
        return candidates[guess] if guess is not None else None

    def _has_unknown_decorator(self, function: FunctionNode) -> bool:
        return any(
            not (isinstance(decorator, ast.Name) and decorator.id in ("staticmethod", "classmethod"))
            and not self._routes.is_route(decorator)
            for decorator in function.decorator_list
        )

    @property
    def _of_class(self) -> str:
        return f"class {self._generation.class_name}: " if self._generation.class_name else ""

    @property
    def _noun(self) -> str:
        return "method" if self._generation.class_name else "function"

    def _at(self, node: ast.expr | ast.stmt | ast.arg, message: str, fix: str) -> Diagnostic:
        line, column = self._source.position(node)
        return Diagnostic(self._file, line, column, "", message, fix)

    def _at_name(
        self, scope: Scope, name: str | None, otherwise: ast.stmt | None, message: str, fix: str
    ) -> Diagnostic:
        node = scope.functions()[name] if name else otherwise
        return self._at(node, message, fix) if node else Diagnostic(self._file, 0, 0, "", message, fix)


def _rename(wrong: str, right: str) -> str:
    return f'did you mean this one? rename "{wrong}" to "{right}"'


def _type_of_application(node: ast.stmt, module: Scope) -> str:
    """Return the type that serves what a statement binds: an application, or its factory; empty if it is neither."""
    match node:
        case ast.Assign(value=value) | ast.AnnAssign(value=value):
            return _type_of_call(value)
        case ast.FunctionDef(body=body) if not node.decorator_list:
            arguments, _ = arguments_of(node, module)
            if all(each.has_default or each.name == "config" or str(each)[0] == "*" for each in arguments):
                scope = scope_of(body)
                values = (
                    each.value for each, _ in _statements(body, conditional=False) if isinstance(each, ast.Return)
                )
                return next(filter(None, (_type_of_result(value, scope) for value in values)), "")
    return ""


def _type_of_result(value: ast.expr | None, scope: Scope) -> str:
    if isinstance(value, ast.Name) and value.id in scope.bindings:
        node = scope.bindings[value.id][-1].node
        return _type_of_call(node.value) if isinstance(node, ast.Assign | ast.AnnAssign) else ""
    return _type_of_call(value)


def _type_of_call(value: ast.expr | None) -> str:
    match value:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return _APPLICATIONS.get(name, "")
    return ""


def _sets_attribute(node: ast.ClassDef, name: str) -> bool:
    """Return whether a method of a class assigns `self.<name>`."""
    return any(
        isinstance(inner, ast.Attribute) and inner.attr == name and isinstance(inner.ctx, ast.Store)
        for inner in ast.walk(node)
    )


FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True)
class Binding:
    """A statement that binds a name."""

    node: ast.stmt
    conditional: bool  #: the statement may not run


@dataclass(frozen=True)
class Scope:
    """The names that a module or class body binds, in order."""

    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    is_open: bool = False  #: it may bind further names dynamically

    def functions(self) -> dict[str, FunctionNode]:
        """Return the functions by name, the last definition of each."""
        return {n: b[-1].node for n, b in self.bindings.items() if isinstance(b[-1].node, FunctionNode)}

    def classes(self) -> dict[str, ast.ClassDef]:
        """Return the classes by name, the last definition of each."""
        return {n: b[-1].node for n, b in self.bindings.items() if isinstance(b[-1].node, ast.ClassDef)}


class Source:
    """A parsed source file."""

    def __init__(self, text: str, file: str) -> None:
        """Parse and compile `text` without running it. Raises: SyntaxError, also if it is too long to be checked."""
        if len(text) > MAX_SOURCE_LENGTH:
            raise SyntaxError(f"longer than {MAX_SOURCE_LENGTH} characters")
        text = text.removeprefix("\ufeff")
        self.text = text
        self._lines = re.split(_NEWLINE, text)
        if "\0" in text:
            line = text.count("\n", 0, text.index("\0")) + 1
            raise SyntaxError("the file contains a NUL byte: it is not text", (file, line, 1, None))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes of the user must not appear in the operator's log
            try:
                self.tree = ast.parse(text, file)
                compile(
                    text, file, "exec", dont_inherit=True
                )  # finds errors that the parser accepts, such as a stray `return`
            except (ValueError, RecursionError, MemoryError) as exc:
                raise SyntaxError(str(exc) or "too deeply nested") from exc
        self.scope = scope_of(self.tree.body)
        self.used_names = set(_used_names(self.tree))

    def position(self, node: ast.expr | ast.stmt | ast.arg) -> tuple[int, int]:
        """Return the 1-based line and column of a node; for a function or class, those of its name."""
        line = self._lines[node.lineno - 1] if node.lineno <= len(self._lines) else ""
        column = len(line.encode()[: node.col_offset].decode(errors="replace"))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            at = line.find(node.name, column + len("def "))
            column = at if at >= 0 else column
        return node.lineno, column + 1


def scope_of(body: list[ast.stmt]) -> Scope:
    """Collect the names that a body binds, including those inside `if`, `try`, `with` and loops."""
    bindings: dict[str, list[Binding]] = {}
    is_open = False
    for statement, conditional in _statements(body, conditional=False):
        for name in _bound_names(statement):
            if name == "*":
                is_open = True
            else:
                bindings.setdefault(name, []).append(Binding(statement, conditional))
    return Scope(bindings, is_open or _binds_dynamically(body))


def members_of(module: Scope, node: ast.ClassDef, seen: frozenset[str] = frozenset()) -> tuple[Scope, bool]:
    """Return the members of a class and its bases in this module; False if some bases are unknown."""
    own = scope_of(node.body)
    bindings = dict(own.bindings)
    is_complete = not own.is_open
    for base in node.bases:
        name = base.id if isinstance(base, ast.Name) else ""
        defined = module.bindings.get(name, [])
        definition = defined[0].node if len(defined) == 1 else None
        if isinstance(definition, ast.ClassDef) and not definition.decorator_list and name not in seen:
            inherited, is_known = members_of(module, definition, seen | {node.name})
            is_complete = is_complete and is_known
            for key, value in inherited.bindings.items():
                bindings.setdefault(key, value)
        elif name != "object" or defined:
            is_complete = False
    return Scope(bindings, own.is_open), is_complete


def arguments_of(function: FunctionNode, module: Scope) -> tuple[list[Argument], list[ast.arg]]:
    """Return the declared arguments of a function of a module and their nodes, in the same order."""
    declared = function.args
    plain = declared.posonlyargs + declared.args
    defaults = [*[None] * (len(plain) - len(declared.defaults)), *declared.defaults]
    found: list[tuple[Argument, ast.arg]] = []
    for index, (node, default) in enumerate(zip(plain, defaults, strict=True)):
        kind = ArgumentKind.POSITIONAL_ONLY if index < len(declared.posonlyargs) else ArgumentKind.ORDINARY
        found.append((Argument(node.arg, kind, default is not None, _fastapi_default(default, module)), node))
    if declared.vararg:
        found.append((Argument(declared.vararg.arg, ArgumentKind.STAR), declared.vararg))
    for node, default in zip(declared.kwonlyargs, declared.kw_defaults, strict=True):
        kind = ArgumentKind.KEYWORD_ONLY
        found.append((Argument(node.arg, kind, default is not None, _fastapi_default(default, module)), node))
    if declared.kwarg:
        found.append((Argument(declared.kwarg.arg, ArgumentKind.DOUBLE_STAR), declared.kwarg))
    return [argument for argument, _ in found], [node for _, node in found]


def _fastapi_default(default: ast.expr | None, module: Scope) -> str:
    """Return the function of FastAPI that a default calls, if that is plain from the imports; empty otherwise."""
    match default:
        case ast.Call(func=ast.Name(id=name)):
            imports = [each.node for each in module.bindings.get(name, ()) if isinstance(each.node, ast.ImportFrom)]
            from_fastapi = [alias for each in imports if each.module == "fastapi" for alias in each.names]
            return next((alias.name for alias in from_fastapi if (alias.asname or alias.name) == name), "")
        case ast.Call(func=ast.Attribute(value=ast.Name(id="fastapi"), attr=name)):
            return name if "fastapi" in module.bindings else ""
    return ""


def is_generator(function: FunctionNode) -> bool:
    """Return whether a function contains `yield`."""
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


def _binds_dynamically(body: list[ast.stmt]) -> bool:
    """Return whether a body may bind names dynamically, so that a missing name is not certainly a mistake."""
    names = {"globals", "exec", "setattr", "locals", "vars"}
    for statement in body:
        if isinstance(statement, FunctionNode) and statement.name == "__getattr__":
            return True
        if not isinstance(statement, _SCOPES):
            calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
            if any(isinstance(function, ast.Name) and function.id in names for function in calls):
                return True
    return False


def _package_names(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield the names that a module uses from the package `cortex`, unless it has something else of that name."""
    modules: set[str] = set()
    others: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] != "cortex":
                    others.add(alias.asname or alias.name.partition(".")[0])
                elif alias.asname is None or alias.name == "cortex":
                    modules.add(alias.asname or "cortex")
        elif isinstance(node, ast.ImportFrom):
            others.update(alias.asname or alias.name for alias in node.names)
            if node.module == "cortex" and not node.level:
                yield from ((node, alias.name) for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            others.add(node.id)
        elif isinstance(node, ast.arg):
            others.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            others.add(node.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules - others:
            yield node, node.attr


@cache
def _is_submodule(name: str) -> bool:
    return name.startswith("__") or find_spec(f"cortex.{name}") is not None


def _used_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
