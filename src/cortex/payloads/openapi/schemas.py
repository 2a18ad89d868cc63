"""Schemas of an OpenAPI document: the `$defs` of each JSON Schema become components, which all schemas share.

In a JSON Schema, `#/$defs/Iris` refers to the schema itself; inside a document, `#` is the document.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from cortex.payloads.json_object import Json

#: The name of a definition, and its content with all that it refers to.
_Key = tuple[str, str]

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

_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
_EXAMPLES: Json = {"string": "text", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
_FORMATS: Json = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "duration": "PT1H",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "uri": "https://example.com/",
    "email": "name@example.com",
    **dict.fromkeys(("ipv4", "ipvanyaddress", "ipvanyinterface"), "192.0.2.1"),
    **dict.fromkeys(("ipv4network", "ipvanynetwork", "ipv4interface"), "192.0.2.0/24"),
    "ipv6": "2001:db8::1",
    "json-string": "{}",
}
#: Bounds of what an example repeats and nests.
_MAX_ITEMS, _MAX_LENGTH, _MAX_DEPTH = 10, 100, 5


class NoExampleError(Exception):
    """A schema has a pattern that the example does not match."""


def example_of(schema: Any, definitions: Json, depth: int = 0, *, is_exact: bool = False) -> Any:
    """Return a small value that a JSON Schema accepts, as far as the common keywords decide; None if it names no type.

    `definitions` has what the last part of a `$ref` names. Texts do not match patterns; with `is_exact`, that raises
    NoExampleError.
    """
    if isinstance(schema, dict) and "$ref" in schema:
        schema = definitions.get(unquote(str(schema["$ref"])).rpartition("/")[2], {})
    if not isinstance(schema, dict):
        return None
    given = [schema[key] for key in ("default", "const") if key in schema]
    given += [schema[key][0] for key in ("examples", "enum") if schema.get(key)]
    if given:
        return given[0]
    if depth < _MAX_DEPTH and (found := _example_of_parts(schema, definitions, depth + 1, is_exact)) is not None:
        return found
    match _type_of(schema):
        case "integer" | "number" as type_:
            return _number_of(schema, type_)
        case "string":
            text = str(_FORMATS.get(schema.get("format", ""), _EXAMPLES["string"]))
            text = text.ljust(min(schema.get("minLength", 0), _MAX_LENGTH), "x")[: schema.get("maxLength")]
            if is_exact and not _matches(text, schema.get("pattern", "")):
                raise NoExampleError
            return text
        case type_:
            return _EXAMPLES.get(type_)


def example_with_keys(schema: Any, definitions: Json, keys: Iterable[str]) -> Any:
    """Return an example as `example_of`; if the schema is of a map with any keys, the example has `keys`.

    Raises: NoExampleError.
    """
    example = example_of(schema, definitions, is_exact=True)
    if example != {}:
        return example
    value = example_of(schema.get("additionalProperties"), definitions)
    return dict.fromkeys(keys, 1 if value is None else value)


def _example_of_parts(schema: Json, definitions: Json, depth: int, is_exact: bool) -> Any:
    """Return an example made of those of the properties, alternatives or items; None if there are none."""
    if "properties" in schema:
        properties: Json = schema["properties"]
        required: list[str] = schema.get("required") or list(properties)
        return {name: example_of(properties.get(name, {}), definitions, depth, is_exact=is_exact) for name in required}
    for keyword in ("anyOf", "oneOf", "allOf"):
        if choices := [each for each in schema.get(keyword, ()) if not _is_null(each)]:
            return example_of(choices[0], definitions, depth, is_exact=is_exact)
    if _type_of(schema) == "array" and schema.get("maxItems") != 0 and schema.get("minItems", 0) <= _MAX_ITEMS:
        items = schema.get("prefixItems") or [schema.get("items", {})] * max(1, schema.get("minItems", 1))
        examples = [example_of(each, definitions, depth, is_exact=is_exact) for each in items]
        return [] if None in examples else examples
    return None


def _matches(text: str, pattern: Any) -> bool:
    try:
        return re.search(pattern, text) is not None
    except (re.error, TypeError):  # other dialects have other patterns
        return False


def _is_null(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "null"


def _type_of(schema: Json) -> str:
    type_ = schema.get("type")
    return str(next((each for each in type_ if each != "null"), "null") if isinstance(type_, list) else type_)


def _number_of(schema: Json, type_: str) -> float:
    """Return a number within the bounds of a schema, 1 if possible."""
    one: float = _EXAMPLES[type_]
    least, most = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
    if type_ == "integer":
        step = schema.get("multipleOf", 1)
        return int(min(math.ceil(max(one, least, above + 1) / step) * step, most, below - 1))
    low, high = float(max(least, above)), float(min(most, below))
    if low < one < high or one in (least, most):
        return one
    return (low + high) / 2 if math.isfinite(low + high) else low + 1 if math.isfinite(low) else high - 1


class SchemaComponents:
    """The component schemas of one document, `own` and those of users. Equal definitions are one component.

    Generators of clients name classes after titles, or after the names of components without one. So both are unique.
    """

    def __init__(self, own: Mapping[str, Json]) -> None:
        self.schemas: Json = dict(own)
        self._titles = {_letters(name) for name in own}
        self._names: dict[_Key, str] = {}
        self._suffixes: dict[_Key, str] = {}

    def distinguish(self, inputs: Iterable[Json], outputs: Iterable[Json]) -> None:
        """Name definitions that differ between the requests and the responses of an API `X-Input` and `X-Output`.

        Call it before the schemas are added.
        """
        of_inputs = {key for schema in inputs for key in _keys(schema)}
        of_outputs = {key for schema in outputs for key in _keys(schema)}
        names = {name for name, _ in of_inputs} & {name for name, _ in of_outputs}
        for keys, suffix in ((of_inputs - of_outputs, "Input"), (of_outputs - of_inputs, "Output")):
            self._suffixes |= {key: suffix for key in keys if key[0] in names}

    def add(self, schema: Any) -> Any:
        """Add the definitions of a schema; return the schema with references to them.

        Other references, which readers of the document could not follow, are left out.
        """
        if not isinstance(schema, dict):
            return schema if isinstance(schema, bool) else {}
        schema, definitions = _definitions(schema)
        return _rewrite(schema, self._add_definitions(definitions))

    def register(self, name: str, schema: Json) -> Json:
        """Add a schema that refers to components already; return a reference to it."""
        free = self._free_name(name)
        self.schemas[free] = self._with_unique_title(schema, free)
        return {"$ref": _COMPONENTS + free}

    def _add_definitions(self, definitions: Mapping[str, Any]) -> dict[str, str]:
        """Return the component of each definition; those that are not known yet are added."""
        names, new = {}, {}
        for name in definitions:
            key = _key(name, definitions)
            if key not in self._names:
                new[name] = self._suffixes.get(key, "")
                self._names[key] = self._free_name(name, new[name])
                self.schemas[self._names[key]] = {}
            names[name] = self._names[key]
        for name, suffix in new.items():
            component = {} if _is_endless(name, definitions) else _rewrite(definitions[name], names)
            self.schemas[names[name]] = self._with_unique_title(component, names[name], suffix)
        return names

    def _free_name(self, wanted: str, suffix: str = "") -> str:
        """Return a key for a component (https://spec.openapis.org/oas/v3.1.0#components-object)."""
        base = re.sub(r"[^A-Za-z0-9._-]+", "_", wanted).strip("_")[:100] or "Schema"
        base = f"{base}-{suffix}" if suffix else base
        return next(name for name in _numbered(base, "_") if name not in self.schemas)

    def _with_unique_title(self, component: Any, name: str, suffix: str = "") -> Any:
        """Return a component with another title if its own, or its name without one, is that of another component."""
        if not isinstance(component, dict):
            return component
        title = component.get("title")
        wanted = title + suffix if isinstance(title, str) and title else name
        unique = next(each for each in _numbered(wanted, "") if _letters(each) not in self._titles)
        self._titles.add(_letters(unique))
        return component if unique in (title, name) else {**component, "title": unique}


def _definitions(schema: Json) -> tuple[Json, dict[str, Any]]:
    """Return a schema, which may itself become a definition, and the definitions that it refers to."""
    found = schema.get("$defs")
    definitions = dict(found) if isinstance(found, dict) else {}
    title = schema.get("title")
    if "properties" in schema and isinstance(title, str) and title and title not in definitions:
        definitions[title] = schema  # clients that are generated from the document name their class after it
        schema = {"$ref": _DEFS + quote(title.replace("~", "~0").replace("/", "~1"))}
    return schema, _reachable(schema, definitions)


def _keys(schema: Json) -> Iterator[_Key]:
    _, definitions = _definitions(schema)
    for name in definitions:
        yield _key(name, definitions)


def _key(name: str, definitions: Mapping[str, Any]) -> _Key:
    content = {**_reachable(definitions[name], definitions), name: definitions[name]}
    return name, json.dumps(content, sort_keys=True)


def _letters(name: str) -> str:
    """Return what distinguishes a name in a client, which may write it `a_b` or `AB`."""
    return re.sub(r"\W|_", "", name).casefold()


def _numbered(name: str, separator: str) -> Iterator[str]:
    yield name
    for number in itertools.count(2):
        yield f"{name}{separator}{number}"


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
        elif keyword == "default":
            # Code may declare any default. One that is no JSON, such as NaN, has become null.
            if _is_of_type(value, schema):
                made[keyword] = value
        elif keyword not in _DROPPED:
            made[keyword] = value
    return made


def _is_of_type(value: Any, schema: Any) -> bool:
    """Return whether a value has the type of a JSON Schema, or one of its types; True if it names none."""
    if not isinstance(schema, dict):
        return True
    if isinstance(choices := schema.get("anyOf"), list):
        return any(_is_of_type(value, each) for each in choices)
    named = schema.get("type")
    types = [each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)]
    if isinstance(value, list) and "array" in types:
        return all(_is_of_type(each, schema.get("items")) for each in value)
    if isinstance(value, bool):  # of Python's integers, too
        return not types or "boolean" in types
    return not types or any(isinstance(value, _TYPES.get(each, object)) for each in types)


def _rewrite_discriminator(discriminator: Json, names: Mapping[str, str]) -> Json:
    mapping = discriminator.get("mapping")
    targets = mapping.items() if isinstance(mapping, dict) else ()
    components = {value: _component(target, names) for value, target in targets}
    found = {value: component for value, component in components.items() if component is not None}
    return {"propertyName": discriminator["propertyName"], **({"mapping": found} if found else {})}


def _component(reference: Any, names: Mapping[str, str]) -> str | None:
    component = names.get(_definition_in(reference) or "")
    return None if component is None else _COMPONENTS + component
