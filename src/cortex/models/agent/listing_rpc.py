"""Shared listings in a cluster: nodes' model agents get listings of stores from the operator's model agent.

`ListingServer`, in the operator's agent, lists each prefix once for all nodes, on a socket of its own that offers
nothing else. `ListingClient`, in the agent of a node, connects to a socket of the node's agent, which relays it to the
operator's machine. The protocol: one JSON object per line in each direction. A `ListReply` is followed by the models in
`size` bytes, which are omitted if the client has the same models already.

    client                              server
    ListRequest ───────────────────────▶
                ◀─────────────────────── ListPending, every second while the listing takes
                ◀─────────────────────── ListReply and the models, or ListFailed

Malformed messages raise ValueError and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import time
from asyncio import Future, StreamReader, StreamWriter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from secrets import token_hex
from typing import Any

import orjson

from cortex.errors import StorageError
from cortex.models.agent.listing import FileMarks, Listing, ModelFolder, Prefix, VersionContent
from cortex.models.agent.poller import ListPrefix, Poller, RemoteListing
from cortex.storage.client import is_remote
from cortex.telemetry import Logger

MAX_LINE_BYTES = 64 * 1024
#: Maximum size of a listing's models: 100,000 versions take about 12 MB.
MAX_MODELS_BYTES = 256 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024


# Messages.


@dataclass(frozen=True)
class ListRequest:
    """Request for a listing that began less than `newer_than_s` ago: a new one if none is younger than `max_age_s`."""

    prefix: Prefix
    max_age_s: float
    newer_than_s: float = math.inf
    models_id: str = ""  #: of the listing that the client has


@dataclass(frozen=True)
class ListReply:
    """A listing without its models."""

    taken_at: float
    age_s: float  #: when the reply was sent
    objects: int
    is_truncated: bool
    models_id: str  #: opaque; equal for equal models
    size: int  #: of the models that follow; 0: the client has them

    def listing(self, prefix: Prefix, models: Mapping[str, ModelFolder]) -> Listing:
        """Return the listing with its models."""
        return Listing(prefix, self.taken_at, models, self.objects, self.is_truncated)


@dataclass(frozen=True)
class ListFailed:
    """The prefix can't be listed; `message` is one line."""

    message: str


@dataclass(frozen=True)
class ListPending:
    """The listing is still in progress; a heartbeat."""


ListAnswer = ListReply | ListFailed | ListPending


def write(message: ListRequest | ListAnswer) -> bytes:
    """Return a message as one line; `read_request` and `read_answer` parse it."""
    return orjson.dumps(_fields(message)) + b"\n"


