"""Parse and validate `cortex.yaml` and the project folder."""
