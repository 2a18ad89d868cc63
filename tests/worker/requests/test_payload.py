import collections
import datetime
import decimal
import enum
import gc
import ipaddress
import json
import math
import os
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from starlette.datastructures import FormData, UploadFile

from cortex.errors import UserError
from cortex.payloads.annotations import payload_type
from cortex.payloads.validation import PayloadError
from cortex.predictor.binding import Bodies
from cortex.worker.requests.payload import (
    BYTES,
    JSON,
    JSON_LINES,
    MAX_FORM_PARTS,
    TEXT,
    BadBody,
    encode,
    encode_chunk,
    make_headers,
    make_query_params,
    parse,
    parse_typed,
    stream_media_type,
)

pytestmark = pytest.mark.processes

INT64 = st.integers(-(2**63), 2**64 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | INT64 | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=20)


# Bodies.


@given(VALUES)
def test_any_json_value_round_trips(value):
    assert parse(JSON, encode([value]).body) == [value]


@pytest.mark.parametrize(
    "content_type",
    [b"application/json", b"application/json; charset=utf-8", b"APPLICATION/JSON", b" application/json ;x=y"],
)
@pytest.mark.parametrize("bodies", Bodies)
def test_json_is_recognized_by_its_content_type(content_type, bodies):
    assert parse(content_type, b'{"a": [1, "\xc3\xa9"]}', bodies) == {"a": [1, "é"]}


def test_a_byte_order_mark_before_json_is_skipped():
    assert parse(JSON, b"\xef\xbb\xbf[1]") == [1]
    with pytest.raises(BadBody):
        parse(JSON, b"\xef\xbb\xbf")


@pytest.mark.parametrize("body", [b"", b"{", b'{"a": NaN}', b"\xff", b"[1,]", b"1 2", b"[" * 5000, b'"\\ud800"'])
def test_malformed_json_is_a_client_error(body):
    with pytest.raises(BadBody, match="^malformed JSON: "):
        parse(JSON, body)
    with pytest.raises(BadBody):
        parse(JSON, body, Bodies.JSON_ONLY)


@pytest.mark.parametrize("content_type", [None, b"", b"text/plain", b"application/x-www-form-urlencoded", b"image/png"])
def test_functions_receive_json_or_nothing(content_type):
    assert parse(content_type, b"a=b", Bodies.JSON_ONLY) is None


@pytest.mark.parametrize("content_type", [None, b"", b"image/png", b"application/octet-stream"])
def test_other_content_types_are_bytes(content_type):
    assert parse(content_type, b"\x00\xff") == b"\x00\xff"


@pytest.mark.parametrize("content_type", [b"application/ld+json", b"text/json", b"Application/Vnd.X+JSON; v=1"])
def test_json_of_other_media_types_is_json_but_not_for_older_generations(content_type):
    assert parse(content_type, b"[1]", Bodies.JSON_OVER_FORMS) == [1]
    assert parse_typed(payload_type(list), content_type, b"[1]") == [1]
    assert parse(content_type, b"[1]") == b"[1]"
    assert parse(content_type, b"[1]", Bodies.JSON_ONLY) is None


@pytest.mark.parametrize("charset", ["utf-16", "iso-8859-1", "windows-1252"])
def test_json_and_csv_are_decoded_by_their_charset(charset):
    json_type = f"application/json; charset={charset}".encode()
    assert parse(json_type, '{"é": 1}'.encode(charset)) == {"é": 1}
    assert parse_typed(payload_type(dict), json_type, '{"é": 1}'.encode(charset)) == {"é": 1}
    frame = parse_typed(payload_type(pd.DataFrame), f"text/csv; charset={charset}".encode(), "é\nü\n".encode(charset))
    assert frame.to_dict("list") == {"é": ["ü"]}


def test_json_in_an_undeclared_charset_is_refused_with_the_remedy():
    for body in ('{"a": "é"}'.encode("latin-1"), '{"a": 1}'.encode("utf-16")):
        with pytest.raises(BadBody, match="the body is not UTF-8; the content type must name another character set"):
            parse(JSON, body)


