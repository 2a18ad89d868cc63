"""The vocabulary of the code is closed: the terms of `docs/reference/glossary.md`, and some plain words."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "cortex"
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"

#: Words of module names that need no definition. Add a word only if any programmer knows it in the meaning that it has
#: here; otherwise name the module with a term of the glossary, or define a new term there.
_PLAIN = """
access address annotated annotation answers app archive argument arguments array async auth autoscaling background
base binding body bootstrap bound budget builder certificate change chart check cleanup cli client command commands
config connection console content controller conversion cpu credential cross dashboard database debugger deploy
deployer description detection dev device diagnose dockerfile document dotenv election embedded encoding engine
error exception export fetcher field file filelock foreground form format forwarding get glob haproxy hosting http
identity ignore import importing infrastructure installer interface json jsonl judge key known kubernetes lifecycle
lightgbm limit link loaded loader local location log main map mapping masking memory message metric mlflow monitor
monitoring multipart object onnx openai output packaging parameter path pickle policy postgresql prediction
preparations priority probe process progress protobuf protocol python query queue queueing ray reason record reload
remote rendering replica report request requirement reservation retry route routed routing rpc rule run runner
sample scaling schema secret security service serving session settings shape simulation sklearn socket source
spelling start state statistics status storage store stream streaming summary table task telemetry template tensor
tensorflow terminal testing theory timing tls total traceback tracking traffic transport tree type unacknowledged
upstream usage user validate validation value view violation watcher wire writer wsgi xgboost
"""
PLAIN = set(_PLAIN.split())


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


def test_module_names_consist_of_known_words() -> None:
    known = PLAIN | {word for term in terms() for word in re.split("[ -]", term.lower())}
    odd = {}
    for path in sorted([*SOURCE.rglob("*.py"), *(folder for folder in SOURCE.rglob("*") if has_code(folder))]):
        if path.stem == "__init__" or SOURCE / "cli" / "commands" in path.parents:  # named like the command
            continue
        if unknown := [word for word in path.stem.split("_") if not singulars(word) & known]:
            odd[path.relative_to(SOURCE).as_posix()] = unknown
    assert not odd, (
        f"module names with words that nobody can look up: {odd}. Rename the module with a term of "
        "docs/reference/glossary.md; or define the word there; or, if it is a plain word, add it to PLAIN in this test"
    )


def has_code(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.py"))


def singulars(word: str) -> set[str]:
    """Return a word and what it may be the plural of."""
    forms = {word}
    if word.endswith("s"):
        forms |= {word[:-1], word.removesuffix("es"), word.removesuffix("ies") + "y"}
    return forms
