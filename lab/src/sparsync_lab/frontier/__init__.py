"""The command `sparsync frontier`: quality against bits sent, for a list of methods, in one process without links."""
