from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cortex.config.schema import Api
from cortex.config.validate import check_file
from cortex.config.values import quote
from cortex.projects.project import ProjectFiles
from harness.config_files import examine_text, lines_of

CONFIGS = Path(__file__).parent.parent / "fixtures" / "configs"


def realtime(name: str, rest: str = "", path: str = "handler.py") -> str:
    return f"- name: {name}\n  kind: RealtimeAPI\n  handler:\n    type: python\n    path: {path}\n{rest}"


def deployed(name: str, endpoint: str, deployment: str | None = None, kind: str = "RealtimeAPI") -> Api:
    return Api.model_validate(
        {
            "name": name,
            "kind": kind,
            "deployment": deployment,
            "handler": {"interface": "handler", "type": "python", "path": "handler.py"},
            "networking": {"endpoint": endpoint},
        }
    )


def test_returns_the_apis_in_the_order_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text("")
    config = tmp_path / "cortex.yaml"
    config.write_text(realtime("b") + realtime("a"))
    apis = check_file(config, "cortex.yaml", ProjectFiles.scan(tmp_path, "cortex.yaml")).apis
    assert [api.name for api in apis] == ["b", "a"]


def test_reports_all_mistakes_sorted_with_the_display_name(tmp_path: Path) -> None:
    config = tmp_path / "other.yaml"
    config.write_text(realtime("a", "  compute: {gpu: -1}\n  colour: red\n") + realtime("B", path="b.py"))
    found = check_file(config, "shown/other.yaml", ProjectFiles.scan(tmp_path, "other.yaml")).problems
    assert [(d.file, d.line, d.column, d.path) for d in found] == [
        ("shown/other.yaml", 5, 11, "a.handler.path"),
        ("shown/other.yaml", 6, 18, "a.compute.gpu"),
        ("shown/other.yaml", 7, 3, "a.colour"),
        ("shown/other.yaml", 8, 9, "B.name"),
        ("shown/other.yaml", 12, 11, "B.handler.path"),
    ]


def test_a_missing_file_is_one_mistake(tmp_path: Path) -> None:
    project = ProjectFiles.scan(tmp_path, "cortex.yaml")
    (problem,) = check_file(tmp_path / "cortex.yaml", "cortex.yaml", project).problems
    assert str(problem).startswith("cortex.yaml: file does not exist (")
    (tmp_path / "cortex.yaml").mkdir()
    (problem,) = check_file(tmp_path / "cortex.yaml", "cortex.yaml", project).problems
    assert "Is a directory" in problem.message


def test_skips_rules_about_invalid_fields(tmp_path: Path) -> None:
    rest = (
        "  autoscaling: {min_replicas: 5, max_replicas: two}\n  update_strategy: {max_surge: 0, max_unavailable: 0}\n"
    )
    assert lines_of(examine_text(tmp_path, realtime("a", rest))) == [
        '6:48: a.autoscaling.max_replicas: "two": invalid type (expected an integer)',
        "7:52: a.update_strategy.max_unavailable: max_surge and max_unavailable cannot both be 0",
    ]


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (
            "  autoscaling: {min_replicas: 200}\n",
            "6:31: a.autoscaling.min_replicas: min_replicas cannot be greater than max_replicas (200 > 100)",
        ),
        (
            "  autoscaling: {init_replicas: 3, max_replicas: 2}\n",
            "6:32: a.autoscaling.init_replicas: init_replicas cannot be greater than max_replicas (3 > 2)",
        ),
        (
            "  autoscaling: {init_replicas: 1, min_replicas: 2}\n",
            "6:32: a.autoscaling.init_replicas: init_replicas cannot be less than min_replicas (1 < 2)",
        ),
        (
            "    threads_per_process: 20\n  autoscaling: {max_replica_concurrency: 10}\n",
            "7:42: a.autoscaling.max_replica_concurrency: target_replica_concurrency cannot be greater than "
            "max_replica_concurrency (20 > 10)",
        ),
        ("  compute: {cpu: 19m}\n", "6:18: a.compute.cpu: must be greater than or equal to 20m (got 19m)"),
        ("  compute: {cpu: 10001}\n", "6:18: a.compute.cpu: must be less than or equal to 10000 (got 10001)"),
        ("  compute: {mem: 512m}\n", "6:18: a.compute.mem: must be greater than or equal to 20Mi (got 512m)"),
        ("  compute: {mem: 1Gi, mem_limit: 1G}\n", "6:34: a.compute.mem_limit: mem_limit cannot be less than mem"),
        ("  compute: {gpu: 1, inf: 1}\n", "6:26: a.compute.inf: inf and gpu cannot be used together"),
        (
            "    processes_per_replica: 3\n  compute: {inf: 1}\n",
            "6:28: a.handler.processes_per_replica: 3 processes cannot share 4 NeuronCores evenly",
        ),
        (
            "    preload: true\n    multi_model_reloading: {path: 's3://bucket/model'}\n",
            "6:14: a.handler.preload: cannot be used with models that cortex loads: each process loads and reloads its "
            "own",
        ),
        (
            "    preload: true\n  compute: {inf: 1}\n",
            "6:14: a.handler.preload: cannot be used with inf: the Neuron runtime of a process does not survive a fork",
        ),
    ],
)
def test_rules_between_fields(rest: str, expected: str, tmp_path: Path) -> None:
    assert lines_of(examine_text(tmp_path, realtime("a", rest))) == [expected]


