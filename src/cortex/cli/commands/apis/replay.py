"""`cortex replay`: send the requests of a recording again, and compare the answers with the recorded ones."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from cortex.cli.arguments import add_env, add_output
from cortex.cli.output import located
from cortex.cli.session import Session
from cortex.client.client import needs_key
from cortex.client.packaging import find_config
from cortex.client.transport import open_connection
from cortex.config.schema import COMMAND
from cortex.config.values import fraction
from cortex.config.values import percentage as percentage_text
from cortex.errors import ConfigError, InputError, NotFoundError
from cortex.lifecycle import ApiKind
from cortex.operator.deploy.diagnose import Diagnosis, Machine, diagnose
from cortex.predictor.applications import APPLICATION_TYPES
from cortex.processes.http import UnixHttpConnection
from cortex.recording.exchange import Exchange, Redaction
from cortex.recording.files import Recording
from cortex.recording.json_path import JsonPath
from cortex.replay.comparison import ComparisonRules
from cortex.replay.report import (
    DIFFERENCE_HEADERS,
    DURATION_HEADERS,
    ReplayReport,
    as_html,
    as_json,
    as_text,
    difference_rows,
    duration_rows,
)
from cortex.replay.session import ReplaySession, ReplaySettings, ReplayTarget
from cortex.replay.statistics import ReplayStatistics
from cortex.storage.client import download, is_remote
from cortex.worker.spec import ReplicaSpec

#: Added to the timeout of the API.
_GRACE_S = 10.0
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)x")
_MAX_CONCURRENCY = 1000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "recording",
        metavar="RECORDING",
        help="file of a recording, or folder with its files; here, or at s3:// or gs://",
    )
    parser.add_argument(
        "--against",
        metavar="API|FOLDER",
        required=True,
        help="name of a deployed API, or folder of a project, which is started but not deployed; a folder has a slash,"
        " such as ./iris, or is a dot",
    )
    parser.add_argument("--api", metavar="NAME", help="API of the recording, if it has several")
    parser.add_argument(
        "--rate",
        metavar="RATE",
        default="max",
        help="original: at the pace of the recording; 2x: twice as fast; max: as fast as possible; default: max",
    )
    parser.add_argument(
        "--concurrency", metavar="N", type=int, default=8, help="requests in flight at most; default: 8"
    )
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        default=1e-6,
        help="difference of numbers that are equal, relative and absolute; default: 1e-6",
    )
    parser.add_argument(
        "--ignore",
        metavar="PATH",
        action="append",
        default=[],
        help="value in JSON answers that is not compared, such as $.time, $.items[*].id or $..request_id; repeatable",
    )
    parser.add_argument("--limit", metavar="N", type=int, help="number of requests at most")
    parser.add_argument(
        "--report", metavar="FILE", action="append", default=[], help="write the report to FILE.html or FILE.json"
    )
    parser.add_argument(
        "--max-differences",
        metavar="PERCENT",
        default="0%",
        help="share of answers that may differ before the command fails; default: 0%%",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="key for an API with `auth: api_key`; default: the variable CORTEX_API_KEY"
    )
    add_env(parser)
    add_output(parser)


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Replay; return 0 if few enough answers differ, else 1."""
    settings, rules, max_share = _settings(arguments), _rules(arguments), _share(arguments.max_differences)
    reports = [_report_file(name) for name in arguments.report]
    with _opened(arguments.recording, session) as recording:
        is_folder = _is_folder(arguments.against)
        diagnosis = _diagnose(arguments.against, session) if is_folder else None
        recording = _of_one_api(recording, arguments, diagnosis)
        name = recording.apis[0]
        rules = ComparisonRules(rules.tolerance, rules.ignored, _redacted(recording))
        _check(recording, settings, session)
        if diagnosis is not None:
            statistics = _replay_folder(recording, diagnosis, settings, rules, session)
        else:
            target = _deployed(arguments, session)
            statistics = _replay(recording, target, settings, rules, session)
    session.console.clear_progress()
    report = ReplayReport(
        arguments.recording,
        name,
        arguments.against,
        statistics,
        rules.tolerance,
        tuple(arguments.ignore),
        max_share,
        is_paced=settings.speed is not None,
    )
    for file in reports:
        _write(file, report)
    _show(report, arguments, session)
    return 0 if report.passes else 1


# Arguments.


