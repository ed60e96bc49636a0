"""How selected elements look on the wire: bytes out of a Sparse, and a Sparse out of bytes."""
