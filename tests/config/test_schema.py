from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cortex.config.schema import Api
from cortex.config.values import duration_s, parse_quantity

MINIMAL: dict[str, Any] = {
    "name": "iris",
    "handler": {"interface": "handler", "type": "python", "path": "handler.py"},
}


def api_with(place: str, value: object) -> Api:
    data: dict[str, Any] = {**MINIMAL, "handler": dict(MINIMAL["handler"])}
    *sections, leaf = place.split(".")
    inner = data
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[leaf] = value
    return Api.model_validate(data)


def value_of(place: str, value: object) -> Any:
    found: Any = api_with(place, value)
    for part in place.split("."):
        found = getattr(found, part)
    return found


def refusal(place: str, value: object) -> tuple[str, str]:
    with pytest.raises(ValidationError) as raised:
        api_with(place, value)
    error, *_ = raised.value.errors()  # the others follow from the first, through defaults
    return error["ctx"]["text"], error["ctx"]["fix"]


def test_derives_defaults_from_other_fields() -> None:
    """`tests/test_docs.py` compares the other defaults with the documentation."""
    plain = Api.model_validate(MINIMAL)
    assert (plain.networking.endpoint, plain.networking.timeout_s, plain.autoscaling.init_replicas) == ("/iris", 60, 1)
    assert api_with("autoscaling.min_replicas", 3).autoscaling.init_replicas == 3
    assert api_with("deployment", "flowers").networking.endpoint == "/flowers/iris"
    api = api_with("handler", {**MINIMAL["handler"], "processes_per_replica": 2, "threads_per_process": 3})
    assert (api.concurrency, api.target_concurrency) == (6, 6.0)
    assert api_with("autoscaling.target_replica_concurrency", 2.5).target_concurrency == 2.5
    assert api_with("kind", "BatchAPI").networking.max_body_size == 10 * 1024**2
    batch = Api.model_validate({**MINIMAL, "kind": "BatchAPI", "networking": {"max_body_size": "1Gi"}})
    assert (batch.networking.max_body_size, batch.networking.endpoint) == (1024**3, "/iris")


def test_the_target_of_cpu_usage_in_a_deployment_is_that_in_force() -> None:
    def percent(deployment: str | None, **scaling: int | None) -> int | None:
        api = Api.model_validate({**MINIMAL, "deployment": deployment, "autoscaling": scaling})
        return api.autoscaling.target_cpu_utilization

    assert percent("flowers") == percent("flowers", target_cpu_utilization=None) == 80
    assert percent("flowers", min_replicas=2, target_cpu_utilization=60) == 60
    assert percent(None) is None


def test_an_api_is_immutable() -> None:
    with pytest.raises(ValidationError):
        Api.model_validate(MINIMAL).compute.gpu = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("place", "written", "value"),
    [
        ("compute.cpu", "200m", 0.2),
        ("compute.cpu", 2, 2.0),
        ("compute.cpu", 0.5, 0.5),
        ("compute.cpu", None, None),
        ("compute.mem", "1Gi", 1024**3),
        ("compute.mem", "512Mi", 512 * 1024**2),
        ("compute.mem", "1.5G", 1_500_000_000),
        ("compute.mem", "1e9", 10**9),
        ("compute.mem", "2E", 2 * 10**18),
        ("compute.mem", 100_000_000, 100_000_000),
        ("compute.mem_limit", "2Ki", 2048),
        ("networking.timeout_s", "1s", 1.0),
        ("networking.timeout_s", "500ms", 0.5),
        ("networking.timeout_s", "1h2m3.5s", 3723.5),
        ("networking.timeout_s", 90, 90.0),
        ("networking.timeout_s", 0.25, 0.25),
        ("networking.endpoint", "a/b/", "/a/b"),
        ("networking.endpoint", None, "/iris"),
        ("networking.max_body_size", "10Mi", 10 * 1024**2),
        ("networking.max_batch_size", "256Mi", 256 * 1024**2),
        ("networking.local_paths", ["/data/", "/a/../b"], ["/data", "/b"]),
        ("networking.buckets", ["s3://b/", "gs://b/in/"], ["s3://b", "gs://b/in"]),
        (
            "networking.webhook_hosts",
            ["Hooks.internal", "10.0.0.5", "10.1.0.0/8", "::1"],
            ["hooks.internal", "10.0.0.5/32", "10.0.0.0/8", "::1/128"],
        ),
        ("autoscaling.window_s", "2m", 120.0),
        ("autoscaling.upscale_stabilization_period_s", "0", 0.0),
        ("autoscaling.init_replicas", None, 1),
        ("autoscaling.target_replica_concurrency", 1, 1.0),
        ("update_strategy.max_surge", 0, "0"),
        ("update_strategy.max_surge", "100%", "100%"),
        ("update_strategy.max_surge", "3", "3"),
        ("handler.path", "./src//handler.py", "src/handler.py"),
        ("handler.python_path", "./src", "src/"),
        ("handler.config", None, {}),
        ("handler.env", None, {}),
        ("handler.env", {"EMPTY": ""}, {"EMPTY": ""}),
        ("handler.models.poll_interval_s", "1500ms", 1.5),
        ("handler.models.poll_interval_s", 1, 1.0),
        ("handler.models.cache_memory", "500Mi", 500 * 1024**2),
        ("handler.models.cache_size", None, None),
        ("handler.models.dir", "gs://bucket", "gs://bucket"),
        ("handler.models.path", "s3/m", "s3/m"),
        ("handler.tensorflow_serving", "serving.local:8500", "serving.local:8500"),
        ("handler.tensorflow_serving", "[::1]:8500", "[::1]:8500"),
        ("handler.tensorflow_serving", "local", "local"),
    ],
)
def test_converts_values_to_our_units(place: str, written: object, value: object) -> None:
    assert value_of(place, written) == value


