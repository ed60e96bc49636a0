"""The comparison: one training with several schemes, in turn on the same ranks."""
