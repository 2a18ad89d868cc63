"""Add numbers: one file per batch, and at the end of the job one file with the total."""

import json
from pathlib import Path


class PythonPredictor:
    def __init__(self, config, job_spec):
        self.folder = Path(config["results"]) / job_spec["job_id"]
        self.parts = self.folder / "parts"
        self.parts.mkdir(parents=True, exist_ok=True)

    def predict(self, payload, batch_id):
        # Workers share no memory, and a batch may run again after a crash: a file named after the batch is visible to
        # all workers and counted once.
        (self.parts / f"{batch_id}.json").write_text(json.dumps(sum(payload)))

    def on_job_complete(self):
        sums = [json.loads(part.read_text()) for part in self.parts.glob("*.json")]
        (self.folder / "sum.json").write_text(json.dumps({"batches": len(sums), "sum": sum(sums)}))
