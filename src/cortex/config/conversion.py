"""Convert older file forms to the current one; every value keeps its position in the user's file.

`convert` chooses the generation of each resource and moves its values into a `Draft` by the tables in
`generations.py`. Types, defaults and ranges are checked later, by `schema.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cortex.config.document import Document, Node, Path
from cortex.config.generations import (
    DEPLOYED,
    DEPLOYED_CLASS,
    FUNCTIONS,
    GENERATIONS,
    HANDLER,
    IGNORED,
    KEYS_OF_OTHER_SYSTEMS,
    KINDLESS,
    MODEL,
    MODEL_KEYS,
    MODEL_SECTIONS,
    NOT_YET,
    NOT_YET_KEYS,
    OLDER_MODEL_KEYS,
    ONNX_MODEL,
    OPTIONAL_SECTIONS,
    PREDICTOR,
    SHORT_FORMS,
    SPLITTER,
    TASK,
    TENSORFLOW_MODEL,
    UNSUPPORTED_KEYS,
    FileGeneration,
    is_within_unsupported,
    unsupported_key_fix,
)
from cortex.config.schema import MAX_OLD_NAME_LENGTH
from cortex.config.values import NULL, dashed, quote
from cortex.errors import Diagnostic
from cortex.lifecycle import ApiKind
from cortex.spelling import nearest

_KINDS = frozenset(ApiKind)
_WRITTEN = frozenset({*(kind.value for kind in ApiKind), "SyncAPI", "api"})
#: Sections that determine the generation of a resource.
_SHAPES = (("handler", HANDLER), ("predictor", PREDICTOR), ("definition", TASK), ("apis", SPLITTER))
_TOP_KEYS = frozenset(name for generation in GENERATIONS for name in generation.keys_of(""))
MODELS = "handler.models"
MODEL_ENTRIES = "handler.models.paths"


@dataclass
class Draft:
    """One API converted to the current form: each field with the user's own node."""

    document: Document
    item: Node
    generation: FileGeneration
    kind: str
    implied: dict[str, object]  #: values implied by the generation, by field
    fields: dict[str, Node] = dataclasses.field(default_factory=dict)
    sections: dict[str, Node] = dataclasses.field(default_factory=dict)  #: the user's maps, by key as written
    #: Optional sections by field, even if they are empty.
    section_nodes: dict[str, Node] = dataclasses.field(default_factory=dict)
    rejected: set[str] = dataclasses.field(default_factory=set)  #: rejected keys, such as sections that are not maps
    problems: list[Diagnostic] = dataclasses.field(default_factory=list)

    @property
    def type(self) -> str:
        """The handler type as written or implied; python, or that of a command, if it is missing or not a string."""
        node = self.item.at(self.generation.section, "type")
        written = node.value if node is not None else self.implied.get("handler.type")
        return written if isinstance(written, str) else "command" if "handler.command" in self.fields else "python"

    def data(self) -> dict[str, Any]:
        """Return the current form as plain nested maps."""
        data: dict[str, Any] = {}
        for field in self.section_nodes:
            _inner(data, field.split("."))
        for field, value in {**self.implied, **{field: node.plain() for field, node in self.fields.items()}}.items():
            *parents, leaf = field.split(".")
            _inner(data, parents)[leaf] = value
        return data

    def written_key(self, field: str) -> str:
        """Return the key of this generation for a field: the one whose section is present, else the newest."""
        fields = self.generation.fields.items()
        candidates = [written for written, target in fields if target == field]
        if field == MODELS:
            candidates = [written.rpartition(".")[0] for written, target in fields if target == MODEL_ENTRIES]
        fitting = [written for written in candidates if not self.is_out_of_place(written)]
        used = [written for written in fitting if written.rpartition(".")[0] in self.sections.keys() - {""}]
        return (used or fitting or candidates or [field])[-1]

    def last_key(self, field: str) -> str:
        """Return the last part of the key that the user wrote, or should write, for a field."""
        node = self.fields.get(field)
        return str(node.path[-1]) if node else self.written_key(field).rpartition(".")[2]

    def is_for_other_types(self, written: str) -> bool:
        """Return True for a key in a models section of other handler types."""
        types = [MODEL_SECTIONS[part] for part in written.split(".") if part in MODEL_SECTIONS]
        return any(self.type not in some for some in types)

    def is_unsupported(self, written: str) -> bool:
        """Return True for a known key that only other kinds support."""
        is_alone = self.generation in (TASK, SPLITTER)
        is_known = is_alone or written in self.generation.fields or written in self.generation.sections
        # `_misplaced_section` reports sections for other types with a better fix.
        is_foreign = not is_alone and self.is_for_other_types(written.rpartition(".")[2])
        return is_known and unsupported_key_fix(self.kind, written) is not None and not is_foreign

    def is_out_of_place(self, written: str) -> bool:
        """Return True for a key that belongs to other types or other kinds."""
        return self.is_for_other_types(written) or is_within_unsupported(self.kind, written)

    def available_fields(self) -> frozenset[str]:
        """The fields of the current form that this generation and kind support."""
        useful = [field for field, key in self.generation.written.items() if not is_within_unsupported(self.kind, key)]
        return frozenset(useful) - {IGNORED, NOT_YET}

    def find(self, *field: str | int) -> Node | None:
        """Return the user's node for a field or for a value inside it."""
        for length in range(len(field), 0, -1):
            if node := self.fields.get(".".join(map(str, field[:length]))):
                return node.at(*(int(part) if str(part).isdecimal() else part for part in field[length:]))
        return self.section_nodes.get(".".join(map(str, field)))

    def missing(self, field: str) -> tuple[Node, Path]:
        """Return the innermost existing map for a missing field, and the path of the key to add to it."""
        written = self.written_key(field).split(".")
        depth = len(written) - 1
        while depth and ".".join(written[:depth]) not in self.sections:
            depth -= 1
        holder = self.sections[".".join(written[:depth])] if depth else self.item
        return holder, (*holder.path, written[depth])