@pytest.mark.parametrize("name", ["b-side", "a" * 43])
def test_older_files_may_use_names_that_the_current_form_rejects(name: str, tmp_path: Path) -> None:
    assert [p.path for p in examine_text(tmp_path, realtime(name)).problems] == [f"{name}.name"]
    functions = f"- kind: deployment\n  name: d\n- kind: api\n  name: {name}\n  predictor: {{path: predictor.py}}\n"
    assert lines_of(examine_text(tmp_path, functions)) == []


LONG = "x" * 300 + ".py"  # no file can have such a name


@pytest.mark.parametrize(
    ("path", "message", "fix"),
    [
        ("handlr.py", '"handlr.py": file does not exist', 'did you mean "handler.py"?'),
        ("model.py", '"model.py": file does not exist', 'did you mean "src/model.py"?'),
        ("src", '"src": is a folder, not a file', 'did you mean "src/model.py"?'),
        ("requirements.txt", '"requirements.txt" must be a .py or .pickle file', "create it, or correct the path"),
        (
            "hidden.py",
            '"hidden.py": has been excluded from your project directory',
            "see .cortexignore, or rename the file",
        ),
        ("zzz.py", '"zzz.py": file does not exist', "create it, or correct the path"),
        (LONG, f"{quote(LONG)}: file does not exist", "create it, or correct the path"),
    ],
)
def test_reports_code_that_is_not_in_the_project(path: str, message: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / ".cortexignore").write_text("hidden.py\n")
    (tmp_path / "hidden.py").write_text("")
    (problem,) = examine_text(tmp_path, realtime("a", path=path)).problems
    assert (problem.line, problem.column, problem.message, problem.fix) == (5, 11, message, fix)


def test_a_pickle_is_code_for_classes_but_not_for_functions(tmp_path: Path) -> None:
    files = ("handler.pickle",)
    assert lines_of(examine_text(tmp_path, realtime("a", path="handler.pickle"), files=files)) == []
    functions = "- kind: deployment\n  name: d\n- kind: api\n  name: a\n  predictor: {path: handler.pickle}\n"
    assert lines_of(examine_text(tmp_path, functions, files=files)) == [
        '5:21: a.predictor.path: "handler.pickle" must be a .py file'
    ]


def test_dependency_files_must_exist_only_if_they_are_named(tmp_path: Path) -> None:
    assert lines_of(examine_text(tmp_path, realtime("a"), files=("handler.py",))) == []
    named = realtime("a", "    dependencies: {pip: requirements.txt}\n")
    assert lines_of(examine_text(tmp_path, named, files=("handler.py",))) == [
        '6:25: a.handler.dependencies.pip: "requirements.txt": file does not exist'
    ]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("s3://bucket/model", None),
        ("gs://bucket/model/", None),
        ("models/iris.pkl", None),
        ("models", None),
        ("./models/", None),
        ("/", None),
        ("/nowhere/at/all", '"/nowhere/at/all": path does not exist'),
        ("iris.pkl", '"iris.pkl": path does not exist'),
        (LONG, f"{quote(LONG)}: path does not exist"),
        (f"/{LONG}", f"{quote('/' + LONG)}: path does not exist"),
        ("../iris.pkl", '"../iris.pkl" must not contain ".."'),
        ("s3://", '"s3://" has no bucket name'),
        ("http://host/model", '"http://host/model" must be a path, or start with s3:// or gs://'),
        ("~/model", '"~/model" must be a path, or start with s3:// or gs://'),
    ],
)
def test_locations_of_models(model: str, message: str | None, tmp_path: Path) -> None:
    text = "- kind: deployment\n  name: d\n- kind: api\n  name: a\n  predictor:\n    path: predictor.py\n"
    text += f"    model: '{model}'\n"
    found = examine_text(tmp_path, text, files=("predictor.py", "models/iris.pkl")).problems
    assert [p.message for p in found] == ([] if message is None else [message])


