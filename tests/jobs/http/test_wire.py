"""Messages of the worker routes: parsers invert the encoders and reject everything else."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.errors import WorkerMessageError
from cortex.jobs.http.wire import (
    ExchangeRequest,
    HookReport,
    JoinRequest,
    RenewalRequest,
    parse,
    parse_exchange,
    parse_exchanged,
    parse_joined,
    write,
    write_exchange,
    write_exchanged,
    write_joined,
)
from cortex.jobs.spec import (
    HOOK_SEQ,
    Assignment,
    BatchFailure,
    ExchangeReply,
    Lease,
    LeasedBatch,
    RenewalReply,
    Report,
    StopSignal,
)

pytestmark = pytest.mark.processes

texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
json_values = st.recursive(
    st.none() | st.integers(-(2**53), 2**53) | texts, lambda inner: st.lists(inner, max_size=3), max_leaves=10
)
payloads = json_values.map(orjson.dumps)
seqs = st.lists(st.integers(0, 2**32), unique=True, max_size=6).map(sorted)


@st.composite
def reports(draw: st.DrawFn) -> Report:
    failed, returned = draw(seqs), draw(seqs)
    return Report(
        token=draw(texts),
        upto=max([*failed, *returned, draw(st.integers(0, 2**32))]),
        failures=tuple(BatchFailure(seq, draw(texts), draw(texts)) for seq in failed),
        results=tuple((seq, draw(payloads)) for seq in returned),
        seconds=draw(st.floats(0, 1e9)),
    )


@given(st.lists(reports(), max_size=4), st.integers(1, 2**22), texts, st.floats(0, 20))
def test_an_exchange_round_trips(sent: list[Report], pid: int, job_id: str, wait_s: float) -> None:
    exchange = ExchangeRequest(pid, job_id, tuple(sent), max_batches=512, max_bytes=1 << 20, wait_s=wait_s)
    assert parse_exchange(write_exchange(exchange)) == exchange


@given(st.none() | st.tuples(texts, st.lists(payloads, max_size=5)), st.lists(texts))
def test_an_exchange_reply_round_trips(leased: tuple[str, list[bytes]] | None, lost: list[str]) -> None:
    hook = (LeasedBatch(HOOK_SEQ, b""),)
    lease = Lease(leased[0], tuple(LeasedBatch(7 + n, p) for n, p in enumerate(leased[1])) or hook) if leased else None
    answer = ExchangeReply(lease, tuple(lost), is_done=lease is None, stop=bool(lost))
    assert parse_exchanged(write_exchanged(answer)) == answer


ASSIGNMENT = Assignment(
    job_id="7fff",
    config={"big": 2**70, "name": "naïve\n"},
    job_spec={"job_id": "7fff", "workers": 3},
    api_spec={"name": "sum"},
    log_path="/logs/sum/7fff/sum-1.log",
    lease_s=30.0,
    batch_timeout_s=2.5,
)


@pytest.mark.parametrize("answer", [ASSIGNMENT, StopSignal(), None], ids=["job", "stop", "nothing"])
def test_an_assignment_round_trips(answer: Assignment | StopSignal | None) -> None:
    assert parse_joined(write_joined(answer)) == answer


def test_an_assignment_preserves_nan() -> None:
    answer = parse_joined(write_joined(Assignment("7fff", {"x": math.nan}, {}, {}, "", 30)))
    assert isinstance(answer, Assignment)
    assert math.isnan(answer.config["x"])


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        (JoinRequest(4711), {"pid": 4711}),
        (HookReport(4, "7fff", "t"), {"pid": 4, "job": "7fff", "token": "t", "error": None, "traceback": ""}),
        (RenewalRequest(4711, ("a", "b"), True), {"pid": 4711, "tokens": ["a", "b"], "all": True}),
        (RenewalReply(("a",), stop=True), {"lost": ["a"], "stop": True}),
    ],
)
def test_a_small_message_has_the_keys_of_other_versions(message: Any, plain: dict[str, Any]) -> None:
    assert orjson.loads(write(message)) == plain
    assert parse(type(message), write(message)) == message


def test_an_error_with_an_unpaired_surrogate_is_reported() -> None:
    failure = BatchFailure(0, "ValueError: \ud800 in it", "at \udfff")
    report = parse_exchange(write_exchange(ExchangeRequest(1, "7fff", (Report("t", 0, (failure,)),)))).reports[0]
    assert report.failures == (BatchFailure(0, "ValueError: ? in it", "at ?"),)
    assert parse(HookReport, write(HookReport(1, "7fff", "t", "\ud800"))).error == "?"


def test_a_payload_or_result_with_a_line_break_is_rejected() -> None:
    with pytest.raises(WorkerMessageError, match="line break"):
        write_exchange(ExchangeRequest(1, "7fff", (Report("t", 0, results=((0, b"[1,\n2]"),)),)))
    with pytest.raises(WorkerMessageError, match="line break"):
        write_exchanged(ExchangeReply(Lease("t", (LeasedBatch(0, b"[1]\n"),))))


HEAD = {"pid": 1, "job": "7fff", "reports": [], "max_batches": 1, "max_bytes": 1, "wait_s": 0}
REPORT = {"token": "t", "upto": 3, "failures": [], "seconds": 0.5, "results": 1}


def _body(lines: list[bytes], **changes: object) -> bytes:
    return b"\n".join([orjson.dumps({**HEAD, **changes}), *lines])


def _failures(*batches: int) -> list[dict[str, object]]:
    return [{"seq": seq, "error": "", "traceback": ""} for seq in batches]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "reports"),
        (_body([], pid=True), "pid"),
        (_body([], pid=-1), "pid"),
        (_body([], max_batches=2**60), "max_batches"),
        (_body([], max_batches=2**64 - 1), "max_batches"),
        (_body([], wait_s="1"), "wait_s"),
        (_body([], wait_s=-1), "wait_s"),
        (_body([], job=None), "job"),
        (_body([], reports=[1]), "reports: dict expected"),
        (_body([], reports=[REPORT]), "lines of results"),
        (_body([], reports=[{**REPORT, "results": 2**50}]), "lines of results"),
        (_body([b"1 1", b"2 2"], reports=[REPORT]), "announce 1 lines of results, but the body has 2"),
        (_body([b"1"], reports=[REPORT]), "<seq> <json>"),
        (_body([b"-1 1"], reports=[REPORT]), "<seq> <json>"),
        (_body([b"9" * 5000 + b" 1"], reports=[REPORT]), "<seq> <json>"),
        (_body([b"4 1"], reports=[REPORT]), "ascend"),
        (_body([b"1 1", b"1 1"], reports=[{**REPORT, "results": 2}]), "ascend"),
        (_body([], reports=[{**REPORT, "results": 0, "failures": _failures(4)}]), "ascend"),
        (_body([], reports=[{**REPORT, "results": 0, "failures": _failures(2, 1)}]), "ascend"),
        (_body([], reports=[{**REPORT, "results": 0, "failures": [{"seq": 1}]}]), "error"),
    ],
)
def test_rejects_an_invalid_exchange(body: bytes, message: str) -> None:
    with pytest.raises(WorkerMessageError, match=message):
        parse_exchange(body)


@given(st.binary(max_size=200))
def test_parsers_raise_only_wire_errors(body: bytes) -> None:
    for read in (partial(parse, HookReport), parse_joined, parse_exchange, parse_exchanged):
        try:
            read(body)
        except WorkerMessageError:
            continue


def test_rejects_a_truncated_reply() -> None:
    body = write_exchanged(ExchangeReply(Lease("t", (LeasedBatch(0, b"[0]"), LeasedBatch(1, b"[1]")))))
    with pytest.raises(WorkerMessageError, match="2 batches has 1 payloads"):
        parse_exchanged(body[: body.rindex(b"\n")])


def test_importing_the_module_is_cheap() -> None:
    heavy = "pydantic", "starlette", "fastapi", "sqlalchemy", "uvicorn", "asyncio"
    script = f"import sys, cortex.jobs.http.wire; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"