def _inner(data: dict[str, Any], path: list[str]) -> dict[str, Any]:
    for part in path:
        data = data.setdefault(part, {})
    return data


#: Keys of one target of a splitter.
_TRAFFIC_KEYS = {key: key for key in ("name", "weight", "shadow")}
_MEANT_IN_TRAFFIC = {"api": "name", "percent": "weight"}
#: Keys of which an API in a deployment has exactly one.
_SECTIONS_OF_DEPLOYMENTS = tuple(dict.fromkeys(quote(generation.section) for generation in reversed(DEPLOYED)))
#: Keys that exist for a single kind.
_KEYS_OF_KINDS = {"apis": ApiKind.SPLITTER, "definition": ApiKind.TASK}


@dataclass(frozen=True)
class Conversion:
    """The APIs of a file, and the mistakes in keys, kinds and the deployment."""

    drafts: tuple[Draft, ...]
    problems: tuple[Diagnostic, ...]
    deployment: str | None


def convert(document: Document) -> Conversion:
    """Convert every resource of a document to the current form."""
    kinds = [_find_key(item, "kind") for item in document.items]
    names = [kind.value if kind else None for kind in kinds]
    deployments = [item for item, kind in zip(document.items, names, strict=True) if kind == "deployment"]
    deployment, problems = _read_deployments(document, deployments)
    drafts: list[Draft] = []
    for item, kind in zip(document.items, kinds, strict=True):
        if kind is not None and kind.value == "deployment":
            continue
        chosen = _choose(document, item, kind, in_deployment=bool(deployments))
        problems += [chosen.problem] if chosen.problem else []
        if chosen.generation is None:
            continue
        implied = _implied(chosen.generation, chosen.kind, deployment, item)
        draft = Draft(document, item, chosen.generation, chosen.kind, implied)
        _move(draft, item, "")
        instead = UNSUPPORTED_KEYS[draft.kind]
        draft.problems += _misplaced_section(draft.document, draft.sections, draft.type, draft.generation, instead)
        problems += draft.problems
        drafts.append(draft)
    problems += _check_deployment(document, kinds, deployments)
    return Conversion(tuple(drafts), tuple(problems), deployment)


