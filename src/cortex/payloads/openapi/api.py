"""The description of one API in an OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cortex.lifecycle import ApiKind
from cortex.payloads.signature import ApiSignature


@dataclass(frozen=True)
class Sample:
    """A request body that an API answers."""

    title: str
    value: Any  #: parsed from JSON


@dataclass(frozen=True)
class DocumentedApi:
    """An API with everything that its callers see of it."""

    name: str
    kind: ApiKind
    endpoint: str
    revision: str  #: shown as its version
    signature: ApiSignature | None = None  #: None: not known yet
    is_application: bool = False  #: its code decides which paths it answers, and may describe them itself
    is_grpc: bool = False  #: it answers calls only; its routes are those in JSON
    likely_verb: str = "POST"  #: of requests, while the signature is not known
    needs_key: bool = False
    timeout_s: float = 60.0
    max_body_bytes: int = 100 * 1024 * 1024
    is_of_older_file: bool = False  #: its AsyncAPI answers as the generation of its file
    sample: Sample | None = None
    targets: tuple[DocumentedApi, ...] = ()  #: of a TrafficSplitter: the APIs that answer its requests

    @property
    def is_known(self) -> bool:
        """Return whether the signatures of all APIs that answer are known."""
        return all(each.signature is not None or each.is_application for each in self.targets or (self,))

    @property
    def examples(self) -> dict[str, Any]:
        """Return the fields of a media type that show the sample; of a TrafficSplitter, that of its first API."""
        sample = next((each.sample for each in (self, *self.targets) if each.sample is not None), None)
        if sample is None:
            return {}
        return {"examples": {"sample": {"summary": sample.title, "value": sample.value}}}
