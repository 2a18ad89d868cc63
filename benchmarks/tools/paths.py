"""Paths of the benchmark's files."""

from __future__ import annotations

from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent
REPOSITORY = BENCHMARKS.parent
PEERS = BENCHMARKS / "peers"
USER_CODE = BENCHMARKS / "user_code"
WORK = BENCHMARKS / ".work"
VENVS = WORK / "venvs"
RESULTS = BENCHMARKS / "results"
