import asyncio

import pytest
from starlette.background import BackgroundTask
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse

from cortex.worker.requests.streaming import open_response


async def read(opened):
    return b"".join([chunk async for chunk in opened.chunks])


async def test_a_stream_is_read_in_chunks_and_then_its_background_task_runs():
    done = []
    response = StreamingResponse(iter(["é", b"b", ""]), 201, {"X-A": "b"}, "text/csv", BackgroundTask(done.append, 1))
    opened = await open_response(response)
    assert opened.status == 201
    assert (b"x-a", b"b") in opened.headers
    assert (b"content-type", b"text/csv; charset=utf-8") in opened.headers
    assert await read(opened) == "éb".encode()
    await opened.done
    assert done == [1]


async def test_the_body_ends_before_a_slow_background_task_does():
    gate = asyncio.Event()

    async def later():
        await gate.wait()
        raise ValueError("later")

    opened = await open_response(StreamingResponse(iter("ab"), background=BackgroundTask(later)))
    assert await read(opened) == b"ab"
    assert not opened.done.done()
    gate.set()
    with pytest.raises(ValueError, match="later"):
        await opened.done


async def test_a_file_is_sent_completely_or_by_range(tmp_path):
    file = tmp_path / "a.bin"
    file.write_bytes(bytes(range(256)) * 1000)
    opened = await open_response(FileResponse(file))
    assert all(name != b"content-length" for name, _ in opened.headers)
    assert await read(opened) == file.read_bytes()
    opened = await open_response(FileResponse(file), [(b"Range", b"bytes=1-3")])
    assert opened.status == 206
    assert await read(opened) == b"\x01\x02\x03"
    with pytest.raises(Exception, match="does not exist"):
        await open_response(FileResponse(tmp_path / "gone"))


async def test_an_exception_of_a_stream_is_raised_to_its_reader():
    async def broken():
        yield "a"
        raise ValueError("broken")

    opened = await open_response(StreamingResponse(broken()))
    assert await anext(opened.chunks) == b"a"
    with pytest.raises(ValueError, match="broken"):
        await anext(opened.chunks)


async def test_closing_the_reader_stops_the_stream():
    stopped = asyncio.Event()

    async def endless():
        try:
            while True:
                yield "a"
        finally:
            stopped.set()

    opened = await open_response(StreamingResponse(endless()))
    assert await anext(opened.chunks) == b"a"
    await opened.chunks.aclose()
    assert opened.done.cancelled()
    await asyncio.wait_for(stopped.wait(), 10)


async def test_a_slow_reader_slows_the_stream():
    made = []

    async def counting():
        for number in range(1000):
            made.append(number)
            yield str(number)

    opened = await open_response(StreamingResponse(counting()))
    for _ in range(5):
        await anext(opened.chunks)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(made) < 10
    await opened.chunks.aclose()


async def test_custom_responses_are_run():
    class Teapot(Response):
        async def __call__(self, scope, receive, send):
            await PlainTextResponse("tea", 418)(scope, receive, send)

    class Silent(Response):
        async def __call__(self, scope, receive, send):
            pass

    opened = await open_response(Teapot())
    assert (opened.status, await read(opened)) == (418, b"tea")
    with pytest.raises(Exception, match="Silent ended without an answer"):
        await open_response(Silent())
