"""The built-in class of APIs without code: requests in any of the usual forms, answered by models.

`payloads.request_forms` has the forms. This module imports numpy.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cortex.errors import ModelInputError
from cortex.payloads.inference_protocol import V2Error
from cortex.payloads.request_forms import ModelRequest, read_request
from cortex.predictor.inference.batching import join, joining_key, split
from cortex.predictor.inference.registry_models import RegistryModel

#: Query parameters, and headers, that choose one of several models and a version.
_MODEL, _VERSION = ("model", "x-model-name"), ("version", "x-model-version")
_SHOWN_NAMES = 50


@dataclass(frozen=True, slots=True)
class _ModelCall:
    """A call of a version of a model."""

    model: RegistryModel
    version: str | None  #: None: the newest
    request: ModelRequest

    @property
    def key(self) -> Hashable | None:
        """Return what calls must have in common to be joined; None if this one can't be joined."""
        key = joining_key(self.model.signature(self.version), self.request.inputs)
        return None if key is None else (self.model.name, self.version, key)

    def run(self) -> Any:
        """Run the model. Raises: KeyError, V2Error, ModelError."""
        return self.request.answer(self.model.infer(self.request.inputs, self.version))


class ModelHandler:
    """Answers requests, items of jobs and workloads with the models of an API."""

    def __init__(self, models: Mapping[str, RegistryModel]) -> None:
        self._models = models

    def handle_post(self, payload: Any, query_params: Any, headers: Any) -> Any:
        """Run the model on the rows of the body."""
        with _http_errors():
            return self._read(payload, query_params, headers).run()

    predict = handle_post  # of files up to 0.33

    def handle_batch(self, payload: Any) -> Any:
        """Run the model on the items of a batch, one row each."""
        return self._read({"instances": payload}, None, None).run()["predictions"]

    def handle_async(self, payload: Any) -> Any:
        """Run the model on the rows of a workload."""
        return self._read(payload, None, None).run()

    def _read(
        self, payload: Any, query_params: Mapping[str, str] | None, headers: Mapping[str, str] | None
    ) -> _ModelCall:
        """Read a request; jobs have neither query parameters nor headers.

        Raises: KeyError for an unknown model or version; ModelInputError, ModelError.
        """
        query_params, headers = query_params or {}, headers or {}
        model = self._find(_chosen(_MODEL, query_params, headers))
        version = _chosen(_VERSION, query_params, headers)
        version = None if version == "latest" else version
        signature = model.signature(version)
        return _ModelCall(model, version, read_request(payload, signature, headers.get("content-type") or ""))

    def _find(self, name: str | None) -> RegistryModel:
        models = self._models
        if name is None and len(models) == 1:
            return next(iter(models.values()))
        if name is not None and name in models:
            return models[name]
        shown = ", ".join(sorted(models)[:_SHOWN_NAMES])
        if name is None:
            raise KeyError(f"this API has several models: choose one with ?model=, of {shown}")
        raise KeyError(f"there is no model {name!r}; this API has {shown}")


class BatchingModelHandler(ModelHandler):
    """The same with server-side batching: requests for one model and version are joined along the first axis."""

    def handle_post(self, payload: Any, query_params: Any, headers: Any) -> list[Any]:
        """Run the model on the rows of the body."""
        results: list[Any] = [None] * len(payload)
        groups: dict[Any, list[tuple[int, _ModelCall]]] = {}
        for index, request in enumerate(zip(payload, query_params, headers, strict=True)):
            try:
                with _http_errors():
                    call = self._read(*request)
                groups.setdefault(call.key or index, []).append((index, call))
            except Exception as error:  # of this request alone
                results[index] = error
        for group in groups.values():
            for (index, _), result in zip(group, _run_joined([call for _, call in group]), strict=True):
                results[index] = result
        return results

    predict = handle_post


def _run_joined(calls: Sequence[_ModelCall]) -> list[Any]:
    """Return the answers, or the exceptions, of calls with one key: run the model once, or if that fails once each."""
    first, inputs = calls[0], [call.request.inputs for call in calls]
    if len(calls) > 1:
        try:
            parts = split(first.model.infer(join(inputs), first.version), inputs)
        except Exception:  # one of them fails alone, too, and then it is known which
            parts = None
        if parts is not None:
            return [call.request.answer(outputs) for call, outputs in zip(calls, parts, strict=True)]
    return [_result_of(call) for call in calls]


def _result_of(call: _ModelCall) -> Any:
    try:
        with _http_errors():
            return call.run()
    except Exception as error:  # of this request alone
        return error


@contextmanager
def _http_errors() -> Iterator[None]:
    """Convert mistakes of the caller to HTTPException."""
    try:
        yield
    except (KeyError, ModelInputError, V2Error) as error:
        from starlette.exceptions import HTTPException  # noqa: PLC0415 - slow to import, and few requests need it

        status = 404 if isinstance(error, KeyError) else error.status if isinstance(error, V2Error) else 400
        raise HTTPException(status, str(error.args[0])) from error


def _chosen(names: tuple[str, str], query_params: Mapping[str, str], headers: Mapping[str, str]) -> str | None:
    parameter, header = names
    return query_params.get(parameter) or _utf8(headers.get(header) or "") or None


def _utf8(text: str) -> str:
    """Return the value of a header, whose bytes are characters here, as the UTF-8 that clients send if it is that."""
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        return text