class _Choice(NamedTuple):
    """The kind and generation chosen for a resource, and the problem with its `kind` key, if any."""

    generation: FileGeneration | None  #: None if the resource cannot be read further
    kind: ApiKind = ApiKind.REALTIME
    problem: Diagnostic | None = None


def _find_key(item: Node, key: str) -> Node | None:
    """Return the node of a top-level key, or of a likely misspelling of it."""
    assert isinstance(item.value, dict)
    if key in item.value:
        return item.value[key]
    for written, node in item.value.items():
        if written not in _TOP_KEYS and nearest(written, _TOP_KEYS) == key:
            return node
    return None


def _choose(document: Document, item: Node, kind: Node | None, *, in_deployment: bool) -> _Choice:
    """Choose the kind and the generation of a resource; `kind` is the node of its `kind` key."""
    by_shape = _by_shape(item)
    if kind is None:
        if in_deployment:
            return _Choice(_api_generation(item), problem=_missing_kind(document, item, "api"))
        if by_shape is PREDICTOR:
            return _Choice(KINDLESS)
        likely = _kind_of(by_shape)
        return _Choice(by_shape or HANDLER, likely, _missing_kind(document, item, likely))
    if not isinstance(kind.value, str):
        likely = _kind_of(by_shape)
        fix = f'write "{likely}"'
        null = document.at_value(kind, NULL[0], fix) if kind.value is None else None
        return _Choice(by_shape, likely, null or document.wrong_type(kind, "a string", fix))
    meant = kind.value if kind.value in _WRITTEN else _nearest_kind(item, kind.value)
    generation = _generation_of(item, meant)
    served = ApiKind(meant) if meant in _KINDS else _kind_of(generation)
    if kind.value == meant:
        return _Choice(generation, served)
    fix = f"write {quote(meant or served)}"
    return _Choice(generation, served, document.at_value(kind, f"unknown kind {quote(kind.value)}", fix))


def _nearest_kind(item: Node, written: str) -> str | None:
    return nearest(written, {*_WRITTEN, *(() if _by_shape(item) else ("deployment",))})


def _generation_of(item: Node, kind: str | None) -> FileGeneration | None:
    if kind == "api":
        return _api_generation(item)
    if kind == "SyncAPI":
        return KINDLESS
    if kind in (ApiKind.TASK, ApiKind.SPLITTER):
        return TASK if kind == ApiKind.TASK else SPLITTER
    by_shape = _by_shape(item)
    if kind not in _WRITTEN:
        return by_shape
    return PREDICTOR if by_shape is PREDICTOR else HANDLER


def _kind_of(generation: FileGeneration | None) -> ApiKind:
    """Return the usual kind of a file generation."""
    if generation is TASK:
        return ApiKind.TASK
    return ApiKind.SPLITTER if generation is SPLITTER else ApiKind.REALTIME


def _missing_kind(document: Document, item: Node, kind: str) -> Diagnostic:
    return document.diagnostic(item.line, item.column, (*item.path, "kind"), "must be defined", f'write "kind: {kind}"')


def _by_shape(item: Node) -> FileGeneration | None:
    return next((generation for section, generation in _SHAPES if _find_key(item, section) is not None), None)


def _api_generation(item: Node) -> FileGeneration:
    predictor = _find_key(item, "predictor")
    if predictor is None:
        models = (TENSORFLOW_MODEL, ONNX_MODEL, MODEL)
        return next((one for one in models if _find_key(item, one.section) is not None), FUNCTIONS)
    keys = predictor.value if isinstance(predictor.value, dict) else {}
    return DEPLOYED_CLASS if any(key in keys for key in ("type", "config", "env")) else FUNCTIONS


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
            fix = f'did you mean "{meant}"?' if meant else "remove it; supported keys: name, kind"
            problems.append(document.at_key(node, f"key {quote(key)} is not supported", fix))
    name = _find_key(item, "name")
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
    elif len(name.value) > MAX_OLD_NAME_LENGTH:
        message = f"is too long ({len(name.value)} characters)"
        problems.append(document.at_value(name, message, f"shorten it to {MAX_OLD_NAME_LENGTH} characters"))
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


