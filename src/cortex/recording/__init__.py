"""Recordings: files with a share of an API's requests and their answers. `worker/monitoring` writes them."""
