"""Describe what a deploy changes: fields of the configuration, requirements, and files of the project."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from cortex.config.api_spec import api_spec
from cortex.config.generations import HANDLER
from cortex.config.schema import Api
from cortex.masking import is_secret_field, mask_secrets, secret_values
from cortex.models.spec import DEFAULT_MODEL
from cortex.operator.deploy.model_pins import pins_of
from cortex.operator.deploy.projects import dotenv_of
from cortex.projects.requirements import requirement_lines

#: Longest value that is shown.
_VALUE_CHARACTERS = 60
#: Maximum number of file names per line.
_NAMES = 5
#: Maximum number of lines per section.
_LINES = 20
_MISSING = object()


def _duration(seconds: float) -> str:
    unit, name = next((each for each in ((3600, "h"), (60, "m")) if seconds and seconds % each[0] == 0), (1, "s"))
    return f"{seconds / unit:g}{name}"


def _amount(size_bytes: float) -> str:
    units = ((1 << 40, "Ti"), (1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki"))
    unit, name = next((each for each in units if size_bytes and size_bytes % each[0] == 0), (1, ""))
    return f"{size_bytes / unit:.0f}{name}"


def _defaults(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the default of each field of a model and of the sections in it, by its path."""
    for name, field in model.model_fields.items():
        for each in (field.annotation, *get_args(field.annotation)):
            if isinstance(each, type) and issubclass(each, BaseModel):
                yield from _defaults(each, f"{prefix}{name}.")
        if not (field.is_required() or field.default_factory_takes_validated_data):
            yield f"{prefix}{name}", field.get_default(call_default_factory=True)


#: How values of keys are written, if there are several notations.
_NOTATIONS: Mapping[str, Callable[[float], str]] = {
    **{key: _duration for field, key in HANDLER.written.items() if field.endswith("_s")},
    "compute.cpu": lambda cores: f"{cores:g}",
    **dict.fromkeys(("compute.mem", "compute.mem_limit", "compute.shm"), _amount),
    **dict.fromkeys(("networking.max_body_size", "networking.max_stored_size"), _amount),
}
#: By the key of the field.
_DEFAULTS = {HANDLER.written[field]: default for field, default in _defaults(Api) if field in HANDLER.written}


def describe_changes(before: Api, after: Api, folder_before: Path, folder_after: Path) -> tuple[str, ...]:
    """Return one line per difference between two deployed states of an API; empty if there is none.

    Reads the files of both projects unless the folders are the same.
    """
    states = ((before, folder_before), (after, folder_after))
    values = [value for api, folder in states for value in secret_values(api_spec(api), dotenv_of(folder))]
    lines = _limited(list(spec_changes(before, after, values)), "fields")
    lines += [change.describe() for change in version_changes(before, after)]
    lines += _model_package_changes(before, after)
    if folder_before != folder_after and folder_before.is_dir():  # it may be missing after a change of the leader
        lines += _limited(list(_requirement_changes(before, after, folder_before, folder_after)), "requirements")
        lines += file_changes(folder_before, folder_after)
    return tuple(lines)


def spec_changes(before: Api, after: Api, secrets: Sequence[str] = ()) -> Iterator[str]:
    """Yield a line for each key of the user's file whose value differs, such as `compute.cpu: 0.2 → 0.5`.

    `secrets` are values to mask, in addition to what looks like one.
    Times and amounts have one notation, however they are written. Of a section that is new, defaults are not shown.
    """
    # An older version of cortex stored neither what the user wrote nor the defaults of fields that it did not have.
    complete = tuple(api.model_copy(update={"as_written": None}) for api in (before, after))
    if before.as_written is None or after.as_written is None:
        before, after = complete
    old, new = (dict(_fields("", api_spec(api))) for api in (before, after))
    old_defaults, new_defaults = (dict(_fields("", api_spec(api))) for api in complete)
    for values, parsed in ((old, old_defaults), (new, new_defaults)):
        values |= {key: parsed[key] for key in values.keys() & parsed.keys() & _NOTATIONS.keys()}
    sections = {key.rpartition(".")[0] for key in old}
    unshown = dict[str, bool]()  #: by new section: all of its fields have their defaults
    for field in dict.fromkeys([*old, *new]):
        was = old.get(field, old_defaults.get(field, _MISSING))
        now = new.get(field, new_defaults.get(field, _MISSING))
        if was == now:
            continue
        if now is _MISSING:
            yield f"{field}: removed"
        elif is_secret_field(field):
            yield f"{field}: {'added' if was is _MISSING else 'changed'}"
        elif was is _MISSING:
            section = field.rpartition(".")[0]
            is_default = section not in sections and field in _DEFAULTS and _DEFAULTS[field] == now
            unshown[section] = is_default and unshown.get(section, True)
            if not is_default:
                yield f"{field}: {_shown(now, field, secrets)} (new)"
        else:
            before_shown, after_shown = _shown(was, field, secrets), _shown(now, field, secrets)
            differs = before_shown != after_shown  # else in a secret
            yield f"{field}: {before_shown} → {after_shown}" if differs else f"{field}: changed"
    for section, has_only_defaults in unshown.items():
        if has_only_defaults:
            yield f"{section}: its defaults (new)"


