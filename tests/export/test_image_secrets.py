"""Values that an image must not contain."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.config.validate import check_file
from cortex.errors import Diagnostic
from cortex.export.secrets import secret_paths, secret_problems
from cortex.projects.project import ProjectFiles
from harness.exported_projects import realtime, write_files


def problems(folder: Path, files: dict[str, str], allowed: tuple[str, ...] = ()) -> list[Diagnostic]:
    project = ProjectFiles.scan(write_files(folder, files), "cortex.yaml")
    checked = check_file(folder / "cortex.yaml", "cortex.yaml", project)
    assert not checked.problems
    return secret_problems(checked, project, allowed)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("API_TOKEN", "abc"),
        ("password", "x"),
        ("DB_PASSWORD", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("openai-api-key", "x"),
        ("client.secret", "x"),
        ("DATABASE", "postgresql://me:hunter2@db/x"),
        ("CERTIFICATE", "-----BEGIN RSA PRIVATE KEY-----\n"),
    ],
)
def test_values_that_look_like_secrets(key: str, value: str) -> None:
    assert list(secret_paths({key: value})) == [(key,)]
    assert list(secret_paths({"outer": [{key: value}]})) == [("outer", key)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("MAX_TOKENS", "100"),
        ("TOKENIZER", "bert"),
        ("KEY_COLUMN", "id"),
        ("API_TOKEN", ""),
        ("MONKEY", "x"),
        ("DATABASE", "postgresql://me@db/x"),
        ("URL", "https://example.com:8080/a@b"),
        ("token", 5),
    ],
)
def test_other_values(key: str, value: object) -> None:
    assert list(secret_paths({key: value})) == []


def test_secrets_in_the_submission_of_a_schedule_are_reported(tmp_path: Path) -> None:
    config = """\
- name: report
  kind: BatchAPI
  handler: {type: python, path: handler.py}
  schedule:
    cron: 0 4 * * *
    submission: {workers: 1, item_list: {items: [1], batch_size: 1}, config: {api_key: abc}}
"""
    handler = "class Handler:\n    def __init__(self, config): pass\n    def handle_batch(self, payload): pass\n"
    files = {"cortex.yaml": config, "handler.py": handler}
    (found,) = problems(tmp_path, files)
    assert (found.line, found.message.partition(" ")[0]) == (6, "api_key")
    assert problems(tmp_path, files, ("api_key",)) == []


def test_secrets_are_reported_where_they_are(tmp_path: Path) -> None:
    config = """\
- name: iris
  kind: RealtimeAPI
  handler:
    type: python
    path: handler.py
    config:
      model: {api_key: abc}
    env:
      PLAIN: abc
      HF_TOKEN: abc
"""
    found = problems(tmp_path, {"cortex.yaml": config})

    assert [(each.file, each.line, each.message.partition(" ")[0]) for each in found] == [
        ("cortex.yaml", 10, "HF_TOKEN"),
        ("cortex.yaml", 7, "api_key"),
    ]
    assert found[0].fix == (
        "move it to .env, which is not part of the image; or add `--allow-secret HF_TOKEN` if it is none"
    )
    assert problems(tmp_path, {"cortex.yaml": config}, ("HF_TOKEN", "api_key")) == []


def test_credentials_of_a_package_index_are_reported(tmp_path: Path) -> None:
    requirements = "six\n--index-url https://me:secret@example.com/simple  # ours\n# https://a:b@c\n"

    [found] = problems(tmp_path, {"cortex.yaml": realtime(), "requirements.txt": requirements})

    assert (found.file, found.line, found.column) == ("requirements.txt", 2, 13)
