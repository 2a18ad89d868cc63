"""The last catalogue that each API was told, on disk: what to serve while its source can't be listed after a restart.

Files that can't be read or written are not worth an error: they only help.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import orjson

from cortex.models.spec import Catalogue, ModelSource


class Remembered:
    """One file for each API and source in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def recall(self, api: str, source: ModelSource) -> Catalogue | None:
        """Return the catalogue that was kept last; None if there is none."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return Catalogue.from_json(self._file(api, source).read_bytes())
        return None

    def keep(self, api: str, source: ModelSource, catalogue: Catalogue) -> None:
        """Keep a catalogue instead of the one before."""
        file = self._file(api, source)
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = file.with_suffix(".part")
            part.write_bytes(Catalogue(catalogue.models).to_json())
            part.rename(file)

    def forget_all(self) -> None:
        """Forget everything: no API has models any more."""
        with contextlib.suppress(OSError):
            for file in self._folder.iterdir():
                file.unlink(missing_ok=True)

    def _file(self, api: str, source: ModelSource) -> Path:
        key = orjson.dumps([api, source.to_data()], option=orjson.OPT_SORT_KEYS)
        return self._folder / f"{hashlib.sha256(key).hexdigest()[:32]}.json"