def _implied(generation: FileGeneration, kind: str, deployment: str | None, item: Node) -> dict[str, object]:
    implied: dict[str, object] = {"kind": kind}
    if generation is not SPLITTER:  # a splitter has no code
        implied["handler.interface"] = generation.interface
    if generation in (FUNCTIONS, TASK):
        implied["handler.type"] = "python"
    if generation in (ONNX_MODEL, TENSORFLOW_MODEL):
        implied["handler.type"] = generation.section
    if generation is MODEL:
        model = item.at("model")
        is_onnx = model is not None and isinstance(model.value, str) and model.value.endswith(".onnx")
        implied["handler.type"] = "onnx" if is_onnx else "tensorflow"
    if generation in DEPLOYED:
        # A placeholder if the deployment's name is invalid: the file is rejected anyway.
        implied["deployment"] = deployment or "deployment"
    return implied


def _move(draft: Draft, holder: Node, section: str) -> None:
    """Move each value of a map to its field; an unknown key is read as the key it most likely means."""
    assert isinstance(holder.value, dict)
    draft.sections[section] = holder
    for key, node in holder.value.items():
        written = f"{section}.{key}" if section else key
        if draft.is_unsupported(written):
            _report_unsupported(draft, key, written, node)
        elif written in draft.generation.fields or written in draft.generation.sections:
            _set(draft, written, node)
        else:
            fix, meant = _suggest(draft, section, key, node)
            other = _find_duplicate(draft, section, holder, meant) if meant is not None else None
            if other is not None and meant not in draft.generation.sections:
                fix = f"remove it: it duplicates {quote(other)}"
            draft.problems.append(draft.document.at_key(node, f"key {quote(key)} is not supported", fix))
            if meant is not None and other is None and meant not in draft.sections:
                _set(draft, meant, node)


def _report_unsupported(draft: Draft, key: str, written: str, node: Node) -> None:
    """Report a key that only other kinds support."""
    message, fix = f"{key} key is not supported for {draft.kind} kind", unsupported_key_fix(draft.kind, written) or ""
    draft.problems.append(draft.document.at_key(node, message, fix))


def _find_duplicate(draft: Draft, section: str, holder: Node, written: str) -> str | None:
    """Return the user's key, with its sections, that already sets what `written` would set."""
    home, _, key = written.rpartition(".")
    same = holder.at(key) if home == section else draft.item.at(*written.split("."))
    node = same or draft.fields.get(draft.generation.fields.get(written, ""))
    return ".".join(map(str, node.path[1:])) if node is not None else None


def _set(draft: Draft, written: str, node: Node) -> None:
    if written in draft.generation.sections:
        _set_section(draft, written, node)
        return
    field = draft.generation.fields[written]
    if field == NOT_YET:
        key = written.rpartition(".")[2]
        about, fix = NOT_YET_KEYS[key]
        message = f"key {quote(key)} ({about}) is not available in this version of cortex"
        draft.problems.append(draft.document.at_key(node, message, fix))
        if key == written:  # it replaces the section that describes the code
            draft.rejected.add(draft.generation.section)
    elif field in draft.fields:
        other = ".".join(str(part) for part in draft.fields[field].path[1:])
        draft.problems.append(draft.document.at_key(node, f"duplicates {quote(other)}", "remove one of them"))
    elif field in (MODEL_ENTRIES, "apis"):
        _set_list(draft, field, node)
    elif field not in (IGNORED, "kind"):
        draft.fields[field] = node


