"""Mistakes in `networking.record`, and kinds of APIs that do not record."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.errors import ConfigError
from cortex.operator.deploy.diagnose import diagnose

HANDLER = """
class Handler:
    def __init__(self, config):
        pass

    def handle_post(self, payload):
        pass
"""


def problems(folder: Path, record: str, kind: str = "RealtimeAPI") -> str:
    (folder / "handler.py").write_text(HANDLER)
    (folder / "cortex.yaml").write_text(
        f"- name: iris\n  kind: {kind}\n  handler: {{type: python, path: handler.py}}\n"
        f"  networking: {{record: {record}}}\n"
    )
    try:
        diagnose(folder / "cortex.yaml", "cortex.yaml")
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{share: 0.5%, max_size: 16Mi, redact: ["$.a", X-User], to: /data/rec}', ""),
        ("{to: s3://bucket/rec}", ""),
        ("{share: 0%}", "share: must be more than 0% and at most 100%"),
        ("{max_cpu: 0%}", "max_cpu: must be more than 0% and at most 100%"),
        ("{max_size: 1Mi}", "max_size: must be at least 16Mi"),
        ("{to: rec}", '"rec" must be an absolute path, or start with s3:// or gs://'),
        ('{redact: ["$.a["]}', '"$.a[" must be a path in JSON bodies, or the name of a header'),
        ('{redact: ["a b"]}', '"a b" must be a path in JSON bodies, or the name of a header'),
        ("{rate: 5%}", 'key "rate" is not supported'),
    ],
)
def test_a_mistake_in_record_is_named(tmp_path: Path, record: str, message: str) -> None:
    found = problems(tmp_path, record)
    assert (message in found) if message else not found


@pytest.mark.parametrize("kind", ["AsyncAPI", "BatchAPI"])
def test_only_a_realtime_api_records(tmp_path: Path, kind: str) -> None:
    assert "only requests of a RealtimeAPI are recorded" in problems(tmp_path, "{}", kind)
