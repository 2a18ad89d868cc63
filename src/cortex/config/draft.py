"""One API on its way to the schema: what the user wrote, by its place in the current form, and how it was written.

Knows the tables of `generations.py` and `unsupported.py`; `eras.py` fills it in, `validate.py` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cortex.config.document import Document, Node, Path
from cortex.config.generations import IGNORED, MODEL_SECTIONS, NOT_YET, SPLITTER, TASK, Generation
from cortex.config.unsupported import instead_of, is_within_unsupported
from cortex.errors import Diagnostic

MODELS = "handler.models"
MODEL_ENTRIES = "handler.models.paths"


@dataclass
class Draft:
    """One API on its way to the schema: the current form's places, each with the user's own node."""

    document: Document
    item: Node
    generation: Generation
    kind: str
    constants: dict[str, object]  #: what the generation implies, by place
    fields: dict[str, Node] = field(default_factory=dict)
    sections: dict[str, Node] = field(default_factory=dict)  #: the user's maps, by key as written
    homes: dict[str, Node] = field(default_factory=dict)  #: the section of the models, by place, even if it is empty
    broken: set[str] = field(default_factory=set)  #: what was refused here: sections that are no maps
    problems: list[Diagnostic] = field(default_factory=list)

    @property
    def type(self) -> str:
        """Tell which type of code the user asked for, or probably meant to."""
        node = self.item.at(self.generation.section, "type")
        return node.value if node is not None and isinstance(node.value, str) else "python"

    def data(self) -> dict[str, Any]:
        """Build the current form as plain nested maps."""
        data: dict[str, Any] = {}
        for place in self.homes:
            _inner(data, place.split("."))
        for place, value in {**self.constants, **{place: node.plain() for place, node in self.fields.items()}}.items():
            *parents, leaf = place.split(".")
            _inner(data, parents)[leaf] = value
        return data

    def written(self, place: str) -> str:
        """Say how this generation writes a place: of several ways the one whose section is there, or the newest."""
        fields = self.generation.fields.items()
        ways = [written for written, target in fields if target == place]
        if place == MODELS:
            ways = [written.rpartition(".")[0] for written, target in fields if target == MODEL_ENTRIES]
        fitting = [written for written in ways if not self.is_out_of_place(written)]
        used = [written for written in fitting if written.rpartition(".")[0] in self.sections.keys() - {""}]
        return (used or fitting or ways or [place])[-1]

    def key(self, place: str) -> str:
        """Say which key the user wrote for a place, or would have to write."""
        node = self.fields.get(place)
        return str(node.path[-1]) if node else self.written(place).rpartition(".")[2]

    def is_foreign(self, written: str) -> bool:
        """Tell whether a key is of a section for the models of other types."""
        types = [MODEL_SECTIONS[part] for part in written.split(".") if part in MODEL_SECTIONS]
        return any(self.type not in some for some in types)

    def is_unsupported(self, written: str) -> bool:
        """Tell whether a key is for other kinds only: of this generation, or of the one that kind was written in."""
        is_alone = self.generation in (TASK, SPLITTER)
        is_known = is_alone or written in self.generation.fields or written in self.generation.sections
        # The section for the models of other types is a mistake of its own, with a better fix.
        is_foreign = not is_alone and self.is_foreign(written.rpartition(".")[2])
        return is_known and instead_of(self.kind, written) is not None and not is_foreign

    def is_out_of_place(self, written: str) -> bool:
        """Tell whether a key is in a section for other types, or for other kinds only."""
        return self.is_foreign(written) or is_within_unsupported(self.kind, written)

    def served_places(self) -> frozenset[str]:
        """List the places of the current form that this generation and kind have keys for."""
        useful = [place for place, key in self.generation.written.items() if not is_within_unsupported(self.kind, key)]
        return frozenset(useful) - {IGNORED, NOT_YET}

    def find(self, *place: str | int) -> Node | None:
        """Find the user's node for a place, also one inside a value that the user wrote as a whole."""
        for length in range(len(place), 0, -1):
            if node := self.fields.get(".".join(map(str, place[:length]))):
                return node.at(*(int(part) if str(part).isdecimal() else part for part in place[length:]))
        return self.homes.get(".".join(map(str, place)))

    def missing(self, place: str) -> tuple[Node, Path]:
        """Find where the user should have written a place: the innermost map there is, and the key to add to it."""
        written = self.written(place).split(".")
        depth = len(written) - 1
        while depth and ".".join(written[:depth]) not in self.sections:
            depth -= 1
        holder = self.sections[".".join(written[:depth])] if depth else self.item
        return holder, (*holder.path, written[depth])


def _inner(data: dict[str, Any], path: list[str]) -> dict[str, Any]:
    for part in path:
        data = data.setdefault(part, {})
    return data
