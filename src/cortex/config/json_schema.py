"""JSON Schema of `cortex.yaml` for editors, of each file generation.

Keys come from `generations.py`; types, ranges and defaults from `schema.py`. What a schema cannot express, such as a
file that must exist or a limit that depends on another field, is left to `cortex check`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from cortex.config.descriptions import DESCRIPTIONS
from cortex.config.generations import (
    DEPLOYED,
    DEPLOYED_CLASS,
    FUNCTIONS,
    HANDLER,
    IGNORED,
    KINDLESS,
    MODEL,
    MODEL_SECTIONS,
    NOT_YET,
    OLDER_MODEL_KEYS,
    ONNX_MODEL,
    OPTIONAL_SECTIONS,
    PREDICTOR,
    SHORT_FORMS,
    SPLITTER,
    TASK,
    TENSORFLOW_MODEL,
    FileGeneration,
    is_within_unsupported,
)
from cortex.config.schema import PYTHON, REQUEST_HANDLERS, Api, ConfigModel
from cortex.config.values import ACCEPTED
from cortex.lifecycle import ApiKind
from cortex.payloads.json_object import Json

#: The last version of the original of each file generation → the forms of its resources. The last one is current.
FORMS: Mapping[str, tuple[FileGeneration, ...]] = MappingProxyType(
    {
        "0.9": (MODEL,),
        "0.11": (FUNCTIONS, ONNX_MODEL, TENSORFLOW_MODEL),
        "0.12": (DEPLOYED_CLASS,),
        "0.18": (KINDLESS,),
        "0.33": (PREDICTOR, TASK, SPLITTER),
        "0.35": (HANDLER, TASK, SPLITTER),
    }
)
CURRENT = "0.35"
#: The last version whose files can leave out the kind, which is SyncAPI then.
_SYNC = "0.18"

_DIALECT = "http://json-schema.org/draft-07/schema#"
_KINDS = MappingProxyType({TASK.section: (ApiKind.TASK,), SPLITTER.section: (ApiKind.SPLITTER,)})
_HANDLED = tuple(kind for kind in ApiKind if kind not in (ApiKind.TASK, ApiKind.SPLITTER))
_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_MIB = 1024 * 1024
_LINK = re.compile(r"\[([^]]+)\]\([^)]*\)")


def json_schema(generation: str = CURRENT) -> Json:
    """Return the JSON Schema of the files of a generation, a key of `FORMS`."""
    resources = dict(_resources(generation))
    kinds = [
        resource["properties"]["kind"]["const"] for resource in resources.values() if "kind" in resource["required"]
    ]
    item: Json = {"type": "object"}
    if generation == _SYNC:
        is_batch = {"properties": {"kind": {"const": ApiKind.BATCH.value}}, "required": ["kind"]}
        item |= {"if": is_batch, "then": _reference(ApiKind.BATCH.value), "else": _reference("api")}
        item["properties"] = {"kind": {"enum": ["SyncAPI", *kinds], "description": _description("kind")}}
    elif kinds:
        item |= {"required": ["kind"], "properties": {"kind": {"enum": kinds, "description": _description("kind")}}}
        item["allOf"] = [
            {"if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]}, "then": _reference(name)}
            for kind, name in zip(kinds, resources, strict=True)
        ]
    else:
        item = _reference(next(iter(resources)))
    return {
        "$schema": _DIALECT,
        "title": f"cortex.yaml of cortex {generation}" if generation != CURRENT else "cortex.yaml",
        "type": "array",
        "minItems": 1,
        "items": item,
        "definitions": resources,
    }


def _reference(name: str) -> Json:
    return {"$ref": f"#/definitions/{name}"}


def _resources(generation: str) -> Iterator[tuple[str, Json]]:
    """Yield the name and the schema of each kind of resource."""
    forms = FORMS[generation]
    if all(form in DEPLOYED for form in forms):
        name = {"type": "string", "pattern": _NAME, "description": "the name of the deployment"}
        yield "deployment", _object({"name": name, "kind": {"const": "deployment"}}, ["name", "kind"])
        yield "api", _one_of([_resource(form, ApiKind.REALTIME, {"const": "api"}) for form in forms])
        return
    for form in forms:
        if form is KINDLESS:
            resource = _resource(form, ApiKind.REALTIME, {"const": "SyncAPI"})
            yield "api", {**resource, "required": [key for key in resource["required"] if key != "kind"]}
            # 0.18, the first version with batch jobs, already had the keys of later versions for them.
            yield ApiKind.BATCH.value, _resource(PREDICTOR, ApiKind.BATCH, {"const": ApiKind.BATCH.value})
        else:
            for kind in _KINDS.get(form.section, _HANDLED):
                yield kind.value, _resource(form, kind, {"const": kind.value})


def _one_of(resources: Sequence[Json]) -> Json:
    """Return the schema of a resource that has exactly one of several sections."""
    first, *others = resources
    if not others:
        return first
    shared = [key for key in first["required"] if all(key in other["required"] for other in others)]
    sections = [key for resource in resources for key in resource["required"] if key not in shared]
    properties = {key: value for resource in reversed(resources) for key, value in resource["properties"].items()}
    return {**_object(properties, shared), "oneOf": [{"required": [section]} for section in sections]}


def _resource(form: FileGeneration, kind: ApiKind, written_kind: Json) -> Json:
    """Return the schema of one API of a kind."""
    code = {"interface": form.interface, "type": "python", "path": "handler.py"}
    deployment = "deployment" if form in DEPLOYED else None
    defaults = Api.model_validate({"name": "a", "kind": kind, "deployment": deployment, "handler": code})
    resource = _object({}, ["name", "kind", form.section])
    for key, field in form.fields.items():
        if field == NOT_YET or is_within_unsupported(kind, key):
            continue
        section, path = resource, key.split(".")[:-1]
        for part in path:
            section = section["properties"].setdefault(part, _object({}, []))
        leaf = key.rpartition(".")[2]
        if (meaning := _meaning(form, key, field)) is not None:
            section.setdefault("description", meaning)
        if field == "kind":
            section["properties"][leaf] = {**written_kind, "description": _description("kind")}
        elif field == IGNORED:
            section["properties"][leaf] = {"description": "accepted for compatibility, without effect"}
        else:
            info = _field(field)
            schema = _of_field(field)
            if field == "handler.models.paths" and form is not HANDLER:
                entry = schema["anyOf"][0]["items"]
                entry["properties"] |= dict.fromkeys(OLDER_MODEL_KEYS, entry["properties"]["path"])
                entry["required"] = ["name"]
            default = _default(field, info, defaults)
            section["properties"][leaf] = {
                "description": _description(field),
                **schema,
                **({} if default is None else {"default": default}),
            }
            is_alone = list(form.fields.values()).count(field) == 1
            is_derived = field == "networking.endpoint" or (field == "handler.type" and form is MODEL)
            if info.is_required() and is_alone and not is_derived and leaf not in section["required"]:
                section["required"].append(leaf)
            elif field == "handler.path" and form.interface not in REQUEST_HANDLERS:
                _require_code(section)
    return _with_short_forms(resource, form)


def _require_code(section: Json) -> None:
    """Require the user's file of Python code; models of other types can be served without code."""
    if "type" not in section["properties"]:
        section["required"].append("path")
    else:
        section |= {
            "if": {"properties": {"type": {"const": PYTHON}}, "required": ["type"]},
            "then": {"required": ["path"]},
        }


