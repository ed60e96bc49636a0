"""`sparsync probe`: measures a group of ranks for predictions, and writes what it found into a file."""
