"""Older file forms → the current one: picks the generation of each resource and moves its values, positions kept.

Knows the tables of `generations.py`; knows nothing of types, defaults and ranges, which are `schema.py`'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cortex.config.document import Document, Node, Path
from cortex.config.generations import (
    DEPLOYED_CLASS,
    FUNCTIONS,
    GENERATIONS,
    HANDLER,
    IGNORED,
    KINDLESS,
    MODEL_SECTIONS,
    NOT_YET,
    NOT_YET_KEYS,
    NOT_YET_KINDS,
    ONLY,
    PREDICTOR,
    Generation,
)
from cortex.config.model_forms import misplaced_section, read_entries, section_fix
from cortex.config.values import dashed, nearest, quote
from cortex.errors import Diagnostic

MODELS = "handler.models"
MODEL_ENTRIES = "handler.models.paths"

_NULLABLE_SECTIONS = frozenset({"tracker", "monitoring"})
_TOP_KEYS = frozenset(name for generation in GENERATIONS for name in generation.keys_of(""))


@dataclass
class Draft:
    """One API on its way to the schema: the current form's places, each with the user's own node."""

    document: Document
    item: Node
    generation: Generation
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
        fitting = [written for written in ways if not self.is_foreign(written)]
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


@dataclass(frozen=True)
class Translation:
    """The APIs of a file, and what was wrong with keys, kinds and the deployment."""

    drafts: tuple[Draft, ...]
    problems: tuple[Diagnostic, ...]
    deployment: str | None


def translate(document: Document) -> Translation:
    """Bring every resource of a document into the current form."""
    kinds = [_find(item, "kind") for item in document.items]
    names = [kind.value if kind else None for kind in kinds]
    deployments = [item for item, kind in zip(document.items, names, strict=True) if kind == "deployment"]
    deployment, problems = _read_deployments(document, deployments)
    drafts: list[Draft] = []
    for item, kind in zip(document.items, kinds, strict=True):
        if kind is not None and kind.value == "deployment":
            continue
        generation, kind_problem = _choose(document, item, kind, in_deployment=bool(deployments))
        problems += [kind_problem] if kind_problem else []
        if generation is None:
            continue
        draft = Draft(document, item, generation, _implied(generation, deployment))
        _move(draft, item, "")
        draft.problems += misplaced_section(draft.document, draft.sections, draft.type, draft.generation)
        problems += draft.problems
        drafts.append(draft)
    problems += _check_deployment(document, kinds, deployments)
    return Translation(tuple(drafts), tuple(problems), deployment)


def _find(item: Node, key: str) -> Node | None:
    """Find a top-level key, or what looks like it misspelt."""
    assert isinstance(item.value, dict)
    if key in item.value:
        return item.value[key]
    for written, node in item.value.items():
        if written not in _TOP_KEYS and nearest(written, _TOP_KEYS) == key:
            return node
    return None


def _read_deployments(document: Document, deployments: list[Node]) -> tuple[str | None, list[Diagnostic]]:
    problems = [
        document.diagnostic(
            item.line, item.column, item.path, "deployment resource may only be defined once", "remove it"
        )
        for item in deployments[1:]
    ]
    if not deployments:
        return None, problems
    item = deployments[0]
    assert isinstance(item.value, dict)
    for key, node in item.value.items():
        if key not in ("name", "kind"):
            meant = nearest(key, ("name", "kind"))
            fix = f'did you mean "{meant}"?' if meant else "remove it; there can be: name, kind"
            problems.append(document.at_key(node, f"key {quote(key)} is not supported", fix))
    name = _find(item, "name")
    if name is None:
        path = (*item.path, "name")
        problems.append(
            document.diagnostic(item.line, item.column, path, "must be defined", 'write "name: my-deployment"')
        )
    elif not isinstance(name.value, str):
        problems.append(document.wrong_type(name, "a string", "write text"))
    elif not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name.value):
        message = (
            f"{quote(name.value)} must contain only lower case letters, numbers, and dashes, "
            "and cannot start or end with a dash"
        )
        problems.append(document.at_value(name, message, f"write {quote(dashed(name.value) or 'my-deployment')}"))
    else:
        return name.value, problems
    return None, problems


def _check_deployment(document: Document, kinds: list[Node | None], deployments: list[Node]) -> list[Diagnostic]:
    apis = [kind for kind in kinds if kind is not None and kind.value == "api"]
    if apis and not deployments:
        fix = 'add "- kind: deployment" with a "name"'
        return [document.at_value(apis[0], "the file must define a deployment resource for its APIs", fix)]
    if deployments and len(kinds) == len(deployments):
        return [document.at_value(deployments[0], "the deployment has no APIs", 'add "- kind: api"')]
    return []


def _implied(generation: Generation, deployment: str | None) -> dict[str, object]:
    implied: dict[str, object] = {"kind": "RealtimeAPI", "handler.interface": generation.interface}
    if generation is FUNCTIONS:
        implied["handler.type"] = "python"
    if generation in (FUNCTIONS, DEPLOYED_CLASS):
        # A placeholder when the deployment's own name is wrong: the file is refused anyhow.
        implied["deployment"] = deployment or "deployment"
    return implied


def _choose(
    document: Document, item: Node, kind: Node | None, *, in_deployment: bool
) -> tuple[Generation | None, Diagnostic | None]:
    """Pick the generation of a resource; none if nothing more can be said about it."""
    by_shape = _by_shape(item)
    if kind is None:
        if in_deployment:
            problem = _missing_kind(document, item, "api")
            return _api_generation(item), problem
        if by_shape is PREDICTOR:
            return KINDLESS, None
        return by_shape or HANDLER, _missing_kind(document, item, "RealtimeAPI")
    if not isinstance(kind.value, str):
        return by_shape, document.wrong_type(kind, "a string", 'write "RealtimeAPI"')
    generation_of: dict[str, Callable[[], Generation]] = {
        "RealtimeAPI": lambda: by_shape or HANDLER,
        "SyncAPI": lambda: KINDLESS,
        "api": lambda: _api_generation(item),
    }
    if kind.value in generation_of:
        return generation_of[kind.value](), None
    meant = nearest(kind.value, {*generation_of, *NOT_YET_KINDS, *(() if by_shape else ("deployment",))})
    if meant in NOT_YET_KINDS:
        return None, document.at_value(kind, f"kind {quote(meant)} is not available: {ONLY}", "remove this resource")
    fix = f"write {quote(meant or 'RealtimeAPI')}"
    return (generation_of[meant]() if meant in generation_of else by_shape), document.at_value(
        kind, f"unknown kind {quote(kind.value)}", fix
    )


def _missing_kind(document: Document, item: Node, kind: str) -> Diagnostic:
    return document.diagnostic(item.line, item.column, (*item.path, "kind"), "must be defined", f'write "kind: {kind}"')


def _by_shape(item: Node) -> Generation | None:
    if _find(item, "handler") is not None:
        return HANDLER
    return PREDICTOR if _find(item, "predictor") is not None else None


def _api_generation(item: Node) -> Generation:
    predictor = _find(item, "predictor")
    keys = predictor.value if predictor is not None and isinstance(predictor.value, dict) else {}
    return DEPLOYED_CLASS if any(key in keys for key in ("type", "config", "env")) else FUNCTIONS


def _move(draft: Draft, holder: Node, section: str) -> None:
    """Put each value of a map where the current form has it; unknown keys are read as what they probably mean."""
    assert isinstance(holder.value, dict)
    draft.sections[section] = holder
    for key, node in holder.value.items():
        written = f"{section}.{key}" if section else key
        if written in draft.generation.fields or written in draft.generation.sections:
            _place(draft, written, node)
            continue
        fix, meant = _suggest(draft, section, key, node)
        draft.problems.append(draft.document.at_key(node, f"key {quote(key)} is not supported", fix))
        if meant is not None and not _is_taken(draft, section, holder.value, meant):
            _place(draft, meant, node)


def _is_taken(draft: Draft, section: str, siblings: Mapping[str, Node], written: str) -> bool:
    home, _, key = written.rpartition(".")
    holder = draft.item.at(*home.split(".")) if home else draft.item
    beside = home == section and key in siblings
    return beside or (holder is not None and holder.at(key) is not None) or written in draft.sections


def _place(draft: Draft, written: str, node: Node) -> None:
    if written in draft.generation.sections:
        _place_section(draft, written, node)
        return
    place = draft.generation.fields[written]
    if place == NOT_YET:
        key = written.rpartition(".")[2]
        about, fix = NOT_YET_KEYS[key]
        message = f"key {quote(key)} ({about}) is not available: {ONLY}"
        draft.problems.append(draft.document.at_key(node, message, fix))
        if key == written:  # it stands where the code would be described
            draft.broken.add(draft.generation.section)
    elif place in draft.fields:
        other = ".".join(str(part) for part in draft.fields[place].path[1:])
        draft.problems.append(draft.document.at_key(node, f"says the same as {quote(other)}", "remove one of them"))
    elif place == MODEL_ENTRIES:
        entries, problems = read_entries(draft.document, node, draft.generation)
        draft.problems += problems
        if entries is None:
            draft.broken.add(place)
        else:
            draft.fields[place] = entries
    elif place not in (IGNORED, "kind"):
        draft.fields[place] = node


def _place_section(draft: Draft, written: str, node: Node) -> None:
    holds_models = written.rpartition(".")[2] in MODEL_SECTIONS
    if node.value is None and (holds_models or written in _NULLABLE_SECTIONS):
        return
    if holds_models:
        draft.homes[MODELS] = node
    if isinstance(node.value, dict):
        _move(draft, node, written)
    elif holds_models and isinstance(node.value, tuple) and draft.generation is not HANDLER:
        draft.sections[written] = node
        _place(draft, f"{written}.paths", node)
    else:
        draft.broken |= {written, MODELS} if holds_models else {written}
        fix = section_fix(node) if holds_models else 'write "key: value" lines below it'
        draft.problems.append(draft.document.wrong_type(node, "a map", fix))


def _suggest(draft: Draft, section: str, key: str, node: Node) -> tuple[str, str | None]:
    """Say what to do about an unknown key, and which key (as written) it probably is."""
    generation = draft.generation
    subsections = [inner for inner in MODEL_SECTIONS if f"{section}.{inner}" in generation.sections]
    near = nearest(key, [inner for inner in subsections if not draft.is_foreign(inner)])
    if near is not None and isinstance(node.value, dict):
        return f'did you mean "{near}"?', f"{section}.{near}"
    if meant := _elsewhere(draft, section, key):
        parent, _, leaf = meant.rpartition(".")
        return (f'write "{leaf}"' if parent == section else f'move it to "{meant}"'), meant
    siblings = [other for other in generation.keys_of(section) if not draft.is_foreign(other)]
    # What another generation has here is no misspelling.
    known = any(_as_in(other, generation, section, key) in {*other.fields, *other.sections} for other in GENERATIONS)
    near = None if known else nearest(key, siblings)
    if near is not None:
        return f'did you mean "{near}"?', f"{section}.{near}" if section else near
    if isinstance(node.value, dict) and (section_home := _home_of_section(generation, key)):
        return f'move what is in it to "{section_home}"', None
    return f"remove it; there can be: {', '.join(siblings)}", None


def _elsewhere(draft: Draft, section: str, key: str) -> str | None:
    """Find a key that another generation, or another section, has: what does this generation write for it?"""
    generation = draft.generation
    served = generation.written.keys() - {IGNORED, NOT_YET}
    for other in GENERATIONS:
        place = other.fields.get(_as_in(other, generation, section, key))
        if place in served:
            return draft.written(place)
    places = {
        place
        for other in GENERATIONS
        for written, place in other.fields.items()
        if written.rpartition(".")[2] == key and place in served
    }
    # Of a key that models have as well, the other one is meant.
    likely = {place for place in places if not place.startswith(f"{MODELS}.")} or places
    return draft.written(likely.pop()) if len(likely) == 1 else None


def _as_in(other: Generation, generation: Generation, section: str, key: str) -> str:
    """Write a key of one generation as another would: `predictor` is the other's `handler`."""
    same_section = re.sub(rf"^{generation.section}\b", other.section, section)
    return f"{same_section}.{key}" if same_section else key


def _home_of_section(generation: Generation, section: str) -> str | None:
    for other in GENERATIONS:
        for written, place in other.fields.items():
            if written.startswith(f"{section}.") and place in generation.written and place not in (IGNORED, NOT_YET):
                return generation.written[place].rpartition(".")[0] or None
    return None
