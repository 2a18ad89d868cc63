"""Reports about clients and protocols: uploads that are refused, heads that are too large, half-closed connections."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.installations.installation import ECHO_SOURCE, Installation
from harness.installations.reports import Report, ReportedApi, deployed_report

SMALL_BODIES = """
    - name: t
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
      networking: {max_body_size: 1Mi}
"""
JOBS = """
    - name: t
      kind: BatchAPI
      handler: {type: python, path: handler.py}
"""
BATCH_SOURCE = """
    class Handler:
        def __init__(self, config):
            pass

        def handle_batch(self, payload):
            return len(payload)
"""
LARGE_HEAD_SOURCE = """
    from starlette.responses import Response

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload):
            return Response("body", headers={"x-large": "x" * 1_100_000})
"""
LENGTH = 20_000_000


def upload(api: ReportedApi, chunked: bool = False) -> tuple[int, str]:
    """Send 20 MB before reading, and return the status and the error."""
    head = b"POST /t HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
    if chunked:
        return parse(
            api.exchange(b"%btransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (head, LENGTH, b" " * LENGTH))
        )
    return parse(api.exchange(head + b"content-length: %d\r\n\r\n" % LENGTH + b" " * LENGTH))


def parse(response: bytes) -> tuple[int, str]:
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def submit_and_half_close(api: ReportedApi) -> object:
    """Submit jobs on connections that are closed for sending, and return the status of each."""
    body = b'{"workers": 1, "item_list": {"items": [1], "batch_size": 1}}'
    request = b"POST /t HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    return [int(api.exchange(request, half_close=True).split()[1]) for _ in range(5)]


def dry_run_by_http_1_0(api: ReportedApi) -> list[object]:
    """Send a dry run as HTTP/1.0, and return the coding of the response, and its body."""
    body = b'{"workers": 1, "item_list": {"items": [1], "batch_size": 1}}'
    request = b"POST /t?dryRun=true HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    head, _, lines = api.exchange(request).partition(b"\r\n\r\n")
    return [b"chunked" in head.lower(), lines]


REPORTS = [
    Report(
        "a client that sends a body above the limit as a whole receives the refusal",
        "haproxy#3316",
        ECHO_SOURCE,
        upload,
        (413, "the body is larger than 1048576 bytes"),
        config=SMALL_BODIES,
    ),
    Report(
        "a client that sends a submission above the limit as a whole receives the refusal",
        "haproxy#3316",
        BATCH_SOURCE,
        lambda api: [(status, text.partition(";")[0]) for status, text in (upload(api), upload(api, chunked=True))],
        [(413, "the body is larger than 10485760 bytes")] * 2,
        config=JOBS,
    ),
    Report(
        "a client that sends chunks above the limit receives the refusal",
        "haproxy#3316",
        ECHO_SOURCE,
        lambda api: upload(api, chunked=True),
        (413, "the request body is larger than 1048576 bytes"),
        config=SMALL_BODIES,
    ),
    Report(
        "a head above the limit is refused with the limit",
        "haproxy#1309",
        ECHO_SOURCE,
        lambda api: parse(
            api.exchange(b"GET /t HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx: %s\r\n\r\n" % (b"x" * 500_000))
        ),
        (431, "the URL and the headers are larger than 65536 bytes"),
    ),
    Report(
        "the head of a response above the limit is an error of the code that names the limit",
        "haproxy#1309",
        LARGE_HEAD_SOURCE,
        lambda api: (answer := api.post({})).status == 500 and answer.json["error"].partition("; ")[2],
        "the gateway passes on up to 512 KiB",
    ),
    Report(
        "the lines of a dry run are not sent in chunks to a client of HTTP/1.0",
        "RFC 9112, section 6.1",
        BATCH_SOURCE,
        dry_run_by_http_1_0,
        [False, b"validations passed\n"],
        config=JOBS,
    ),
    Report(
        "a client that ends its side of the connection receives the response to its submission",
        "haproxy#811",
        BATCH_SOURCE,
        submit_and_half_close,
        [200] * 5,
        config=JOBS,
    ),
]


@pytest.mark.parametrize("report", REPORTS, ids=str)
def test_report_has_the_right_outcome(report: Report, cortex: Installation, tmp_path: Path) -> None:
    with deployed_report(report, cortex, tmp_path / "project") as api:
        assert report.observe(api) == report.right
