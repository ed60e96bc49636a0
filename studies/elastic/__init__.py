"""Random events in runs of `sparsync_elastic`, several in each, and what must hold afterwards."""

from studies.elastic.command import main as main

__all__ = ["main"]
