"""`sparsync probe`: measure a group of ranks for predictions, and write the results to a file."""
