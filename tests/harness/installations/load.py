"""A constant load in a process of its own: open loop, latencies counted from the time a request was due.

Run as `python load.py URL RATE CONNECTIONS`: it prints an empty line after the first response. When its standard input
closes, it prints one JSON object and ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from urllib.parse import urlsplit

BODY = b'{"x": 1}'
#: Of how many different answers the number is counted.
DISTINCT = 1000


class Load:
    """Sends `rate` requests per second over kept-alive connections until stopped."""

    def __init__(self, url: str, rate: float, connections: int) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        self._request = (
            f"POST {target} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(BODY)}\r\n\r\n"
        ).encode() + BODY
        self._rate = rate
        self._connections = connections
        self._due: asyncio.Queue[float] = asyncio.Queue()
        self.statuses: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.latencies: list[float] = []
        self.failures: list[dict[str, object]] = []

    async def run(self, stopped: asyncio.Event) -> None:
        workers = [asyncio.create_task(self._work()) for _ in range(self._connections)]
        start, sent = time.monotonic(), 0
        while not stopped.is_set():
            now = time.monotonic()
            while start + sent / self._rate <= now:
                self._due.put_nowait(start + sent / self._rate)
                sent += 1
            await asyncio.sleep(0.002)
        self._due.put_nowait(time.monotonic())  # sent after the stop: it sees whatever the stopper saw
        await self._due.join()
        for worker in workers:
            worker.cancel()

    async def _work(self) -> None:
        reader: asyncio.StreamReader | None = None
        writer: asyncio.StreamWriter | None = None
        while True:
            due = await self._due.get()
            status, detail = "error", ""
            try:
                if writer is None or reader is None:
                    reader, writer = await asyncio.open_connection(self._host, self._port)
                writer.write(self._request)
                status, body, close = await _read_answer(reader)
                detail = body.decode("utf-8", "replace")[:300]
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                detail, close = repr(error), True
            if close and writer is not None:
                writer.close()
                reader = writer = None
            if not self.latencies:
                print(flush=True)
            self.latencies.append(time.monotonic() - due)
            self.statuses[status] += 1
            if status == "200" and (detail in self.answers or len(self.answers) < DISTINCT):
                self.answers[detail] += 1
            if status != "200" and len(self.failures) < 50:
                self.failures.append({"status": status, "detail": detail, "at": time.time()})
            self._due.task_done()

    def summary(self) -> dict[str, object]:
        ordered = sorted(self.latencies) or [0.0]
        return {
            "sent": len(self.latencies),
            "statuses": dict(self.statuses),
            "answers": dict(self.answers),
            "failures": self.failures,
            "p50_s": ordered[len(ordered) // 2],
            "p99_s": ordered[int(len(ordered) * 0.99)],
            "max_s": ordered[-1],
        }


async def _read_answer(reader: asyncio.StreamReader) -> tuple[str, bytes, bool]:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return lines[0].split(" ")[1], body, headers.get("connection") == "close"


async def main() -> None:
    load = Load(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, stopped.set)
    await load.run(stopped)
    print(json.dumps(load.summary()))


if __name__ == "__main__":
    asyncio.run(main())