def read_request(line: bytes) -> ListRequest:
    """Parse a request. Raises: ValueError."""
    data = _object(line)
    try:
        newer_than_s = math.inf if data["newer_than_s"] is None else float(data["newer_than_s"])
        prefix = Prefix(_text(data["url"]), bool(data["is_dir"]))
        return ListRequest(prefix, float(data["max_age_s"]), newer_than_s, _text(data["known"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"the request can't be read: {error!r}") from error


def read_answer(line: bytes) -> ListAnswer:
    """Parse an answer. Raises: ValueError."""
    data = _object(line)
    try:
        match data.get("op"):
            case "wait":
                return ListPending()
            case "unlisted":
                return ListFailed(_text(data["message"]))
            case "listed":
                times = float(data["taken_at"]), float(data["age_s"])
                size = int(data["size"])
                if not 0 <= size <= MAX_MODELS_BYTES:
                    raise ValueError(f"a listing of {size} bytes")
                return ListReply(*times, int(data["objects"]), bool(data["is_cut"]), _text(data["state"]), size)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the answer can't be read: {error!r}") from error
    raise ValueError(f"unknown op {data.get('op')!r}")


def write_models(models: Mapping[str, ModelFolder]) -> bytes:
    """Return the models of a listing as JSON; `read_models` parses it."""
    plain = {
        name: [
            {number: _plain(content) for number, content in folder.versions.items()},
            folder.rest and _plain(folder.rest),
            folder.is_file,
        ]
        for name, folder in models.items()
    }
    try:
        return orjson.dumps(plain)
    except TypeError:  # a lone surrogate in a name, which a store may have
        return json.dumps(plain).encode()


def read_models(data: bytes) -> dict[str, ModelFolder]:
    """Parse the result of `write_models`. Raises: ValueError."""
    try:
        plain = orjson.loads(data)
    except ValueError:
        plain = json.loads(data)
    try:
        return {
            name: ModelFolder(
                {number: _content(each) for number, each in versions.items()}, rest and _content(rest), is_file
            )
            for name, (versions, rest, is_file) in plain.items()
        }
    except (AttributeError, TypeError) as error:
        raise ValueError(f"the models can't be read: {error!r}") from error


def _fields(message: ListRequest | ListAnswer) -> dict[str, Any]:
    match message:
        case ListRequest(prefix, max_age_s, newer_than_s, models_id):
            newer = None if math.isinf(newer_than_s) else newer_than_s
            ages = {"max_age_s": max_age_s, "newer_than_s": newer}
            return {"op": "list", "url": prefix.url, "is_dir": prefix.is_dir, **ages, "known": models_id}
        case ListReply(taken_at, age_s, objects, is_truncated, models_id, size):
            times = {"taken_at": taken_at, "age_s": age_s}
            found = {"objects": objects, "is_cut": is_truncated, "state": models_id, "size": size}
            return {"op": "listed", **times, **found}
        case ListFailed(text):
            return {"op": "unlisted", "message": text}
        case ListPending():
            return {"op": "wait"}


def _plain(content: VersionContent) -> list[Any]:
    times = content.digest, content.files, content.size_bytes, content.modified_at
    return [*times, int(content.marks), content.onnx_files, content.example, content.flaw]


def _content(plain: list[Any]) -> VersionContent:
    digest, files, size_bytes, modified_at, marks, onnx_files, example, flaw = plain
    return VersionContent(digest, files, size_bytes, modified_at, FileMarks(marks), onnx_files, example, flaw)


def _object(line: bytes) -> dict[str, Any]:
    data = orjson.loads(line)  # JSONDecodeError is a ValueError
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    return data


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of a string")
    return value


# The client.

#: After a failure that took longer than `_QUICK_S`, the server is considered unreachable for this long, as each
#: further attempt would cost that wait.
_UNREACHABLE_S = 30.0
_QUICK_S = 0.5
_MAX_IDLE_CONNECTIONS = 16


class ListingClient:
    """Requests listings over `socket`, one at a time per connection; for one event loop."""

    def __init__(self, socket: Path, timeout_s: float, logger: Logger) -> None:
        self._socket = socket
        self._timeout_s = timeout_s
        self._logger = logger
        self._idle: list[tuple[StreamReader, StreamWriter]] = []
        self._is_unreachable = False
        self._unreachable_until = 0.0

    async def list(
        self, prefix: Prefix, max_age_s: float, newer_than_s: float, before: RemoteListing | None
    ) -> RemoteListing | None:
        """Implement `poller.ListRemotely`."""
        started_at = time.monotonic()
        if started_at < self._unreachable_until:
            return None
        try:
            request = ListRequest(prefix, max_age_s, newer_than_s, before.models_id if before else "")
            answer, data = await self._exchange(request)
            listing = None if isinstance(answer, ListFailed) else await _remote_listing(prefix, answer, data, before)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            if time.monotonic() - started_at > _QUICK_S:
                self._unreachable_until = time.monotonic() + _UNREACHABLE_S
            self._log_reachability(f"{type(error).__name__}: {error}")
            return None
        self._log_reachability(None)
        if isinstance(answer, ListFailed):
            raise StorageError(answer.message)
        return listing

    def close(self) -> None:
        """Close all connections."""
        for _, writer in self._idle:
            with contextlib.suppress(RuntimeError):
                writer.close()

    async def _exchange(self, request: ListRequest) -> tuple[ListReply | ListFailed, bytes]:
        while True:
            is_reused = bool(self._idle)
            reader, writer = self._idle.pop() if is_reused else await self._connect()
            try:
                writer.write(write(request))
                answer = await self._read_answer(reader)
                data = await self._read_bytes(reader, answer.size) if isinstance(answer, ListReply) else b""
            except BaseException as error:
                writer.close()
                is_broken = isinstance(error, OSError | EOFError) and not isinstance(error, TimeoutError)
                if is_reused and is_broken:
                    continue  # the server has restarted since the connection was last used
                raise
            if len(self._idle) < _MAX_IDLE_CONNECTIONS:
                self._idle.append((reader, writer))
            else:
                writer.close()
            return answer, data

    async def _connect(self) -> tuple[StreamReader, StreamWriter]:
        async with asyncio.timeout(self._timeout_s):
            return await asyncio.open_unix_connection(str(self._socket), limit=MAX_LINE_BYTES)

    async def _read_answer(self, reader: StreamReader) -> ListReply | ListFailed:
        while True:
            async with asyncio.timeout(self._timeout_s):
                answer = read_answer(await reader.readuntil())
            if not isinstance(answer, ListPending):
                return answer

    async def _read_bytes(self, reader: StreamReader, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            async with asyncio.timeout(self._timeout_s):
                chunk = await reader.read(min(size - len(data), _CHUNK_BYTES))
            if not chunk:
                raise EOFError("the connection ended in the middle of a listing")
            data += chunk
        return bytes(data)

    def _log_reachability(self, reason: str | None) -> None:
        """Log each time the server becomes unreachable or reachable."""
        if reason is not None and not self._is_unreachable:
            self._logger.warning("operator lists no models for this node, listing here", reason=reason)
        elif reason is None and self._is_unreachable:
            self._logger.info("operator lists models for this node again")
        self._is_unreachable = reason is not None


async def _remote_listing(
    prefix: Prefix, answer: ListReply, data: bytes, before: RemoteListing | None
) -> RemoteListing:
    """Return the listing of a reply. Raises: ValueError if the models are missing."""
    begun_at = time.monotonic() - answer.age_s
    models: Mapping[str, ModelFolder]
    if answer.size:
        models = await asyncio.to_thread(read_models, data)  # 100,000 models take a second
    elif before is not None and before.models_id == answer.models_id:
        models = before.listing.models
    else:
        raise ValueError("a listing without models")
    return RemoteListing(answer.listing(prefix, models), begun_at, answer.models_id)


# The server.

#: Interval of `ListPending` messages.
HEARTBEAT_S = 1.0
#: A prefix is removed this long after its next request was due.
LINGER_S = 30.0
_MAX_INTERVAL_S = 3600.0


class ListingServer:
    """Lists prefixes for all clients; for one event loop."""

    def __init__(
        self, list_prefix: ListPrefix, concurrency: asyncio.Semaphore, logger: Logger, linger_s: float = LINGER_S
    ) -> None:
        self._linger_s = linger_s
        self._list_prefix = list_prefix
        self._concurrency = concurrency
        self._logger = logger
        self._prefixes: dict[Prefix, _SharedPrefix] = {}
        self._server: asyncio.Server | None = None

    async def startup(self, listener: socket.socket) -> None:
        """Accept connections."""
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=MAX_LINE_BYTES)

    def shutdown(self) -> None:
        """Accept no more connections and stop listing."""
        if self._server is not None:
            self._server.close()
        for shared in self._prefixes.values():
            shared.stop()

    def remove_unneeded(self) -> None:
        """Remove prefixes that no client has requested lately; call it regularly."""
        for prefix in [prefix for prefix, shared in self._prefixes.items() if not shared.is_needed]:
            self._prefixes.pop(prefix).stop()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            while True:
                await self._answer(read_request(await reader.readuntil()), writer)
        except (ValueError, asyncio.LimitOverrunError) as error:
            self._logger.warning("model agent closed a node's connection", reason=str(error)[:500])
        except (OSError, EOFError):
            pass  # the client disconnected
        finally:
            writer.close()

    async def _answer(self, request: ListRequest, writer: StreamWriter) -> None:
        found = await self._list(request, writer)
        if isinstance(found, str):
            writer.write(write(ListFailed(found)))
        else:
            listing, models = found.listing, found.models
            data = b"" if models.id == request.models_id else await asyncio.shield(models.data)
            age_s = time.monotonic() - found.begun_at
            reply = ListReply(listing.taken_at, age_s, listing.objects, listing.is_truncated, models.id, len(data))
            writer.write(write(reply))
            for start in range(0, len(data), _CHUNK_BYTES):
                writer.write(data[start : start + _CHUNK_BYTES])
                await writer.drain()
        await writer.drain()

    async def _list(self, request: ListRequest, writer: StreamWriter) -> _CompletedListing | str:
        """Return a listing, or why there is none, as soon as there is either. Raises: ValueError if not permitted."""
        if not is_remote(request.prefix.url):
            raise ValueError(f"{request.prefix.url} is not in an object store")
        if not (0 < request.max_age_s < math.inf and request.newer_than_s >= 0):
            raise ValueError(f"ages of {request.max_age_s} and {request.newer_than_s}")
        shared = self._prefixes.get(request.prefix)
        if shared is None:
            shared = _SharedPrefix(request.prefix, self._list_prefix, self._concurrency, self._logger, self._linger_s)
            self._prefixes[request.prefix] = shared
        future = shared.get(request)
        try:
            while not (await asyncio.wait({future}, timeout=HEARTBEAT_S))[0]:
                writer.write(write(ListPending()))
                await writer.drain()
            return future.result()
        finally:
            future.cancel()


@dataclass(frozen=True)
class _ListedModels:
    """The models of successive listings while they stay the same."""

    models: Mapping[str, ModelFolder]
    id: str

    @cached_property
    def data(self) -> Future[bytes]:
        """The models as JSON, encoded once for all clients, on a thread."""
        return asyncio.ensure_future(asyncio.to_thread(write_models, self.models))


@dataclass(frozen=True)
class _CompletedListing:
    listing: Listing
    begun_at: float  #: monotonic
    models: _ListedModels


class _SharedPrefix:
    """One prefix; the only watcher of its poller, which lists when a client needs it."""

    interval_s = math.inf

    def __init__(
        self,
        prefix: Prefix,
        list_prefix: ListPrefix,
        concurrency: asyncio.Semaphore,
        logger: Logger,
        linger_s: float,
    ) -> None:
        self._list_prefix = list_prefix
        self._poller = Poller(prefix, self._list, concurrency, logger)
        self._linger_s = linger_s
        self._remove_at = 0.0  #: monotonic
        self._begun_at = 0.0
        self._newest: _CompletedListing | None = None
        self._error: str | None = None
        self._waiting: dict[Future[_CompletedListing | str], float] = {}  #: with the monotonic time to be newer than
        self._is_scheduled = False

    def get(self, request: ListRequest) -> Future[_CompletedListing | str]:
        """Return a future listing, or the reason why there is none."""
        now = time.monotonic()
        self._remove_at = max(self._remove_at, now + min(request.max_age_s, _MAX_INTERVAL_S) + self._linger_s)
        future: Future[_CompletedListing | str] = asyncio.get_running_loop().create_future()
        newest = self._newest
        if newest is not None and now - newest.begun_at < min(request.max_age_s, request.newer_than_s):
            future.set_result(newest)
        elif self._error is not None:  # the poller retries by itself
            future.set_result(self._error)
        else:
            self._waiting[future] = now - request.newer_than_s
            future.add_done_callback(self._waiting.pop)
            self._list_soon()
        return future

    @property
    def is_needed(self) -> bool:
        """Return whether a client waits or may request it again."""
        return bool(self._waiting) or time.monotonic() < self._remove_at

    def stop(self) -> None:
        """Stop listing."""
        self._poller.stop()

    def on_listing(self, listing: Listing) -> None:
        """Resolve the requests that accept this listing; for others, list again."""
        before = self._newest.models if self._newest else None
        models = before if before and before.models == listing.models else _ListedModels(listing.models, token_hex(8))
        self._newest = _CompletedListing(listing, self._begun_at, models)
        self._error = None
        self._is_scheduled = False
        for future, newer_than in list(self._waiting.items()):
            if newer_than < self._begun_at and not future.done():
                future.set_result(self._newest)
            elif not future.done():
                self._list_soon()

    def on_error(self, prefix: Prefix, message: str) -> None:
        """Fail all requests."""
        self._error = message
        for future in self._waiting:
            if not future.done():
                future.set_result(message)

    async def _list(self, prefix: Prefix) -> Listing:
        self._begun_at = time.monotonic()
        return await self._list_prefix(prefix)

    def _list_soon(self) -> None:
        if self._is_scheduled:
            return
        self._is_scheduled = True
        if not self._poller.watchers:
            self._poller.add(self)  # starts the poller
        else:
            self._poller.list_soon(0)
