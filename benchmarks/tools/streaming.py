"""Streamed responses read by one client: time to the first byte, and rate."""

from __future__ import annotations

import socket
import statistics
import time
from dataclasses import dataclass

from benchmarks.tools.endpoint import Endpoint
from benchmarks.tools.workloads import CHUNK_COUNT, Workload


@dataclass(frozen=True)
class Streaming:
    """Medians over the requests of one client."""

    first_byte_us: float
    chunks_per_s: float


def streaming(endpoint: Endpoint, workload: Workload, seconds: float) -> Streaming:
    """Read answers one after the other, each on a connection of its own, for some seconds."""
    firsts: list[float] = []
    wholes: list[float] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or not wholes:
        first, whole = _one(endpoint, workload)
        firsts.append(first)
        wholes.append(whole)
    return Streaming(statistics.median(firsts) * 1e6, CHUNK_COUNT / statistics.median(wholes))


def _one(endpoint: Endpoint, workload: Workload) -> tuple[float, float]:
    """Return the seconds to the first byte of the body and to its end. Raises: ValueError if chunks are missing."""
    request = workload.request(endpoint.host, endpoint.path).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    with socket.create_connection((endpoint.host, endpoint.port), timeout=30) as connection:
        start = time.perf_counter()
        connection.sendall(request)
        answer = bytearray()
        first = 0.0
        while data := connection.recv(65536):
            answer += data
            if not first and answer.partition(b"\r\n\r\n")[2]:
                first = time.perf_counter()
        end = time.perf_counter()
    if mistake := workload.mistake(int(answer[9:12]), bytes(answer)):
        raise ValueError(mistake)
    return first - start, end - start
