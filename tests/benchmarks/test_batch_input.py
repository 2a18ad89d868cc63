"""What the batch benchmarks send, and the CPU time that they count."""

from __future__ import annotations

import subprocess
import sys

import pytest
from benchmarks.tools.batch_client import lines
from benchmarks.tools.processes import cpu_with_ended_s
from benchmarks.user_code.batch_driver import batches

pytestmark = pytest.mark.processes

BURN = "import time\nwhile time.process_time() < 0.3: pass"


@pytest.mark.parametrize("items", [0, 1, 32_768, 100_001])
def test_lines_are_the_integers_in_order_with_no_line_torn(items: int) -> None:
    pieces = list(lines(items))
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert list(map(int, b"".join(pieces).split())) == list(range(items))


def test_last_batch_has_what_is_left() -> None:
    assert list(batches(5, 2)) == [[0, 1], [2, 3], [4]]


def test_cpu_time_of_a_process_that_ended_is_counted() -> None:
    before = cpu_with_ended_s()
    # A child of a child: what its parent waited for counts as the parent's.
    nested = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}], check=True)"
    subprocess.run([sys.executable, "-c", nested], check=True)
    assert cpu_with_ended_s() - before >= 0.25
