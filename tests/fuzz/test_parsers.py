"""Parsers of bytes that others send, with mutations of their input: each returns, or raises the error that it names.

A mutation that once found a fault is an `example` of its parser's own tests.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cortex.config.document import parse as parse_document
from cortex.errors import CortexError, InputError, ModelFormatError, WorkerMessageError
from cortex.jobs.http import wire
from cortex.jobs.intake.submission import SubmissionLimits, parse_submission, parse_task
from cortex.models import protocol
from cortex.models.formats import onnx_file, pickles, tensorflow_model
from cortex.models.formats.detection import detect
from cortex.models.formats.protobuf import MessageError
from cortex.payloads import content_encoding, inference_protocol
from cortex.payloads.inference_tensors import decode_request
from cortex.payloads.signature import ModelSignature
from cortex.payloads.validation import BadBody, PayloadError
from cortex.projects import archive
from cortex.projects.dotenv import parse_dotenv
from cortex.projects.ignore_file import parse_pattern
from cortex.recording.exchange import parse_exchange, parse_head
from cortex.recording.json_path import JsonPath
from cortex.worker.requests.payload import Bodies, parse
from harness.models.model_makers import onnx_model

pytestmark = [pytest.mark.long, pytest.mark.hypothesis]

SAVED_MODEL = Path(__file__).parents[1] / "fixtures" / "saved_model_add" / "saved_model.pb"


@dataclass(frozen=True)
class Parser:
    name: str
    parse: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]  #: input that is valid, or nearly


def as_text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: parse(data.decode("utf-8", "surrogateescape"))


def as_stream(parse: Callable[[io.BytesIO, int], object]) -> Callable[[bytes], object]:
    return lambda data: parse(io.BytesIO(data), len(data))


def unpack(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        archive.unpack(data, Path(folder, "project"))
        assert {path.name for path in Path(folder).iterdir()} == {"project"}


def detect_file(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "model")
        path.write_bytes(data)
        detect(path)


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("cortex.yaml", "- name: a\n" * 20)
        packed.writestr("folder/handler.py", "class Handler: pass\n")
    return buffer.getvalue()


def body(content_type: bytes) -> Callable[[bytes], object]:
    return lambda data: parse(content_type, data, Bodies.JSON_OVER_FORMS)


def infer(data: bytes) -> object:
    """Read V2 in binary: the length of the JSON, then the body, as a header and a body would bring them."""
    length, _, rest = data.partition(b"\n")
    return decode_request(rest, inference_protocol.parse_json_length(length or None, len(rest)), SIGNATURE)


#: Of a model that does not declare its tensors: any are accepted.
SIGNATURE = ModelSignature("m", "python", (), ())
V2_JSON = json.dumps(
    {
        "id": "1",
        "inputs": [
            {"name": "x", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}},
            {"name": "y", "shape": [2, 1], "datatype": "BYTES", "data": ["a", "b"]},
        ],
        "outputs": [{"name": "z", "parameters": {"binary_data": True}}],
    }
).encode()
V2 = b"%d\n%b%b" % (len(V2_JSON), V2_JSON, np.array([1, 2], np.float32).tobytes())
FORM = (
    b'--X\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--X\r\nContent-Disposition: form-data; name="f"; '
    b"filename*=UTF-8''%e2%82%ac.png\r\nContent-Type: image/png; charset=utf-8\r\n\r\nPNG\r\n--X--\r\n"
)
EXCHANGE = (
    b'{"id":"1","time":"2026-11-28T12:00:00+00:00","duration_ms":1.5,"handler_ms":1,"method":"POST","path":"/x",'
    b'"query":"a=1","headers":[["a","b"]],"request":{"json":{"x":1}},"status":200,"response":{"base64":"AAAA"}}\n'
)
SUBMISSION = json.dumps(
    {
        "workers": 2,
        "config": {"a": [1]},
        "timeout": 60,
        "webhook": "https://example.org/done",
        "output": "s3://bucket/out",
        "sqs_dead_letter_queue": {"arn": "arn:aws:sqs:us-west-2:1:q", "max_receive_count": 3},
        "file_path_lister": {
            "s3_paths": ["s3://bucket/a"],
            "includes": ["**.csv"],
            "excludes": ["a?"],
            "batch_size": 8,
        },
    }
).encode()
LIMITS = SubmissionLimits()
SOURCE = {"dir": "s3://bucket/models", "layout": "python"}

PARSERS = [
    Parser("project archive", unpack, (InputError,), (zipped(),)),
    Parser("archive hash", archive.archive_hash, (InputError,), (zipped(),)),
    Parser(
        "cortex.yaml",
        lambda data: parse_document(data, "cortex.yaml"),
        (CortexError,),
        (
            b"- name: a\n  kind: RealtimeAPI\n  handler: {type: python, path: 'a.py', config: &x {a: [1, 2.5, null]}}\n"
            b"  networking: {<<: *x, timeout: 3s}  # text\n- |\n  text\n",
        ),
    ),
    Parser(
        ".env",
        as_text(lambda text: parse_dotenv(text, {"HOME": "/"})),
        (CortexError,),
        (b"A=1\nexport B='x y'\nC=\"$A ${B:-z} \\n\"\n# text\nD=`\n",),
    ),
    Parser(".cortexignore", as_text(parse_pattern), (ValueError,), (b"!a/**/b[!x-z]*.py\\ /", b"**/x[[:alpha:]]?/")),
    Parser("ONNX: header", as_stream(onnx_file.read_header), (MessageError,), tuple(onnx_model(1, 64).values())),
    Parser("ONNX: files", as_stream(onnx_file.external_files), (MessageError,), tuple(onnx_model(1, 64).values())),
    Parser("ONNX: shapes", as_stream(onnx_file.unranked), (MessageError,), tuple(onnx_model(1, 64).values())),
    Parser("SavedModel", as_stream(tensorflow_model.read_saved_model), (MessageError,), (SAVED_MODEL.read_bytes(),)),
    Parser(
        "pickle",
        as_stream(pickles.inspect),
        (),
        tuple(
            packed
            for protocol_number in (0, 2, 5)
            for plain in (pickle.dumps([OrderedDict(a=Path("x")), np.arange(3)], protocol_number),)
            for packed in (plain, gzip.compress(plain))
        ),
    ),
    Parser(
        "model file",
        detect_file,
        (ModelFormatError,),
        (
            *onnx_model(1, 64).values(),
            zipped(),
            pickle.dumps(OrderedDict(a=1)),
            b'{"learner": {"attributes": {}}}',
            b"tree\nversion=v4\nnum_class=1\n",
            SAVED_MODEL.read_bytes()[:300],
        ),
    ),
    Parser("V2", infer, (inference_protocol.V2Error,), (V2,)),
    Parser(
        "V2: path",
        inference_protocol.parse_route,
        (inference_protocol.V2Error,),
        (b"/v2/models/a%20b/versions/1/infer",),
    ),
    Parser("multipart", body(b"multipart/form-data; boundary=X"), (BadBody, PayloadError), (FORM,)),
    Parser(
        "form", body(b"application/x-www-form-urlencoded"), (BadBody, PayloadError), (b"a=1&b=%c3%a9&c", b'{"a": 1}')
    ),
    Parser(
        "JSON",
        body(b"application/json; charset=utf-16"),
        (BadBody, PayloadError),
        ('{"a": [1, "é"]}'.encode("utf-16"),),
    ),
    Parser(
        "gzip",
        lambda data: content_encoding.decode_body(data, "gzip", 10_000),
        (BadBody, PayloadError),
        (gzip.compress(b"abc" * 100),),
    ),
    Parser("submission", lambda data: parse_submission(data, LIMITS), (InputError,), (SUBMISSION,)),
    Parser("task", lambda data: parse_task(data, LIMITS), (InputError,), (SUBMISSION,)),
    Parser(
        "recording: head",
        lambda data: parse_head(data, "a:1"),
        (InputError,),
        (b'{"cortex_recording":1,"api":"a","started":"2026-11-28T12:00:00Z","share":1.0}\n',),
    ),
    Parser("recording: exchange", lambda data: parse_exchange(data, "a:2"), (InputError,), (EXCHANGE,)),
    Parser("JSON path", as_text(JsonPath.parse), (ValueError,), (b"$.a[0]['b c'].*",)),
    Parser(
        "worker: exchange",
        wire.parse_exchange,
        (WorkerMessageError,),
        (
            wire.write_exchange(wire.ExchangeRequest(1, "j", (), 8, 1000, 1.5)),
            b'{"pid":1,"job":"j","reports":[{"token":"t","upto":2,"results":1,"failures":[]}],"max_batches":1,'
            b'"max_bytes":1,"wait_s":1}\n[1]',
        ),
    ),
    Parser(
        "worker: hook",
        partial(wire.parse, wire.HookReport),
        (WorkerMessageError,),
        (wire.write(wire.HookReport(1, "j", "t")),),
    ),
    Parser(
        "models: request",
        protocol.read_request,
        (ValueError,),
        tuple(
            json.dumps(each).encode()
            for each in (
                {"op": "watch", "api": "a", "source": SOURCE},
                {
                    "op": "fetch",
                    "id": 1,
                    "api": "a",
                    "source": SOURCE,
                    "model": "m",
                    "version": "1",
                    "digest": "0" * 64,
                },
            )
        ),
    ),
    Parser(
        "models: answer", protocol.read_answer, (ValueError,), (b'{"op":"catalogue","confirmed":{"a":{}},"error":"x"}',)
    ),
]


@st.composite
def mutations(draw: st.DrawFn, seed: bytes) -> bytes:
    """Change bytes at a few places: bits, numbers, repeated, missing, exchanged and foreign parts."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 24)))
        match draw(st.sampled_from(("flip", "cut", "end", "repeat", "insert", "token"))):
            case "flip" if start < len(data):
                data[start] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[start:end]
            case "end":
                del data[start:]
            case "repeat":
                data[start:start] = data[start:end] * draw(st.sampled_from((1, 3, 2000)))
            case "insert":
                data[start:start] = draw(st.binary(max_size=8))
            case _:
                data[start:end] = draw(st.sampled_from(TOKENS))
    return bytes(data)


TOKENS = [b"null", b"NaN", b"1e999", b"-1", b"9" * 30, b"\xff" * 8 + b"\x7f", b"\x00", b'"', b"[" * 3000, b"\xc3", b"%"]
TOKENS += [b"{", b"\\ud800", "\u202e".encode(), b"../../etc", b"/", b"true", b"[]", b"{}", b'""', b"\r\n"]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_a_parser_raises_nothing_but_the_errors_that_it_names(parser: Parser) -> None:
    for seed in parser.seeds:

        @settings(max_examples=300, suppress_health_check=list(HealthCheck))
        @given(mutations(seed))
        def check(data: bytes) -> None:
            try:
                parser.parse(data)
            except parser.errors as error:
                assert str(error)

        check()
