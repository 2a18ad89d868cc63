"""Reports about the bodies of requests: content types, codings, character sets, forms."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import pytest

from harness.installations.installation import ECHO_SOURCE, Installation
from harness.installations.reports import Report, ReportedApi, deployed_report

FORM = "application/x-www-form-urlencoded"

#: Every kind of API that reads a body itself.
READERS = """
    import asyncio

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload, headers):
            payload = dict(payload) if hasattr(payload, "multi_items") else payload
            payload = payload.decode("latin-1") if isinstance(payload, bytes) else payload
            return {"payload": payload, "coding": headers.get("content-encoding")}

        async def handle_put(self, payload):
            await asyncio.sleep(0)
            return {"payload": payload}

        def handle_async(self, payload):
            return {"payload": payload}

    class Task:
        def __call__(self, config):
            return config
"""
READERS_CONFIG = """
    - name: t
      kind: RealtimeAPI
      handler: {type: python, path: handler.py}
      networking: {max_body_size: 1Mi}
    - name: a
      kind: AsyncAPI
      handler: {type: python, path: handler.py}
      networking: {max_body_size: 1Mi}
    - name: k
      kind: TaskAPI
      definition: {path: handler.py}
      networking: {max_body_size: 1Mi}
"""
TARGETS = [("POST", "/t"), ("PUT", "/t"), ("POST", "/a"), ("POST", "/k")]


def outcomes_of_codings(api: ReportedApi) -> object:
    """Return the statuses of all kinds of APIs for a good body, a damaged one, a bomb, and a coding that is unknown."""
    plain = b'{"config": {"x": 1}}'
    bodies = {
        "good": ("gzip", gzip.compress(plain)),
        "deflate": ("deflate", zlib.compress(plain)),
        "damaged": ("gzip", gzip.compress(plain)[:-5]),
        "bomb": ("gzip", gzip.compress(b"[" + bytes(20_000_000))),
        "unknown": ("br", plain),
    }
    found: dict[str, Any] = {}
    for method, path in TARGETS:
        for name, (coding, body) in bodies.items():
            headers = {"content_type": "application/json", "content_encoding": coding}
            answer = api.cortex.post(path, body=body, method=method, **headers)
            found.setdefault(name, []).append(answer.status)
            if name == "unknown":
                found.setdefault("accepts", []).append(answer.headers.get("accept-encoding"))
    form = api.post(body=gzip.compress(b"a=1"), content_type=FORM, content_encoding="gzip")
    return found | {"form": form.json}


def outcomes_of_charsets(api: ReportedApi) -> object:
    """Return the statuses of all kinds of APIs for a codec that is no character set."""
    found = []
    for method, path in TARGETS:
        slow = b'{"config": {"x-' + b"a" * 400_000 + b'": 1}}'
        latin = '{"config": {"é": 1}}'.encode("latin-1")
        for charset, body in (("punycode", slow), ("latin1", latin)):
            content_type = f"application/json; charset={charset}"
            found.append(api.cortex.post(path, body=body, method=method, content_type=content_type).status)
    return found


def large_numbers(api: ReportedApi) -> object:
    """Return what a method, a workload and a task receive of a whole number beyond 64 bits."""
    body = b'{"config": {"n": 123456789012345678901234567890}}'
    workload = api.cortex.post("/a", body=body).json["id"]
    done = api.cortex.post(f"/a/{workload}?wait=30", method="GET").json
    job = api.cortex.post("/k", body=body).json
    return [api.post(body=body).json["payload"]["config"], done["result"]["payload"]["config"], job["config"]]


FORMS = """
    import pandas as pd
    from starlette.datastructures import FormData, UploadFile

    class Handler:
        def __init__(self, config):
            pass

        def handle_post(self, payload: list[UploadFile]):
            return [each.filename for each in payload]

        def handle_put(self, payload: FormData):
            return list(payload)

        def handle_patch(self, payload: pd.DataFrame):
            return [str(payload[name].dtype) for name in payload]

        def handle_delete(self, payload):
            raise type("E" * 200_000, (Exception,), {})
"""
TWO_FILES = b"".join(
    b'--X\r\ncontent-disposition: form-data; name="f"; filename="%b"\r\n\r\ntext\r\n' % name for name in (b"a", b"b")
)


def outcomes_of_forms(api: ReportedApi) -> object:
    """Return the outcomes of forms that are cut off, of other bodies for a form, and of frames."""
    files = "multipart/form-data; boundary=X"
    cut_off = [api.post(body=TWO_FILES + end, content_type=files).status for end in (b"", b"--X", b"--X--")]
    form = [api.post(body=b'{"a": 1}', content_type=kind, method="PUT").status for kind in ("application/json", "a/b")]
    rows = [[{"a": None, "b": 7.9}], [{"a": None, "b": 1.5}, {"a": 3, "b": 2}], [{"a": 2**53 + 1}, {"a": None}]]
    frames = [api.post(each, method="PATCH").json for each in rows]
    raised = api.post({}, method="DELETE")
    return cut_off, form, frames, (raised.status, len(raised.body) < 1000)


REPORTS = [
    Report(
        "a content type in any case, with a blank, is JSON",
        "bentoml#893",
        ECHO_SOURCE,
        lambda api: api.post(body=b'{"a": 1}', content_type="Application/JSON ; Charset=UTF-8").json,
        {"a": 1},
    ),
    Report(
        "a compressed body is decoded, or refused, in the same way by every kind of API",
        "tensorflow/serving#1091",
        READERS,
        outcomes_of_codings,
        {
            "good": [200, 200, 202, 200],
            "deflate": [200, 200, 202, 200],
            "damaged": [400] * 4,
            "bomb": [413] * 4,
            "unknown": [415] * 4,
            "accepts": ["gzip, deflate"] * 4,
            "form": {"payload": {"a": "1"}, "coding": None},
        },
        READERS_CONFIG,
    ),
    Report(
        "a codec that is no character set is refused at once by every kind of API",
        "C2",
        READERS,
        outcomes_of_charsets,
        [415, 200, 415, 200, 415, 202, 415, 200],
        READERS_CONFIG,
    ),
    Report(
        "a form without its end, or in place of one, is refused, and a frame has one type however many rows there are",
        "bentoml#5532",
        FORMS,
        outcomes_of_forms,
        ([400, 400, 200], [422, 422], [["float64", "float64"], ["float64", "float64"], ["Int64"]], (500, True)),
    ),
    Report(
        "a whole number beyond 64 bits is exact in every kind of API",
        "C9",
        READERS,
        large_numbers,
        [{"n": 123456789012345678901234567890}] * 3,
        READERS_CONFIG,
    ),
]


@pytest.mark.parametrize("report", REPORTS, ids=str)
def test_report_has_the_right_outcome(report: Report, cortex: Installation, tmp_path: Path) -> None:
    with deployed_report(report, cortex, tmp_path / "project") as api:
        assert report.observe(api) == report.right
