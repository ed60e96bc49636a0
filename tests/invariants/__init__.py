"""The invariants: what must hold for every scheme in every world, one table and one file per kind of invariant."""
