"""What operator and nodes say is for them only: nobody reads along, nobody stands between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from cortex.cluster import transport as wire_module
from cortex.cluster.credentials import fingerprint, make_certificate, unverified_context
from cortex.cluster.node.relay import splice
from cortex.cluster.transport import MAX_LINE_BYTES, PeerError, accept, connect

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
            writer.write(await far_reader.readuntil(b"\n"))  # the listener's word to begin
            await far_writer.start_tls(unverified_context())
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
            with pytest.raises(PeerError):
                await connect("127.0.0.1", port, KEY)
        assert heard == []

    run(test)


def test_what_is_put_in_before_tls_is_noticed() -> None:
    async def test() -> None:
        async with echo([]) as far:

            async def serve(reader: StreamReader, writer: StreamWriter) -> None:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", far)
                writer.write(await far_reader.readuntil(b"\n"))
                far_writer.write(await reader.readuntil(b"\n"))
                writer.write(await far_reader.readuntil(b"\n") + b'{"put": "in"}\n')
                await splice(reader, writer, far_reader, far_writer)

            async with listener(serve) as port:
                with pytest.raises(PeerError):
                    await connect("127.0.0.1", port, KEY)

    run(test)


def test_who_knows_the_secret_is_not_made_to_answer_for_another() -> None:
    """A greeting may hold anything: the answer to it must be of no use where the certificate is asked about."""
    heard: list[Json] = []
    hello: Json = {}

    async def answer_to(nonce: str) -> bytes:
        """Return what somebody who knows the secret says to a greeting of ours."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def greet(reader: StreamReader, writer: StreamWriter) -> None:
            writer.write(json.dumps({"hello": hello["hello"], "nonce": nonce}).encode() + b"\n")
            answer.set_result(await reader.readuntil(b"\n"))
            writer.close()

        async with listener(greet) as port:
            with pytest.raises(PeerError):
                await connect("127.0.0.1", port, KEY)
        return await answer

    async def test() -> None:
        nonlocal hello
        async with echo(heard) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            hello = json.loads(await reader.readuntil(b"\n"))
            writer.write(await answer_to(hello["nonce"]))
            await reader.readuntil(b"\n")
            await writer.start_tls(unverified_context())
            shown = fingerprint(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
            writer.write(await answer_to(f"{hello['nonce']} {shown}"))
            writer.write(b'{"command": "of a stranger"}\n')
            await reader.read()
            writer.close()
        assert heard == []

    run(test)


@pytest.mark.parametrize("said", [b'{"proof": "\\ud800"}', b'{"proof": {"a": 1}}', b"[1]", b"\xff", b"[" * 4000])
def test_who_answers_a_greeting_with_anything_is_hung_up_on(said: bytes) -> None:
    async def test() -> None:
        unhandled: list[Json] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        async with echo([]) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await reader.readuntil(b"\n")
            writer.write(said + b"\n")
            assert await reader.read() == b""
            writer.close()
        assert unhandled == []

    run(test)


def test_who_is_slow_to_begin_tls_is_hung_up_on_while_many_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "HANDSHAKE_TIMEOUT_S", 1000.0)
    monkeypatch.setattr(wire_module, "MAX_UNKNOWN", 1)

    async def test() -> None:
        unhandled: list[Json] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        async with echo([]) as far:

            async def serve(reader: StreamReader, writer: StreamWriter) -> None:
                """Pass on all but TLS."""
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", far)
                writer.write(await far_reader.readuntil(b"\n"))
                far_writer.write(await reader.readuntil(b"\n"))
                writer.write(await far_reader.readuntil(b"\n"))
                _, another = await asyncio.open_connection("127.0.0.1", far)
                assert await far_reader.read() == b""
                for each in (writer, far_writer, another):
                    each.transport.abort()

            async with listener(serve) as port:
                with pytest.raises(PeerError):
                    await connect("127.0.0.1", port, KEY)
        assert unhandled == []

    run(test)
