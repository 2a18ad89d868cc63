"""Names in docstrings exist: in the function, class or module, as a module, or in the documentation."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAME = re.compile(r"`([a-z]\w*(?:\.[a-z]\w*)*)(?:\(\))?`", re.ASCII)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_FOREIGN = """
a_b aclose anonymous cpu.cfs_quota_us default dir.c environ handler.config.db.password holds increase
iris.handler.path meaning model.skops pool_pre_ping punycode readlines send wildmatch.c
"""
#: Names of other programs, and examples.
FOREIGN = set(_FOREIGN.split())


class Source:
    """A module, whose lines are without docstrings and comments."""

    def __init__(self, path: Path) -> None:
        text = path.read_text()
        self.tree = ast.parse(text)
        self.lines = [line.partition("# ")[0].partition("#:")[0] for line in text.splitlines()]
        self.docstrings: dict[Documented, str] = {}
        self._take_docstrings(self.tree)
        self.words = self.words_of(self.tree)

    def _take_docstrings(self, node: Documented) -> None:
        if text := ast.get_docstring(node):
            self.docstrings[node] = text
            first, last = node.body[0].lineno - 1, node.body[0].end_lineno or 0
            self.lines[first:last] = [""] * (last - first)
        for child in node.body:
            if isinstance(child, Documented):
                self._take_docstrings(child)

    def words_of(self, node: Documented) -> set[str]:
        lines = self.lines[getattr(node, "lineno", 1) - 1 : getattr(node, "end_lineno", None)]
        return set(re.findall(r"\w+", "\n".join(lines)))


def test_names_in_docstrings_exist() -> None:
    files = sorted((ROOT / "src").rglob("*.py"))
    names = (f".{path.relative_to(ROOT / 'src').with_suffix('')}".replace("/", ".") for path in files)
    sources = {name.removesuffix(".__init__"): Source(path) for name, path in zip(names, files, strict=True)}
    code = "\n".join(line for source in sources.values() for line in source.lines)
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    known = {part for module in sources for part in module.split(".")}
    known |= {*re.findall(r"[`\"]([\w.]+)[`\"]", pages), *dir(builtins), *keyword.kwlist, *sys.stdlib_module_names}
    known |= FOREIGN | {word for source in sources.values() for word in source.words if "_" in word.strip("_")}

    def exists(name: str, near: set[str]) -> bool:
        first, _, rest = name.partition(".")
        if name in known or name in near or not rest:
            return name in known or name in near
        in_module = any(module.endswith(f".{first}") and rest in source.words for module, source in sources.items())
        is_module = any(module.endswith(f".{name.removesuffix('.py')}") for module in sources)
        return in_module or is_module or first in sys.stdlib_module_names or name in code

    def unknown(module: str, node: Documented, near: set[str]) -> Iterator[str]:
        if text := sources[module].docstrings.get(node):
            inside = near | sources[module].words_of(node)
            yield from (f"{module}: `{name}`" for name in NAME.findall(text) if not exists(name, inside))
        if isinstance(node, ast.ClassDef):
            near = sources[module].words_of(node)
        elif isinstance(node, ast.Module):
            near = {getattr(each, "name", "") for each in node.body}
        for child in node.body:
            if isinstance(child, Documented):
                yield from unknown(module, child, near)

    assert [name for module, source in sources.items() for name in unknown(module, source.tree, set())] == []
