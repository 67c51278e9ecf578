"""Benchmarks: numbers that the documentation quotes, measured side by side in one run."""