@pytest.mark.parametrize(
    "content_type",
    [
        b"text/plain; charset=punycode",
        b"application/json; charset=hex",
        b"application/x-www-form-urlencoded; charset=rot13",
        b"multipart/form-data; boundary=X; charset=punycode",
    ],
)
def test_a_codec_that_is_no_character_set_is_refused_for_every_type(content_type):
    body = multipart((b'name="a"', b"1")) if b"boundary" in content_type else b"[1]"
    for call in (
        lambda: parse(content_type, body, Bodies.JSON_OVER_FORMS),
        lambda: parse_typed(payload_type(dict[str, str]), content_type, body),
        lambda: parse_typed(payload_type(str | dict), content_type, body),
    ):
        with pytest.raises(BadBody, match="is not supported; send UTF-8") as caught:
            call()
        assert caught.value.status == 415


@pytest.mark.parametrize(
    ("content_type", "body", "text"),
    [
        (b"text/plain", "é".encode(), "é"),
        (b"text/plain; charset=latin-1", b"\xe9", "é"),
        (b'Text/Plain; format=flowed; Charset="UTF-16"', "é".encode("utf-16"), "é"),
        (b"text/plain", b"", ""),
    ],
)
def test_text_is_decoded_by_its_charset(content_type, body, text):
    assert parse(content_type, body) == text


@pytest.mark.parametrize("charset", [b"", b"; charset=utf-8", b"; charset=utf-16", b"; charset=ascii"])
def test_undecodable_text_is_a_client_error(charset):
    with pytest.raises(BadBody, match="the body is not .* text; the content type must name its character set"):
        parse(b"text/plain" + charset, b"\xff\xfe\xfd")


FORMS = [b"application/x-www-form-urlencoded", b"Application/X-WWW-Form-Urlencoded; charset=utf-8"]


@pytest.mark.parametrize("content_type", FORMS)
@pytest.mark.parametrize("body", [b'{"name": "Ada"}', b' [1, {"a": null}]\n', b"5", b'\xef\xbb\xbf{"a": 1}'])
def test_a_form_whose_body_is_json_has_a_forgotten_content_type(content_type, body):
    value = orjson.loads(body.removeprefix(b"\xef\xbb\xbf"))
    assert parse(content_type, body, Bodies.JSON_OVER_FORMS) == value
    assert hasattr(parse(content_type, body), "getlist"), "older generations receive the form"
    assert parse(content_type, body, Bodies.JSON_ONLY) is None


@pytest.mark.parametrize("body", [b"", b"a=1&b=2", b"name", b'{"a": ', b"%7B%7D"])
def test_a_form_whose_body_is_not_json_stays_a_form(body):
    assert list(parse(FORMS[0], body, Bodies.JSON_OVER_FORMS)) == list(parse(FORMS[0], body))
    assert parse(MULTIPART, multipart((b'name="a"', b"1")), Bodies.JSON_OVER_FORMS)["a"] == "1"


@pytest.mark.parametrize("content_type", [None, b"text/plain", b"application/octet-stream"])
def test_text_and_bytes_are_not_parsed_as_json(content_type):
    assert parse(content_type, b'{"a": 1}', Bodies.JSON_OVER_FORMS) in ('{"a": 1}', b'{"a": 1}')


def test_an_urlencoded_form_is_a_multi_dict():
    form = parse(b"application/x-www-form-urlencoded; charset=utf-8", b"a=1&a=2&b=%C3%A9+x&c=")
    assert form.getlist("a") == ["1", "2"]
    assert form["b"] == "é x"
    assert form["c"] == ""


def multipart(*parts):
    lines = []
    for head, body in parts:
        lines += [b"--X", b"content-disposition: form-data; " + head, b"", body]
    return b"\r\n".join([*lines, b"--X--", b""])


FDS = Path("/proc/self/fd")
MULTIPART = b"multipart/form-data; boundary=X"


def test_a_multipart_form_has_fields_and_files_in_memory():
    big = os.urandom(3 * 1024 * 1024)
    open_before = len(list(FDS.iterdir()))
    form = parse(MULTIPART, multipart((b'name="size"', b"3"), (b'name="image"; filename="a.png"', big)))
    assert form["size"] == "3"
    assert form["image"].filename == "a.png"
    assert form["image"].file.read() == big
    assert len(list(FDS.iterdir())) == open_before


@pytest.mark.parametrize("end", [b"", b"--X", b"--X-", b"rest of a longer file"])
def test_a_multipart_form_without_its_end_is_refused(end):
    body = multipart((b'name="a"; filename="a"', b"1"), (b'name="b"; filename="b"', b"2")).removesuffix(b"--X--\r\n")
    assert len(parse(MULTIPART, body + b"--X--").multi_items()) == 2
    with pytest.raises(BadBody, match="malformed form: the closing boundary is missing"):
        parse(MULTIPART, body + end)


