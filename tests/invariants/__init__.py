"""The invariants of sparsync.testing on the table of our schemes, and further promises of our schemes."""