INTEGER = "invalid type (expected an integer)"
STRING = "invalid type (expected a string)"
NULL = "cannot be null"


@pytest.mark.parametrize(
    ("place", "written", "message"),
    [
        ("handler.processes_per_replica", "2", f'"2": {INTEGER}'),
        ("handler.processes_per_replica", True, f"true: {INTEGER}"),
        ("handler.processes_per_replica", 2.0, f"2: {INTEGER}"),
        ("handler.processes_per_replica", [1], f"[1]: {INTEGER}"),
        ("handler.processes_per_replica", None, NULL),
        ("handler.processes_per_replica", 0, "must be greater than or equal to 1 (got 0)"),
        ("handler.processes_per_replica", 101, "must be less than or equal to 100 (got 101)"),
        ("handler.path", True, f"true: {STRING}"),
        ("handler.path", 5, f"5: {STRING}"),
        ("handler.path", {"a": 1}, f'{{"a": 1}}: {STRING}'),
        ("handler.path", " ", "cannot be empty"),
        ("handler.path", "a\0b", '"a\\u0000b" cannot contain a null character'),
        ("handler.path", "a/../../b.py", '"a/../../b.py" must be inside the project folder'),
        ("handler.python_path", ".", '"." is the project folder, which is on the Python path already'),
        ("handler.python_path", "~/lib", '"~/lib" must be relative to the project folder'),
        ("handler.log_level", "warn", 'invalid value (got "warn", must be "debug" or "info" or "warning" or "error")'),
        ("handler.log_level", True, 'invalid value (got true, must be "debug" or "info" or "warning" or "error")'),
        ("handler.config", [], "[]: invalid type (expected a map)"),
        ("handler.env", {"A": 1}, f"1: {STRING}"),
        ("handler.env", {"CORTEX_A": "x"}, '"CORTEX_A" cannot start with CORTEX_ (such names are reserved)'),
        ("compute.gpu", -1, "must be greater than or equal to 0 (got -1)"),
        ("compute.inf", 2, "must be less than or equal to 1 (got 2)"),
        ("compute.cpu", "0m", "must be greater than 0 (got 0m)"),
        ("compute.cpu", "-1", "must be greater than 0 (got -1)"),
        ("compute.cpu", "1.2.3", '"1.2.3": invalid quantity'),
        ("compute.cpu", "1.5Gi", '"1.5Gi": invalid quantity of CPU (Gi is a suffix of memory)'),
        ("compute.cpu", True, "true: invalid type (expected a string or a number)"),
        ("compute.mem", "1Gb", '"1Gb": invalid quantity'),
        ("compute.mem", "9" * 100, f'"{"9" * 78}…: invalid quantity'),
        ("compute.mem", "1e30", 'must be at most 4Ei (got "1e30")'),
        ("compute.mem_limit", "9" * 30, f'must be at most 4Ei (got "{"9" * 30}")'),
        ("compute.node_groups", [], "cannot be empty"),
        ("compute.node_groups", [5], f"5: {STRING}"),
        ("compute.node_groups", "a", '"a": invalid type (expected a list)'),
        ("networking.timeout_s", 0, "must be greater than 0s (got 0)"),
        ("networking.timeout_s", "0s", "must be greater than 0s (got 0s)"),
        ("networking.timeout_s", "-1s", "must be greater than 0s (got -1s)"),
        ("networking.timeout_s", "999999999999999h", "must be at most 876000h (got 999999999999999h)"),
        ("autoscaling.window_s", "100000000000000s", "must be at most 876000h (got 100000000000000s)"),
        ("networking.timeout_s", "5 s", '"5 s": invalid duration'),
        ("networking.timeout_s", "5", '"5": invalid duration'),
        ("networking.timeout_s", "1d", '"1d": invalid duration'),
        ("networking.timeout_s", None, NULL),
        ("networking.timeout_s", False, "false: invalid type (expected a duration)"),
        ("networking.max_body_size", 0, "must be greater than 0 (got 0)"),
        ("networking.max_batch_size", "257Mi", 'must be at most 256Mi (got "257Mi")'),
        ("networking.local_paths", [], "cannot be empty"),
        ("networking.buckets", ["my-bucket"], '"my-bucket" must start with s3:// or gs:// and a bucket'),
        ("networking.buckets", ["s3:///x"], '"s3:///x" must start with s3:// or gs:// and a bucket'),
        ("networking.webhook_hosts", ["http://a"], '"http://a" must be a host, an address or a network'),
        ("networking.webhook_hosts", ["10.0.0.0/99"], '"10.0.0.0/99" must be a host, an address or a network'),
        ("networking.endpoint", "/", '"/" is not an endpoint'),
        ("networking.endpoint", "a//b", '"a//b" cannot contain adjacent slashes'),
        ("networking.endpoint", "/" + "a" * 1000, "must be no longer than 1000 characters (got 1001)"),
        ("autoscaling.min_replicas", -1, "must be greater than or equal to 0 (got -1)"),
        ("autoscaling.window_s", "5s", "must be greater than or equal to 10s (got 5s)"),
        ("autoscaling.window_s", "25s", "must be a multiple of 10s (got 25s)"),
        ("autoscaling.max_downscale_factor", 1, "must be less than 1 (got 1)"),
        ("autoscaling.max_upscale_factor", 1.0, "must be greater than 1 (got 1)"),
        ("autoscaling.target_replica_concurrency", 0, "must be greater than 0 (got 0)"),
        ("autoscaling.target_replica_concurrency", "1", '"1": invalid type (expected a number)'),
        ("update_strategy.max_surge", -1, "-1 must be an integer of at least 0 or a percentage from 0% to 100%"),
        ("update_strategy.max_surge", 0.5, "0.5: invalid type (expected a string or an integer)"),
        (
            "name",
            "My_API",
            '"My_API" must contain only lower case letters, numbers, and dashes, start with a letter, '
            "and cannot end with a dash",
        ),
    ],
)
def test_rejects_a_wrong_value_with_the_specified_message(place: str, written: object, message: str) -> None:
    found, fix = refusal(place, written)
    assert found == message
    assert fix


