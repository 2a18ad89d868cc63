"""Servers that are loaded in turn: requests with headers of their own, and the table of results."""

from __future__ import annotations

from benchmarks.tools.side_by_side import Measured, table
from benchmarks.tools.workloads import BYTES, Workload


def test_a_workload_can_have_headers_and_a_part_of_the_response() -> None:
    workload = Workload("binary", b"body", BYTES, b"iris", (("X-Length", "3"),))
    assert b"X-Length: 3\r\nContent-Length: 4\r\n\r\nbody" in workload.request("host", "/path")
    assert workload.mistake(200, b"..iris..") == ""
    assert workload.mistake(200, b"other") == "b'other' without b'iris'"


def test_the_table_compares_each_case_with_the_first() -> None:
    row = Measured("noop", "typed", 64, 12_345.6, 80.4, 21.25, 0.954, 7.71)
    assert table([row]).splitlines()[-1] == "| noop | typed | 64 | 12,346 | 0.95 | 80 µs | 21.2 µs (+7.7) |"