@pytest.mark.parametrize(
    ("sent", "name"),
    [(rb"C:\x\y.png", "y.png"), (rb"a\b.png", r"a\b.png"), (rb"a\"b.png", 'a"b.png'), (b"../y", "../y")],
)
def test_the_name_of_a_file_is_the_text_of_the_client_without_the_path_of_windows(sent, name):
    assert parse(MULTIPART, multipart((b'name="f"; filename="%b"' % sent, b"1")))["f"].filename == name


def test_a_multipart_form_may_have_a_preamble_and_an_epilogue():
    body = multipart((b'name="a"', b"1"))
    for text in (b"\r\n", b"This is a multi-part message.\r\n", b"--XY is no boundary\r\n\r\n"):
        assert parse(MULTIPART, text + body + b"epilogue").multi_items() == [("a", "1")]


def test_a_file_may_have_its_name_in_the_extended_form_only():
    form = parse(MULTIPART, multipart((b"name=\"a\"; filename*=UTF-8''%e2%82%ac%22.png", b"1")))
    assert form["a"].filename == '€".png'
    form = parse(MULTIPART, multipart((b'name="a"; filename="b.png"; filename*=UTF-8\'\'c.png', b"1")))
    assert form["a"].filename == "b.png", "RFC 7578 prefers the plain one"


def test_fields_of_forms_are_decoded_by_their_charset():
    assert parse(FORMS[0] + b"; charset=windows-1251", b"%D0+x=%FF&b=\xff")["Р x"] == "я"
    assert parse(MULTIPART + b"; charset=latin-1", multipart((b'name="\xe9"', b"\xe9")))["é"] == "é"
    of_part = b'name="a"\r\ncontent-type: text/plain; charset=utf-16'
    assert parse(MULTIPART, multipart((of_part, "é".encode("utf-16"))))["a"] == "é"
    with pytest.raises(BadBody, match="is not supported"):
        parse(MULTIPART, multipart((of_part.replace(b"utf-16", b"hex"), b"00")))
    file = multipart((b'name="f"; filename="f.csv"\r\ncontent-type: text/csv; charset=latin-1', b"\xe9\n\xfc\n"))
    assert parse_typed(payload_type(pd.DataFrame), MULTIPART, file).to_dict("list") == {"é": ["ü"]}


@pytest.mark.parametrize("annotation", [FormData, FormData | None, Annotated[FormData, "words"]])
def test_a_payload_that_is_a_form_takes_no_other_body(annotation):
    kind = payload_type(annotation)
    others = [JSON, b"text/plain", b"application/octet-stream", b"image/png", b"text/csv", b"application/x+json", None]
    for content_type in others:
        with pytest.raises(PayloadError, match="Input should be a form: multipart/form-data or "):
            parse_typed(kind, content_type, b'{"a": 1}')
    for content_type, body in ((FORMS[0], b"a=1"), (MULTIPART, multipart((b'name="a"', b"1")))):
        assert parse_typed(kind, content_type, body).multi_items() == [("a", "1")]
    assert parse_typed(kind, FORMS[0], b"").multi_items() == []
    assert isinstance(parse_typed(kind, FORMS[0], b'{"a": 1}'), FormData), "as it is"


def test_an_empty_body_is_the_default_of_a_form():
    assert parse_typed(payload_type(FormData | None), None, b"") is None
    with pytest.raises(PayloadError, match="the body is empty"):
        parse_typed(payload_type(FormData), None, b"")
    assert parse_typed(payload_type(FormData | dict), JSON, b'{"a": 1}') == {"a": 1}
    with pytest.raises(PayloadError):
        parse_typed(payload_type(FormData | dict), JSON, b"[1]")


FILE = multipart((b'name="f"; filename="x.txt"', b"hello"))


