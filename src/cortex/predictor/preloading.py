"""Import the libraries of the user's code ahead of it, without running any of it.

The user's file begins with imports. Those that precede everything else can run earlier, in another process from which
the one with the user's code is forked: nothing comes before them that could change what they do. Imports of the
project's own modules are followed. Any other statement ends the search, because it may set an environment variable, or
a path, on which the next import depends:

    import torch                       preloaded
    from helpers import resize         a file of the project: its first imports are preloaded
    SIZES = [1, 2]                     ignored: literals, functions and classes
    os.environ["OMP_NUM_THREADS"]= "1" the end
    import scipy                       imported with the user's code
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path


def find_leading_imports(project: Path, path: str, python_path: str | None) -> list[ast.stmt]:
    """Return the imports of libraries at the beginning of the user's file, in order; none if it can't be parsed."""
    if not path.endswith(".py"):
        return []
    roots = [project, *([project / python_path] if python_path else [])]
    search = _Search(roots)
    search.read(project / path)
    return search.found


def run_imports(imports: Sequence[ast.stmt]) -> None:
    """Run import statements up to the first that fails: the user's code will fail in the same place."""
    namespace = {"__name__": __name__}
    try:
        for statement in imports:
            exec(compile(ast.Module([statement], []), __file__, "exec"), namespace)
    except BaseException:  # libraries are not ours either
        return


class _Search:
    def __init__(self, roots: Sequence[Path]) -> None:
        self.found: list[ast.stmt] = []
        self._roots = roots
        self._seen: set[Path] = set()

    def read(self, file: Path) -> bool:
        """Add the imports of a file; return whether those of the next may be added, too."""
        if file in self._seen:
            return True
        self._seen.add(file)
        try:
            statements = ast.parse(file.read_bytes()).body
        except (OSError, ValueError, SyntaxError):
            return False
        return all(self._add(statement, file) for statement in statements)

    def _add(self, statement: ast.stmt, file: Path) -> bool:
        match statement:
            case ast.Import(names=names):
                return all(
                    self._add_module(alias.name, ast.copy_location(ast.Import([alias]), statement)) for alias in names
                )
            case ast.ImportFrom(module=module, level=0):
                return self._add_module(module or "", statement)
            case ast.ImportFrom(module=module, level=level):
                folder = file.parents[level - 1]
                return all(map(self.read, _modules_at(folder, (module or "").split(".") if module else [], statement)))
            case ast.Expr(value=ast.Constant()) | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return True
            case ast.Assign(targets=[ast.Name()], value=value) | ast.AnnAssign(target=ast.Name(), value=value):
                return value is None or _is_literal(value)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=[]):
                return True
        return False

    def _add_module(self, name: str, statement: ast.stmt) -> bool:
        parts = name.split(".")
        for root in self._roots:
            if (root / parts[0]).is_dir() or (root / f"{parts[0]}.py").is_file():
                return all(map(self.read, _modules_at(root, parts, statement)))
            if any(root.glob(f"{parts[0]}.*.so")) or (root / f"{parts[0]}.so").exists():
                return False  # a compiled module of the project
        self.found.append(statement)
        return True


def _modules_at(folder: Path, parts: Sequence[str], statement: ast.stmt) -> Iterator[Path]:
    """Yield the files that importing a module of the project runs, in order."""
    place = folder
    if parts == [] and (folder / "__init__.py").is_file():
        yield folder / "__init__.py"
    for part in parts:
        place = place / part
        if (place / "__init__.py").is_file():
            yield place / "__init__.py"
        elif place.with_name(f"{part}.py").is_file():
            yield place.with_name(f"{part}.py")
    if isinstance(statement, ast.ImportFrom):  # its names may be modules
        for alias in statement.names:
            for file in (place / alias.name / "__init__.py", place / f"{alias.name}.py"):
                if file.is_file():
                    yield file


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True
