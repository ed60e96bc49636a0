"""Benchmarks: each checks its result and prints the ceiling measured in the same run."""
