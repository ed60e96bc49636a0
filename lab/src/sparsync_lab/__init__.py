"""The laboratory of sparsync: the command `sparsync`, which trains, measures and predicts over rate-limited links."""

from sparsync_lab.results import read_results

__all__ = ["read_results"]