def _settings(arguments: argparse.Namespace) -> ReplaySettings:
    if not 0 < arguments.concurrency <= _MAX_CONCURRENCY:
        raise InputError(f"--concurrency {arguments.concurrency}: must be 1 to {_MAX_CONCURRENCY}")
    if arguments.limit is not None and arguments.limit < 1:
        raise InputError(f"--limit {arguments.limit}: must be at least 1")
    return ReplaySettings(_speed(arguments.rate), arguments.concurrency, arguments.limit)


def _speed(rate: str) -> float | None:
    if rate in ("original", "max"):
        return 1.0 if rate == "original" else None
    found = _RATE.fullmatch(rate)
    if found is None or not float(found[1]):
        raise InputError(f"--rate {rate}: must be original, max, or a factor such as 2x or 0.5x")
    return float(found[1])


def _rules(arguments: argparse.Namespace) -> ComparisonRules:
    if not 0 <= arguments.tolerance < 1:
        raise InputError(f"--tolerance {arguments.tolerance:g}: must be at least 0 and below 1")
    try:
        return ComparisonRules(arguments.tolerance, tuple(map(JsonPath.parse, arguments.ignore)))
    except ValueError as error:
        raise InputError(f"--ignore: {error}") from None


def _share(text: str) -> float:
    try:
        return fraction(percentage_text()(text))
    except ValueError as error:
        raise InputError(f"--max-differences: {error}") from None


def _report_file(name: str) -> Path:
    file = Path(name)
    if file.suffix not in (".html", ".json"):
        raise InputError(f"--report {name}: must end in .html or .json")
    if not file.absolute().parent.is_dir():
        raise InputError(f"--report {name}: its folder does not exist")
    return file


def _is_folder(against: str) -> bool:
    return "/" in against or against.startswith(".")


# The recording.


@contextmanager
def _opened(written: str, session: Session) -> Iterator[Recording]:
    """Open a recording, after a download if it is in a bucket. Raises: InputError, StorageError."""
    if not is_remote(written):
        yield Recording.open(Path(written))
        return
    with tempfile.TemporaryDirectory(prefix="cortex-replay-") as folder:
        session.console.progress(f"downloading {written}")
        path = Path(folder) / written.rstrip("/").rpartition("/")[2]
        asyncio.run(download(written, path, session.environ))
        yield Recording.open(path)


def _of_one_api(recording: Recording, arguments: argparse.Namespace, diagnosis: Diagnosis | None) -> Recording:
    """Return the files of the API whose requests are sent. Raises: InputError."""
    apis, wanted = recording.apis, arguments.api
    if not apis:
        raise InputError(f"{arguments.recording}: this recording is empty")
    if wanted is None and diagnosis is None and arguments.against in apis:
        wanted = arguments.against
    if wanted is None and diagnosis is not None:
        both = [api.name for api in diagnosis.apis if api.name in apis]
        wanted = both[0] if len(both) == 1 else None
    if wanted is None and len(apis) == 1:
        wanted = apis[0]
    if wanted not in apis:
        raise InputError(f"{arguments.recording}: choose one of its APIs with --api: {', '.join(apis)}")
    return recording.of(wanted)


def _redacted(recording: Recording) -> tuple[JsonPath, ...]:
    entries = {str(entry) for file in recording.files for entry in file.head.get("redact", ())}
    return Redaction.parse(sorted(entries)).paths


def _check(recording: Recording, settings: ReplaySettings, session: Session) -> None:
    """Read the whole recording, so that a damaged line is found before the first request. Raises: InputError."""
    session.console.progress("reading the recording")
    sendable = sum(each.is_sendable for each in itertools.islice(recording.exchanges(), settings.limit))
    if not sendable:
        raise InputError(f"the recording of {recording.apis[0]} has no request that can be sent")


# Targets.