def _meaning(form: FileGeneration, key: str, field: str) -> str | None:
    """Return the description of the section that has a key; None if the key's field is in another section."""
    written, current = (path.rpartition(".")[0].rpartition(".")[2] for path in (key, field))
    is_same = written in (current, form.section) or written in MODEL_SECTIONS or written in OPTIONAL_SECTIONS
    return _model_at(field.split(".")[:-1]).__doc__ if written and current and is_same else None


def _with_short_forms(schema: Json, form: FileGeneration) -> Json:
    """Allow null and other forms of the sections in a schema."""
    for key, inner in schema["properties"].items():
        if "properties" not in inner:
            continue
        inner = _with_short_forms(inner, form)
        alternatives = [inner]
        if key in SHORT_FORMS:
            alternatives.append(_of_field(SHORT_FORMS[key]))
        if key in MODEL_SECTIONS and form is not HANDLER:  # a list in place of `paths`
            alternatives.append(inner["properties"]["paths"])
        if key in MODEL_SECTIONS or key in OPTIONAL_SECTIONS:
            alternatives.append({"type": "null"})
        schema["properties"][key] = inner if len(alternatives) == 1 else {"anyOf": alternatives}
    return schema


def _default(field: str, info: FieldInfo, defaults: Api) -> Any:
    """Return the default of a field as a user writes it; None if there is none, or if it depends on other fields."""
    if info.is_required() or info.default_factory is not None or info.validate_default:
        return None
    value: Any = defaults
    for part in field.split("."):
        value = info.default if value is None else getattr(value, part, info.default)
    if field.endswith("_s"):
        return f"{value:g}s"
    if field == "compute.cpu":
        return f"{value * 1000:g}m"
    is_memory = isinstance(value, int) and value >= _MIB and value % _MIB == 0
    return f"{value // _MIB}Mi" if is_memory else value


