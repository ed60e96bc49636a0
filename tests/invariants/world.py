"""Gradients that show which ranks are in a sum."""

from functools import cache

import torch
from torch import Tensor

from invariants.table import BY_ID
from sparsync.testing.world import COUNT, Step, run, started


def marks(P: int, n: int, steps: int, bits: int) -> list[list[Tensor]]:
    """Make 2^r for rank r in every element, so that a sum's bits show its ranks; with few bits, only some ranks at each step."""
    groups = -(-P // bits)
    return [
        [torch.full((n,), float(2 ** (rank % bits)) if rank // bits == step % groups else 0.0) for rank in range(P)]
        for step in range(steps)
    ]


@cache
def marked(id: str, P: int) -> tuple[Step, ...]:
    """Run some steps of a row without a residual, on marks, in a world of P ranks; the result is cached."""
    row = BY_ID[id]
    return tuple(run(started(row.make(), P), marks(P, COUNT, row.observes + 2, row.wire_bits)))
