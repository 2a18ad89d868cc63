"""Check the memory budget of model caching, and the release of memory: `python -m benchmarks.model_cache`.

A new process requests 300 models of 20 MB under `cache_memory: 500Mi` on four threads: 20,000 requests distributed by
Zipf's law, with its memory sampled every few milliseconds. Then all models are removed. Further processes load and
unload models 1,000 times: pickles of one large array, pickles of thousands of small objects, the same with a reference
cycle, ONNX sessions, SavedModels. The 300 models are hard links to one file, because the disk is not under test.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.tools import machine, report, results
from benchmarks.tools.paths import REPOSITORY

MB = 1_000_000
MIB = 1024 * 1024
BUDGET_BYTES = 500 * MIB
MODELS, MODEL_BYTES = 300, 20 * MB
GETS = 20_000
SAMPLED_EVERY_S = 0.005
#: For the first tenth of the cycles a process is still finding its size; a flat one grows no more than this after it.
FLAT_SHARE = 0.02
EXPONENT = 1.0


def main() -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_cache", description=__doc__)
    parser.add_argument("--gets", type=int, default=GETS)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    facts = machine.facts()
    goals: list[report.Goal] = []
    data: dict[str, Any] = {"facts": facts}
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="cortex-bench-") as folder:
        for objects in ("big", "small"):
            found = _zipf(Path(folder) / f"zipf-{objects}", objects, arguments.gets)
            data[f"zipf-{objects}"] = found
            goals += _zipf_goals(found, objects)
            lines.append(_zipf_line(found, objects))
        for kind in arguments.kinds:
            if kind == "tensorflow" and importlib.util.find_spec("tensorflow") is None:
                lines.append("- tensorflow is not installed: its cycles are not measured")
                continue
            found = _cycles(Path(folder) / kind, kind, arguments.cycles)
            data[f"cycles-{kind}"] = found
            goals.append(_cycles_goal(found, kind, arguments.cycles))
            lines.append(_cycles_line(found, kind))
    text = f"# Caching of models\n\n{report.goals_table(goals)}\n\nBeside them:\n\n" + "\n".join(lines) + "\n"
    results.write("model-cache", text, data)


def _zipf(folder: Path, objects: str, gets: int) -> dict[str, Any]:
    _write_pickle(folder / "m0", objects)
    for number in range(1, MODELS):
        (folder / f"m{number}").mkdir()
        os.link(folder / "m0" / "model.pkl", folder / f"m{number}" / "model.pkl")
    arguments = {"models": MODELS, "gets": gets, "budget_bytes": BUDGET_BYTES, "exponent": EXPONENT}
    return _in_process("zipf", {"folder": str(folder), **arguments})


def _zipf_goals(found: dict[str, Any], objects: str) -> list[report.Goal]:
    above = found["highest"] - found["baseline"]
    limit = BUDGET_BYTES * 1.1
    returned = found["after"] / found["baseline"]
    loads, fetches, models = found["hundred"]
    return [
        report.Goal(
            f"memory above the baseline, {objects} objects, highest",
            f"≤ {limit / MIB:.0f} MiB",
            f"{above / MIB:.0f} MiB",
            above <= limit,
        ),
        report.Goal(
            f"memory once all are evicted, {objects} objects, to the start",
            "≤ 1.05",
            f"{returned:.3f}",
            returned <= 1.05,
        ),
        report.Goal(
            f"100 first gets at once, {objects} objects: loads, fetches, models",
            "1, 1, 1",
            f"{loads}, {fetches}, {models}",
            found["hundred"] == [1, 1, 1],
        ),
    ]


def _zipf_line(found: dict[str, Any], objects: str) -> str:
    return (
        f"- {objects} objects: {found['gets']} gets, {found['loads']} loads (p50 {found['load_p50_ms']:.1f} ms) in "
        f"{found['took_s']:.0f} s; get p50 {found['get_p50_us']:.1f} µs, p99 {found['get_p99_ms']:.0f} ms; "
        f"{found['loaded_at_end']} models loaded at the end with {found['full'] / MIB:.0f} MiB; baseline "
        f"{found['baseline'] / MIB:.1f} MiB, after evicting all {found['after'] / MIB:.1f} MiB; "
        f"memory read {found['samples']} times"
    )


def _cycles(folder: Path, kind: str, cycles: int) -> dict[str, Any]:
    for number in range(2):
        KINDS[kind](folder / f"m{number}", number)
    return _in_process("cycles", {"folder": str(folder), "kind": kind, "cycles": cycles})


def _growth(found: dict[str, Any]) -> float:
    """Return the growth from the second to the last tenth of the cycles, when the process is warm."""
    resident = found["resident"]
    return sum(resident[-2:]) / sum(resident[2:4]) - 1


def _cycles_goal(found: dict[str, Any], kind: str, cycles: int) -> report.Goal:
    growth = _growth(found)
    text = f"{cycles} loads and unloads, {kind}: growth after the first tenth"
    return report.Goal(text, f"≤ {FLAT_SHARE:.0%}", f"{growth:+.1%}", growth <= FLAT_SHARE)


def _cycles_line(found: dict[str, Any], kind: str) -> str:
    seen = ", ".join(f"{each / MIB:.0f}" for each in found["resident"][::2])
    return (
        f"- {kind}: MiB as it goes: {seen}; {found['after'] / MIB:.0f} at the end; load {found['load_p50_ms']:.1f} ms"
    )


def _write_pickle(folder: Path, objects: str) -> None:
    """Write 20 MB as one array, or as arrays of up to 20 kB, lists and strings, as trees and vocabularies are."""
    import numpy

    folder.mkdir(parents=True)
    model: dict[str, Any] = {"weights": numpy.ones(MODEL_BYTES // 8)}
    if objects != "big":
        arrays = [numpy.ones(100 + number % 2400) for number in range(1700)]
        model = {"weights": arrays[0], "arrays": arrays, "words": {f"word {n}": [n, str(n)] for n in range(10_000)}}
    if objects == "cyclic":
        model["itself"] = model  # only garbage collection finds it
    (folder / "model.pkl").write_bytes(pickle.dumps(model))


def _write_onnx(folder: Path, number: int) -> None:
    from benchmarks.tools.big_models import write_onnx

    folder.mkdir(parents=True)
    write_onnx(folder, number, MODEL_BYTES)


def _write_tensorflow(folder: Path, number: int) -> None:
    """Write a SavedModel in a process of its own, because TensorFlow can't be unloaded."""
    code = f"""
import tensorflow as tf
class M(tf.Module):
    def __init__(self): self.weights = tf.Variable(tf.random.uniform([{MODEL_BYTES // 4}]))
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def __call__(self, x): return {{"y": x + self.weights[0]}}
m = M(); tf.saved_model.save(m, {str(folder)!r}, signatures=m.__call__)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


KINDS = {
    "big": lambda folder, number: _write_pickle(folder, "big"),
    "small": lambda folder, number: _write_pickle(folder, "small"),
    "cyclic": lambda folder, number: _write_pickle(folder, "cyclic"),
    "onnx": _write_onnx,
    "tensorflow": _write_tensorflow,
}


def _in_process(part: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a part in a fresh process, and read its memory until it ends."""
    print(f"{part} {arguments}", flush=True)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "benchmarks.tools.model_cache_process", part, json.dumps(arguments), file.name]
        process = subprocess.Popen(command, cwd=REPOSITORY)
        highest = samples = 0
        statm = Path(f"/proc/{process.pid}/statm")
        while process.poll() is None:
            fields = statm.read_text().split()
            highest = max(highest, int(fields[1]) * os.sysconf("SC_PAGE_SIZE"))
            samples += 1
            time.sleep(SAMPLED_EVERY_S)
        if process.returncode:
            raise SystemExit(f"{part} failed, see above")
        found: dict[str, Any] = json.loads(Path(file.name).read_text())
    # The kernel knows the highest of all; reading now and then may miss it.
    return {**found, "highest": max(highest, found.get("peak", 0)), "samples": samples}


if __name__ == "__main__":
    main()
