"""The terms of `docs/reference/glossary.md` are used, and names of classes are unique."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "cortex"
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"


def terms() -> list[str]:
    return re.findall(r"^\| (?!term \|)([A-Za-z -]+) \|", GLOSSARY.read_text(), re.MULTILINE)


def pattern(term: str) -> re.Pattern[str]:
    """Match a term as words of a text and as parts of a name: "node agent", `node_agent`, `NodeAgent`."""
    return re.compile(r"[ _-]?\n?\s*".join(map(re.escape, term.lower().replace("-", " ").split())))


def test_each_term_occurs_in_code_and_documentation() -> None:
    code = "\n".join(path.read_text() for path in sorted(SOURCE.rglob("*.py"))).lower()
    paths = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path != GLOSSARY]
    pages = "\n".join(path.read_text() for path in [ROOT / "README.md", *paths]).lower()
    unused = [term for term in terms() if not pattern(term).search(code)]
    assert unused == [], "no code uses these terms: remove them from docs/reference/glossary.md"
    unread = [term for term in terms() if not pattern(term).search(pages)]
    assert unread == [], "no page uses these terms: use them, or remove them from docs/reference/glossary.md"


def test_each_term_is_defined_once() -> None:
    assert len(terms()) == len({term.lower() for term in terms()})


def test_public_class_names_are_unique() -> None:
    modules = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in re.findall(r"^ *class ([A-Za-z]\w*)[(:\[]", path.read_text(), re.MULTILINE):
            modules[name].append(path.relative_to(SOURCE).as_posix())
    repeated = {name: places for name, places in modules.items() if len(places) > 1}
    assert not repeated, f"one class name must mean one class; rename all but one of each: {repeated}"