@pytest.mark.parametrize(
    ("annotation", "content_type", "body", "expected"),
    [
        (dict, FORMS[0], b"a=1&b=2&b=3", {"a": "1", "b": ["2", "3"]}),
        (dict, MULTIPART, multipart((b'name="a"', b"1")), {"a": "1"}),
        (dict[str, Any] | None, FORMS[0], b"a=1", {"a": "1"}),
        (Mapping, FORMS[0], b"a=1", {"a": "1"}),
        (FormData | dict, FORMS[0], b"a=1", FormData([("a", "1")])),
        (FormData | str, FORMS[0], b"a=1", FormData([("a", "1")])),
        (FormData | str, b"text/plain", b"hello", "hello"),
        (FormData | str, JSON, b'{"a": 1}', "Input should be a valid string"),
        (FormData | bytes, JSON, b'{"a": 1}', b'{"a": 1}'),
        (FormData | bytes | None, None, b"", None),
        (UploadFile | bytes, MULTIPART, FILE, UploadFile),
        (UploadFile | bytes, MULTIPART, multipart((b'name="a"', b"1")), "Input should be a form with one file"),
        (UploadFile | bytes, b"image/png", b"\x89PNG", b"\x89PNG"),
        (UploadFile | dict, MULTIPART, multipart((b'name="a"', b"1")), {"a": "1"}),
        (UploadFile | dict, JSON, b'{"a": 1}', {"a": 1}),
        (Iterable, JSON, b"[1]", [1]),
        (Iterable, JSON, b'"text"', "Input should be a valid array"),
        (list, FORMS[0], b"a=1", "Input should not be a form"),
    ],
)
def test_a_payload_is_of_its_annotated_type_whatever_the_content_type(annotation, content_type, body, expected):
    kind = payload_type(annotation)
    if isinstance(expected, str) and expected.startswith("Input"):
        with pytest.raises(PayloadError, match=expected):
            parse_typed(kind, content_type, body)
        return
    value = parse_typed(kind, content_type, body)
    assert (
        isinstance(value, expected)
        if isinstance(expected, type)
        else (type(value), value)
        == (
            type(expected),
            expected,
        )
    )


def test_a_large_field_of_a_form_is_accepted():
    assert parse(MULTIPART, multipart((b'name="text"', b"x" * 2_000_000)))["text"] == "x" * 2_000_000


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (b"multipart/form-data", multipart((b'name="a"', b"1"))),
        (MULTIPART, b"garbage"),
        (MULTIPART, multipart((b"nothing", b"1"))),
        (MULTIPART, multipart(*[(b'name="a"', b"1")] * (MAX_FORM_PARTS + 1))),
        (MULTIPART, multipart(*[(b'name="a"; filename="f"', b"1")] * (MAX_FORM_PARTS + 1))),
        (b"application/x-www-form-urlencoded", b"a=1&" * (MAX_FORM_PARTS + 1)),
    ],
)
def test_a_malformed_or_excessive_form_is_a_client_error_that_logs_nothing(content_type, body, caplog):
    with pytest.raises(BadBody, match="malformed form"):
        parse(content_type, body)
    assert caplog.text == ""


def test_any_body_is_parsed_or_rejected():
    @given(
        st.sampled_from([JSON, b"text/plain", MULTIPART, b"application/x-www-form-urlencoded"]), st.binary(max_size=200)
    )
    def check(content_type, body):
        for variant in (body, b"--X\r\n" + body, b'--X\r\ncontent-disposition: form-data; name="a"\r\n\r\n' + body):
            try:
                parse(content_type, variant)
            except BadBody as refusal:
                assert str(refusal)

    check()
    gc.collect()  # reports files that were not closed


@given(st.binary(max_size=60))
def test_any_content_type_is_parsed_or_rejected(content_type):
    for kind in (content_type, b"text/plain;charset=" + content_type, b"multipart/form-data;" + content_type):
        try:
            parse(kind, b"a=1")
        except BadBody as refusal:
            assert str(refusal)


def test_query_params_and_headers_are_multi_dicts():
    assert make_query_params(b"a=1&a=2&b=%20").getlist("a") == ["1", "2"]
    headers = make_headers([(b"X-Key", b"1"), (b"accept", b"*/*")])
    assert headers["x-KEY"] == "1"
    assert headers["Accept"] == "*/*"


# Results.


@dataclass
class Point:
    x: int
    y: object


class Color(enum.Enum):
    RED = "red"


