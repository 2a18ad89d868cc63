"""Lists of small maps in a file: each key as the user wrote it → the one of the current form, positions kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cortex.config.document import Document, Node
from cortex.config.values import nearest, quote
from cortex.errors import Diagnostic


def read_entries(
    document: Document, listing: Node, known: Mapping[str, str], older: Mapping[str, str], fix: str
) -> tuple[Node | None, list[Diagnostic]]:
    """Bring the entries of a list into the current form; None if one of them can't be read at all.

    `known` maps the keys that this file may have to the current ones, `older` those that only others may have; `fix`
    is for an entry that is no map.
    """
    if not isinstance(listing.value, tuple):
        return listing, []  # the schema will say so
    problems: list[Diagnostic] = []
    entries: list[Node] = []
    for item in listing.value:
        if isinstance(item.value, dict):
            entries.append(_read_entry(document, item, item.value, (known, older), problems))
        else:
            problems.append(document.wrong_type(item, "a map", fix))
    is_whole = len(entries) == len(listing.value)
    return (replace(listing, value=tuple(entries)) if is_whole else None), problems


def _read_entry(
    document: Document,
    item: Node,
    written: Mapping[str, Node],
    keys: tuple[Mapping[str, str], Mapping[str, str]],
    problems: list[Diagnostic],
) -> Node:
    known, older = keys
    current = list(dict.fromkeys(known.values()))
    entry: dict[str, Node] = {}
    for key, node in written.items():
        meant = known.get(key) or older.get(key) or nearest(key, current)
        if key not in known:
            question = f'write "{meant}"' if key in older else f'did you mean "{meant}"?'
            fix = question if meant else f"remove it; there can be: {', '.join(current)}"
            problems.append(document.at_key(node, f"key {quote(key)} is not supported", fix))
            if meant in written:
                continue
        if meant in entry:
            other = entry[meant].path[-1]
            problems.append(document.at_key(node, f"says the same as {quote(other)}", "remove one of them"))
        elif meant is not None:
            entry[meant] = node
    return replace(item, value=entry)
