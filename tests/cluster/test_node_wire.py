"""What operator and nodes say is for them only: nobody reads along, nobody stands between them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from cortex.cluster.certificate import any_certificate, make_certificate
from cortex.cluster.relay import splice
from cortex.cluster.wire import MAX_LINE_BYTES, WireError, accept, connect

KEY = "a key of tests"
Json = dict[str, Any]


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(in_time())


@contextlib.asynccontextmanager
async def listener(serve: Callable[[StreamReader, StreamWriter], Awaitable[None]]) -> AsyncIterator[int]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=MAX_LINE_BYTES)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@contextlib.asynccontextmanager
async def echo(heard: list[Json]) -> AsyncIterator[int]:
    """Listen, keep each message and send it back."""

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        wire = await accept(reader, writer, KEY)
        while wire is not None and (message := await wire.receive()) is not None:
            heard.append(message)
            wire.send(message)
        writer.close()

    async with listener(serve) as port:
        yield port


def test_messages_of_any_size_come_as_they_were_sent() -> None:
    async def test() -> None:
        heard: list[Json] = []
        async with echo(heard) as port:
            wire = await connect("127.0.0.1", port, KEY)
            sent = [{"n": 1}, {"text": os.urandom(4_000_000).hex()}, {"text": "ü\n\u2028"}]
            for message in sent:
                wire.send(message)
                assert await wire.receive() == message
            wire.close()
        assert heard == sent

    run(test)


def test_who_reads_along_learns_nothing() -> None:
    seen = bytearray()

    async def copy(reader: StreamReader, writer: StreamWriter) -> None:
        while data := await reader.read(65536):
            seen.extend(data)
            writer.write(data)
        writer.close()

    async def test() -> None:
        async with echo([]) as far:

            async def tap(reader: StreamReader, writer: StreamWriter) -> None:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", far)
                await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

            async with listener(tap) as port:
                wire = await connect("127.0.0.1", port, KEY)
                wire.send({"env": "a password"})
                assert await wire.receive() == {"env": "a password"}
                wire.close()
        assert b'"hello"' in seen
        assert b"password" not in seen and KEY.encode() not in seen

    run(test)


@contextlib.asynccontextmanager
async def in_between(far: int, ends_tls: str) -> AsyncIterator[int]:
    """Pass on what is said before TLS, then be the other side's end of TLS: to both, or to the listener only."""

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", far)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            writer.write(await far_reader.readuntil(b"\n"))  # the greeting
            far_writer.write(await reader.readuntil(b"\n"))  # the client's proof
            writer.write(await far_reader.readuntil(b"\n"))  # the listener's
            await far_writer.start_tls(any_certificate())
            if ends_tls == "both":
                await writer.start_tls(make_certificate().context)
            await splice(reader, writer, far_reader, far_writer)
        writer.close()
        far_writer.close()

    async with listener(serve) as port:
        yield port


@pytest.mark.parametrize("ends_tls", ["both", "listener"])
def test_who_stands_between_both_is_noticed(ends_tls: str) -> None:
    async def test() -> None:
        heard: list[Json] = []
        async with echo(heard) as far, in_between(far, ends_tls) as port:
            with pytest.raises(WireError):
                await connect("127.0.0.1", port, KEY)
        assert heard == []

    run(test)