@pytest.mark.parametrize(
    ("place", "written", "fix"),
    [
        ("name", "My_API v2!", 'write "my-api-v2"'),
        ("name", 5, 'write "api-5"'),
        ("name", 1.5, 'write "api-1-5"'),
        ("name", True, 'write "true"'),
        ("name", "2nd_model", 'write "api-2nd-model"'),
        ("name", "5", 'write "api-5"'),
        ("name", "_", 'write "my-api"'),
        ("autoscaling.downscale_tolerance", "99%", "write 0.99"),
        ("autoscaling.downscale_tolerance", "250%", "write a number, such as 0.5"),
        ("autoscaling.downscale_tolerance", "x", "write a number, such as 0.5"),
        ("autoscaling.max_upscale_factor", "150%", "write 1.5"),
        ("autoscaling.max_upscale_factor", "50%", "write a number, such as 1.5"),
        ("update_strategy.canary.confidence", "99%", "write 0.99"),
        ("compute.mem", "2GB", 'write "2Gi"'),
        ("compute.mem", "512mb", 'write "512Mi"'),
        ("compute.cpu", "500mb", 'write "500m"'),
        ("compute.cpu", "2 cores", "write 2"),
        ("compute.cpu", "2x", 'write something like "500m" or 2'),
        ("handler.type", "FastAPI", 'write "asgi"'),
        ("handler.type", "flask", 'write "wsgi"'),
        ("handler.type", "sklearn", 'write "model"'),
        ("handler.type", "uvicorn", 'write "asgi"'),
        ("handler.type", "Gunicorn", 'write "wsgi"'),
        ("compute.cpu", "500M", 'write "500m"'),
        ("compute.cpu", "500Mi", 'write "500m"'),
        ("compute.cpu", "2k", 'write something like "500m" or 2'),
        ("handler.log_level", "Warn", 'write "warning"'),
        ("handler.log_level", "DEBUG", 'write "debug"'),
        ("handler.processes_per_replica", "2", "write 2 without quotes"),
        ("handler.env", {"A": True}, 'write "true"'),
        ("networking.endpoint", "//a//b", 'write "/a/b"'),
        ("networking.endpoint", "/v1/*", 'write "/v1"'),
        ("networking.endpoint", "/users/{id}/", 'write "/users/id"'),
        ("networking.endpoint", "my api", 'write "/my-api"'),
        ("networking.endpoint", "/*", 'write "/my-api"'),
    ],
)
def test_the_fix_suggests_a_value(place: str, written: object, fix: str) -> None:
    assert refusal(place, written)[1] == fix


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
PLACES = [
    f"{section}.{name}"
    for section, field in Api.model_fields.items()
    for name in getattr(field.annotation, "model_fields", ())
]