@dataclass(frozen=True)
class VersionChange:
    """A model whose pinned version differs between two revisions."""

    model: str  #: empty for the one model of `path`
    before: str
    after: str

    def describe(self) -> str:
        """Return the change as one line."""
        name = f"model {self.model}" if self.model else "model"
        return f"{name}: version {self.before} → {'new content' if self.before == self.after else self.after}"


def version_changes(before: Api, after: Api) -> list[VersionChange]:
    """Return the models that both states pin to different versions."""
    old = {pin.model: pin for pin in pins_of(before)}
    return [
        VersionChange("" if pin.model == DEFAULT_MODEL else pin.model, old[pin.model].number, pin.number)
        for pin in pins_of(after)
        if pin.model in old and (pin.number, pin.digest) != (old[pin.model].number, old[pin.model].digest)
    ]


def file_changes(before: Path, after: Path) -> list[str]:
    """Return a line each for added, changed and removed files, with the first names."""
    old, new = _files(before), _files(after)
    changed = [name for name in sorted(old & new) if _differs(before / name, after / name)]
    kinds = {"added": sorted(new - old), "changed": changed, "removed": sorted(old - new)}
    return [_names(f"files {kind}", names) for kind, names in kinds.items() if names]


def _fields(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of nested maps, and of lists of maps, with their dotted names."""
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _fields(f"{prefix}.{key}" if prefix else str(key), inner)
    elif value is not None:
        yield prefix, value


def _model_package_changes(before: Api, after: Api) -> list[str]:
    old, new = (tuple(api.handler.dependencies.model_packages) for api in (before, after))
    return [f"packages of its models: {', '.join(old) or 'none'} → {', '.join(new) or 'none'}"] if old != new else []


def _requirement_changes(before: Api, after: Api, folder_before: Path, folder_after: Path) -> Iterator[str]:
    old = _requirements(folder_before / before.handler.dependencies.pip)
    new = _requirements(folder_after / after.handler.dependencies.pip)
    file = after.handler.dependencies.pip
    for name in sorted(old.keys() | new.keys()):
        was, now = old.get(name), new.get(name)
        if was == now:
            continue
        if was is None:
            yield f"{file}: {mask_secrets(now)} (new)"
        else:
            yield mask_secrets(f"{file}: {was} → {now}" if now else f"{file}: {was} removed")


def _requirements(file: Path) -> dict[str, str]:
    """Return the lines of a requirements file by the name of the package."""
    try:
        return requirement_lines(file.read_text(errors="replace"))
    except OSError:
        return {}


def _files(folder: Path) -> set[str]:
    """List the files of a project, without the bytecode that Python wrote there."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if "__pycache__" not in path.parts}


def _differs(before: Path, after: Path) -> bool:
    is_executable = [bool(path.stat().st_mode & 0o100) for path in (before, after)]
    return is_executable[0] != is_executable[1] or not filecmp.cmp(before, after, shallow=False)


def _names(title: str, names: list[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f"{title}: {', '.join(names[:_NAMES])}{more}"


def _limited(lines: list[str], what: str) -> list[str]:
    more = [f"{len(lines) - _LINES} more {what}"] if len(lines) > _LINES else []
    return lines[:_LINES] + more


def _shown(value: Any, key: str, secrets: Sequence[str]) -> str:
    notation = _NOTATIONS.get(key)
    if notation is not None and isinstance(value, int | float):
        return notation(value)
    value = mask_secrets(value, secrets)
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 1]}…"
