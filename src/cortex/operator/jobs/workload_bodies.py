"""Validation of the bodies of workloads at their submission, by the signature that the API's replicas have reported."""

from __future__ import annotations

import contextlib

from cortex.errors import DatabaseUnavailableError
from cortex.operator.replicas.signatures import Signatures
from cortex.payloads.content_type import FORM, is_json, media_type_of, to_utf8
from cortex.payloads.json_bodies import read_json
from cortex.payloads.payload_type import BYTES_TYPE, JSON_TYPE
from cortex.payloads.signature import BodySignature
from cortex.payloads.validation import payload_error
from cortex.state.queries.apis import ApiStore
from cortex.state.revision import Revision


class WorkloadBodies:
    """Validates bodies. What it can't judge is accepted, and fails in the replica if it is wrong."""

    def __init__(self, apis: ApiStore, signatures: Signatures) -> None:
        self._apis = apis
        self._signatures = signatures
        self._known: dict[str, tuple[str, BodySignature | None]] = {}  #: by API: the revision and its payload

    def check(self, api: str, content_type: str, body: bytes) -> None:
        """Validate the body of a workload as the live revision will read it. Raises: BadBody, PayloadError."""
        record = self._apis.get(api)
        payload = self._payload(record.serving or record.target) if record is not None else None
        if payload is not None:
            check_body(payload, content_type.encode("latin-1", "replace"), body)

    def _payload(self, revision: Revision) -> BodySignature | None:
        """Return the payload of a revision; None if it takes none, or none is known yet."""
        name = revision.spec.name
        known, payload = self._known.get(name, ("", None))
        if known != revision.hash:
            with contextlib.suppress(DatabaseUnavailableError):
                if (signature := self._signatures.of(revision)) is not None:
                    payload = signature.methods[0].payload if signature.methods else None
                    self._known[name] = revision.hash, payload
                    return payload
            return None
        return payload


def check_body(payload: BodySignature, content_type: bytes, body: bytes) -> None:
    """Validate a body that has to be JSON; accept any other. Raises: BadBody, PayloadError."""
    kind = media_type_of(content_type)
    if payload.media_type == BYTES_TYPE or (kind == FORM and not body.lstrip().startswith((b"{", b"["))):
        return
    needs_json = is_json(kind)
    if payload.is_typed and not kind.startswith(b"multipart/"):
        if not body:
            if payload.is_required:
                raise payload_error("missing", "the body is empty")
            return
        needs_json = needs_json or (payload.media_type == JSON_TYPE and not payload.alternatives)
    if needs_json:
        read_json(to_utf8(body, content_type))
