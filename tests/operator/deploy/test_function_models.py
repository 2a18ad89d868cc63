"""Models that module functions get, at a real object store."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.errors import ConfigError
from cortex.operator.deploy.diagnose import Machine, diagnose
from harness.servers.public_bucket import public_bucket

pytestmark = pytest.mark.processes

FUNCTIONS = """\
- kind: deployment
  name: iris
- kind: api
  name: classifier
  predictor:
    path: functions.py
    model: {model}
"""


@pytest.mark.parametrize(
    ("model", "problems"),
    [
        ("s3://models/iris/model.pth", []),
        ("s3://models/iris", []),
        (
            "s3://models/iris/model.pt",
            ["cortex.yaml:7:12: classifier.predictor.model: there is nothing at s3://models/iris/model.pt"],
        ),
    ],
)
def test_looks_up_the_model_that_module_functions_get(tmp_path: Path, model: str, problems: list[str]) -> None:
    (tmp_path / "functions.py").write_text("def predict(sample, metadata):\n    return sample\n")
    (tmp_path / "cortex.yaml").write_text(FUNCTIONS.format(model=model))
    with public_bucket() as bucket:
        bucket.objects["iris/model.pth"] = b"weights"
        environ = {"AWS_ENDPOINT_URL": bucket.url, "HOME": str(tmp_path / "home")}
        try:
            diagnose(tmp_path / "cortex.yaml", "cortex.yaml", machine=Machine(environ))
            found = []
        except ConfigError as error:
            found = [str(problem) for problem in error.diagnostics]
    assert found == problems
