"""The invariants of sparsync.testing on the table of our schemes, and what only our schemes promise."""
