"""Examples of tasks: what their README says, and what they return."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import yaml

from cortex.config.values import cron_expression
from cortex.jobs.intake.submission import SubmissionLimits, parse_body
from harness.installations.example_cases import EXAMPLES_DIR


def test_disk_report_returns_what_its_readme_says(tmp_path: Path) -> None:
    folder = EXAMPLES_DIR / "task-disk-report"
    api = yaml.safe_load((folder / "cortex.yaml").read_text())[0]
    spec = importlib.util.spec_from_file_location("task_example", folder / api["definition"]["path"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "a.txt").write_text("four")
    (tmp_path / "b.txt").write_text("x" * 1200)
    result = module.Task()({**api["definition"]["config"], "folder": str(tmp_path)})
    assert json.dumps(result) in (folder / "README.md").read_text()
    assert cron_expression(api["schedule"]) == "0 6 * * mon"
    submission = parse_body((folder / "job.json").read_bytes(), SubmissionLimits(is_task=True))
    assert submission.options.config == {"folder": "/var/tmp"}
