"""Quality against the bits that a rank sends, for a list of methods, in one process without links: the command `sparsync frontier`."""
