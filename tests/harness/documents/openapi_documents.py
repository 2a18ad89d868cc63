"""Validation of OpenAPI documents."""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from openapi_spec_validator.schemas import schema_v31
from referencing import Registry, Resource

_SCHEMA = dict(schema_v31)


class _Validator(OpenAPIV31SpecValidator):
    #: With the anchors of the schema of OpenAPI; without, each look-up of one reads the whole schema again.
    schema_validator = Draft202012Validator(
        _SCHEMA, registry=Registry().with_resource(_SCHEMA["$id"], Resource.from_contents(_SCHEMA)).crawl()
    )


def openapi_problems(document: dict[str, Any]) -> list[str]:
    """Return what is wrong with a document, each with its position."""
    return [f"{list(error.absolute_path)}: {error.message}" for error in _Validator(document).iter_errors()]
