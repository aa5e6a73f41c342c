"""Measurements, a command each: ``python -m benchmarks.layers --help``."""
