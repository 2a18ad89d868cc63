"""Lists prefixes for all nodes of a cluster: one pass at a time, however many ask. Its other side is `asking`.

Runs in the operator's model agent, on a socket of its own: who gets there can ask for listings and for nothing else.
A prefix that nobody has asked for in a while is forgotten.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from asyncio import Future, StreamReader, StreamWriter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from secrets import token_hex

from cortex.models.listing import Folder, Listing, Prefix
from cortex.models.listing_codec import MAX_LINE_BYTES, List, Listed, Unlisted, Wait, read_request, write, write_models
from cortex.models.poller import List as ListPrefix
from cortex.models.poller import Lister
from cortex.storage.client import is_remote
from cortex.telemetry import Logger

#: Who waits is told so this often.
BEAT_S = 1.0
#: A prefix is remembered so long after it should have been asked for again.
LINGER_S = 30.0
_MAX_INTERVAL_S = 3600.0
_CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class _State:
    """What was found, for as long as it stays the same."""

    models: Mapping[str, Folder]
    name: str

    @cached_property
    def data(self) -> Future[bytes]:
        """The models as bytes; made once for all who ask, beside the event loop."""
        return asyncio.ensure_future(asyncio.to_thread(write_models, self.models))


@dataclass(frozen=True)
class _Pass:
    """A listing that was made."""

    listing: Listing
    begun_at: float  #: monotonic
    state: _State


class _Place:
    """One prefix; watches its lister, which lists when somebody needs that."""

    interval_s = math.inf

    def __init__(
        self, prefix: Prefix, list_prefix: ListPrefix, turns: asyncio.Semaphore, logger: Logger, linger_s: float
    ) -> None:
        self.forget_at = 0.0  #: monotonic
        self._list_prefix = list_prefix
        self._lister = Lister(prefix, self._list, turns, logger)
        self._linger_s = linger_s
        self._begun_at = 0.0
        self._newest: _Pass | None = None
        self._error: str | None = None
        self._waiting: dict[Future[_Pass | str], float] = {}  #: with what must be newer; monotonic
        self._is_asked = False

    def get(self, request: List) -> Future[_Pass | str]:
        """Promise a pass, or the reason why there is none."""
        now = time.monotonic()
        self.forget_at = max(self.forget_at, now + min(request.max_age_s, _MAX_INTERVAL_S) + self._linger_s)
        future: Future[_Pass | str] = asyncio.get_running_loop().create_future()
        newest = self._newest
        if newest is not None and now - newest.begun_at < min(request.max_age_s, request.newer_than_s):
            future.set_result(newest)
        elif self._error is not None:  # it is tried again without being asked
            future.set_result(self._error)
        else:
            self._waiting[future] = now - request.newer_than_s
            future.add_done_callback(self._waiting.pop)
            self._list_soon()
        return future

    @property
    def is_needed(self) -> bool:
        """Tell whether somebody waits, or may ask again."""
        return bool(self._waiting) or time.monotonic() < self.forget_at

    def stop(self) -> None:
        """List no more."""
        self._lister.stop()

    def on_listing(self, listing: Listing) -> None:
        """Give a listing to all who wait, but those who have a newer one."""
        before = self._newest.state if self._newest else None
        state = before if before and before.models == listing.models else _State(listing.models, token_hex(8))
        self._newest = _Pass(listing, self._begun_at, state)
        self._error = None
        self._is_asked = False
        for future, newer_than in list(self._waiting.items()):
            if newer_than < self._begun_at and not future.done():
                future.set_result(self._newest)
            elif not future.done():
                self._list_soon()

    def on_error(self, prefix: Prefix, message: str) -> None:
        """Tell all who wait."""
        self._error = message
        for future in self._waiting:
            if not future.done():
                future.set_result(message)

    async def _list(self, prefix: Prefix) -> Listing:
        self._begun_at = time.monotonic()
        return await self._list_prefix(prefix)

    def _list_soon(self) -> None:
        if self._is_asked:
            return
        self._is_asked = True
        if not self._lister.watchers:
            self._lister.add(self)  # which is when it begins
        else:
            self._lister.list_soon(0)


class SharedListings:
    """All prefixes that are asked for; for one event loop."""

    def __init__(
        self, list_prefix: ListPrefix, turns: asyncio.Semaphore, logger: Logger, linger_s: float = LINGER_S
    ) -> None:
        self._linger_s = linger_s
        self._list_prefix = list_prefix
        self._turns = turns
        self._logger = logger
        self._places: dict[Prefix, _Place] = {}
        self._server: asyncio.Server | None = None

    async def startup(self, listener: socket.socket) -> None:
        """Answer who connects."""
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=MAX_LINE_BYTES)

    def shutdown(self) -> None:
        """Answer nobody any more."""
        if self._server is not None:
            self._server.close()
        for place in self._places.values():
            place.stop()

    def forget_unneeded(self) -> None:
        """List no more what nobody asks for; call it now and then."""
        for prefix in [prefix for prefix, place in self._places.items() if not place.is_needed]:
            self._places.pop(prefix).stop()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            while True:
                await self._answer(read_request(await reader.readuntil()), writer)
        except (ValueError, asyncio.LimitOverrunError) as error:
            self._logger.warning("model agent hung up on a node", reason=str(error)[:500])
        except (OSError, EOFError):
            pass  # they left
        finally:
            writer.close()

    async def _answer(self, request: List, writer: StreamWriter) -> None:
        found = await self._find(request, writer)
        if isinstance(found, str):
            writer.write(write(Unlisted(found)))
        else:
            listing, state = found.listing, found.state
            data = b"" if state.name == request.known else await asyncio.shield(state.data)
            age_s = time.monotonic() - found.begun_at
            writer.write(write(Listed(listing.taken_at, age_s, listing.objects, listing.is_cut, state.name, len(data))))
            for start in range(0, len(data), _CHUNK_BYTES):
                writer.write(data[start : start + _CHUNK_BYTES])
                await writer.drain()
        await writer.drain()

    async def _find(self, request: List, writer: StreamWriter) -> _Pass | str:
        """Return what was asked for, as soon as there is something. Raises: ValueError if it may not be asked for."""
        if not is_remote(request.prefix.url):
            raise ValueError(f"{request.prefix.url} is in no store")
        if not (0 < request.max_age_s < math.inf and request.newer_than_s >= 0):
            raise ValueError(f"ages of {request.max_age_s} and {request.newer_than_s}")
        place = self._places.get(request.prefix)
        if place is None:
            place = _Place(request.prefix, self._list_prefix, self._turns, self._logger, self._linger_s)
            self._places[request.prefix] = place
        future = place.get(request)
        try:
            while not (await asyncio.wait({future}, timeout=BEAT_S))[0]:
                writer.write(write(Wait()))
                await writer.drain()
            return future.result()
        finally:
            future.cancel()
