"""The forms that models have had in files: the keys of one of several models, and the section for each type of code.

Moves nodes and keeps their positions; which model may be called what is `schema.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from cortex.config.document import Document, Node
from cortex.config.generations import (
    DEPLOYED_CLASS,
    HANDLER,
    KINDLESS,
    MODEL_KEYS,
    MODEL_SECTIONS,
    OLDER_MODEL_KEYS,
    Generation,
)
from cortex.config.list_entries import read_entries
from cortex.config.values import quote
from cortex.errors import Diagnostic


def read_models(document: Document, listing: Node, generation: Generation) -> tuple[Node | None, list[Diagnostic]]:
    """Bring the entries of a list of models into the current form; None if one of them can't be read at all."""
    known = MODEL_KEYS if generation is HANDLER else {**MODEL_KEYS, **OLDER_MODEL_KEYS}
    fix = 'write "name: my-model" and "path: s3://bucket/path" in it'
    return read_entries(document, listing, known, OLDER_MODEL_KEYS, fix)


def section_fix(node: Node) -> str:
    """Say what to write instead of a section of models that is no map."""
    if isinstance(node.value, tuple):
        return 'write "paths:" above its items'
    return f'write "path: {node.value if isinstance(node.value, str) else "s3://bucket/path"}" below it'


def misplaced_section(
    document: Document, sections: Mapping[str, Node], type_: str, generation: Generation, instead: Mapping[str, str]
) -> list[Diagnostic]:
    """Say that models are in the section for another type of code; `instead` is for keys that the kind has not."""
    problems: list[Diagnostic] = []
    for written, node in sections.items():
        key = written.rpartition(".")[2]
        right = next((name for name, types in MODEL_SECTIONS.items() if type_ in types), None)
        if key not in MODEL_SECTIONS or right in (None, key) or _is_shared(node, generation):
            continue
        message = f"key {quote(key)} is not supported with type {quote(type_)}"
        fix = instead.get(right or "", f'did you mean "{right}"?')
        problems.append(document.at_key(node, message, fix))
    return problems


def _is_shared(section: Node, generation: Generation) -> bool:
    """Tell whether the section may be one of a file up to 0.24, when Python code had its models under `models` too."""
    if generation in (DEPLOYED_CLASS, KINDLESS):
        return True
    if generation is HANDLER or section.path[-1] != "models":
        return False
    listing = section if isinstance(section.value, tuple) else section.at("paths")
    entries = listing.value if listing is not None and isinstance(listing.value, tuple) else ()
    return all(holder.at("path") is None for holder in (section, *entries))
