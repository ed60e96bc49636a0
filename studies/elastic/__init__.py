"""Disturb runs of `sparsync_elastic` with several random events each, and check them afterwards."""

from studies.elastic.command import main as main

__all__ = ["main"]
