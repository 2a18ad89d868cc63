"""Translation of a spec's paths for a node: every field that holds a path is declared as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from cortex.cluster.remote_replica import home_folders, map_paths
from cortex.home import Home
from cortex.models.spec import HOME_PATH, ModelPath, ModelSource, Pin
from cortex.worker.spec import ReplicaSpec, Setup
from harness.replicas.specs import replica_spec

#: Text fields that are never absolute paths below a home. A new text field goes here or is declared with HOME_PATH.
NOT_PATHS = {
    "ReplicaSpec": {
        *("id", "api", "revision", "interface", "path", "python_path", "log_level", "type", "tensorflow_serving"),
        *(
            "gpu_ids",
            "kind",
            "jobs_token",
            "tracker_key",
            "tracker_type",
            "readiness",
            "listen_host",
            "gateway_secret",
            "on_disconnect",
        ),
        *("node_groups", "app", "command", "endpoint", "protobuf_path", "config", "env", "api_spec", "working_copies"),
        *("record_redact", "version", "environment"),
    },
    "Setup": {"model_packages", "project_hash", "pip", "conda", "shell", "env", "model"},
    "ModelSource": {"layout", "signature_key"},
    "ModelPath": {"name", "signature_key"},
    "Pin": {"model", "number", "digest"},
}
OPERATOR, NODE = Home(Path("/operator/home")), Home(Path("/node/home"))


def full_spec() -> ReplicaSpec:
    home = OPERATOR
    models = ModelSource(
        "python",
        (ModelPath("a", f"{home.models_dir}/a"), ModelPath("b", "s3://bucket/b")),
        f"{home.projects_dir}/p/m",
        pins=(Pin("a", "1", "d", 1, 0.0),),
    )
    return replica_spec(
        project_dir=f"{home.projects_dir}/p",
        python=f"{home.environments_dir}/e/bin/python",
        run_dir=f"{home.replicas_dir}/iris-1-a",
        sockets=(f"{home.sockets_dir}/0", f"{home.sockets_dir}/1"),
        control_socket=f"{home.sockets_dir}/control",
        log_path=f"{home.logs_dir}/iris/log",
        model_path=f"{home.models_dir}/m",
        models=models,
        model_agent_socket=f"{home.sockets_dir}/models",
        jobs_socket=f"{home.sockets_dir}/jobs",
        metrics_dir=f"{home.metrics_dir}/iris-1-a",
        setup=Setup("hash", "requirements.txt", "conda.txt", "setup.sh", {"A": "b"}, "model.pkl"),
    )


def dataclasses_in(value: Any) -> Iterator[Any]:
    if is_dataclass(value):
        yield value
        for each in fields(value):
            yield from dataclasses_in(getattr(value, each.name))
    elif isinstance(value, tuple):
        for each in value:
            yield from dataclasses_in(each)


def mentions_text(hint: Any) -> bool:
    return hint is str or any(mentions_text(each) for each in get_args(hint)) or isinstance(hint, str)


def test_every_text_field_is_declared_as_a_path_or_listed_as_none() -> None:
    kinds = {type(value) for value in dataclasses_in(full_spec())}
    assert {kind.__name__ for kind in kinds} == NOT_PATHS.keys()
    for kind in kinds:
        hints = get_type_hints(kind)
        texts = {each.name for each in fields(kind) if mentions_text(hints[each.name])}
        paths = {each.name for each in fields(kind) if HOME_PATH.items() <= each.metadata.items()}
        assert paths.isdisjoint(NOT_PATHS[kind.__name__])
        assert texts == paths | NOT_PATHS[kind.__name__], kind


def test_all_paths_of_a_spec_are_those_of_the_node() -> None:
    spec = full_spec()
    mapped = map_paths(spec, home_folders(OPERATOR, NODE))
    assert str(OPERATOR.path) not in mapped.to_json()
    assert str(OPERATOR.metrics_dir) not in mapped.to_json()
    assert mapped.sockets == (f"{NODE.sockets_dir}/0", f"{NODE.sockets_dir}/1")
    assert mapped.models is not None
    assert [each.url for each in mapped.models.paths] == [f"{NODE.models_dir}/a", "s3://bucket/b"]
    assert map_paths(mapped, home_folders(NODE, OPERATOR)) == spec


def test_paths_outside_of_the_home_stay() -> None:
    spec = replace(full_spec(), python="/usr/bin/python3", model_path="/operator/home/modelsx/m", jobs_socket=None)
    mapped = map_paths(spec, home_folders(OPERATOR, NODE))
    assert (mapped.python, mapped.model_path, mapped.jobs_socket) == ("/usr/bin/python3", spec.model_path, None)
