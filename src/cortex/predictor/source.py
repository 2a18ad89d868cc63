"""Find what is wrong with a user's file by reading it: syntax, class, methods, signatures. It never runs it.

Where the source leaves doubt (imported or decorated definitions, unknown base classes) it says nothing: the loader
says the same about the living objects when the replica starts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from cortex.errors import Diagnostic
from cortex.predictor.batched import batched_name, batching_problem
from cortex.predictor.interface import GENERATIONS, Generation, Signature
from cortex.predictor.misplaced_members import find_foreign_class, find_foreign_method, find_method_of_kind
from cortex.predictor.outline import FunctionNode, Scope, Source, arguments_of, is_generator, scope_of
from cortex.predictor.signature import find_problems, nearest

#: Methods that some kind of API serves: no misspellings of others.
_SERVING = frozenset(name for row in GENERATIONS.values() for name in row.methods)
#: How alike a name must be to count as a misspelling where it could also be a method of the user's own.
_LIKELY = 0.7


def inspect_source(
    text: str,
    file: str,
    interface: str,
    type_: str = "python",
    has_models: bool = False,
    kind: str = "RealtimeAPI",
    batches: bool = False,
) -> list[Diagnostic]:
    """Return every mistake in a `.py` that can be known without running it.

    `file` is the name to show; `batches` says that several requests are to be one call.
    """
    generation = GENERATIONS[kind, interface, type_, has_models]
    try:
        source = Source(text, file)
    except SyntaxError as exc:
        line = exc.lineno or 0
        column = max(exc.offset or 1, 1) if line else 0
        return [Diagnostic(file, line, column, "", f"{type(exc).__name__}: {exc.msg}", "correct the Python syntax")]
    checker = _Checker(source, file, generation, batches)
    found = checker.check_functions() if generation.class_name is None else checker.check_class(generation.class_name)
    return sorted(found)


class _Checker:
    """Applies one generation's row to one source."""

    def __init__(self, source: Source, file: str, generation: Generation, batches: bool) -> None:
        self._source = source
        self._file = file
        self._generation = generation
        self._batches = batches
        self._scope = source.scope

    def check_functions(self) -> Iterator[Diagnostic]:
        """Check the generation whose interface is functions of the module."""
        name = next(iter(self._generation.methods))
        if name not in self._scope.bindings and not self._scope.is_open:
            yield self._missing_function(name)
        yield from self._check_member(self._scope, name, self._generation.method_signature)
        init = self._generation.constructor
        yield from self._check_member(self._scope, init, self._generation.constructor_signature)
        yield from self._misspelt(self._scope, init)

    def check_class(self, name: str) -> Iterator[Diagnostic]:
        """Check a generation whose interface is a class of this name."""
        bindings = self._scope.bindings.get(name, [])
        if not bindings:
            if not self._scope.is_open:
                yield self._missing_class(name)
            return
        if not all(isinstance(binding.node, ast.ClassDef) for binding in bindings):
            return  # assigned or imported: what it is can't be seen here
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
        scope, is_complete = self._members(node, set())
        constructor = generation.constructor
        if constructor not in scope.bindings and is_complete and generation.constructor_required:
            at = self._guess(constructor, scope)
            fix = _rename(at, constructor) if at else "add it"
            shown = ", ".join(("self", *generation.constructor_signature.required))
            yield self._at_name(scope, at, node, f"{self._of_class}__init__({shown}) is not defined", fix)
        serving = generation.serving(scope.bindings.__contains__)
        if is_complete and not serving:
            yield self._missing_method(scope, node)
        elif is_complete:  # else it may override what an unseen base calls
            for name in sorted({*generation.methods, *generation.hooks} - generation.required_hooks):
                yield from self._misspelt(scope, name)
        if is_complete:
            yield from self._missing_hooks(scope, node)
        if is_complete and serving and self._batches:
            yield from self._check_batched(scope, node)
        yield from self._check_member(scope, constructor, generation.constructor_signature)
        for name in serving:
            yield from self._check_member(scope, name, generation.method_signature)
        for name, signature in generation.hooks.items():
            yield from self._check_member(scope, name, signature)

    def _members(self, node: ast.ClassDef, seen: set[str]) -> tuple[Scope, bool]:
        """Return what a class and its bases of this file define; False if there are bases that can't be seen."""
        own = scope_of(node.body)
        bindings = dict(own.bindings)
        is_complete = not own.is_open
        for base in node.bases:
            name = base.id if isinstance(base, ast.Name) else ""
            defined = self._scope.bindings.get(name, [])
            definition = defined[0].node if len(defined) == 1 else None
            if isinstance(definition, ast.ClassDef) and not definition.decorator_list and name not in seen:
                inherited, is_known = self._members(definition, seen | {node.name})
                is_complete = is_complete and is_known
                for key, value in inherited.bindings.items():
                    bindings.setdefault(key, value)
            elif name != "object" or defined:
                is_complete = False
        return Scope(bindings, own.is_open), is_complete

    def _check_member(self, scope: Scope, name: str, signature: Signature) -> Iterator[Diagnostic]:
        """Check one function, if it is plainly defined: once, unconditionally, under decorators that we know."""
        bindings = scope.bindings.get(name, [])
        if not bindings or any(binding.conditional for binding in bindings):
            return
        nodes = [binding.node for binding in bindings if isinstance(binding.node, FunctionNode)]
        if len(nodes) != len(bindings) or any(_has_unknown_decorator(node) for node in nodes):
            return
        for other in nodes[1:]:
            message = f"{self._of_class}{self._noun} {name} is defined twice, first on line {nodes[0].lineno}"
            yield self._at(other, message, "keep one of the two")
        yield from self._check_signature(nodes[-1], signature)

    def _check_signature(self, function: FunctionNode, signature: Signature) -> Iterator[Diagnostic]:
        arguments, nodes = arguments_of(function)
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

    def _missing_class(self, name: str) -> Diagnostic:
        message = f"class {name} is not defined"
        classes = self._scope.classes()
        if foreign := find_foreign_class(self._generation, classes):
            return self._at(classes[foreign[0]], message, foreign[1])
        guess = nearest(name, classes) or self._class_that_serves(classes)
        if guess:
            return self._at(classes[guess], message, _rename(guess, name))
        functions = GENERATIONS["RealtimeAPI", "functions", "python", False]
        for function, node in self._scope.functions().items():
            if function in functions.methods:
                return self._at(node, message, f"functions of the module belong to {functions.yaml_form}")
        return Diagnostic(self._file, 0, 0, "", message, "define it at the top level of the file")

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
        if found := find_method_of_kind(generation, functions):
            return self._at(functions[found[0]], message, f"{found[0]} belongs to `kind: {found[1]}`")
        if foreign := find_foreign_method(generation, functions):
            fix = f"{foreign[1]}; name it {next(iter(generation.methods))}"
            return self._at(functions[foreign[0]], message, fix)
        guesses = [self._guess(name, scope) or nearest(name, functions, _LIKELY) for name in generation.methods]
        guess = next(filter(None, guesses), None)
        fix = _rename(guess, nearest(guess, generation.methods) or "") if guess else "add it"
        return self._at_name(scope, guess, node, message, fix)

    def _missing_hooks(self, scope: Scope, node: ast.ClassDef) -> Iterator[Diagnostic]:
        for name in sorted(self._generation.required_hooks):
            if name not in scope.bindings:
                arguments = ", ".join(("self", *self._generation.hooks[name].required))
                guess = self._guess(name, scope)
                fix = _rename(guess, name) if guess else "add it: it makes a model of the files at a path"
                yield self._at_name(scope, guess, node, f"{self._of_class}{name}({arguments}) is not defined", fix)

    def _check_batched(self, scope: Scope, node: ast.ClassDef) -> Iterator[Diagnostic]:
        """Check that there is a method that can be given several requests."""
        name = batched_name(self._generation)
        bindings = scope.bindings.get(name, [])
        at = next((binding.node for binding in bindings if isinstance(binding.node, FunctionNode)), None)
        streams = at is not None and len(bindings) == 1 and is_generator(at) and not _has_unknown_decorator(at)
        problem = batching_problem(name, bool(bindings), streams)
        if problem is not None and (bindings or self._guess(name, scope) is None):  # a misspelt one is told already
            yield self._at(at or node, self._of_class + problem[0], problem[1])

    def _misspelt(self, scope: Scope, name: str) -> Iterator[Diagnostic]:
        """Report a function that nobody uses and whose name is almost `name`, which nobody defines."""
        if name in scope.bindings:
            return
        guess = self._guess(name, scope)
        if guess is not None and guess not in self._source.used_names:
            node = scope.functions()[guess]
            yield self._at(node, f"{self._of_class}{self._noun} {guess} is never called", _rename(guess, name))

    def _guess(self, name: str, scope: Scope) -> str | None:
        """Return the function that is most likely meant to be `name`; a shared prefix counts nothing."""
        generation = self._generation
        known = {generation.constructor, *generation.hooks, *_SERVING}
        prefix = "handle_" if name.startswith("handle_") else ""
        candidates = {n.removeprefix(prefix): n for n in scope.functions() if n not in known and n.startswith(prefix)}
        guess = nearest(name.removeprefix(prefix), candidates, _LIKELY)
        return candidates[guess] if guess is not None else None

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


def _has_unknown_decorator(function: FunctionNode) -> bool:
    return any(
        not (isinstance(decorator, ast.Name) and decorator.id in ("staticmethod", "classmethod"))
        for decorator in function.decorator_list
    )
