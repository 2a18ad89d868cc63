"""Older file forms → the current one: picks the generation of each resource and moves its values, positions kept.

Knows the tables of `generations.py`; knows nothing of types, defaults and ranges, which are `schema.py`'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cortex.config.document import Document, Node
from cortex.config.draft import MODEL_ENTRIES, MODELS, Draft
from cortex.config.generations import (
    DEPLOYED_CLASS,
    FUNCTIONS,
    GENERATIONS,
    HANDLER,
    IGNORED,
    MODEL_SECTIONS,
    NOT_YET,
    NOT_YET_KEYS,
    SHORT_FORMS,
    SPLITTER,
    TASK,
    Generation,
)
from cortex.config.kinds import choose, find_key
from cortex.config.list_entries import read_entries
from cortex.config.model_forms import misplaced_section, read_models, section_fix
from cortex.config.unsupported import UNSUPPORTED_KEYS, instead_of
from cortex.config.values import dashed, nearest, quote
from cortex.errors import Diagnostic
from cortex.lifecycle import ApiKind

#: Sections that may be null, and their places.
_OPTIONAL_SECTIONS = {
    "monitoring": "tracker",
    "schedule": "schedule",
    "server_side_batching": "handler.server_side_batching",
    "tracker": "tracker",
}
#: What one API behind a splitter may say.
_TRAFFIC_KEYS = {key: key for key in ("name", "weight", "shadow")}
_MEANT_IN_TRAFFIC = {"api": "name", "percent": "weight"}
#: Keys that only one kind has, with that kind.
_KEYS_OF_KINDS = {"apis": ApiKind.SPLITTER, "definition": ApiKind.TASK}


@dataclass(frozen=True)
class Translation:
    """The APIs of a file, and what was wrong with keys, kinds and the deployment."""

    drafts: tuple[Draft, ...]
    problems: tuple[Diagnostic, ...]
    deployment: str | None


def translate(document: Document) -> Translation:
    """Bring every resource of a document into the current form."""
    kinds = [find_key(item, "kind") for item in document.items]
    names = [kind.value if kind else None for kind in kinds]
    deployments = [item for item, kind in zip(document.items, names, strict=True) if kind == "deployment"]
    deployment, problems = _read_deployments(document, deployments)
    drafts: list[Draft] = []
    for item, kind in zip(document.items, kinds, strict=True):
        if kind is not None and kind.value == "deployment":
            continue
        chosen = choose(document, item, kind, in_deployment=bool(deployments))
        problems += [chosen.problem] if chosen.problem else []
        if chosen.generation is None:
            continue
        implied = _implied(chosen.generation, chosen.kind, deployment)
        draft = Draft(document, item, chosen.generation, chosen.kind, implied)
        _move(draft, item, "")
        instead = UNSUPPORTED_KEYS[draft.kind]
        draft.problems += misplaced_section(draft.document, draft.sections, draft.type, draft.generation, instead)
        problems += draft.problems
        drafts.append(draft)
    problems += _check_deployment(document, kinds, deployments)
    return Translation(tuple(drafts), tuple(problems), deployment)


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
    name = find_key(item, "name")
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


def _implied(generation: Generation, kind: str, deployment: str | None) -> dict[str, object]:
    implied: dict[str, object] = {"kind": kind}
    if generation is not SPLITTER:  # which alone has no code
        implied["handler.interface"] = generation.interface
    if generation in (FUNCTIONS, TASK):
        implied["handler.type"] = "python"
    if generation in (FUNCTIONS, DEPLOYED_CLASS):
        # A placeholder when the deployment's own name is wrong: the file is refused anyhow.
        implied["deployment"] = deployment or "deployment"
    return implied


def _move(draft: Draft, holder: Node, section: str) -> None:
    """Put each value of a map where the current form has it; unknown keys are read as what they probably mean."""
    assert isinstance(holder.value, dict)
    draft.sections[section] = holder
    for key, node in holder.value.items():
        written = f"{section}.{key}" if section else key
        if draft.is_unsupported(written):
            _refuse(draft, key, written, node)
        elif written in draft.generation.fields or written in draft.generation.sections:
            _place(draft, written, node)
        else:
            fix, meant = _suggest(draft, section, key, node)
            draft.problems.append(draft.document.at_key(node, f"key {quote(key)} is not supported", fix))
            if meant is not None and not _is_taken(draft, section, holder.value, meant):
                _place(draft, meant, node)


def _refuse(draft: Draft, key: str, written: str, node: Node) -> None:
    """Say that a key belongs to other kinds."""
    message, fix = f"{key} key is not supported for {draft.kind} kind", instead_of(draft.kind, written) or ""
    draft.problems.append(draft.document.at_key(node, message, fix))


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
        message = f"key {quote(key)} ({about}) is not available in this version of cortex"
        draft.problems.append(draft.document.at_key(node, message, fix))
        if key == written:  # it stands where the code would be described
            draft.broken.add(draft.generation.section)
    elif place in draft.fields:
        other = ".".join(str(part) for part in draft.fields[place].path[1:])
        draft.problems.append(draft.document.at_key(node, f"says the same as {quote(other)}", "remove one of them"))
    elif place in (MODEL_ENTRIES, "apis"):
        _place_list(draft, place, node)
    elif place not in (IGNORED, "kind"):
        draft.fields[place] = node


def _place_list(draft: Draft, place: str, node: Node) -> None:
    if place == MODEL_ENTRIES:
        entries, problems = read_models(draft.document, node, draft.generation)
    else:
        fix = 'write "name: my-api" and "weight: 100" in it'
        entries, problems = read_entries(draft.document, node, _TRAFFIC_KEYS, _MEANT_IN_TRAFFIC, fix)
    draft.problems += problems
    if entries is None:
        draft.broken.add(place)
    else:
        draft.fields[place] = entries


def _place_section(draft: Draft, written: str, node: Node) -> None:
    if written in SHORT_FORMS and isinstance(node.value, str):
        draft.fields[SHORT_FORMS[written]] = draft.sections[written] = node
        return
    key = written.rpartition(".")[2]
    holds_models = key in MODEL_SECTIONS
    if node.value is None and (holds_models or key in _OPTIONAL_SECTIONS):
        return
    if holds_models:
        draft.homes[MODELS] = node
    if isinstance(node.value, dict):
        if key in _OPTIONAL_SECTIONS:  # it asks for something even if it is empty
            draft.homes[_OPTIONAL_SECTIONS[key]] = node
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
    if not section and key in _KEYS_OF_KINDS:
        return f"remove it: it belongs to {_KEYS_OF_KINDS[key]}", None
    subsections = [inner for inner in MODEL_SECTIONS if f"{section}.{inner}" in generation.sections]
    near = nearest(key, [inner for inner in subsections if not draft.is_out_of_place(inner)])
    if near is not None and isinstance(node.value, dict):
        return f'did you mean "{near}"?', f"{section}.{near}"
    if meant := _elsewhere(draft, section, key):
        parent, _, leaf = meant.rpartition(".")
        return (f'write "{leaf}"' if parent == section else f'move it to "{meant}"'), meant
    prefix = f"{section}." if section else ""
    siblings = [other for other in generation.keys_of(section) if not draft.is_out_of_place(prefix + other)]
    # What another generation has here is no misspelling.
    known = any(_as_in(other, generation, section, key) in {*other.fields, *other.sections} for other in GENERATIONS)
    near = None if known else nearest(key, siblings)
    if near is not None:
        return f'did you mean "{near}"?', prefix + near
    if isinstance(node.value, dict) and (section_home := _home_of_section(draft, key)):
        return f'move what is in it to "{section_home}"', None
    return f"remove it; there can be: {', '.join(siblings)}", None


def _elsewhere(draft: Draft, section: str, key: str) -> str | None:
    """Find a key that another generation, or another section, has: what does this generation write for it?"""
    generation = draft.generation
    served = draft.served_places()
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


def _home_of_section(draft: Draft, section: str) -> str | None:
    served = draft.served_places()
    for other in GENERATIONS:
        for written, place in other.fields.items():
            if written.startswith(f"{section}.") and place in served:
                return draft.generation.written[place].rpartition(".")[0] or None
    return None
