"""What a user writes: cortex.yaml and the project folder, read into checked, frozen models."""