Pair = collections.namedtuple("Pair", "a b")
NAT = np.datetime64("NaT")


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"a": [1, None, True, 2.5, "é"]}, {"a": [1, None, True, 2.5, "é"]}),
        ((1, 2), [1, 2]),
        (Pair(1, 2), [1, 2]),
        (None, None),
        (3, 3),
        (True, True),
        ([math.nan, math.inf, -math.inf], [None, None, None]),
        ([math.nan, 2**70], [None, 2**70]),
        (-(2**70), -(2**70)),
        ({1: "a", None: "b", 2.5: "c", 2**70: "d"}, {"1": "a", "null": "b", "2.5": "c", str(2**70): "d"}),
        ({np.int64(3): 1, np.float32(0.5): 2, np.str_("k"): 3}, {"3": 1, "0.5": 2, "k": 3}),
        ({Color.RED: Color.RED}, {"red": "red"}),
        (Point(1, {2: 3}), {"x": 1, "y": {"2": 3}}),
        (Point(2**70, []), {"x": 2**70, "y": []}),
        ([datetime.date(2021, 1, 2), 2**70], ["2021-01-02", 2**70]),
        ([uuid.UUID(int=1), 2**70], ["00000000-0000-0000-0000-000000000001", 2**70]),
        (Point(decimal.Decimal("1.50"), datetime.timedelta(seconds=90)), {"x": "1.50", "y": "PT1M30S"}),
        ([ipaddress.ip_address("10.0.0.1"), Path("a/b"), pd.NA], ["10.0.0.1", "a/b", None]),
        (np.float64(1.5), 1.5),
        (np.float16(0.5), 0.5),
        (np.longdouble(1.25), 1.25),
        (np.bool_(True), True),
        (np.int8(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.array(3), 3),
        (np.array([1, 2.5, np.nan]), [1.0, 2.5, None]),
        (np.array([1.5], np.longdouble), [1.5]),
        (np.arange(6).reshape(2, 3).T, [[0, 3], [1, 4], [2, 5]]),
        (np.arange(10)[::-3], [9, 6, 3, 0]),
        (np.asfortranarray([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([1, 2], ">i4"), [1, 2]),
        (np.zeros((2, 0)), [[], []]),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.array([1, "a", None, {"b": np.int64(2)}], object), [1, "a", None, {"b": 2}]),
        (np.array(["2021-01-02", NAT], "M8[ns]"), ["2021-01-02T00:00:00.000000000", None]),
        (np.array(3.5), 3.5),
        (np.array(["2021-01-02"], "M8[D]"), ["2021-01-02T00:00:00"]),
        ([np.array(["2021-01-02", NAT], "M8[D]"), 2**70], [["2021-01-02T00:00:00", None], 2**70]),
        ({"t": NAT}, {"t": None}),
        (np.ma.array([1, 2], mask=[False, True]), [1, None]),
        (np.matrix([[1, 2]]), [[1, 2]]),
        (np.array([(1, 2.5)], dtype=[("a", int), ("b", float)]), [[1, 2.5]]),
        ({"deep": {"er": np.arange(4)[::2]}}, {"deep": {"er": [0, 2]}}),
        (collections.OrderedDict(a=collections.Counter("aab")), {"a": {"a": 2, "b": 1}}),
    ],
)
def test_results_become_json(result, expected):
    encoded = encode(result)
    assert (encoded.status, encoded.media_type) == (200, JSON)
    assert json.loads(encoded.body) == expected


@given(
    hnp.arrays(hnp.scalar_dtypes() | hnp.unicode_string_dtypes(), hnp.array_shapes(max_dims=3, max_side=4)),
    st.booleans(),
)
def test_arrays_of_any_type_become_json_or_a_clear_error(array, transposed):
    array = array.T if transposed else array
    try:
        value = json.loads(encode({"a": array}).body)["a"]
    except UserError as error:
        assert array.dtype.kind in "cmMSUV", array.dtype
        assert "JSON" in str(error)
        return
    assert np.shape(value) == array.shape or array.dtype.kind in "M"
    if array.dtype.kind in "iub" or (array.dtype.kind == "f" and np.isfinite(array).all()):
        assert np.array_equal(np.array(value, dtype=array.dtype), array)


@given(st.dictionaries(st.none() | st.booleans() | st.integers() | TEXTS, st.integers() | VALUES))
def test_keys_and_numbers_are_formatted_like_python(value):
    assert json.loads(encode(value).body) == json.loads(json.dumps(value))


