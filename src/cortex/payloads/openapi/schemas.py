"""Schemas of an OpenAPI document: the `$defs` of each JSON Schema become components, which all schemas share.

In a JSON Schema, `#/$defs/Iris` refers to the schema itself; inside a document, `#` is the document.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

Json = dict[str, Any]

_DEFS = "#/$defs/"
_COMPONENTS = "#/components/schemas/"
#: Keywords of JSON Schema 2020-12 by what they contain. Values of all others, such as `default`, are data.
_SCHEMA = frozenset(
    {
        *("additionalProperties", "contains", "contentSchema", "else", "if", "items", "not", "propertyNames", "then"),
        *("unevaluatedItems", "unevaluatedProperties"),
    }
)
_SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED_SCHEMAS = frozenset({"dependentSchemas", "patternProperties", "properties"})
#: Keywords that change the meaning of `#`, or that refer to other documents, which no reader should have to fetch.
_DROPPED = frozenset({"$anchor", "$defs", "$dynamicAnchor", "$dynamicRef", "$id", "$schema", "definitions"})

_EXAMPLES: Json = {"string": "text", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
_FORMATS: Json = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "duration": "PT1H",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "uri": "https://example.com/",
    "email": "name@example.com",
}
#: Bounds of what an example repeats and nests.
_MAX_ITEMS, _MAX_LENGTH, _MAX_DEPTH = 10, 100, 5


def example_of(schema: Json, definitions: Json, depth: int = 0) -> Any:
    """Return a small value that a JSON Schema accepts, as far as the common keywords decide; None if it names no type.

    `definitions` has what the last part of a `$ref` names.
    """
    if "$ref" in schema:
        schema = definitions.get(str(schema["$ref"]).rpartition("/")[2], {})
    given = [schema[key] for key in ("default", "const") if key in schema]
    given += [schema[key][0] for key in ("examples", "enum") if schema.get(key)]
    if given:
        return given[0]
    if "properties" in schema and depth < _MAX_DEPTH:
        properties: Json = schema["properties"]
        required: list[str] = schema.get("required") or list(properties)
        return {name: example_of(properties[name], definitions, depth + 1) for name in required}
    choices: list[Json] = schema.get("anyOf") or []
    if choices := [each for each in choices if each.get("type") != "null"]:
        return example_of(choices[0], definitions, depth + 1)
    if 0 < schema.get("minItems", 0) <= _MAX_ITEMS and depth < _MAX_DEPTH:
        return [example_of(schema.get("items", {}), definitions, depth + 1)] * schema["minItems"]
    match schema.get("type"):
        case "integer" | "number":
            return _number_of(schema)
        case "string":
            text = str(_FORMATS.get(schema.get("format", ""), _EXAMPLES["string"]))
            return text.ljust(min(schema.get("minLength", 0), _MAX_LENGTH), "x")[: schema.get("maxLength")]
        case type_:
            return _EXAMPLES.get(str(type_))


def _number_of(schema: Json) -> float:
    """Return a number within the bounds of a schema, 1 if possible."""
    one: float = _EXAMPLES[schema["type"]]
    least, most = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
    if schema["type"] == "integer":
        return int(min(max(one, least, above + 1), most, below - 1))
    low, high = float(max(least, above)), float(min(most, below))
    if low < one < high or one in (least, most):
        return one
    return (low + high) / 2 if math.isfinite(low + high) else low + 1 if math.isfinite(low) else high - 1


class SchemaComponents:
    """The component schemas of one document, `own` and those of users. Equal definitions are one component."""

    def __init__(self, own: Mapping[str, Json]) -> None:
        self.schemas: Json = dict(own)
        self._names: dict[tuple[str, str], str] = {}  #: by name and content of the definition

    def add(self, schema: Any) -> Any:
        """Add the definitions of a schema; return the schema with references to them.

        Other references, which readers of the document could not follow, are left out.
        """
        if not isinstance(schema, dict):
            return schema if isinstance(schema, bool) else {}
        found = schema.get("$defs")
        definitions = dict(found) if isinstance(found, dict) else {}
        title = schema.get("title")
        if "properties" in schema and isinstance(title, str) and title and title not in definitions:
            definitions[title] = schema  # clients that are generated from the document name their class after it
            schema = {"$ref": _DEFS + quote(title.replace("~", "~0").replace("/", "~1"))}
        return _rewrite(schema, self._add_definitions(_reachable(schema, definitions)))

    def register(self, name: str, schema: Json) -> Json:
        """Add a schema that refers to components already; return a reference to it."""
        free = self._free_name(name)
        self.schemas[free] = schema
        return {"$ref": _COMPONENTS + free}

    def _add_definitions(self, definitions: Mapping[str, Any]) -> dict[str, str]:
        """Return the component of each definition; those that are not known yet are added."""
        names, new = {}, []
        for name, definition in definitions.items():
            content = {**_reachable(definition, definitions), name: definition}
            key = (name, json.dumps(content, sort_keys=True))
            if key not in self._names:
                self._names[key] = self._free_name(name)
                self.schemas[self._names[key]] = {}
                new.append(name)
            names[name] = self._names[key]
        for name in new:
            self.schemas[names[name]] = {} if _is_endless(name, definitions) else _rewrite(definitions[name], names)
        return names

    def _free_name(self, wanted: str) -> str:
        """Return a key for a component (https://spec.openapis.org/oas/v3.1.0#components-object)."""
        base = re.sub(r"[^A-Za-z0-9._-]+", "_", wanted).strip("_")[:100] or "Schema"
        name, number = base, 1
        while name in self.schemas:
            number += 1
            name = f"{base}_{number}"
        return name


def _reachable(schema: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions that a schema refers to, also indirectly."""
    found: dict[str, Any] = {}
    waiting = [schema]
    while waiting:
        for name in _references(waiting.pop()):
            if name in definitions and name not in found:
                found[name] = definitions[name]
                waiting.append(definitions[name])
    return dict(sorted(found.items()))


def _references(schema: Any) -> Iterator[str]:
    """Yield the names of the definitions that a schema refers to directly."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        if (name := _definition_in(each.get("$ref"))) is not None:
            yield name
        for keyword, value in each.items():
            if keyword in _SCHEMA:
                waiting.append(value)
            elif keyword in _SCHEMAS and isinstance(value, list):
                waiting += value
            elif keyword in _NAMED_SCHEMAS and isinstance(value, dict):
                waiting += value.values()


def _is_endless(name: str, definitions: Mapping[str, Any]) -> bool:
    """Return whether a definition refers to itself without describing anything, which many readers can't bear."""
    followed: set[str] = set()
    current: str | None = name
    while current is not None and current in definitions and current not in followed:
        followed.add(current)
        definition = definitions[current]
        current = _definition_in(definition.get("$ref")) if isinstance(definition, dict) else None
    return current in followed


def _definition_in(reference: Any) -> str | None:
    """Return the name of the definition that a reference means, a JSON pointer in a URL (RFC 6901)."""
    if not isinstance(reference, str) or not reference.startswith(_DEFS):
        return None
    return unquote(reference.removeprefix(_DEFS)).replace("~1", "/").replace("~0", "~")


def _rewrite(schema: Any, names: Mapping[str, str]) -> Any:
    """Return a copy of a schema that refers to the components in `names`."""
    if not isinstance(schema, dict):
        return schema if isinstance(schema, bool) else {}
    made: Json = {}
    for keyword, value in schema.items():
        if keyword == "$ref":
            if (component := _component(value, names)) is not None:
                made[keyword] = component
        elif keyword in _SCHEMA:
            made[keyword] = _rewrite(value, names)
        elif keyword in _SCHEMAS and isinstance(value, list):
            made[keyword] = [_rewrite(each, names) for each in value]
        elif keyword in _NAMED_SCHEMAS and isinstance(value, dict):
            made[keyword] = {name: _rewrite(each, names) for name, each in value.items()}
        elif keyword == "discriminator":
            if isinstance(value, dict) and isinstance(value.get("propertyName"), str):
                made[keyword] = _rewrite_discriminator(value, names)
        elif keyword not in _DROPPED:
            made[keyword] = value
    return made


def _rewrite_discriminator(discriminator: Json, names: Mapping[str, str]) -> Json:
    mapping = discriminator.get("mapping")
    targets = mapping.items() if isinstance(mapping, dict) else ()
    components = {value: _component(target, names) for value, target in targets}
    found = {value: component for value, component in components.items() if component is not None}
    return {"propertyName": discriminator["propertyName"], **({"mapping": found} if found else {})}


def _component(reference: Any, names: Mapping[str, str]) -> str | None:
    component = names.get(_definition_in(reference) or "")
    return None if component is None else _COMPONENTS + component