def test_names_and_endpoints_are_unique_in_a_file(tmp_path: Path) -> None:
    text = realtime("a") + realtime("a") + realtime("c", "  networking: {endpoint: a/}\n") + realtime("d")
    assert lines_of(examine_text(tmp_path, text)) == [
        '6:9: a.name: "a" is the name of another API (on line 1)',
        '16:26: c.networking.endpoint: "/a" is the endpoint of "a" (on line 1)',
    ]


def test_rejects_an_endpoint_of_another_deployed_api_at_its_position(tmp_path: Path) -> None:
    text = realtime("a") + realtime("b", "  networking: {endpoint: /x}\n")
    reading = examine_text(tmp_path, text, [deployed("old", "/a"), deployed("older", "/x")])
    assert lines_of(reading) == [
        '1:9: a.name: "/a" is the endpoint of "old", which is deployed',
        '11:26: b.networking.endpoint: "/x" is the endpoint of "older", which is deployed',
    ]
    assert reading.problems[0].fix == 'choose another endpoint, or run "cortex delete old"'


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("livez", "the gateway's health check"),
        ("/readyz/", "the gateway's health check"),
        ("/healthz", "the gateway's health check"),
        ("/v2", "the Open Inference Protocol of all APIs"),
        ("/v2/models/vault/infer", "the Open Inference Protocol of all APIs"),
        ("/dashboard", "the dashboard"),
        ("/dashboard/keys/", "the dashboard"),
        ("/grpc.health.v1.Health", "the gRPC services that each API has"),
        ("/grpc.reflection.v1alpha.ServerReflection", "the gRPC services that each API has"),
    ],
)
def test_rejects_endpoints_that_belong_to_the_gateway(tmp_path: Path, path: str, owner: str) -> None:
    reading = examine_text(tmp_path, realtime("a", f"  networking: {{endpoint: {path}}}\n"))
    endpoint = "/" + path.strip("/")
    assert lines_of(reading) == [f'6:26: a.networking.endpoint: "{endpoint}" belongs to {owner}']
    assert reading.problems[0].fix == "choose another endpoint"


def test_rejects_a_name_whose_endpoint_belongs_to_the_gateway(tmp_path: Path) -> None:
    assert lines_of(examine_text(tmp_path, realtime("dashboard"))) == [
        '1:9: dashboard.name: "/dashboard" belongs to the dashboard'
    ]
    assert not examine_text(tmp_path, realtime("dashboard", "  networking: {endpoint: /charts}\n")).problems
    older = "- kind: deployment\n  name: v2\n- kind: api\n  name: iris\n  model: s3://bucket/model.onnx\n"
    (problem,) = examine_text(tmp_path, older).problems
    assert problem.message == '"/v2/iris" belongs to the Open Inference Protocol of all APIs'


@pytest.mark.parametrize("path", ["/Livez", "/livez2", "/v2beta", "/v20/a", "/my/dashboard", "/a/v2", "/a/livez"])
def test_accepts_endpoints_that_only_resemble_those_of_the_gateway(tmp_path: Path, path: str) -> None:
    assert not examine_text(tmp_path, realtime("a", f"  networking: {{endpoint: {path}}}\n")).problems


@pytest.mark.parametrize("path", ["/x/../v2", "/./livez", "/a/..", "a/."])
def test_rejects_endpoints_that_clients_would_shorten(tmp_path: Path, path: str) -> None:
    (problem,) = examine_text(tmp_path, realtime("a", f"  networking: {{endpoint: {path}}}\n")).problems
    endpoint = "/" + path.strip("/")
    assert problem.message == f'"{endpoint}" cannot be called: clients remove "." and ".." from a path'