@given(st.sampled_from(PLACES), PLAIN)
def test_any_value_is_rejected_or_survives_a_round_trip_through_the_database(place: str, value: object) -> None:
    try:
        api = api_with(place, value)
    except ValidationError as error:
        assert all("\n" not in detail["msg"] for detail in error.errors())
        return
    assert Api.model_validate_json(api.model_dump_json()) == api


@given(st.text())
def test_any_text_is_parsed_as_quantity_and_duration_or_rejected(text: str) -> None:
    assert parse_quantity(text) is None or text.strip()
    try:
        assert duration_s()(text) == duration_s()(text)
    except ValueError as error:
        assert "invalid duration" in str(error)


@given(st.integers(0, 10**6), st.sampled_from(["", "k", "Ki", "M", "Mi", "G", "Gi"]))
def test_larger_units_are_larger_quantities(amount: int, unit: str) -> None:
    factor = {"": 1, "k": 10**3, "Ki": 2**10, "M": 10**6, "Mi": 2**20, "G": 10**9, "Gi": 2**30}[unit]
    assert parse_quantity(f"{amount}{unit}") == amount * factor


@pytest.mark.parametrize(
    ("place", "written", "fix"),
    [
        ("handler.models.path", "gcs://b/m", 'write "gs://b/m"'),
        ("handler.models.path", "s3a://b/m", 'write "s3://b/m"'),
        ("handler.models.path", "s3:b/m", 'write "s3://b/m"'),
        ("handler.models.path", "gs//b/m", 'write "gs://b/m"'),
        ("handler.models.path", "https://s3.eu-west-1.amazonaws.com/b/m?x=1", 'write "s3://b/m"'),
        ("handler.models.path", "https://storage.cloud.google.com/b/m", 'write "gs://b/m"'),
        ("handler.models.path", "http://host/m", 'write "s3://bucket/path"'),
        ("handler.models.dir", "file:///models", 'write "s3://bucket/path"'),
        ("handler.tensorflow_serving", "http://host:8501/v1", 'write "host:8500"'),
        ("handler.tensorflow_serving", "host:0", 'write "host:8500"'),
        ("handler.tensorflow_serving", "host :1", 'write "localhost:8500"'),
        ("handler.tensorflow_serving", "LOCAL", 'write "local"'),
    ],
)
def test_suggests_corrections_of_near_misses(place: str, written: str, fix: str) -> None:
    assert refusal(place, written)[1] == fix


NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True).filter(lambda name: name != "_cortex_default")
LOCATIONS = st.builds("{}{}".format, st.sampled_from(["s3://b/", "gs://b/", "/", ""]), NAMES)
MODELS = st.fixed_dictionaries(
    {},
    optional={
        "path": LOCATIONS,
        "paths": st.lists(st.fixed_dictionaries({"name": NAMES, "path": LOCATIONS}), min_size=1, max_size=3),
        "dir": LOCATIONS,
        "signature_key": NAMES,
        "poll_interval_s": st.floats(1, 1e6).map(lambda seconds: round(seconds, 9)),
        "cache_size": st.integers(1, 10**6),
        "disk_cache_size": st.integers(1, 10**6),
        "cache_memory": st.integers(1, 2**60),
    },
)


@given(MODELS)
def test_models_round_trip_through_json(models: dict[str, Any]) -> None:
    api = api_with("handler.models", models)
    assert Api.model_validate(api.model_dump(mode="json")) == api
    assert Api.model_validate_json(api.model_dump_json()) == api
