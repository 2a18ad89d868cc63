from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cortex.config.schema import Api
from cortex.operator.deploy.history import describe_changes, file_changes, spec_changes


def api(handler: dict[str, Any] | None = None, **sections: Any) -> Api:
    code = {"interface": "handler", "type": "python", "path": "handler.py", **(handler or {})}
    return Api.model_validate({"name": "iris", "handler": code, **sections})


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        (api(), api(), []),
        (api(), api(compute={"cpu": 0.5}), ["compute.cpu: 0.2 → 0.5"]),
        (api(), api(compute={"mem": "1Gi"}), ["compute.mem: 1Gi (new)"]),
        (api(compute={"mem": "1Gi"}), api(), ["compute.mem: removed"]),
        (
            api({"config": {"a": {"b": [1, 2]}, "c": ""}}),
            api({"config": {"a": {"b": [1, 3]}, "c": "x"}}),
            ["handler.config.a.b: [1, 2] → [1, 3]", 'handler.config.c: "" → x'],
        ),
        (
            api(),
            api(tracker={"model_type": "regression"}),
            ["tracker.model_type: regression (new)"],
        ),
        (api(), api(update_strategy={"canary": {}}), ["update_strategy.canary: its defaults (new)"]),
        (
            api(),
            api(update_strategy={"canary": {"steps": ["50%"], "give_up_after_s": 7200}}),
            ['update_strategy.canary.steps: ["50%"] (new)', "update_strategy.canary.give_up_after: 2h (new)"],
        ),
        (api(), api(autoscaling={"window_s": "10s"}), ["autoscaling.window: 1m → 10s"]),
        (api(), api({"config": {"text": "x" * 100}}), [f"handler.config.text: {'x' * 59}… (new)"]),
    ],
)
def test_names_each_field_whose_value_differs(before: Api, after: Api, lines: list[str]) -> None:
    assert list(spec_changes(before, after)) == lines


def test_a_default_that_an_older_version_did_not_have_is_no_change() -> None:
    written = {"name": "iris", "handler": {"type": "python", "path": "handler.py"}}
    older, same, other = (
        api(handler).model_copy(update={"as_written": {**written, "handler": {"path": "handler.py", **handler}}})
        for handler in ({}, {"preload": False}, {"preload": True})
    )
    assert list(spec_changes(older, same)) == []
    assert list(spec_changes(same, older)) == [], "a rollback to it"
    assert list(spec_changes(older, other)) == ["handler.preload: false → true"]
    assert list(spec_changes(other, older)) == ["handler.preload: true → false"]


def test_one_notation_is_shown_however_values_are_written() -> None:
    def written(cpu: object, window: object) -> Api:
        as_written = {"compute": {"cpu": cpu}, "autoscaling": {"window": window}}
        made = api(compute={"cpu": cpu}, autoscaling={"window_s": window})
        return made.model_copy(update={"as_written": as_written})

    assert list(spec_changes(written(0.2, 60.0), written("500m", "10s"))) == [
        "compute.cpu: 0.2 → 0.5",
        "autoscaling.window: 1m → 10s",
    ]
    assert list(spec_changes(written(0.5, "60s"), written("500m", "1m"))) == []


def test_never_shows_values_of_environment_variables() -> None:
    before = api({"env": {"KEPT": "1", "TOKEN": "secret", "GONE": "secret"}})
    after = api({"env": {"KEPT": "1", "TOKEN": "other", "NEW": "secret"}})
    assert list(spec_changes(before, after)) == [
        "handler.env.TOKEN: changed",
        "handler.env.GONE: removed",
        "handler.env.NEW: added",
    ]


def test_never_shows_secrets_of_the_configuration() -> None:
    old = {"token": "a", "db": {"password": "a", "url": f"postgresql://ada:{'x' * 80}@db"}, "gone_secret": "a"}
    new = {"token": "b", "db": {"password": "b", "url": "postgresql://ada:hunter2@db"}, "api_key": "b"}
    assert list(spec_changes(api({"config": old}), api({"config": new}))) == [
        "handler.config.token: changed",
        "handler.config.db.password: changed",
        "handler.config.db.url: changed",
        "handler.config.gone_secret: removed",
        "handler.config.api_key: added",
    ]


def test_never_shows_secrets_by_value(tmp_path: Path) -> None:
    before, after = (write(tmp_path / name, **{".env": f"LOGIN_TOKEN={name}-of-dotenv\n"}) for name in ("old", "new"))
    config = {
        "note": "Bearer abc",
        "hook": "https://h/x?token=abc&sig=abc",
        "args": ["--token", "abc", "new-of-dotenv"],
    }
    lines = describe_changes(api({"config": {"note": "old-of-dotenv"}}), api({"config": config}), before, after)
    assert lines[:3] == (
        "handler.config.note: ******** → Bearer ********",
        "handler.config.hook: https://h/x?token=********&sig=******** (new)",
        'handler.config.args: ["--token", "********", "********"] (new)',
    )


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_lists_added_changed_and_removed_files(tmp_path: Path) -> None:
    before = write(tmp_path / "a", same="1", changed="1", gone="1", sub__script="1")
    after = write(tmp_path / "b", same="1", changed="2", new="1", sub__script="1")
    (after / "sub/script").chmod(0o755)
    assert file_changes(before, after) == [
        "files added: new",
        "files changed: changed, sub/script",
        "files removed: gone",
    ]
    many = write(tmp_path / "c", **{f"f{number}": "" for number in range(7)})
    assert file_changes(tmp_path / "a", write(tmp_path / "d")) == ["files removed: changed, gone, same, sub/script"]
    assert file_changes(tmp_path / "d", many) == ["files added: f0, f1, f2, f3, f4 and 2 more"]


def test_shows_packages_that_the_requirements_add_change_and_remove(tmp_path: Path) -> None:
    before = write(tmp_path / "a", **{"requirements.txt": "numpy==1.26  # old\nscipy\n--pre\n"})
    after = write(tmp_path / "b", **{"requirements.txt": "torch>=2\nNumPy==2.0\n--pre\n"})
    assert describe_changes(api(), api(), before, after) == (
        "requirements.txt: numpy==1.26 → NumPy==2.0",
        "requirements.txt: scipy removed",
        "requirements.txt: torch>=2 (new)",
        "files changed: requirements.txt",
    )


def test_many_differences_are_cut_short(tmp_path: Path) -> None:
    lines = describe_changes(api(), api({"config": {f"k{number}": 1 for number in range(30)}}), tmp_path, tmp_path)
    assert len(lines) == 21
    assert lines[-1] == "10 more fields"
