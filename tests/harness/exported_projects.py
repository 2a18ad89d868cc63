"""Projects whose images tests plan and export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cortex.engine.environment import dependency_files
from cortex.export.plan import ImagePlan, plan_image
from cortex.operator.deploy.diagnose import diagnose

HANDLER = "class Handler:\n    def __init__(self, config): pass\n    def handle_post(self, payload): return payload\n"
MODEL_HANDLER = """
class Handler:
    def __init__(self, model_client, config): pass
    def load_model(self, model_path): return model_path
    def handle_post(self, payload): return payload
"""


def realtime(name: str = "iris", handler: str = "", rest: str = "") -> str:
    """Return the configuration of one API; `handler` has more keys of its handler, `rest` more keys of the API."""
    return f"- name: {name}\n  kind: RealtimeAPI\n  handler: {{type: python, path: handler.py{handler}}}\n{rest}"


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    """Write the files of a project, `handler.py` included; return the folder."""
    for name, text in {"handler.py": HANDLER, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def planned(folder: Path, files: Mapping[str, str], config_name: str = "cortex.yaml") -> ImagePlan:
    """Write a project and plan its image."""
    write_files(folder, files)
    found = diagnose(folder / config_name, config_name)
    root = found.project.root
    return plan_image(
        found.apis,
        found.project,
        config_name,
        lambda name: (root / name).stat().st_size,
        lambda api: dependency_files(root, api.handler.dependencies),
    )
