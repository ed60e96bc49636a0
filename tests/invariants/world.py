"""The worlds of sparsync.testing, and gradients that show which ranks are in a sum."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from invariants.table import BY_ID
from sparsync.testing.checks import check_conservation
from sparsync.testing.world import COUNT as COUNT
from sparsync.testing.world import NAMES as NAMES
from sparsync.testing.world import Step as Step
from sparsync.testing.world import flat_residual as flat_residual
from sparsync.testing.world import integer_sum as integer_sum
from sparsync.testing.world import integers as integers
from sparsync.testing.world import layout as layout
from sparsync.testing.world import reals as reals
from sparsync.testing.world import run as run
from sparsync.testing.world import same_bits as same_bits
from sparsync.testing.world import started as started


def marks(P: int, n: int, steps: int, bits: int) -> list[list[Tensor]]:
    """Make 2^r for rank r in every element, so that a sum's bits show its ranks; with few bits, only some ranks at each step."""
    groups = -(-P // bits)
    return [
        [torch.full((n,), float(2 ** (rank % bits)) if rank // bits == step % groups else 0.0) for rank in range(P)]
        for step in range(steps)
    ]


def assert_mass(steps: Sequence[Step], before: Tensor) -> None:
    """Check conservation at each step: residuals + P x written gradients == previous residuals + gradients."""
    check_conservation(steps, before)


@cache
def marked(id: str, P: int) -> tuple[Step, ...]:
    """Run some steps of a row without a residual, on marks, in a world of P ranks; the result is cached."""
    row = BY_ID[id]
    return tuple(run(started(row.make(), P), marks(P, COUNT, row.observes + 2, row.wire_bits)))
