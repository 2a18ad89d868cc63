"""OpenAPI documents of the deployed APIs, from their configuration, their signatures and the samples of their projects.

A document describes the revision that serves. Until one does, and for jobs, it describes the newest revision.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson

from cortex import __version__
from cortex.errors import NotFoundError
from cortex.lifecycle import ApiKind
from cortex.operator.deploy.projects import ProjectFolders
from cortex.operator.replicas.signatures import Signatures
from cortex.payloads.inference_protocol import model_document
from cortex.payloads.json_object import Json
from cortex.payloads.openapi.api import DocumentedApi, Sample
from cortex.payloads.openapi.document import api_document, common_document
from cortex.payloads.openapi.inference import row_of_zeros
from cortex.payloads.signature import ApiSignature
from cortex.predictor.applications import APPLICATION_TYPES
from cortex.predictor.checks.request_arguments import request_arguments
from cortex.state.queries.apis import ApiRecord, ApiStore
from cortex.state.revision import Revision

#: The sample of a project without `readiness`.
_SAMPLE_FILE = "sample.json"
#: A longer sample is no example that anybody reads.
_SAMPLE_MAX_BYTES = 64 * 1024


class Documentation:
    """Documents by API."""

    def __init__(self, apis: ApiStore, signatures: Signatures, projects: ProjectFolders) -> None:
        self._apis = apis
        self._signatures = signatures
        self._projects = projects

    def endpoint(self, name: str) -> str:
        """Return the endpoint of an API with documentation. Raises: NotFoundError."""
        return self._record(name).spec.networking.endpoint

    def document(self, name: str) -> Json:
        """Return the document of an API. Raises: NotFoundError, DatabaseUnavailableError."""
        return api_document(self._describe(self._record(name)))

    async def common_document(self, gateway_url: str, only: str | None = None) -> Json:
        """Return the document of all APIs with documentation, or of `only` one. Raises: DatabaseUnavailableError."""
        records = [record for record in self._apis.records() if only in (None, record.name)]
        described = [self._describe(record) for record in records if record.spec.networking.docs]
        # On a thread: it takes a millisecond per API.
        return await asyncio.to_thread(common_document, described, gateway_url, __version__)

    def models_without_code(self, record: ApiRecord) -> list[Json]:
        """Return the metadata of each model that an API without code serves, with `found`: its format, and why."""
        revision = record.serving or record.target
        handler = revision.spec.handler
        has_code = handler is None or handler.path is not None or handler.models is None
        if has_code or handler.interface != "handler":
            return []
        signature = self._signatures.in_memory(revision)
        models = signature.models if signature is not None else ()
        return [{**model_document(model.name, model, ()), "found": model.description} for model in models]

    def needs_key(self, record: ApiRecord) -> bool:
        """Return whether callers need an API key: for a splitter also if one of the APIs behind it requires one."""
        behind = (self._apis.get(each.name) for each in record.spec.apis or [])
        return any(each.spec.networking.needs_key for each in (record, *filter(None, behind)))

    def has_page(self, record: ApiRecord) -> bool:
        """Return whether an API has a documentation page: a splitter has none if an API behind it answers all paths."""
        behind = (self._apis.get(each.name) for each in record.spec.apis or [] if not each.shadow)
        return record.spec.has_docs and not any(each.spec.answers_all_paths for each in filter(None, behind))

    def _record(self, name: str) -> ApiRecord:
        record = self._apis.get(name)
        if record is None or not record.spec.networking.docs:
            raise NotFoundError(f"{name} has no documentation")
        return record

    def _describe(self, record: ApiRecord) -> DocumentedApi:
        networking, revision = record.spec.networking, record.serving or record.target
        behind = [self._apis.get(each.name) for each in record.spec.apis or []]
        found = [each for each in behind if each is not None]
        answering = {each.name for each in record.spec.apis or [] if not each.shadow}
        signature = self._signatures.of(revision) if revision.spec.kind is not ApiKind.SPLITTER else None
        handler = revision.spec.handler
        targets = tuple(self._describe(each) for each in found if each.name in answering)
        return DocumentedApi(
            name=record.name,
            kind=record.spec.kind,
            endpoint=networking.endpoint,
            revision=str(record.live_number or record.number),
            signature=signature,
            is_application=handler is not None and handler.type in (*APPLICATION_TYPES, "command"),
            is_grpc=any(each.is_grpc for each in targets) or (handler is not None and revision.spec.is_grpc),
            likely_verb="POST" if signature is not None else self._likely_verb(revision),
            needs_key=self.needs_key(record),
            timeout_s=networking.timeout_s,
            max_body_bytes=networking.max_body_size,
            is_of_older_file=handler is not None and handler.interface != "handler",
            sample=self._sample(revision) or _sample_of_model(revision, signature),
            targets=targets,
        )

    def _sample(self, revision: Revision) -> Sample | None:
        """Return the sample that the replicas have answered, or the one of the project."""
        folder = self._projects.path(revision.project_hash)
        for name in filter(None, (revision.spec.readiness_sample, _SAMPLE_FILE)):
            try:
                text = _read(folder / name, _SAMPLE_MAX_BYTES)
                return Sample(f"{name} of the project", orjson.loads(text))
            except (OSError, ValueError):
                continue
        return None

    def _likely_verb(self, revision: Revision) -> str:
        """Return the verb of the first method in the user's file; POST if there is none plainly."""
        spec, handler = revision.spec, revision.spec.handler
        if spec.kind is not ApiKind.REALTIME or handler.path is None:
            return "POST"
        try:
            text = (self._projects.path(revision.project_hash) / handler.path).read_text(errors="replace")
        except OSError:
            return "POST"
        found = request_arguments(text, handler.interface, handler.type, handler.models is not None, spec.kind)
        return found.verb if found is not None else "POST"


def _sample_of_model(revision: Revision, signature: ApiSignature | None) -> Sample | None:
    """Return a row of zeros for the only model of an API without code."""
    models = signature.models if signature is not None and revision.spec.handler.path is None else ()
    row = row_of_zeros(models[0]) if len(models) == 1 else None
    return Sample("A row of zeros", {"instances": [row]}) if row is not None else None


def _read(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file. Raises: OSError; ValueError if it is too long."""
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path.name} is longer than {max_bytes} bytes")
    return content
