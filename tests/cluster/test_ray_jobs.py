"""A job that loses a killed node and one that is cut off records every item once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.cluster.cluster_installation import OnRay
from harness.cluster.ray_cluster import RayNode
from harness.installations.chaos import CONFIG, HANDLER
from harness.installations.installation import write_project
from harness.installations.job_audit import mistakes
from harness.wait import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.processes, pytest.mark.timeout(600)]
ITEMS, BATCH, WORKERS = 6000, 10, 3
_CALL_BYTES = 16


def test_a_job_records_every_item_once_though_nodes_are_lost(on_ray: OnRay, tmp_path: Path) -> None:
    cortex, notes = on_ray.cortex, tmp_path / "notes"
    notes.mkdir()
    config = CONFIG.format(folder=notes, poison=[], pause_s=0.02)
    cortex.cortex("deploy", write_project(tmp_path / "project", HANDLER, config))
    job = submit(on_ray)

    def calls() -> int:
        return sum(path.stat().st_size for path in notes.glob("calls-*")) // _CALL_BYTES

    def until(share: float) -> None:
        wait_until(lambda: calls() >= share * ITEMS / BATCH, 120, f"{share} of the items were called")

    until(0.1)
    killed = node_with_workers(on_ray)
    killed.kill()
    until(0.3)
    said, cut_off = on_ray.said(), node_with_workers(on_ray)
    cut_off.partition()
    wait_until(lambda: f"node is lost node={cut_off.host}" in said(), 30, "the operator knows it")
    on_ray.restore(killed)
    until(0.6)
    said = on_ray.said()
    cut_off.heal()  # what it did meanwhile was given to others
    wait_until(lambda: f"node is up node={cut_off.host}" in said(), 60, "the operator follows it again")

    wait_until(lambda: status_of(on_ray, job)["end_time"], 120, "the job ends")
    status = status_of(on_ray, job)
    results = list(on_ray.client.job_results("chaos", job))
    assert mistakes(ITEMS, [], status, results, list(on_ray.client.dead_letters("chaos", job))) == []
    assert (notes / "completed").read_text() == "completed\n"


def submit(on_ray: OnRay) -> str:
    body = b"\n".join(map(b"%d".__mod__, range(ITEMS)))
    query = f"workers={WORKERS}&batch_size={BATCH}"
    reply = on_ray.cortex.post(f"/chaos?{query}", body=body, content_type="application/x-ndjson")
    assert reply.status == 200, reply
    return str(reply.json["job_id"])


def status_of(on_ray: OnRay, job: str) -> dict[str, Any]:
    reply = on_ray.cortex.post(f"/chaos?jobID={job}", method="GET")
    status: dict[str, Any] = reply.json["job_status"]
    return status


def node_with_workers(on_ray: OnRay) -> RayNode:
    return wait_until(lambda: on_ray.nodes_of("chaos"), 60, "a node has workers")[0]