def _deployed(arguments: argparse.Namespace, session: Session) -> ReplayTarget:
    """Return a deployed API. Raises: InputError."""
    client = session.client(arguments.env)
    try:
        api = client.get_api(arguments.against)
    except NotFoundError as error:
        if Path(arguments.against).is_dir():
            raise InputError(f"{error}; to replay against the folder, write ./{arguments.against}") from None
        raise
    spec = api["spec"]
    handler = spec.get("handler") or {}
    if spec.get("kind") not in (ApiKind.REALTIME, ApiKind.SPLITTER) or handler.get("protobuf_path"):
        raise InputError(f"{arguments.against} is not a RealtimeAPI over HTTP, which is what recordings are of")
    endpoint = client.environment.check_host(str(api["endpoint"]))
    trust = client.environment.connect().trust
    timeout_s = float(spec["networking"]["timeout_s"]) + _GRACE_S
    key = arguments.api_key or session.environ.get("CORTEX_API_KEY") if needs_key(api) else None
    if needs_key(api) and not key:
        raise InputError(f"{arguments.against} needs a key: write --api-key KEY, or set CORTEX_API_KEY")
    headers = {"x-api-key": key} if key else {}
    return ReplayTarget(
        arguments.against,
        lambda: open_connection(endpoint, timeout_s, trust),
        urlsplit(endpoint).path.rstrip("/"),
        lambda exchange: headers,
    )


def _diagnose(folder: str, session: Session) -> Diagnosis:
    file = find_config(Path(folder))
    try:
        return diagnose(file, file.name, machine=Machine(session.environ))
    except ConfigError as error:
        raise located(error, file.parent) from None


def _replay_folder(
    recording: Recording, diagnosis: Diagnosis, settings: ReplaySettings, rules: ComparisonRules, session: Session
) -> ReplayStatistics:
    """Replay against a replica of this machine that is not deployed. Raises: InputError, UserError."""
    name = recording.apis[0]
    apis = [api for api in diagnosis.apis if api.kind is ApiKind.REALTIME and not api.is_grpc]
    chosen = [api for api in apis if api.name == name] or apis
    if len(chosen) != 1:
        raise InputError(f"the project has no RealtimeAPI named {name}, but {len(apis)} others; rename one of them")
    api = chosen[0]
    from cortex.cli.local_replicas import local_replicas  # noqa: PLC0415 - imports the engine

    async def replay() -> ReplayStatistics:
        async with local_replicas(session.home, session.environ, diagnosis) as replicas:
            session.console.progress(f"starting {api.name}")
            spec = await replicas.start(api)
            sockets = itertools.cycle(spec.sockets)

            def connect() -> UnixHttpConnection:
                return UnixHttpConnection(next(sockets), spec.timeout_s + _GRACE_S)

            endpoint = api.networking.endpoint.rstrip("/")
            headers = _GatewayHeaders(spec, api.networking.endpoint)
            target = ReplayTarget(api.name, connect, endpoint, headers.of)
            return await asyncio.to_thread(_replay, recording, target, settings, rules, session)

    return asyncio.run(replay())


class _GatewayHeaders:
    """The headers that the gateway would set."""

    def __init__(self, spec: ReplicaSpec, endpoint: str) -> None:
        self._endpoint = endpoint
        self._is_prefix = spec.type in (*APPLICATION_TYPES, COMMAND)
        self._numbers = itertools.count(1)

    def of(self, exchange: Exchange) -> dict[str, str]:
        """Return the headers of a request."""
        request_id = f"{time.time_ns() // 1_000_000}-replay-{next(self._numbers)}"
        below = {"x-cortex-endpoint": self._endpoint} if exchange.path or self._is_prefix else {}
        return {"x-cortex-request-id": request_id, **below}


def _replay(
    recording: Recording, target: ReplayTarget, settings: ReplaySettings, rules: ComparisonRules, session: Session
) -> ReplayStatistics:
    def show(sent: int) -> None:
        session.console.progress(f"{sent:,} answers of {target.name}")

    return ReplaySession(recording, target, settings, rules, show).run()


# The report.


def _write(file: Path, report: ReplayReport) -> None:
    text = as_html(report) if file.suffix == ".html" else json.dumps(as_json(report), indent=2) + "\n"
    try:
        file.write_text(text)
    except OSError as error:
        raise InputError(f"--report {file}: can't be written: {(error.strerror or str(error)).lower()}") from None


def _show(report: ReplayReport, arguments: argparse.Namespace, session: Session) -> None:
    console = session.console
    if arguments.output == "json":
        console.json(as_json(report))
        return
    for line in as_text(report):
        console.line(line)
    if rows := difference_rows(report.statistics):
        console.line()
        console.table(DIFFERENCE_HEADERS, rows)
    if rows := duration_rows(report.statistics):
        console.line()
        console.table(DURATION_HEADERS, rows)