def _set_list(draft: Draft, field: str, node: Node) -> None:
    if field == MODEL_ENTRIES:
        known = MODEL_KEYS if draft.generation is HANDLER else {**MODEL_KEYS, **OLDER_MODEL_KEYS}
        fix = 'write "name: my-model" and "path: s3://bucket/path" in it'
        entries, problems = _read_entries(draft.document, node, known, OLDER_MODEL_KEYS, fix)
    else:
        fix = 'write "name: my-api" and "weight: 100" in it'
        entries, problems = _read_entries(draft.document, node, _TRAFFIC_KEYS, _MEANT_IN_TRAFFIC, fix)
    draft.problems += problems
    if entries is None:
        draft.rejected.add(field)
    else:
        draft.fields[field] = entries


def _set_section(draft: Draft, written: str, node: Node) -> None:
    if written in SHORT_FORMS and isinstance(node.value, str):
        draft.fields[SHORT_FORMS[written]] = draft.sections[written] = node
        return
    key = written.rpartition(".")[2]
    holds_models = key in MODEL_SECTIONS
    if node.value is None and (holds_models or key in OPTIONAL_SECTIONS):
        return
    if holds_models:
        draft.section_nodes[MODELS] = node
    if isinstance(node.value, dict):
        if key in OPTIONAL_SECTIONS:  # an empty section still enables the feature
            draft.section_nodes[OPTIONAL_SECTIONS[key]] = node
        _move(draft, node, written)
    elif holds_models and isinstance(node.value, tuple) and draft.generation is not HANDLER:
        draft.sections[written] = node
        _set(draft, f"{written}.paths", node)
    else:
        draft.rejected |= {written, MODELS} if holds_models else {written}
        if node.value is None and written == draft.generation.section:
            fix = "write its keys below it, further to the right"
            draft.problems.append(draft.document.at_value(node, NULL[0], fix))
            return
        fix = _section_fix(node) if holds_models else 'write "key: value" lines below it'
        draft.problems.append(draft.document.wrong_type(node, "a map", fix))


def _suggest(draft: Draft, section: str, key: str, node: Node) -> tuple[str, str | None]:
    """Return the fix for an unknown key, and the key (as written) that it most likely means."""
    generation = draft.generation
    if fix := _fix_of_section(draft, section, key):
        return fix, None
    subsections = [inner for inner in MODEL_SECTIONS if f"{section}.{inner}" in generation.sections]
    near = nearest(key, [inner for inner in subsections if not draft.is_out_of_place(inner)])
    if near is not None and isinstance(node.value, dict):
        return f'did you mean "{near}"?', f"{section}.{near}"
    prefix = f"{section}." if section else ""
    siblings = [other for other in generation.keys_of(section) if not draft.is_out_of_place(prefix + other)]
    longer = [other for other in siblings if {*key.split("_")} < {*other.split("_")}]  # max_size for max_batch_size
    if "_" in key and len(longer) == 1 and (near := nearest(key, longer)):
        return f'did you mean "{near}"?', prefix + near
    if meant := _find_moved_key(draft, section, key):
        parent, _, leaf = meant.rpartition(".")
        if parent == section:
            return f'write "{leaf}"', meant
        return (f'move it to "{meant}"' if parent else f'move it out of "{section}": write "{leaf}" beside it'), meant
    # A key that another generation has here, or that another system has, is not a misspelling.
    known = _without_separators(key) in KEYS_OF_OTHER_SYSTEMS or any(
        _translate_key(other, generation, section, key) in {*other.fields, *other.sections} for other in GENERATIONS
    )
    near = None if known else nearest(key, siblings)
    if near is not None:
        return f'did you mean "{near}"?', prefix + near
    if isinstance(node.value, dict) and (section_home := _home_of_section(draft, key)):
        return f'move what is in it to "{section_home}"', None
    return f"remove it; supported keys: {', '.join(siblings)}", None