def test_an_api_may_reuse_its_own_endpoint_or_that_of_a_replaced_api(tmp_path: Path) -> None:
    before = [deployed("a", "/a"), deployed("b", "/b")]
    swapped = realtime("a", "  networking: {endpoint: /b}\n") + realtime("b", "  networking: {endpoint: /a}\n")
    assert lines_of(examine_text(tmp_path, swapped, before)) == []


def test_an_api_removed_from_its_deployment_frees_its_endpoint(tmp_path: Path) -> None:
    text = (
        "- kind: deployment\n  name: d\n- kind: api\n  name: new\n  endpoint: /shared\n"
        "  predictor: {path: predictor.py}\n"
    )
    assert lines_of(examine_text(tmp_path, text, [deployed("old", "/shared", "d")])) == []
    assert len(examine_text(tmp_path, text, [deployed("old", "/shared", "other")]).problems) == 1
    assert len(examine_text(tmp_path, text, [deployed("old", "/shared")]).problems) == 1


def test_rejects_a_changed_kind_of_a_deployed_api(tmp_path: Path) -> None:
    reading = examine_text(tmp_path, realtime("a"), [deployed("a", "/a", kind="TaskAPI")])
    assert lines_of(reading) == ['2:9: a.kind: cannot change the kind of "a" from TaskAPI to RealtimeAPI']
    text = realtime("a").replace("RealtimeAPI", "BatchAPI")
    assert examine_text(tmp_path, text, [deployed("a", "/a", kind="BatchAPI")]).problems == ()
    (problem,) = examine_text(tmp_path, text, [deployed("a", "/a")]).problems
    assert problem.message == 'cannot change the kind of "a" from RealtimeAPI to BatchAPI'
    assert problem.fix == 'run "cortex delete a" and deploy again'


def test_invalid_apis_with_known_code_are_readable(tmp_path: Path) -> None:
    text = (
        realtime("a", "    log_level: loud\n  compute: 5\n")
        + realtime("b", path="nothing.py")
        + "- name: c\n  kind: RealtimeAPI\n  handler: {type: python}\n"
        + "- name: d\n  kind: RealtimeAPI\n  predictor: {type: onyx, path: predictor.py}\n"
    )
    reading = examine_text(tmp_path, text)
    assert reading.apis == ()
    assert [(api.name, api.handler.path) for api in reading.readable] == [("a", "handler.py"), ("b", "nothing.py")]


KEYS = st.sampled_from(
    ["name", "kind", "handler", "predictor", "compute", "autoscaling", "networking", "tracker", "path", "type", "cpu"]
    + ["config", "env", "min_replicas", "endpoint", "dependencies", "model", "monitoring", "x", "naem", "metadata"]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 10**20),
    st.sampled_from(
        ["RealtimeAPI", "api", "deployment", "SyncAPI", "python", "handler.py", "1Gi", "5s", "", "é\u2028"]
    ),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=15
)


@given(st.lists(st.dictionaries(KEYS, VALUES, max_size=6), max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_document_is_accepted_or_rejected_with_positions(tmp_path: Path, document: list[dict[str, object]]) -> None:
    import json

    text = json.dumps(document, indent=1)
    reading = examine_text(tmp_path, text)
    assert bool(reading.problems) != bool(reading.apis)
    for problem in reading.problems:
        assert 1 <= problem.line <= len(text.split("\n"))
        assert problem.column >= 1
        assert problem.message
        assert problem.fix
        assert "\n" not in str(problem)
    assert list(reading.problems) == sorted(set(reading.problems))


def test_a_misplaced_key_does_not_make_its_section_required(tmp_path: Path) -> None:
    config = tmp_path / "cortex.yaml"
    config.write_text(
        "- name: a\n  kind: RealtimeAPI\n  handler:\n    type: python\n    path: predictor.py\n    credentials: null\n"
    )
    reading = check_file(config, "cortex.yaml", ProjectFiles(tmp_path, ("predictor.py",)))
    assert reading.problems and all(problem.fix and problem.line == 6 for problem in reading.problems)


def test_an_invalid_value_is_not_reported_again_at_a_default_derived_from_it(tmp_path: Path) -> None:
    text = (CONFIGS / "0.15.yaml").read_text().replace("min_replicas: 1", "min_replicas:")
    config = tmp_path / "cortex.yaml"
    config.write_text(text)
    files = ProjectFiles(tmp_path, ("predictor.py", "requirements.txt", "src/model.py"))
    [problem] = check_file(config, "cortex.yaml", files).problems
    assert (problem.path, problem.message) == ("iris.autoscaling.min_replicas", "cannot be null")


@given(data=st.data())
@settings(max_examples=2 * settings().max_examples, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_accepted_or_rejected(tmp_path: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(path.name for path in CONFIGS.glob("*.yaml"))))
    text = (CONFIGS / name).read_text()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(start + 20, len(text))))
    text = text[:start] + data.draw(st.text(max_size=5)) + text[end:]
    config = tmp_path / "cortex.yaml"
    config.write_bytes(text.encode("utf-8", "surrogatepass"))
    reading = check_file(
        config, "cortex.yaml", ProjectFiles(tmp_path, ("predictor.py", "requirements.txt", "src/model.py"))
    )
    assert bool(reading.problems) != bool(reading.apis)
    assert all(problem.line >= 1 and problem.fix for problem in reading.problems)


