"""The comparison: the same training with several schemes, on the same ranks, one after the other."""