def _description(field: str) -> str:
    return _LINK.sub(r"\1", DESCRIPTIONS.get(field.removesuffix("_s"), ""))


# Fields and annotations.


def _field(path: str) -> FieldInfo:
    """Return the definition of a field of the current form."""
    *section, leaf = path.split(".")
    return _model_at(section).model_fields[leaf]


def _model_at(section: Sequence[str]) -> type[ConfigModel]:
    """Return the model of a section of the current form, also if the section may be absent."""
    model: type[ConfigModel] = Api
    for part in section:
        annotation = model.model_fields[part].annotation
        (model,) = (kind for kind in get_args(annotation) or (annotation,) if kind is not NoneType)
    return model


def _of_field(path: str) -> Json:
    """Return the schema of the values of a field."""
    info = _field(path)
    schema = _of_annotation(info.annotation, info.metadata, path)
    *section, leaf = path.split(".")
    return _nullable(schema) if leaf in _model_at(section).null_means_default else schema


def _of_annotation(annotation: Any, metadata: Sequence[Any], path: str) -> Json:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _of_annotation(arguments[0], arguments[1:], path)
    if origin in (Union, UnionType):
        (inner,) = (part for part in arguments if part is not NoneType)
        return _nullable(_of_annotation(inner, metadata, path))
    schema: Json = {}
    for check in metadata:
        if isinstance(check, BeforeValidator):
            schema |= getattr(check.func, ACCEPTED)
    if origin is list:
        schema["items"] = _of_annotation(arguments[0], (), path)
    elif origin is dict and arguments[1] is not Any:
        names, values = (_of_annotation(argument, (), path) for argument in arguments)
        schema |= {"propertyNames": names, "additionalProperties": values}
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        schema = _entry(annotation, path)
    return schema


def _entry(model: type[BaseModel], path: str) -> Json:
    """Return the schema of an entry of a list."""
    properties = {}
    for name, info in model.model_fields.items():
        schema = _of_annotation(info.annotation, info.metadata, path)
        properties[name] = {"description": _description(f"{path}.{name}"), **schema}
    return _object(properties, [name for name, info in model.model_fields.items() if info.is_required()])


def _nullable(schema: Json) -> Json:
    if "anyOf" in schema:
        return schema if {"type": "null"} in schema["anyOf"] else {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {"anyOf": [schema, {"type": "null"}]}


def _object(properties: Json, required: list[str]) -> Json:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
