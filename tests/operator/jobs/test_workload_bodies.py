"""Validation of the bodies of workloads at their submission."""

from __future__ import annotations

import pytest

from cortex.operator.jobs.workload_bodies import check_body
from cortex.payloads.signature import BodySignature
from cortex.payloads.validation import BadBody, PayloadError

UNTYPED, TYPED = BodySignature(), BodySignature(is_typed=True)
OPTIONAL = BodySignature(is_typed=True, is_required=False)
RAW = BodySignature(media_type="application/octet-stream", is_typed=True)
TEXT = BodySignature(media_type="text/plain", is_typed=True)
ARRAY = BodySignature(is_typed=True, alternatives=(BodySignature(media_type="text/csv"),))
JSON, FORM = "application/json", "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("payload", "content_type", "body", "refused"),
    [
        (UNTYPED, JSON, b"{", BadBody),
        (UNTYPED, "application/problem+json", b"{", BadBody),
        (UNTYPED, JSON, b"", BadBody),
        (UNTYPED, "", b"{", None),
        (UNTYPED, "text/plain", b"{", None),
        (TYPED, "", b"{", BadBody),
        (TYPED, "image/png", b"{", BadBody),
        (TYPED, FORM, b"{", BadBody),
        (TYPED, FORM, b"a=1", None),
        (TYPED, "multipart/form-data; boundary=x", b"{", None),
        (TYPED, JSON, b"", PayloadError),
        (OPTIONAL, JSON, b"", None),
        (RAW, JSON, b"{", None),
        (TEXT, "", b"{", None),
        (ARRAY, "text/csv", b"{", None),
        (ARRAY, JSON, b"{", BadBody),
        (TYPED, "application/json; charset=utf-16", '{"a": "ü"}'.encode("utf-16"), None),
    ],
)
def test_refuses_what_the_method_would_fail_to_parse(
    payload: BodySignature, content_type: str, body: bytes, refused: type[Exception] | None
) -> None:
    if refused is None:
        check_body(payload, content_type.encode(), body)
    else:
        with pytest.raises(refused):
            check_body(payload, content_type.encode(), body)
