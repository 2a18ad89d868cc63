"""The archive that a deploy uploads: the project's files and the configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cortex.client.packaging import BIG_BYTES, dump_specs, find_config, pack_file, pack_specs
from cortex.errors import InputError
from cortex.projects.archive import unpack


def unpacked(archive: bytes, folder: Path) -> dict[str, str]:
    unpack(archive, folder)
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_a_configuration_file_is_packed_with_its_folder(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "data").mkdir(parents=True)
    for name in ("api.yaml", "handler.py", "data/values.json", ".hidden", ".env"):
        (project / name).write_text(f"content of {name}")

    package = pack_file(project / "api.yaml")

    assert package.config_name == "api.yaml"
    assert package.warnings == ()
    names = ("api.yaml", "handler.py", "data/values.json", ".env")
    assert unpacked(package.archive, tmp_path / "out") == {name: f"content of {name}" for name in names}


def test_specifications_replace_the_configuration_file_of_the_folder(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "cortex.yaml").write_text("old")
    (project / "handler.py").write_text("code")

    files = unpacked(pack_specs([{"name": "a"}], project).archive, tmp_path / "out")

    assert files["handler.py"] == "code"
    assert yaml.safe_load(files["cortex.yaml"]) == [{"name": "a"}]


def test_large_projects_are_reported(tmp_path: Path) -> None:
    (tmp_path / "cortex.yaml").write_text("")
    (tmp_path / "weights.bin").write_bytes(bytes(BIG_BYTES))
    (tmp_path / "many").mkdir()
    for number in range(1000):
        (tmp_path / "many" / str(number)).touch()

    assert pack_file(tmp_path / "cortex.yaml").warnings == ("weights.bin is 10 MiB", "the project has 1,001 files")


def test_a_folder_stands_for_its_cortex_yaml(tmp_path: Path) -> None:
    (tmp_path / "cortex.yaml").touch()

    assert find_config(tmp_path) == find_config(tmp_path / "cortex.yaml") == tmp_path / "cortex.yaml"


@pytest.mark.parametrize("path", ["", "nope", "nope.yaml"])
def test_a_missing_configuration_file_is_reported(tmp_path: Path, path: str) -> None:
    with pytest.raises(InputError, match="does not exist"):
        find_config(tmp_path / path)


def test_a_pipe_and_a_broken_link_are_no_configuration_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cortex.yaml")
    (tmp_path / "link.yaml").symlink_to("nowhere")

    for path in (tmp_path, tmp_path / "link.yaml"):
        with pytest.raises(InputError, match="yaml: is not a file"):
            find_config(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(spec=st.dictionaries(st.text(), JSON, max_size=4))
def test_a_specification_is_unchanged_after_writing_and_parsing(spec: dict[str, Any]) -> None:
    assert yaml.safe_load(dump_specs([spec])) == [spec]


def test_rejects_a_specification_with_an_object() -> None:
    with pytest.raises(ValueError, match="can't be written as YAML"):
        dump_specs([{"name": object()}])
