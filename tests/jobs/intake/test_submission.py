"""Submissions to BatchAPIs and TaskAPIs are parsed, or rejected with an error that names the field and the fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.errors import SubmissionError
from cortex.jobs.intake.submission import SubmissionLimits, check_query, parse_body, parse_submission, parse_upload
from cortex.jobs.spec import (
    DelimitedFiles,
    FilePathLister,
    ItemList,
    JobOptions,
    RetryOf,
    Source,
    Submission,
    TaskCall,
    Upload,
    source_from_json,
    source_to_json,
)

LIMITS = SubmissionLimits()
ITEMS = {"items": [1, 2], "batch_size": 1}
FILES = {"s3_paths": ["s3://bucket/in/"], "batch_size": 2}


def parse(**body: Any) -> Submission:
    return parse_submission(json.dumps(body).encode(), LIMITS)


def test_reads_all_fields() -> None:
    found = parse(
        workers=3,
        config={"a": {"b": 1}},
        timeout=60,
        batch_timeout="1m30s",
        max_attempts=5,
        isolate_failures=True,
        output="s3://bucket/out",
        webhook="https://host/done?token=1",
        sqs_dead_letter_queue={"arn": "arn:aws:sqs:x", "max_receive_count": 7},
        item_list=ITEMS,
    )
    queue = {"arn": "arn:aws:sqs:x", "max_receive_count": 7}
    assert found.source == ItemList([1, 2], 1)
    assert found.options == JobOptions(
        3, {"a": {"b": 1}}, 60, 90.0, 5, True, "s3://bucket/out", "https://host/done?token=1", queue
    )


def test_missing_and_null_fields_have_defaults() -> None:
    nulls = dict.fromkeys(["config", "timeout", "sqs_dead_letter_queue", "file_path_lister", "output", "webhook"])
    assert parse(workers=1, item_list={"items": [None]}, **nulls) == Submission(ItemList([None], 1), JobOptions(1))


def test_config_may_be_nested() -> None:
    assert parse(workers=1, item_list=ITEMS, config=nested(100)).options.config == nested(100)


def test_files_are_selected_by_prefixes_and_globs() -> None:
    found = parse(workers=1, file_path_lister={**FILES, "includes": ["**.json"], "excludes": None})
    assert found.source == FilePathLister(("s3://bucket/in/",), 2, ("**.json",), ())
    paths = ["/data/../in//x/", "/data/img", "gs://b/é ?#", "s3://bucket"]
    found = parse(workers=1, delimited_files={"paths": paths})
    assert found.source == DelimitedFiles(("/in/x/", "/data/img", "gs://b/é ?#", "s3://bucket"), 1)


def test_the_receive_count_of_a_queue_sets_the_attempts() -> None:
    queue = {"arn": "arn", "max_receive_count": 7}
    assert parse(workers=1, sqs_dead_letter_queue=queue, item_list=ITEMS).options.max_attempts == 7


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"isolate_failure": True}, 'key "isolate_failure" is not supported; did you mean "isolate_failures"?'),
    ({"batchtimeout": 5}, 'key "batchtimeout" is not supported; did you mean "batch_timeout"?'),
    ({"batch_size": 5}, 'key "batch_size" is not supported; move it to "item_list"'),
    ({"batchsize": 5}, 'key "batchsize" is not supported; move it to "item_list" as "batch_size"'),
    ({"Workers": None}, 'key "Workers" is not supported; did you mean "workers"?'),
    ({"job_id": "x"}, 'key "job_id" is not supported; remove it; supported keys: workers, config, timeout,'),
    (
        {"item_list": {**ITEMS, "batchsize": 1}},
        'item_list: key "batchsize" is not supported; did you mean "batch_size"?',
    ),
    (
        {"sqs_dead_letter_queue": {"arn": "a", "max_receive_count": 1, "x": 1}},
        'sqs_dead_letter_queue: key "x" is not supported; remove it; supported keys: arn, max_receive_count',
    ),
    ({"é\n" * 10_000: 1}, 'key "é\\né'),
]


@pytest.mark.parametrize(("fields", "message"), UNKNOWN)
def test_refuses_an_unknown_key_with_the_key_that_it_resembles(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SubmissionError) as caught:
        parse(**{"workers": 1, "item_list": ITEMS, **fields})
    assert str(caught.value).startswith(message) and len(str(caught.value).splitlines()) == 1


def test_names_only_the_first_unknown_keys() -> None:
    with pytest.raises(SubmissionError) as caught:
        parse(workers=1, item_list=ITEMS, **{f"x{number}": 1 for number in range(1000)})
    assert len(str(caught.value).splitlines()) == 10


def test_a_stored_submission_may_have_unknown_keys() -> None:
    stored = {"workers": 1, "item_list": {**ITEMS, "other": 1}, "time_out": 3}
    assert parse_body(stored, LIMITS, ignores_unknown=True) == parse(workers=1, item_list=ITEMS)
    assert parse_body({"time_out": 3}, SubmissionLimits(is_task=True), ignores_unknown=True).options.timeout_s is None


def test_refuses_an_unknown_parameter_of_the_query() -> None:
    check_query({})
    check_query({"dryRun": "true"})
    with pytest.raises(SubmissionError, match='query: key "dryrun" is not supported; did you mean "dryRun"?'):
        check_query({"dryrun": "true"})
    with pytest.raises(SubmissionError, match='key "isolate_failure" is not supported; did you mean'):
        parse_upload({"workers": "1", "isolate_failure": "true"}, LIMITS)
    assert parse_upload({"workers": "1", "dryRun": "true"}, LIMITS).source == Upload(1)


def test_reads_the_options_of_an_upload_from_its_query() -> None:
    query = {
        "workers": "2",
        "batch_size": "10",
        "timeout": "60",
        "batch_timeout": "30s",
        "max_attempts": "1",
        "isolate_failures": "true",
        "config": '{"a": 1}',
        "output": "/tmp/out",
        "webhook": "http://host",
        "dryRun": "true",
    }
    expected = JobOptions(2, {"a": 1}, 60, 30.0, 1, True, "/tmp/out", "http://host")
    assert parse_upload(query, LIMITS) == Submission(Upload(10), expected)
    assert parse_upload({"workers": "1"}, LIMITS) == Submission(Upload(1), JobOptions(1))


def nested(depth: int) -> dict[str, Any]:
    """Return `depth` nested maps and lists."""
    found: Any = 1
    for level in reversed(range(depth)):
        found = [found] if level % 2 else {"a": found}
    return {} if not depth else found


GOOD = {"workers": 1, "item_list": ITEMS}
#: (changes to a valid submission, where None removes a key; the error message)
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"workers": ...}, 'workers: must be defined; write "workers": 1'),
    ({"workers": None}, 'workers: cannot be null; write "workers": 1'),
    ({"workers": 0}, 'workers: must be at least 1 (got 0); write "workers": 1'),
    ({"workers": -3}, "workers: must be at least 1 (got -3)"),
    ({"workers": 100_000}, "workers: must be at most 10,000 (got 100000)"),
    ({"workers": "2"}, 'workers: must be an integer (got "2"); write 2 without quotes'),
    ({"workers": 2.0}, "workers: must be an integer (got 2.0); write 2"),
    ({"workers": 1.5}, "workers: must be an integer (got 1.5)"),
    ({"workers": True}, "workers: must be an integer (got true)"),
    ({"config": [1]}, 'config: must be a map (got [1]); write "config": {"key": "value"}'),
    ({"config": "x"}, 'config: must be a map (got "x")'),
    ({"config": nested(101)}, "config: is nested deeper than 100 levels; make it flatter, or send it as a string"),
    ({"config": {"text": "x" * 1024**2}}, "config: has 1,048,588 bytes as JSON, more than 1,048,576; put it in a file"),
    ({"config": nested(900)}, "config: is nested deeper than 100 levels"),
    ({"timeout": 0}, 'timeout: must be at least 1 (got 0); write a number of seconds, such as "timeout": 3600'),
    ({"timeout": "1h"}, 'timeout: must be an integer (got "1h"); write a number of seconds'),
    ({"timeout": 10**18}, "timeout: must be at most 3,153,600,000"),
    ({"batch_timeout": 0}, "batch_timeout: must be greater than 0s (got 0); write something like 10s"),
    ({"batch_timeout": "soon"}, 'batch_timeout: "soon": invalid duration; write something like "30s"'),
    ({"batch_timeout": [1]}, "batch_timeout: [1]: invalid type"),
    ({"max_attempts": 0}, 'max_attempts: must be at least 1 (got 0); write "max_attempts": 3'),
    ({"max_attempts": 1001}, "max_attempts: must be at most 1,000"),
    (
        {"isolate_failures": "yes"},
        'isolate_failures: must be true or false (got "yes"); write "isolate_failures": true',
    ),
    ({"output": "out/"}, 'output: "out/" is not a valid path; write "s3://bucket/folder/", or an absolute path'),
    ({"output": "http://host/x"}, 'output: "http://host/x": http:// is not supported; use s3://'),
    ({"output": 5}, 'output: must be a string (got 5); write "output": "s3://bucket/folder"'),
    ({"webhook": "host/x"}, 'webhook: must be an http:// or https:// address; write "webhook": "https://host/path"'),
    ({"webhook": "https://"}, "webhook: must be an http:// or https:// address"),
    ({"webhook": "https://host/a b"}, "webhook: must be an http:// or https:// address"),
    ({"webhook": ""}, "webhook: cannot be empty"),
    ({"sqs_dead_letter_queue": "arn"}, 'sqs_dead_letter_queue: must be a map (got "arn"); write'),
    ({"sqs_dead_letter_queue": nested(101)}, "sqs_dead_letter_queue: is nested deeper than 100 levels"),
    ({"sqs_dead_letter_queue": {"max_receive_count": 1}}, 'sqs_dead_letter_queue.arn: must be defined; write "arn"'),
    ({"sqs_dead_letter_queue": {"arn": "", "max_receive_count": 1}}, "sqs_dead_letter_queue.arn: cannot be empty"),
    ({"sqs_dead_letter_queue": {"arn": "a"}}, "sqs_dead_letter_queue.max_receive_count: must be defined; write"),
    (
        {"sqs_dead_letter_queue": {"arn": "a", "max_receive_count": 0}},
        'sqs_dead_letter_queue.max_receive_count: must be at least 1 (got 0); write "max_receive_count": 3',
    ),
    (
        {"item_list": ...},
        "specify exactly one of the following keys: item_list, file_path_lister, delimited_files; write something like",
    ),
    (
        {"delimited_files": FILES},
        "please specify either the item_list or delimited_files field (but not more than one at the same time)",
    ),
    (
        {"delimited_files": FILES, "file_path_lister": FILES},
        "please specify either the item_list, file_path_lister or delimited_files field (but not more than one",
    ),
    ({"item_list": [1, 2]}, 'item_list: must be a map (got [1, 2]); write "item_list": {"items": [1, 2]'),
    ({"item_list": {"batch_size": 1}}, 'item_list.items: must be defined; write "items": [1, 2]'),
    ({"item_list": {"items": []}}, 'item_list.items: cannot be empty; write "items": [1, 2] with at least one item'),
    ({"item_list": {"items": {"a": 1}}}, 'item_list.items: must be a list (got {"a": 1})'),
    ({"item_list": {"items": [1], "batch_size": 0}}, "item_list.batch_size: must be at least 1 (got 0)"),
    ({"item_list": {"items": [1], "batch_size": "5"}}, "item_list.batch_size: must be an integer"),
    ({"item_list": {"items": [1], "batch_size": 2**40}}, "item_list.batch_size: must be at most"),
]
FILE_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"s3_paths": ...}, '.s3_paths: must be defined; write "s3_paths": ["s3://bucket/folder/"]'),
    ({"s3_paths": []}, '.s3_paths: cannot be empty; write "s3_paths"'),
    ({"s3_paths": "s3://bucket/x"}, '.s3_paths: must be a list (got "s3://bucket/x"); write "s3_paths"'),
    ({"s3_paths": ["s3://bucket/x", "bucket/x"]}, '.s3_paths[1]: "bucket/x" is not a valid path; write "s3://'),
    ({"s3_paths": ["s3://"]}, '.s3_paths[0]: "s3://" has no bucket; write "s3://bucket/folder/"'),
    ({"s3_paths": ["s3://my bucket/x"]}, '.s3_paths[0]: "s3://my bucket/x" has an invalid bucket name'),
    ({"s3_paths": ["azure://x/y"]}, '.s3_paths[0]: "azure://x/y": azure:// is not supported; use s3://, gs://'),
    ({"s3_paths": ["file:///data"]}, '.s3_paths[0]: "file:///data" is not a valid path; write "/data"'),
    ({"s3_paths": ["/data\0"]}, ".s3_paths[0]: has a character in it that no path or address can have; remove it"),
    ({"s3_paths": ["/data/../"]}, '.s3_paths[0]: "/data/../" is the whole file system; write the path of a folder'),
    ({"s3_paths": [None]}, ".s3_paths[0]: must be a string (got null)"),
    ({"s3_paths": ["/x"] * 10_001}, ".s3_paths: may have 10,000 (got 10,001); name the folders"),
    ({"paths": ["/data/"]}, ": please specify either the s3_paths or paths field (but not more than one"),
    ({"includes": "*.json"}, '.includes: must be a list (got "*.json"); write a list of globs'),
    ({"includes": ["[a"]}, '.includes[0]: "[a" is not a valid glob; a [ has no ]; close it'),
    ({"excludes": ["**", "{a"]}, '.excludes[1]: "{a" is not a valid glob; a { has no }; close it'),
    ({"excludes": [3]}, ".excludes[0]: must be a string (got 3)"),
    (
        {"excludes": ["x" * 900] * 200},
        ".excludes: the patterns have 180,000 characters, and may have 100,000; use fewer",
    ),
    ({"batch_size": 0}, '.batch_size: must be at least 1 (got 0); write "batch_size": 1'),
]


def changed(body: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**body, **change}.items() if value is not ...}


@pytest.mark.parametrize(("change", "message"), MISTAKES)
def test_rejects_an_invalid_field_with_its_fix(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SubmissionError) as caught:
        parse(**changed(GOOD, change))
    [line] = [line for line in str(caught.value).split("\n") if "did you mean" not in line]
    assert line.startswith(message)
    assert "; " in line
    assert (caught.value.http_status, caught.value.code) == (400, "bad_submission")


@pytest.mark.parametrize("kind", ["file_path_lister", "delimited_files"])
@pytest.mark.parametrize(("change", "message"), FILE_MISTAKES)
def test_rejects_an_invalid_field_about_files_with_its_fix(kind: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(SubmissionError) as caught:
        parse(workers=1, **{kind: changed(FILES, change)})
    assert str(caught.value).startswith(kind + message)
    assert "; " in str(caught.value)


def test_checks_each_of_several_inputs() -> None:
    with pytest.raises(SubmissionError) as caught:
        parse(workers=0, item_list={"items": []}, file_path_lister={"paths": ["data"], "includes": ["[a"]})
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "workers",
        "please specify either the item_list or file_path_lister field (but not more than one at the same time); "
        "remove all but one",
        "item_list.items",
        "file_path_lister.paths[0]",
        "file_path_lister.includes[0]",
    ]


def test_reports_up_to_ten_invalid_elements_of_a_list() -> None:
    paths = ["s3://bucket/x", "a", "/data", "b", *"cdefghijkl"]
    with pytest.raises(SubmissionError) as caught:
        parse_submission({"workers": 0, "file_path_lister": {"s3_paths": paths}}, LIMITS)
    workers, *elements = str(caught.value).splitlines()
    assert workers.startswith("workers: ")
    assert [line.partition(" is not a valid path; ")[0] for line in elements] == [
        f'file_path_lister.s3_paths[{index}]: "{paths[index]}"' for index in (1, *range(3, 12))
    ]


BODIES = [
    (b"", 'the body is empty; send something like {"workers": 1'),
    (b" \n", "the body is empty"),
    (b'{"workers": 1,}', "the body is invalid JSON at line 1, column 14"),
    (b'{"workers": NaN}', "the body is invalid JSON at line 1, column 1"),
    (b'{"workers": "\xff"}', "the body is invalid JSON"),
    (b"[1]", "the body must be a map (got [1]); send something like"),
    (b'"x"', 'the body must be a map (got "x")'),
    (b"workers=1", "the body is invalid JSON at line 1, column 1 (workers=1)"),
    (b"[" * 5000, "the body is invalid JSON"),
    (
        b'{"n": 1}\n{"n": 2}\n',
        'the body is invalid JSON at line 2, column 1 ({"n": 1} {"n": 2} ): unexpected content after document; items as'
        " lines of JSON are sent with the content type application/x-ndjson and options in the query",
    ),
    (b" " * 11_000_000, "the body has 11,000,000 bytes, and may have 10,485,760; raise networking.max_body_size"),
]


@pytest.mark.parametrize(("body", "message"), BODIES)
def test_rejects_a_body_that_is_not_a_map(body: bytes, message: str) -> None:
    with pytest.raises(SubmissionError) as caught:
        parse_submission(body, LIMITS)
    assert str(caught.value).startswith(message)


def test_reports_all_errors_together() -> None:
    with pytest.raises(SubmissionError) as caught:
        parse(workers=0, timeout="x", item_list={"items": [], "batch_size": 0})
    fields = [line.partition(":")[0] for line in str(caught.value).split("\n")]
    assert fields == ["workers", "timeout", "item_list.items", "item_list.batch_size"]


def test_reports_a_misspelt_key_when_a_key_is_missing() -> None:
    with pytest.raises(SubmissionError) as caught:
        parse(workers=1, item_lists={"items": [1]})
    assert "specify exactly one of the following keys" in str(caught.value)
    assert 'key "item_lists" is not supported; did you mean "item_list"?' in str(caught.value)
    with pytest.raises(
        SubmissionError, match=r'delimited_files: key "s3_path" is not supported; did you mean "s3_paths"'
    ):
        parse(workers=1, delimited_files={"s3_path": "s3://b/x"})


@pytest.mark.parametrize("key", ["workers", "output", "batch_timeout", "config", "sqs_dead_letter_queue", "item_list"])
@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("depth", [500, 1000, 1020, 100_000])
def test_values_that_are_nested_too_deeply_are_errors(key: str, start: str, end: str, depth: int) -> None:
    deep = f"{start * depth}1{end * depth}"
    with pytest.raises(SubmissionError):
        parse_submission(f'{{"workers": 1, "item_list": {{"items": [1]}}, "{key}": {deep}}}'.encode(), LIMITS)
    with pytest.raises(SubmissionError):
        parse_submission(deep.encode(), LIMITS)


def test_errors_do_not_contain_the_webhook() -> None:
    with pytest.raises(SubmissionError) as caught:
        parse(workers=1, item_list=ITEMS, webhook="hooks.host/T0/secret")
    assert "secret" not in str(caught.value)


QUERIES = [
    ({}, 'workers: must be defined; write "workers": 1'),
    ({"workers": "x"}, 'workers: must be an integer (got "x")'),
    ({"workers": "1", "batch_size": "0"}, "batch_size: must be at least 1 (got 0)"),
    ({"workers": "1", "config": '{"a":' * 500 + "1" + "}" * 500}, "config: is nested deeper than 100 levels"),
    ({"workers": "1", "config": "[" * 100_000}, "config: must be a map"),
    ({"workers": "1", "config": "{a: 1}"}, 'config: must be a map (got "{a: 1}")'),
    ({"workers": "1", "isolate_failures": "yes"}, 'isolate_failures: must be true or false (got "yes")'),
    ({"workers": "NaN"}, 'workers: must be an integer (got "NaN")'),
    ({"workers": "1", "output": "x"}, 'output: "x" is not a valid path'),
]


@pytest.mark.parametrize(("query", "message"), QUERIES)
def test_rejects_an_invalid_query_parameter(query: dict[str, str], message: str) -> None:
    with pytest.raises(SubmissionError) as caught:
        parse_upload(query, LIMITS)
    assert str(caught.value).startswith(message)


SOURCES = [
    ItemList([], 3),
    Upload(4),
    RetryOf("76d1"),
    FilePathLister(("s3://b/x", "/data/"), 2, ("**.json",), ("**/tmp/**",)),
    DelimitedFiles(("gs://b/é",), 1),
]


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_round_trips_through_its_json(source: Source) -> None:
    assert source_from_json(json.loads(json.dumps(source_to_json(source)))) == source


def test_the_stored_json_of_an_item_list_has_no_items() -> None:
    assert source_to_json(ItemList([1, 2], 3)) == {"kind": "item_list", "batch_size": 3}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["items", "paths", "x"]), inner),
    max_leaves=15,
)
KEYS = ["workers", "config", "timeout", "batch_timeout", "max_attempts", "isolate_failures", "output", "webhook"]
FILE_FIELDS = ["s3_paths", "paths", "includes", "excludes", "batch_size"]
KEYS += ["sqs_dead_letter_queue", "item_list", "file_path_lister", "delimited_files"]


@given(st.dictionaries(st.sampled_from(KEYS), JSON))
def test_any_body_is_parsed_or_rejected(body: dict[str, Any]) -> None:
    try:
        parse_submission(body, LIMITS)
    except SubmissionError as error:
        assert str(error)


def test_every_field_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "job-submission.md").read_text()
    undocumented = [key for key in (*KEYS, *FILE_FIELDS, "items", "arn") if f"`{key}`" not in page]
    assert undocumented == []


# Submissions to a TaskAPI.

TASK_LIMITS = SubmissionLimits(is_task=True)


def parse_task(**body: Any) -> Submission:
    return parse_body(json.dumps(body).encode(), TASK_LIMITS)


@pytest.mark.parametrize("body", [b"", b" \n", b"{}", b'{"workers": 1}', b'{"config": null, "timeout": null}'])
def test_all_fields_of_a_task_are_optional(body: bytes) -> None:
    assert parse_body(body, TASK_LIMITS) == Submission(TaskCall(), JobOptions(workers=1, max_attempts=1))


def test_reads_all_fields_of_a_task() -> None:
    found = parse_task(config={"a": {"b": 1}}, timeout=60, workers=1, max_attempts=3, webhook="https://host/done")
    assert found.options == JobOptions(1, {"a": {"b": 1}}, 60, max_attempts=3, webhook="https://host/done")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"workers": 2}, 'workers: must be at most 1 (got 2); write "workers": 1, or leave it out'),
        ({"workers": "1"}, "workers: must be an integer"),
        ({"timeout": 0}, "timeout: must be at least 1 (got 0)"),
        ({"time_out": 9}, 'key "time_out" is not supported; did you mean "timeout"?'),
        ({"item_list": ITEMS}, 'key "item_list" is not supported; remove it; supported keys: config, timeout'),
        ({"config": [1]}, "config: must be a map"),
        ({"max_attempts": 0}, "max_attempts: must be at least 1"),
        ({"webhook": "host"}, "webhook: must be an http:// or https:// address"),
    ],
)
def test_rejects_an_invalid_field_of_a_task_with_its_fix(body: dict[str, Any], message: str) -> None:
    with pytest.raises(SubmissionError) as error:
        parse_task(**body)
    assert str(error.value).startswith(message)


def test_reports_all_errors_of_a_task_together() -> None:
    with pytest.raises(SubmissionError) as error:
        parse_task(workers=3, timeout="soon", config=7)
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == ["workers", "config", "timeout"]


@pytest.mark.parametrize("body", [b"[1]", b"{", b'{"config": {}}\n{"config": {}}'])
def test_rejects_a_task_body_that_is_not_a_map_with_an_example(body: bytes) -> None:
    with pytest.raises(SubmissionError, match="config") as error:
        parse_body(body, TASK_LIMITS)
    assert "item_list" not in str(error.value) and "x-ndjson" not in str(error.value)


def test_parse_body_parses_submissions_to_a_batch_api() -> None:
    body = {"workers": 2, "item_list": {"items": [1]}}
    assert parse_body(body, SubmissionLimits()).source == ItemList([1], 1)


def test_the_source_of_a_task_round_trips_through_its_json() -> None:
    stored = json.loads(json.dumps(source_to_json(TaskCall()) | {"scheduled_for": 1.0}))
    assert source_from_json(stored) == TaskCall()
