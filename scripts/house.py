"""Print the figures of the source tree: files, lines, importers, repeated class names and import cycles.

Reads the code as text and imports nothing.
"""

from __future__ import annotations

import argparse
import ast
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

SMALL_LINES = 80
FULL_FOLDER = 14


def main() -> None:
    """Print one figure per line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="src", help="the folder of the packages (default: src)")
    root = Path(parser.parse_args().folder)
    modules = {module_name(path, root): path for path in sorted(root.rglob("*.py"))}
    trees = {name: ast.parse(path.read_text()) for name, path in modules.items()}
    lines = {name: len(path.read_text().splitlines()) for name, path in modules.items()}
    code = {name: count for name, count in lines.items() if count > 1}
    imports = {name: set(imported_modules(tree, modules)) - {name} for name, tree in trees.items()}
    importers = Counter(target for targets in imports.values() for target in targets)
    largest = sorted(lines, key=lines.__getitem__, reverse=True)[:3]
    at_start = {target for name, tree in trees.items() for target in imported_modules(tree, modules, at_start=True)}
    alone = sorted(name for name in code if lines[name] < SMALL_LINES and importers[name] == 1 and name in at_start)
    folders = Counter(path.parent for path in modules.values() if path.name != "__init__.py")
    print(f"files: {len(modules)}, {len(code)} of them with code")
    print(f"lines: {sum(lines.values())}, median {statistics.median(code.values()):.0f}")
    print("largest: " + ", ".join(f"{name} {lines[name]}" for name in largest))
    print("folders: " + ", ".join(f"{folder.relative_to(root)} {count}" for folder, count in sorted(folders.items())))
    full = [f"{folder.relative_to(root)} {count}" for folder, count in folders.items() if count > FULL_FOLDER]
    print(f"folders with more than {FULL_FOLDER} files: {', '.join(full) or 'none'}")
    print(f"modules below {SMALL_LINES} lines with one importer, which needs them at its start: {len(alone)}")
    show(alone)
    repeated = {name: places for name, places in public_classes(trees).items() if len(places) > 1}
    print(f"public class names that occur twice or more: {len(repeated)}")
    show(f"{name}: {', '.join(places)}" for name, places in sorted(repeated.items()))
    cycles = import_cycles(imports)
    print(f"import cycles: {len(cycles)}")
    show(", ".join(sorted(cycle)) for cycle in cycles)


def show(rows: Iterator[str] | list[str]) -> None:
    """Print indented rows."""
    for row in rows:
        print(f"  {row}")


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name of a file below `root`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.Module, modules: dict[str, Path], *, at_start: bool = False) -> Iterator[str]:
    """Yield the modules of this tree that a module imports, type checking aside; `at_start`: not those in functions."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
            continue
        if at_start and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                if submodule in modules or node.module in modules:
                    yield submodule if submodule in modules else node.module


def public_classes(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Return the modules that define each public class, by class name."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    return found


def import_cycles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that import each other, directly or through others."""
    reach = {name: reachable(name, imports) for name in imports}
    cycles: list[set[str]] = []
    for name in imports:
        cycle = {other for other in reach[name] if name in reach.get(other, set())}
        if name in cycle and cycle not in cycles:
            cycles.append(cycle)
    return cycles


def reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    """Return all modules that `start` imports, directly or through others."""
    seen: set[str] = set()
    pending = list(imports[start])
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += imports.get(name, ())
    return seen


if __name__ == "__main__":
    main()
