"""Recordings: files with a share of an API's requests and their answers. `replica/monitoring` writes them."""
