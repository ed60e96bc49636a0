"""Benchmarks: each checks its results, and prints the physical limit measured in the same run."""
