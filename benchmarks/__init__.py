"""Benchmarks of cortex against other Python model servers; see README.md. Not part of the product."""