def _fix_of_section(draft: Draft, section: str, key: str) -> str | None:
    """Return the fix for a section of another kind or another system."""
    if not section and key in _KEYS_OF_KINDS:
        return f"remove it: it belongs to {_KEYS_OF_KINDS[key]}"
    if not section and draft.generation in DEPLOYED and key in {other.section for other in DEPLOYED}:
        return f"remove it: an API has only one of {', '.join(_SECTIONS_OF_DEPLOYMENTS)}"
    here = KEYS_OF_OTHER_SYSTEMS.get(_without_separators(key), "")
    is_section = here in draft.generation.sections and not draft.is_out_of_place(here)
    return f'move what is in it to "{here}"' if is_section else None


def _without_separators(key: str) -> str:
    return re.sub("[_-]", "", key.lower())


def _find_moved_key(draft: Draft, section: str, key: str) -> str | None:
    """Return this generation's key for a field that another generation, section or system writes as `key`."""
    generation = draft.generation
    served = draft.available_fields()
    for other in GENERATIONS:
        field = other.fields.get(_translate_key(other, generation, section, key))
        if field in served:
            return draft.written_key(field)
    fields = {
        field
        for other in GENERATIONS
        for written, field in other.fields.items()
        if written.rpartition(".")[2] == key and field in served
    }
    # If models and another section both have the key, prefer the other section.
    likely = {field for field in fields if not field.startswith(f"{MODELS}.")} or fields
    if not likely and (field := KEYS_OF_OTHER_SYSTEMS.get(_without_separators(key))) in served:
        likely = {field}
    return draft.written_key(likely.pop()) if len(likely) == 1 else None


def _translate_key(other: FileGeneration, generation: FileGeneration, section: str, key: str) -> str:
    """Translate a key to another generation: `predictor` becomes `handler`."""
    same_section = re.sub(rf"^{generation.section}\b", other.section, section)
    return f"{same_section}.{key}" if same_section else key


def _home_of_section(draft: Draft, section: str) -> str | None:
    served = draft.available_fields()
    for other in GENERATIONS:
        for written, field in other.fields.items():
            if written.startswith(f"{section}.") and field in served:
                return draft.generation.written[field].rpartition(".")[0] or None
    return None


def _read_entries(
    document: Document, listing: Node, known: Mapping[str, str], older: Mapping[str, str], fix: str
) -> tuple[Node | None, list[Diagnostic]]:
    """Convert the entries of a list to the current form; None if an entry is not a map.

    `known` maps the keys of this generation to the current ones, `older` those of other generations. `fix` is the
    suggestion for an entry that is not a map.
    """
    if not isinstance(listing.value, tuple):
        return listing, []  # the schema reports it
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
            fix = question if meant else f"remove it; supported keys: {', '.join(current)}"
            problems.append(document.at_key(node, f"key {quote(key)} is not supported", fix))
            if meant in written:
                continue
        if meant in entry:
            other = entry[meant].path[-1]
            problems.append(document.at_key(node, f"duplicates {quote(other)}", "remove one of them"))
        elif meant is not None:
            entry[meant] = node
    return replace(item, value=entry)


def _section_fix(node: Node) -> str:
    """Return the fix for a models section that is not a map."""
    if isinstance(node.value, tuple):
        return 'write "paths:" above its items'
    return f'write "path: {node.value if isinstance(node.value, str) else "s3://bucket/path"}" below it'


def _misplaced_section(
    document: Document, sections: Mapping[str, Node], type_: str, generation: FileGeneration, instead: Mapping[str, str]
) -> list[Diagnostic]:
    """Report models sections for other handler types; `instead` has the fixes for keys that the kind lacks."""
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


def _is_shared(section: Node, generation: FileGeneration) -> bool:
    """Return True if the section is valid for all types, as `models` was up to 0.24."""
    if generation in (DEPLOYED_CLASS, KINDLESS):
        return True
    if generation is HANDLER or section.path[-1] != "models":
        return False
    listing = section if isinstance(section.value, tuple) else section.at("paths")
    entries = listing.value if listing is not None and isinstance(listing.value, tuple) else ()
    return all(holder.at("path") is None for holder in (section, *entries))
