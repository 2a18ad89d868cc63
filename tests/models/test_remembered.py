from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cortex.models.source_monitor import LastCatalogues
from cortex.models.spec import Catalogue, Model, ModelProblem, ModelSource, Version

SAVED_SOURCE = ModelSource("python", dir="s3://bucket/models")
CATALOGUE = Catalogue((Model("iris", (Version("1", "aa", 5, 1.5, "/there"),)),))


def test_what_was_kept_last_is_recalled_without_its_problems(tmp_path: Path) -> None:
    remembered = LastCatalogues(tmp_path / "known")
    remembered.save("iris", SAVED_SOURCE, Catalogue(()))
    remembered.save("iris", SAVED_SOURCE, replace(CATALOGUE, problems=(ModelProblem("iris", None, "bad", 1.0),)))
    assert LastCatalogues(tmp_path / "known").load("iris", SAVED_SOURCE) == CATALOGUE


def test_each_api_and_each_source_has_its_own(tmp_path: Path) -> None:
    remembered = LastCatalogues(tmp_path)
    remembered.save("iris", SAVED_SOURCE, CATALOGUE)
    assert remembered.load("wine", SAVED_SOURCE) is None
    assert remembered.load("iris", replace(SAVED_SOURCE, poll_interval_s=1.0)) is None


def test_nothing_is_recalled_of_what_can_not_be_read(tmp_path: Path) -> None:
    remembered = LastCatalogues(tmp_path)
    remembered.save("iris", SAVED_SOURCE, CATALOGUE)
    for file in tmp_path.iterdir():
        file.write_bytes(b"{")
    assert remembered.load("iris", SAVED_SOURCE) is None


def test_what_is_forgotten_is_not_recalled(tmp_path: Path) -> None:
    remembered = LastCatalogues(tmp_path)
    remembered.save("iris", SAVED_SOURCE, CATALOGUE)
    remembered.clear()
    assert remembered.load("iris", SAVED_SOURCE) is None
