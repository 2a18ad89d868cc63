"""The section of a file that says which exported models an API serves."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

from cortex.config.schema_base import Count, Model, Text
from cortex.config.values import a_list, duration_s, memory_bytes, problem, quote, text

STORES = ("s3://", "gs://")
DEFAULT_MODEL = "_cortex_default"  #: what the one model of `path` is called inside
LOCAL_SERVING = "local"  #: a TensorFlow Serving server that we start


def _model_name(value: object) -> str:
    name = text(value)
    if name == DEFAULT_MODEL:
        raise problem(f"{quote(name)} is a reserved name", "rename the model")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        suggestion = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")
        raise problem(
            f"{quote(name)} must contain only letters, numbers, underscores, and dashes",
            f"write {quote(suggestion or 'my-model')}",
        )
    return name


_ALMOST_STORE = re.compile(r"(s3[an]?|gc?s)(?::/*|//)([^/].*)", re.IGNORECASE)
_STORE_OVER_HTTP = re.compile(
    r"https?://(?:(?P<bucket>[^./]+)\.)?"
    r"(?:s3[^/]*\.amazonaws\.com|(?P<google>storage\.(?:cloud\.)?google(?:apis)?\.com))/(?P<path>[^?#]+).*"
)


def _model_location(value: object) -> str:
    """Read where a model is; whether it is there is a rule's business."""
    location = text(value)
    if location.startswith(STORES):
        if not location.split("://", 1)[1].strip("/"):
            raise problem(f"{quote(location)} names no bucket", f'write "{location[:5]}bucket/path"')
        return location
    if "://" in location or location.startswith("~") or _ALMOST_STORE.match(location):
        raise problem(
            f"{quote(location)} must be a path, or start with s3:// or gs://",
            f"write {quote(_as_store(location) or 's3://bucket/path')}",
        )
    if ".." in location.split("/"):
        fix = "move it into the project folder, or write an absolute path"
        raise problem(f"{quote(location)} must not go up with ..", fix)
    return location


def _as_store(url: str) -> str | None:
    """Turn the HTTP address of an object, or what was nearly right, into the store's own form."""
    if found := _ALMOST_STORE.match(url):
        return f"{'s3' if found[1].lower().startswith('s3') else 'gs'}://{found[2]}"
    found = _STORE_OVER_HTTP.fullmatch(url)
    if found is None:
        return None
    bucket = f"{found['bucket']}/" if found["bucket"] else ""
    return f"{'gs' if found['google'] else 's3'}://{bucket}{found['path']}"


def serving_address(value: object) -> str:
    """Read where a TensorFlow Serving server is: host:port, or LOCAL_SERVING."""
    address = text(value)
    if address == LOCAL_SERVING:
        return address
    found = re.fullmatch(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", address)
    if found is None or not 0 < int(found[1]) < 65536:
        if address.lower() == LOCAL_SERVING:
            raise problem(f"{quote(address)} must be host:port, or {quote(LOCAL_SERVING)}", f'write "{LOCAL_SERVING}"')
        host = re.sub(r"^[a-z+]+://", "", address).split("/")[0].split(":")[0]
        raise problem(
            f"{quote(address)} must be host:port, or {quote(LOCAL_SERVING)}",
            f"write {quote(f'{host}:8500')}" if re.fullmatch(r"[A-Za-z0-9_.-]+", host) else 'write "localhost:8500"',
        )
    return address


ModelLocation = Annotated[str, BeforeValidator(_model_location)]


class ModelEntry(Model):
    """One of several models."""

    null_means_default = frozenset({"signature_key"})

    name: Annotated[str, BeforeValidator(_model_name)]
    path: ModelLocation
    signature_key: Text | None = None


class Models(Model):
    """The exported models that an API serves: exactly one of `path`, `paths` and `dir`, and how many are held."""

    null_means_default = frozenset({"path", "paths", "dir", "cache_size", "disk_cache_size", "cache_memory"})

    path: ModelLocation | None = None
    paths: Annotated[list[ModelEntry], BeforeValidator(a_list)] | None = None
    dir: ModelLocation | None = None  #: its folders are models
    signature_key: Text | None = None  #: of each model that has none of its own
    poll_interval_s: Annotated[float, BeforeValidator(duration_s(at_least=1))] = 10.0
    cache_size: Count | None = None  #: model versions in memory
    disk_cache_size: Count | None = None  #: model versions on disk
    cache_memory: Annotated[int, BeforeValidator(memory_bytes)] | None = None

    @property
    def is_cached(self) -> bool:
        """Tell whether models are loaded when first asked for, and dropped again to stay within a limit."""
        return self.cache_size is not None or self.cache_memory is not None
