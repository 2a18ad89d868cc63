"""Locations: a parsed URL, its obstore client, and error messages for failed requests."""

from __future__ import annotations

import asyncio
import contextlib
import html
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import GCSStore, LocalStore, ObjectStore, S3Store

from cortex.errors import StorageError
from cortex.storage.credentials import StoreSettings, endpoint_name, gs_settings, s3_settings

T = TypeVar("T")

SCHEMES = ("s3", "gs")
_SILENCE_S = 60
#: A request that failed after a minute of silence is not tried again: its store hangs.
_RETRIES: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=_SILENCE_S / 2)}
#: Large objects may take hours, but a silent connection fails within a minute.
_TIMEOUTS: Any = {"connect_timeout": "5s", "read_timeout": f"{_SILENCE_S}s", "timeout": "24h"}
#: The debugging output of obstore for a connection that was silent for too long.
_WAS_SILENT = re.compile(r"kind: Request,\s*source: TimedOut")
#: An error response of S3 and of compatible stores.
_ANSWER = re.compile(r"<Code>([^<]+)</Code>\s*<Message>([^<]*)</Message>")
_PARTICIPLES = {"read": "read", "write": "written"}


@dataclass(frozen=True)
class Location:
    """A parsed URL; a local path is a key below the root of the file system."""

    url: str
    scheme: str
    bucket: str
    key: str

    @classmethod
    def of(cls, url: str) -> Location:
        parts = urlsplit(url)
        if parts.scheme in SCHEMES:
            if not parts.netloc:
                raise StorageError(f"{url} has no bucket name")
            # Not parts.path: `?` and `#` are ordinary characters in a key.
            return cls(url, parts.scheme, parts.netloc, url.partition(f"//{parts.netloc}")[2].strip("/"))
        if parts.scheme == "file":
            path = Path(unquote(parts.path))
        elif "://" in url and not url.startswith("/"):
            raise StorageError(f"{url}: {parts.scheme}:// is not supported; use s3://, gs:// or a local path")
        else:
            path = Path(url).expanduser().absolute()
        return cls(url, "file", "", str(path).strip("/"))

    @property
    def path(self) -> Path:
        """Return the local path."""
        return Path("/") / self.key

    @property
    def base(self) -> str:
        """The prefix of keys below this location."""
        return f"{self.key}/" if self.key else ""

    async def run(
        self, environ: Mapping[str, str], action: Callable[[ObjectStore], Awaitable[T]], verb: str = "read"
    ) -> T:
        """Run an action in the store; retry it unsigned if the bucket may be public. Raises: StorageError."""
        settings = StoreSettings()
        try:
            settings = await asyncio.to_thread(self.settings, environ)
            try:
                return await action(self.open(settings))
            except BaseError as error:
                if not (settings.may_be_unsigned and is_without_credentials(error)):
                    raise
                return await action(self.open(settings.unsigned()))
        except (BaseError, OSError, ValueError) as error:
            raise StorageError(self.explain(error, settings, verb)) from error

    @contextlib.contextmanager
    def explaining(self, verb: str = "read") -> Iterator[None]:
        """Replace errors of the file system by a StorageError with their explanation."""
        try:
            yield
        except OSError as error:
            raise StorageError(self.explain(error, StoreSettings(), verb)) from error

    def settings(self, environ: Mapping[str, str]) -> StoreSettings:
        """Return the client settings; blocks, as it may query S3 for a region."""
        if self.scheme == "s3":
            return s3_settings(self.bucket, environ)
        return gs_settings(environ) if self.scheme == "gs" else StoreSettings()

    def open(self, settings: StoreSettings) -> ObjectStore:
        """Return the obstore client."""
        options: Any = {"allow_http": settings.allow_http, **_TIMEOUTS}
        config: Any = dict(settings.config)
        if "endpoint" in config:
            # obstore reads the environment, too, where the variable of this name has priority over `endpoint`.
            config["aws_endpoint_url_s3"] = config["endpoint"]
        if self.scheme == "s3":
            return S3Store(self.bucket, config=config, client_options=options, retry_config=_RETRIES)
        if self.scheme == "gs":
            return GCSStore(self.bucket, config=config, client_options=options, retry_config=_RETRIES)
        return LocalStore("/", mkdir=True)

    def explain(self, error: Exception, settings: StoreSettings, verb: str = "read") -> str:
        """Return the message for a failed read or write."""
        text = str(error)
        host = endpoint_name(settings, self.scheme)
        if "NoSuchBucket" in text or "The specified bucket does not exist" in text:
            return f"{self.url}: there is no bucket {self.bucket} at {host}"
        if isinstance(error, FileNotFoundError):
            return f"{self.url} does not exist"
        if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError) or any(
            mark in text for mark in ("AccessDenied", "status code: 403", "status code: 401")
        ):
            who = host if self.bucket else "the file system"
            return f"{self.url}: {who} denies access; {self._credentials_hint(verb)}"
        if is_without_credentials(error):
            return f"{self.url}: there are no credentials for {host}; {self._credentials_hint(verb)}"
        if _WAS_SILENT.search(text) or isinstance(error, TimeoutError):
            return f"{self.url}: {host} accepted the connection, but did not answer within {_SILENCE_S} s"
        if "error sending request" in text or "error trying to connect" in text:
            return f"{self.url}: {host} can't be reached"
        return f"{self.url} can't be {_PARTICIPLES[verb]}: {store_message(text) or type(error).__name__}"

    def _credentials_hint(self, verb: str) -> str:
        return {
            "s3": "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) of the operator",
            "gs": "check GOOGLE_APPLICATION_CREDENTIALS of the operator",
        }.get(self.scheme, f"check who may {verb} it")


def is_without_credentials(error: Exception) -> bool:
    """Return True if obstore fell back to instance credentials and found none."""
    text = str(error)
    return "169.254." in text or "metadata.google.internal" in text


def store_message(text: str) -> str:
    """Return the store's own error message, or the first line of the error."""
    if found := _ANSWER.search(text):
        code, message = (html.unescape(part) for part in found.groups())
        return f"{code}: {message}"[:500] if message else code
    return _first_line(text)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:500]
