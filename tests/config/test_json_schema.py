"""The JSON Schema of `cortex.yaml`. `examine_text` also compares it with every valid file of the other tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cortex.cli.commands.schema import GENERATIONS as GENERATION_NAMES
from cortex.config.generations import GENERATIONS
from cortex.config.json_schema import CURRENT, FORMS, json_schema
from harness.config_files import editor_problems, editor_schema

ROOT = Path(__file__).parent.parent.parent
CONFIGS = sorted((ROOT / "tests" / "fixtures" / "configs").glob("*.yaml"))
EXAMPLES = sorted((ROOT / "examples").glob("*/cortex.yaml"))
REALTIME = """\
- name: iris
  kind: RealtimeAPI
  handler:
    type: python
    path: handler.py
"""


def is_valid(content: Any, generation: str = CURRENT) -> bool:
    return bool(editor_schema(generation).is_valid(content))


def test_every_form_of_a_file_has_a_schema() -> None:
    assert {id(form) for forms in FORMS.values() for form in forms} == {id(form) for form in GENERATIONS}


@pytest.mark.parametrize("file", [*CONFIGS, *EXAMPLES], ids=lambda file: f"{file.parent.name}/{file.name}")
def test_complete_files_of_every_generation_and_all_examples_are_valid(file: Path) -> None:
    if "kubernetes" not in file.parts:  # its cortex.yaml is a manifest of Kubernetes
        assert editor_problems(file.read_bytes()) == []


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: str(file.name))
def test_a_file_is_valid_in_the_schema_of_its_version(file: Path) -> None:
    version = int(file.stem.partition("-")[0].removeprefix("0."))
    generation = next(name for name in FORMS if version <= int(name.removeprefix("0.")))
    assert is_valid(yaml.safe_load(file.read_text()), generation)


@pytest.mark.parametrize("kind", ["RealtimeAPI", "batchapi", "AsyncAPI"])
def test_files_of_0_18_have_no_other_kinds(kind: str) -> None:
    api = {"name": "iris", "predictor": {"type": "python", "path": "a.py"}}
    assert not is_valid([api | {"kind": kind}], "0.18")
    assert is_valid([api], "0.18")


def test_the_files_of_the_documentation_are_valid() -> None:
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for block in re.findall(r"^```yaml\n(- .*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            assert editor_problems(block.encode()) == [], (page, block)


def misspelt(value: Any) -> list[Any]:
    """Return copies of a file, each with one key of a map misspelt; maps of the user's own keys are left out."""
    copies: list[Any] = []
    if isinstance(value, list):
        for index, item in enumerate(value):
            copies += [[*value[:index], changed, *value[index + 1 :]] for changed in misspelt(item)]
    elif isinstance(value, dict):
        for key, inner in value.items():
            copies.append({f"{name}x" if name == key else name: below for name, below in value.items()})
            if key not in ("config", "metadata", "env", "submission"):
                copies += [{**value, key: changed} for changed in misspelt(inner)]
    return copies


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: str(file.name))
def test_a_file_with_a_misspelt_key_is_not_valid(file: Path) -> None:
    copies = misspelt(yaml.safe_load(file.read_text()))
    assert copies
    for copy in copies:
        assert not any(is_valid(copy, generation) for generation in FORMS), copy


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        REALTIME.replace("RealtimeAPI", "RealTimeAPI"),
        REALTIME.replace("  kind: RealtimeAPI\n", ""),
        REALTIME.replace("iris", "Iris_1"),
        REALTIME.replace("type: python", "type: pyton"),
        REALTIME.replace("    path: handler.py\n", ""),
        REALTIME.replace("handler.py", "../handler.py"),
        REALTIME.replace("handler.py", "/handler.py"),
        REALTIME + "    processes_per_replica: 0\n",
        REALTIME + "    processes_per_replica: 101\n",
        REALTIME + "    processes_per_replica: '2'\n",
        REALTIME + "    env: {CORTEX_X: a}\n",
        REALTIME + "    log_level: warn\n",
        REALTIME + "  networking: {endpoint: '/v1/*'}\n",
        REALTIME + "  networking: {timeout: 0}\n",
        REALTIME + "  networking: {timeout: 5 minutes}\n",
        REALTIME + "  networking: {access_log: 'yes'}\n",
        REALTIME + "  networking: {max_batch_size: 1Mi}\n",
        REALTIME + "  compute: {mem: 1GB}\n",
        REALTIME + "  compute: {cpu: -1}\n",
        REALTIME + "  autoscaling: {window: 15}\n",
        REALTIME + "  autoscaling: {max_downscale_factor: 1}\n",
        REALTIME + "  update_strategy: {max_surge: 101%}\n",
        REALTIME + "  tracker: {key: a}\n",
        REALTIME + "  schedule: '@daily'\n",
        REALTIME.replace("handler:", "predictor:"),
        REALTIME.replace("RealtimeAPI", "BatchAPI") + "  autoscaling: {min_replicas: 1}\n",
        REALTIME.replace("RealtimeAPI", "BatchAPI") + "  schedule: daily\n",
        "- {name: a, kind: TaskAPI, definition: {path: task.py, type: python}}",
        "- {name: a, kind: TrafficSplitter, apis: [{name: b, weight: 101}]}",
        "- {name: a, kind: TrafficSplitter, apis: [{name: b}]}",
        "- {name: a, kind: TrafficSplitter, apis: []}",
    ],
)
def test_mistakes_are_shown_while_typing(text: str) -> None:
    assert not is_valid(yaml.safe_load(text))


def test_fields_have_descriptions_choices_ranges_and_the_defaults_of_their_kind() -> None:
    def networking(kind: str) -> Any:
        return json_schema()["definitions"][kind]["properties"]["networking"]["properties"]

    handler = json_schema()["definitions"]["RealtimeAPI"]["properties"]["handler"]
    assert handler["description"] == "The user's code: its location, its interface and its arguments."
    assert handler["properties"]["log_level"] == {
        "description": "lowest level of the logger that is logged",
        "enum": ["debug", "info", "warning", "error"],
        "default": "info",
    }
    processes = handler["properties"]["processes_per_replica"]
    assert (processes["type"], processes["minimum"], processes["maximum"], processes["default"]) == (
        "integer",
        1,
        100,
        1,
    )
    assert networking("RealtimeAPI")["timeout"]["default"] == "60s"
    assert networking("AsyncAPI")["timeout"]["default"] == "3600s"
    assert networking("RealtimeAPI")["max_body_size"]["default"] == "100Mi"
    assert networking("BatchAPI")["max_body_size"]["default"] == "10Mi"
    assert networking("BatchAPI")["max_batch_size"]["default"] == 256_000
    functions = json_schema("0.11")["definitions"]["api"]["properties"]
    assert functions["compute"]["properties"]["target_cpu_utilization"]["default"] == 80
    assert "metadata" in functions["predictor"]["properties"]


def test_every_key_has_a_description() -> None:
    def undescribed(schema: Any, path: str) -> list[str]:
        found = []
        for key, inner in schema.get("properties", {}).items():
            for part in [inner, *inner.get("anyOf", ())]:
                found += undescribed(part, f"{path}.{key}")
            described = inner.get("description") or any("description" in part for part in inner.get("anyOf", ()))
            found += [] if described else [f"{path}.{key}"]
        return found

    for generation in FORMS:
        for name, definition in json_schema(generation)["definitions"].items():
            if name != "deployment":
                assert undescribed(definition, f"{generation} {name}") == []


def test_the_command_offers_every_generation() -> None:
    assert tuple(FORMS) == GENERATION_NAMES
