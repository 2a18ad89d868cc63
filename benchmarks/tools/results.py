"""Result files: markdown and JSON per run, and the newest under a fixed name."""

from __future__ import annotations

import json
import time
from typing import Any

from benchmarks.tools.paths import RESULTS


def write(name: str, text: str, data: dict[str, Any]) -> None:
    """Write both files; print the text and its path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for stem in (f"{name}-{stamp}", f"{name}-latest"):
        (RESULTS / f"{stem}.md").write_text(text)
        (RESULTS / f"{stem}.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    print(f"\n{text}\nwritten to {RESULTS}/{name}-{stamp}.md and .json", flush=True)