looped: list[object] = []
looped.append({"x": looped})
deep: list[object] = []
for _ in range(100_000):
    deep = [deep]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"a": [1, {"b": {2, 3}}]}, "result['a'][1]['b']: set is not JSON serializable; return a list"),
        ({"x": b"a"}, "result['x']: bytes is not JSON serializable; decode it"),
        (object(), "result: object is not JSON serializable"),
        (np.array([1j]), "result[0]: complex is not JSON serializable"),
        ([np.timedelta64(3, "s")], "result[0]: numpy.timedelta64 is not JSON serializable"),
        (np.array([b"a"]), "result[0]: bytes is not JSON serializable"),
        (np.array([{1, 2}], object), "result[0]: set is not"),
        ({(1, 2): 3}, "result has a key that is not valid in JSON: (1, 2) (tuple); use str(key)"),
        (Point(1, {1}), "result['y']: set is not"),
        (looped, "result[0]['x'] contains itself"),
        (deep, "nested too deeply"),
        (Point, "result: type is not JSON serializable"),
    ],
)
def test_rejects_values_that_json_cannot_represent_with_their_path(result, message):
    with pytest.raises(UserError) as caught:
        encode(result)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("result", "media_type", "body"),
    [
        ("é", TEXT, "é".encode()),
        (np.str_("a"), TEXT, b"a"),
        (b"\x00", BYTES, b"\x00"),
        (bytearray(b"\x01"), BYTES, b"\x01"),
        (memoryview(b"abc")[::2], BYTES, b"ac"),
        ({"a": 1}, JSON, b'{"a":1}'),
    ],
)
def test_str_and_bytes_are_sent_raw(result, media_type, body):
    encoded = encode(result)
    assert (encoded.status, encoded.media_type, encoded.body, encoded.headers) == (200, media_type, body, ())
    assert encoded.response is None


def test_a_functions_str_is_a_json_string():
    assert encode("setosa", json_strings=True)[1:3] == (JSON, b'"setosa"')
    assert encode(b"raw", json_strings=True)[1:3] == (BYTES, b"raw")


def test_text_that_utf8_cannot_encode_is_a_clear_error():
    with pytest.raises(UserError, match="cannot be encoded as UTF-8"):
        encode("\ud800")


def test_a_response_is_sent_unchanged():
    from starlette.background import BackgroundTask
    from starlette.responses import JSONResponse, PlainTextResponse, Response

    background = BackgroundTask(print)
    response = PlainTextResponse("no", 418, {"X-Why": "tea"}, background=background)
    response.set_cookie("a", "b")
    encoded = encode(response)
    assert (encoded.status, encoded.media_type, encoded.body) == (418, TEXT, b"no")
    assert encoded.headers[0] == (b"x-why", b"tea")
    assert encoded.headers[1][0] == b"set-cookie"
    assert len(encoded.headers) == 2
    assert encoded.background is background
    assert encode(Response(status_code=204)) == (204, None, b"", (), None, None)
    assert encode(JSONResponse([1]))[:3] == (200, JSON, b"[1]")


def test_a_custom_response_is_passed_on():
    from starlette.responses import StreamingResponse

    response = StreamingResponse(iter(["a"]), 201, media_type="text/csv")
    encoded = encode(response)
    assert (encoded.status, encoded.response) == (201, response)


# Streams.


@pytest.mark.parametrize(
    ("item", "media_type", "chunk"),
    [
        ("é", TEXT, "é".encode()),
        (b"\xff", BYTES, b"\xff"),
        (bytearray(b"a"), BYTES, b"a"),
        ({"token": np.int64(1)}, JSON_LINES, b'{"token":1}\n'),
        (None, JSON_LINES, b"null\n"),
    ],
)
def test_items_of_a_stream(item, media_type, chunk):
    assert stream_media_type(item) == media_type
    assert encode_chunk(item) == chunk


def test_encoding_json_imports_neither_starlette_nor_numpy():
    code = (
        "import sys; from cortex.worker.requests.payload import *;"
        "assert parse(JSON, encode({'a': 1}).body) == {'a': 1};"
        "assert not {'starlette', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_fast_path_uses_only_orjson():
    value = {"label": "setosa", "scores": [0.1, 0.2]}
    assert encode(value).body == orjson.dumps(value)


@pytest.mark.parametrize(("annotation", "empty", "default"), [(bytes, b"", b"x"), (str, "", "x")])
def test_an_empty_body_is_the_default_of_texts_and_bytes(annotation: type, empty: object, default: object) -> None:
    kind = payload_type(annotation)
    assert kind is not None
    assert parse_typed(kind, None, b"") == empty
    kind.set_default(default)
    assert parse_typed(kind, None, b"") == parse_typed(kind, b"application/json", b"") == default
