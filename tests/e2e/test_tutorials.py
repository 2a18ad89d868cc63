"""Every command and file of quickstart, tutorial, guides and pages for users of other systems, run as a reader does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from harness.documents.walkthrough import run
from harness.installations.installation import ROOT, Installation

FOLDERS = ("quickstart", "tutorial", "coming-from", "guides")
PAGES = [page for folder in FOLDERS for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
#: The others install nothing that is large.
_TIMEOUTS_S = {"scikit-learn": 600, "onnx": 300}


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_says(cortex: Installation, page: Path, tmp_path: Path) -> None:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**cortex.environ, "PATH": programs}
    ports = {"8888": str(cortex.gateway_port), "8889": str(cortex.operator_port)}
    run(page, tmp_path, environ, ports, _TIMEOUTS_S.get(page.stem, 120))
