from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cortex.client.local_operator import replace_operator
from cortex.errors import ConflictError
from cortex.home import Home
from cortex.installation import OperatorIdentity
from cortex.processes.identity import Identity

pytestmark = pytest.mark.processes


def test_an_operator_that_another_command_has_replaced_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    home, steps = Home(tmp_path), list[str]()
    home.prepare()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        old = OperatorIdentity(Identity.of(process.pid), "http://127.0.0.1:1", "http://127.0.0.1:2", version="0.2")
        process.communicate(b"\n")
    with pytest.raises(ConflictError, match=rf"\(pid {old.pid}\) does not run any more.*run `cortex upgrade` again"):
        replace_operator(home, old, lambda: steps.append("hand over"), lambda: steps.append("undo"))
    assert not steps
    assert not home.logs_dir.joinpath("operator.log").exists(), "no operator was started"
