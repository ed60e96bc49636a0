"""Predict published and imagined set-ups: `sparsync simulate`."""
