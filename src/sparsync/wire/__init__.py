"""Packets of positions and values: bytes out of a Sparse, and a Sparse out of bytes."""
