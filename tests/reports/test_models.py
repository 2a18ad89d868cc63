"""Reports about models on disk: sources that lose their models, stray files, links."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.installations.installation import Installation, installation
from harness.installations.reports import Report, ReportedApi, deployed_report
from harness.wait import wait_until

SOURCE = """
    import pathlib

    class PythonPredictor:
        def __init__(self, config, python_client):
            self.client = python_client

        def load_model(self, model_path):
            return pathlib.Path(model_path, "model.txt").read_text()

        def predict(self, payload, query_params):
            try:
                return self.client.get_model(*query_params.values())
            except Exception as error:
                return f"error: {error}"
"""
CONFIG = """
    - name: t
      kind: RealtimeAPI
      predictor:
        type: python
        path: handler.py
        multi_model_reloading: {FORM: PROJECT/models, poll_interval: 1s}
"""
VERSIONS = {"models/1/model.txt": b"one", "models/2/model.txt": b"two"}
DIR = {"models/a/1/model.txt": b"a", "models/b/1/model.txt": b"b"}


def put(api: ReportedApi, name: str, content: str) -> None:
    """Add a version at once: no half of it is listed."""
    file = api.folder / name
    part = api.folder / "part" / file.parent.name
    part.mkdir(parents=True)
    (part / file.name).write_text(content)
    file.parent.parent.mkdir(parents=True, exist_ok=True)
    part.rename(file.parent)


def answer(api: ReportedApi, query: str = "") -> str:
    return api.post({}, query).body.decode()


def problems(api: ReportedApi) -> str:
    return json.dumps(api.cortex.get("t"))


def lose(api: ReportedApi) -> None:
    """Empty the folder in one step, as an unmounted volume does."""
    (api.folder / "models").rename(api.folder / "away")
    (api.folder / "models").mkdir()
    wait_until(lambda: "put the files back" in problems(api))


def find(api: ReportedApi) -> None:
    (api.folder / "models").rmdir()
    (api.folder / "away").rename(api.folder / "models")


def lost_and_found(api: ReportedApi, *queries: str) -> list[str]:
    """Lose the models, refresh, and find them again with a new version."""
    lose(api)
    answers = [answer(api, query) for query in queries]
    pids = api.cortex.pids("t")
    api.cortex.cortex("refresh", "t")
    wait_until(lambda: not pids & api.cortex.pids("t") and "live" in problems(api))
    answers += [answer(api, query) for query in queries]
    find(api)
    put(api, f"models/{'a/' * (len(queries) > 1)}7/model.txt", "seven")
    wait_until(lambda: answer(api, queries[0]) == "seven")
    assert "put the files back" not in problems(api)
    return answers


def add_beside_stray_files(api: ReportedApi) -> list[str]:
    models = api.folder / "models"
    (models / ".DS_Store").write_text("x")
    (models / "_SUCCESS").touch()
    (models / "2.tmp").mkdir()
    (models / "2.tmp/model.txt").write_text("half")
    put(api, "models/9/model.txt", "nine")
    wait_until(lambda: answer(api) == "nine")
    wait_until(lambda: "is ignored: a version is a folder whose name is an integer" in problems(api))
    api.cortex.cortex("refresh", "t")
    (models / "10").symlink_to("9")
    wait_until(lambda: answer(api, "?model=t&version=10") == "nine")
    return [answer(api), answer(api, "?model=t&version=1")]


def add_a_link(api: ReportedApi) -> list[str | bool]:
    (api.folder / "secret").write_text("secret")
    put(api, "models/3/other.txt", "")
    (api.folder / "models/3/model.txt").symlink_to(api.folder / "secret")
    (api.folder / "models/4").symlink_to("..")
    wait_until(lambda: problems(api).count("a link leads out of the folder") == 2)
    return [answer(api), "secret" in problems(api)]


REPORTS = [
    Report(
        "versions of an emptied folder stay in service, also in new processes",
        "tensorflow/serving#1480",
        SOURCE,
        lambda api: lost_and_found(api, ""),
        ["two", "two"],
        CONFIG.replace("FORM", "path"),
        VERSIONS,
    ),
    Report(
        "models of an emptied folder stay in service, also in new processes",
        "tensorflow/serving#1480",
        SOURCE,
        lambda api: lost_and_found(api, "?model=a", "?model=b"),
        ["a", "b", "a", "b"],
        CONFIG.replace("FORM", "dir"),
        DIR,
    ),
    Report(
        "what is beside the versions blocks no new one",
        "triton-inference-server/server#2144",
        SOURCE,
        add_beside_stray_files,
        ["nine", "one"],
        CONFIG.replace("FORM", "path"),
        VERSIONS,
    ),
    Report(
        "a link out of the folder in a new version is not followed",
        "M3",
        SOURCE,
        add_a_link,
        ["two", False],
        CONFIG.replace("FORM", "path"),
        VERSIONS,
    ),
]


@pytest.mark.parametrize("report", REPORTS, ids=str)
def test_report_has_the_right_outcome(report: Report, cortex: Installation, tmp_path: Path) -> None:
    config = report.config.replace("PROJECT", str(tmp_path / "project"))
    with deployed_report(replace(report, config=config), cortex, tmp_path / "project") as api:
        assert report.observe(api) == report.right


@pytest.mark.long
def test_models_of_an_emptied_folder_are_served_after_a_restart_of_the_installation(tmp_path: Path) -> None:
    config = CONFIG.replace("FORM", "path").replace("PROJECT", str(tmp_path / "project"))
    report = Report("restart", "tensorflow/serving#1480", SOURCE, lambda api: answer(api), "two", config, VERSIONS)
    with installation() as cortex, deployed_report(report, cortex, tmp_path / "project") as api:
        (api.folder / "models/.DS_Store").touch()
        lose(api)
        cortex.down()
        cortex.up()
        wait_until(lambda: api.post({}).status != 503)
        assert answer(api) == "two"
        assert "put the files back" in problems(api)
