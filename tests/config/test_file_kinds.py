"""Keys and rules of single kinds of APIs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.config.schema import Api, Networking
from cortex.lifecycle import ApiKind
from harness.config_files import examine_text, lines_of

CODE = "type: python, path: handler.py"


def only(tmp_path: Path, text: str, **kwargs: object) -> Api:
    reading = examine_text(tmp_path, text, **kwargs)  # type: ignore[arg-type]
    assert lines_of(reading) == []
    return reading.apis[-1]


def problems(tmp_path: Path, text: str, **kwargs: object) -> list[str]:
    """Return each mistake as `path: message (fix)`."""
    found = examine_text(tmp_path, text, **kwargs).problems  # type: ignore[arg-type]
    return [f"{problem.path}: {problem.message} ({problem.fix})" for problem in found]


# AsyncAPI and TaskAPI.


@pytest.mark.parametrize("section", ["handler", "predictor"])
def test_an_async_api_has_the_fields_of_a_realtime_api(section: str, tmp_path: Path) -> None:
    text = f"- name: a\n  kind: AsyncAPI\n  {section}: {{{CODE}}}\n  autoscaling: {{min_replicas: 0}}\n"
    api = only(tmp_path, text)
    assert (api.kind, api.handler.interface, api.target_concurrency) == (ApiKind.ASYNC, section, 1.0)
    assert api.networking.max_body_size == 100 * 1024**2


def test_a_task_is_described_by_its_definition(tmp_path: Path) -> None:
    definition = "{path: src/model.py, config: {a: 1}, python_path: src, env: {B: c}}"
    handler = only(tmp_path, f"- name: a\n  kind: TaskAPI\n  definition: {definition}\n").handler
    assert (handler.type, handler.path, handler.config, handler.env) == ("python", "src/model.py", {"a": 1}, {"B": "c"})
    assert handler.python_path == "src/"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- name: a\n  kind: TaskAPI\n", ['a.definition: must be defined (write "definition:")']),
        ("- name: a\n  kind: TaskAPI\n  definition: {}\n",
         ['a.definition.path: must be defined (write "path: task.py")']),
        ("- name: a\n  definition: {path: handler.py}\n", ['a.kind: must be defined (write "kind: TaskAPI")']),
        ("- name: a\n  kind: Task\n  definition: {path: handler.py}\n",
         ['a.kind: unknown kind "Task" (write "TaskAPI")']),
        ("- name: a\n  kind: TaskAPI\n  handler: {path: handler.py}\n",
         ['a.definition: must be defined (write "definition:")',
          'a.handler: handler key is not supported for TaskAPI kind (write "definition:" with "path")']),
        (f"- name: a\n  kind: RealtimeAPI\n  handler: {{{CODE}}}\n  definition: {{path: a.py}}\n",
         ['a.definition: key "definition" is not supported (remove it: it belongs to TaskAPI)']),
    ],
)  # fmt: skip
def test_mistakes_in_a_task(text: str, expected: list[str], tmp_path: Path) -> None:
    assert problems(tmp_path, text) == expected


# TrafficSplitter.

REALTIME = (
    f"- name: x\n  kind: RealtimeAPI\n  handler: {{{CODE}}}\n- name: y\n  kind: RealtimeAPI\n  handler: {{{CODE}}}\n"
)
BATCH = f"- name: nightly\n  kind: BatchAPI\n  handler: {{{CODE}}}\n"


def split(*apis: str) -> str:
    return "- name: s\n  kind: TrafficSplitter\n  apis:\n" + "".join(f"    - {{{api}}}\n" for api in apis)


def test_a_splitter_has_no_code(tmp_path: Path) -> None:
    api = only(tmp_path, REALTIME + split("name: x, weight: 100", "name: y, weight: 5, shadow: true"))
    assert [(share.name, share.weight, share.shadow) for share in api.apis or ()] == [("x", 100, False), ("y", 5, True)]
    assert api.networking.endpoint == "/s"
    assert Api.model_validate(api.model_dump(mode="json")) == api


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- name: s\n  kind: TrafficSplitter\n",
         ['s.apis: must be defined (write "apis:" with "- name: my-api" and "weight: 100" below it)']),
        (split("name: x, weight: 30", "name: y, weight: 60"),
         ["s.apis[1].weight: the weights of all APIs except the shadow must add up to 100 (got 90) "
          "(change the weights)"]),
        (split("name: x, weight: 100", "name: x, weight: 10, shadow: true"),
         ['s.apis[1].name: "x" is already in the list (remove one of them)']),
        (split("name: x, weight: 100", "name: y, weight: 1, shadow: true", "name: x2, weight: 1, shadow: true"),
         ["s.apis[2].name: \"x2\" is neither in this file nor deployed (did you mean \"x\"?)",
          "s.apis[2].shadow: only one API can be the shadow (remove it, or this API)"]),
        (split("name: nightly, weight: 100"),
         ['s.apis[0].name: "nightly" is of kind BatchAPI, not a RealtimeAPI (use the name of a RealtimeAPI)']),
        (split("name: x, wieght: 100"),
         ['s.apis[0].wieght: key "wieght" is not supported (did you mean "weight"?)']),
        (split("name: x, weight: 101"),
         ["s.apis[0].weight: must be less than or equal to 100 (got 101) "
          "(write a number of at least 0 and of at most 100)"]),
        (split("weight: 100"), ['s.apis[0].name: must be defined (write "name: my-api")']),
        (split("name: x, weight: 100") + "  autoscaling: {min_replicas: 1}\n",
         ["s.autoscaling: autoscaling key is not supported for TrafficSplitter kind "
          "(set it for the APIs that the splitter names)"]),
    ],
)  # fmt: skip
def test_mistakes_in_a_splitter(text: str, expected: list[str], tmp_path: Path) -> None:
    assert problems(tmp_path, REALTIME + BATCH + text) == expected


def deployed(name: str, kind: ApiKind = ApiKind.REALTIME) -> Api:
    return Api(name=name, kind=kind, networking=Networking(endpoint=f"/{name}"))


def test_a_splitter_may_target_deployed_apis(tmp_path: Path) -> None:
    text = split("name: x, weight: 100")
    assert problems(tmp_path, text, deployed=[deployed("x")]) == []
    (wrong,) = problems(tmp_path, text, deployed=[deployed("x", ApiKind.ASYNC)])
    assert "is of kind AsyncAPI" in wrong
    assert problems(tmp_path, text, deployed=None) == []  # unknown


# Batching, tracking, readiness, schedules.


def realtime(inside: str = "", beside: str = "", code: str = CODE) -> str:
    return f"- name: a\n  kind: RealtimeAPI\n  handler: {{{code}{inside}}}\n{beside}"


def batching(size: int, more: str = "") -> str:
    return f", server_side_batching: {{max_batch_size: {size}, batch_interval: 5ms{more}}}"


def test_python_code_may_batch_with_any_number_of_threads(tmp_path: Path) -> None:
    api = only(tmp_path, realtime(batching(32, ", isolate_failures: false")))
    wanted = api.handler.server_side_batching
    assert wanted is not None
    assert (wanted.max_batch_size, wanted.batch_interval_s, wanted.isolate_failures) == (32, 0.005, False)
    assert api.target_concurrency == 32.0
    assert only(tmp_path, realtime(", server_side_batching: null")).handler.server_side_batching is None


TENSORFLOW = "type: tensorflow, path: handler.py, models: {path: s3://bucket/model}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (realtime(", server_side_batching: {}"),
         ['a.handler.server_side_batching.batch_interval: must be defined (write "batch_interval: 10ms")',
          'a.handler.server_side_batching.max_batch_size: must be defined (write "max_batch_size: 32")']),
        (realtime(batching(4), code=TENSORFLOW.replace("tensorflow", "onnx")),
         ["a.handler.server_side_batching: cannot be used with type onnx "
          "(remove it, or run the session from Python code)"]),
        (realtime(batching(4) + ", threads_per_process: 2", code=TENSORFLOW),
         ["a.handler.server_side_batching.max_batch_size: max_batch_size cannot be greater than processes_per_replica "
          "times threads_per_process (4 > 2) (set threads_per_process to at least 4)"]),
        (realtime(batching(4) + ", threads_per_process: 4, tensorflow_serving: 'a:1'", code=TENSORFLOW),
         ["a.handler.server_side_batching: cannot be used with an external server, which has its own batching settings "
          "(remove one of them)"]),
        (realtime(batching(1)),
         ["a.handler.server_side_batching.max_batch_size: must be greater than or equal to 2 (got 1) "
          "(write a number of at least 2 and of at most 1024)"]),
        (realtime(batching(4)).replace("RealtimeAPI", "AsyncAPI"),
         ["a.handler.server_side_batching: server_side_batching key is not supported for AsyncAPI kind (remove it: "
          'each process runs one workload at a time; "autoscaling" sets the number of replicas)']),
    ],
)  # fmt: skip
def test_mistakes_in_batching(text: str, expected: list[str], tmp_path: Path) -> None:
    assert problems(tmp_path, text) == expected


def with_files(tmp_path: Path, **files: str) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(content)


def test_accepts_samples_and_baselines(tmp_path: Path) -> None:
    with_files(
        tmp_path, sample='{"x": 1}', numbers=f"[1{', 2.5' * 99}]", classes=f'["a"{", 3" * 99}]', counts='{"a": 100}'
    )
    assert only(tmp_path, realtime(beside="  readiness: sample.json\n")).readiness == "sample.json"
    for model_type, baseline in (
        ("regression", "numbers"),
        ("classification", "classes"),
        ("classification", "counts"),
    ):
        tracker = only(
            tmp_path,
            realtime(beside=f"  tracker: {{model_type: {model_type}, baseline: {baseline}.json, window: 500}}\n"),
        ).tracker
        assert tracker is not None
        assert (tracker.baseline, tracker.window) == (f"{baseline}.json", 500)


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ("readiness: sampl.json", 'a.readiness: "sampl.json": file does not exist (did you mean "sample.json"?)'),
        ("readiness: broken.json",
         'a.readiness: "broken.json" is not JSON: Expecting value (line 2, column 1) (correct the file)'),
        ("tracker: {model_type: regression, baseline: sample.json}",
         'a.tracker.baseline: "sample.json" must contain a list of numbers '
         "(write the predictions for your training data, as [1.5, 2])"),
        ("tracker: {model_type: classification, baseline: empty.json}",
         'a.tracker.baseline: "empty.json" must contain a list of classes, or a map from class to count '
         '(write something like {"cat": 700, "dog": 300})'),
        ("tracker: {model_type: classification, window: 5}",
         "a.tracker.window: must be greater than or equal to 100 (got 5) (write a number of at least 100)"),
        ("tracker: {}", 'a.tracker.model_type: must be defined (write "model_type: classification")'),
        ("schedule: '0 3 * * *'",
         "a.schedule: schedule key is not supported for RealtimeAPI kind "
         "(remove it: only a BatchAPI or a TaskAPI can have a schedule)"),
    ],
)  # fmt: skip
def test_mistakes_in_samples_and_baselines(beside: str, expected: str, tmp_path: Path) -> None:
    with_files(tmp_path, sample='{"x": 1.5}', broken="[1,\n", empty='{"a": 0}')
    assert problems(tmp_path, realtime(beside=f"  {beside}\n")) == [expected]


def task(schedule: str) -> str:
    return f"- name: t\n  kind: TaskAPI\n  definition: {{path: handler.py}}\n  schedule: {schedule}\n"


def test_a_schedule_is_a_string_or_a_map(tmp_path: Path) -> None:
    short = only(tmp_path, task("'0  3 * * mon-fri'")).schedule
    assert short is not None
    assert (short.cron, short.timezone, short.submission) == ("0 3 * * mon-fri", "UTC", {})
    daily = only(tmp_path, task("{cron: '@daily', timezone: Europe/Berlin, submission: {config: {a: 1}}}")).schedule
    assert daily is not None
    assert (short.overlap, daily.overlap) == ("allow", "allow")
    alone = only(tmp_path, task("{cron: '@daily', overlap: skip}")).schedule
    assert alone is not None and alone.overlap == "skip"
    assert (daily.cron, daily.timezone) == ("0 0 * * *", "Europe/Berlin")
    assert daily.submission == {"config": {"a": 1}}
    assert only(tmp_path, task("null")).schedule is None


CRON = 'write something like "0 3 * * *": minute, hour, day of the month, month, day of the week'


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("'0 3 * *'", f't.schedule: "0 3 * *" is not a cron expression: it has 4 fields, not 5 ({CRON})'),
        ("'61 3 * * *'", f't.schedule: "61 3 * * *" is not a cron expression: bad minute ({CRON})'),
        ("'0 0 30 2 *'", f't.schedule: "0 0 30 2 *" is not a cron expression: bad day-of-month ({CRON})'),
        ("'@dayly'", 't.schedule: "@dayly" is not a cron expression (did you mean "@daily"?)'),
        ("{timezone: UTC}", "t.schedule.cron: must be defined (write \"cron: \"0 3 * * *\"\")"),
        ("{cron: '0 3 * * *', timezone: Europe/Berln}",
         't.schedule.timezone: "Europe/Berln" is not a known time zone (write "Europe/Berlin")'),
        ("{cron: '0 3 * * *', time_zone: UTC}",
         't.schedule.time_zone: key "time_zone" is not supported (did you mean "timezone"?)'),
        ("{cron: '0 3 * * *', overlap: forbid}",
         't.schedule.overlap: invalid value (got "forbid", must be "allow" or "skip") (write "allow")'),
        ("5", 't.schedule: 5: invalid type (expected a map) (write "key: value" lines below it)'),
    ],
)  # fmt: skip
def test_mistakes_in_schedules(schedule: str, expected: str, tmp_path: Path) -> None:
    assert problems(tmp_path, task(schedule)) == [expected]


def test_a_scheduled_batch_api_requires_a_submission(tmp_path: Path) -> None:
    text = BATCH + "  schedule: '0 3 * * *'\n"
    (problem,) = problems(tmp_path, text)
    assert problem.startswith("nightly.schedule.submission: must be defined: a job of a BatchAPI needs input")
