from __future__ import annotations

import pytest

from cortex.payloads.signature import (
    ApiSignature,
    BodySignature,
    MethodSignature,
    ModelSignature,
    TensorSignature,
    parse_signature,
)

IRIS = ApiSignature(
    methods=(
        MethodSignature("POST", "handle_post", BodySignature({"type": "object"}, is_typed=True), BodySignature()),
    ),
    models=(ModelSignature("iris", "sklearn", (TensorSignature("x", "FP32", (-1, 4), labels=("a", "b")),), ()),),
)


def test_a_signature_survives_its_json_form() -> None:
    assert parse_signature(IRIS.to_json()) == IRIS
    assert parse_signature(ApiSignature().to_json()) == ApiSignature()


def test_keys_of_a_newer_version_are_ignored() -> None:
    assert parse_signature('{"methods": [], "models": [], "later": 1}') == ApiSignature()


def test_other_json_is_refused() -> None:
    with pytest.raises(ValueError, match="methods"):
        parse_signature('{"methods": 1}')