@pytest.mark.parametrize(
    ("canary", "tracker", "problem"),
    [
        ("{shadow: true, max_disagreement: 1%}", "{model_type: regression}", ""),
        ("{shadow: true}", "", ""),
        ("{shadow: true, max_disagreement: 1%}", "", ""),
        ("{max_disagreement: 1%}", "{model_type: regression}", "max_disagreement needs shadow"),
    ],
)
def test_predictions_of_copies_are_compared_only_with_a_shadow(
    tmp_path: Path, canary: str, tracker: str, problem: str
) -> None:
    tracked = f"  tracker: {tracker}\n" if tracker else ""
    found = lines_of(examine_text(tmp_path, realtime("a", f"{tracked}  update_strategy: {{canary: {canary}}}\n")))
    assert [problem in line for line in found] == ([True] if problem else [])


def test_a_very_long_name_is_a_mistake_like_any_other(tmp_path: Path) -> None:
    (found,) = lines_of(examine_text(tmp_path, realtime("a" * 5000)))
    assert found.endswith(".name: is too long (5000 characters)")
    api = "- kind: api\n  name: a\n  predictor: {type: python, path: handler.py}\n"
    found = lines_of(examine_text(tmp_path, f"- kind: deployment\n  name: {'a' * 5000}\n{api}"))[0]
    assert found.endswith("name: is too long (5000 characters)")


@pytest.mark.parametrize(
    ("type_", "needs_path"),
    [("sklearn", False), ("vllm", False), ("onxx", False), ("FastAPI", True), ("torch", True), ("perl", True)],
)
def test_a_path_is_missing_only_if_the_meant_type_needs_one(type_: str, needs_path: bool, tmp_path: Path) -> None:
    text = f"- name: a\n  kind: RealtimeAPI\n  handler:\n    type: {type_}\n    storageUri: s3://b/m\n"
    fields = {problem.path for problem in examine_text(tmp_path, text).problems}
    path = {"a.handler.path"} if needs_path else set()
    assert fields == {"a.handler.type", "a.handler.storageUri", *path}


@pytest.mark.parametrize("written", ["0755", "NO", "on", "0x1F", "1.10", "1_000", "1e3", "+5", ".5"])
def test_an_unquoted_value_is_shown_as_it_is_written(written: str, tmp_path: Path) -> None:
    env = f"    env: {{MODE: {written}}}\n"
    (found,) = examine_text(tmp_path, realtime("a", env)).problems
    assert (found.message, found.fix) == (f"{written}: invalid type (expected a string)", f'write "{written}"')


def test_the_name_that_is_suggested_has_the_text_of_the_file(tmp_path: Path) -> None:
    for written, fix in (("1e3", "api-1e3"), ("0x1F", "api-0x1f")):
        (found,) = examine_text(tmp_path, realtime(written)).problems
        assert (found.message, found.fix) == (f"{written}: invalid type (expected a string)", f'write "{fix}"')


@pytest.mark.parametrize(("key", "type_"), [("command: [python]", "command"), ("path: handler.py", "python")])
def test_the_type_that_is_suggested_is_the_one_of_the_other_keys(key: str, type_: str, tmp_path: Path) -> None:
    (found,) = examine_text(tmp_path, f"- name: a\n  kind: RealtimeAPI\n  handler:\n    {key}\n").problems
    assert (found.message, found.fix) == ("must be defined", f'write "type: {type_}"')
