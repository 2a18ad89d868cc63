"""Measures cortex against other Python model servers; see README.md. Nothing here is part of the product."""
