"""ExDyna with exact counts: equally many elements from every partition, whose boundaries move freely. A variant of `exdyna`.

Equal counts need no exchange of counts and no padding. At every step all boundaries move so that the smallest selected magnitudes of the
partitions, which travel with the positions, become equal. In balance this selects as one threshold for all partitions would.
"""

from dataclasses import dataclass

import torch

from sparsync.base.state import State
from sparsync.core import Bucket, Comm, or_found_inf, phase, raise_if_found_inf
from sparsync.feedback import Accumulator
from sparsync.schemes.exact_micro import ExactMiCRO, Selection, gather_positions
from sparsync.selection.exclusive import Contiguous, budget, examine, rotation
from sparsync.selection.shares import (
    Profile,
    before_blocks,
    equal_shares,
    levels_of,
    profile_memory,
    relative_magnitudes,
    smallest_of,
)


@dataclass(frozen=True)
class ExactExDyna(ExactMiCRO):
    """Send as ExactMiCRO does, but equally many elements from every partition. Boundaries follow a profile of past selections.

    The settings are ExactMiCRO's. If any rank holds NaN or Inf, which the first message tells, every gradient becomes NaN and nothing
    else changes.
    """

    name = "exact_exdyna"

    def select(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Selection:
        """Agree with the other ranks on equally many positions from every partition. Raises NonFiniteError on all ranks."""
        n, P, t = bucket.grad.numel(), comm.size, bucket.step
        profile = state.shared_state("profile", Profile, bucket, P)
        with phase("select"):
            total = budget(self.density, n, t)
            cut = profile.cut(n, P, least=2 * -(-total // P))
            mine = examine(Contiguous(cut), comm.rank, t, acc.residual.device)
            counts = equal_shares(mine.lengths, total, t // P)
        (selected,) = acc.top_k_of_rows([mine.rows], [counts[comm.rank]], "partition")
        level = or_found_inf(levels_of(smallest_of(selected.value)), acc.is_finite)
        heads, places = gather_positions(level, selected.index, counts, mine.lengths, comm)
        # In the order of the partitions, so that positions ascend.
        ranks = [rotation(p, -t, P) for p in range(P)]
        with phase("decode"):
            positions = torch.cat([places[rank] + span.start for rank, span in zip(ranks, cut, strict=True)])
            # A host sync: boundaries follow from it.
            numbers = torch.cat([heads, before_blocks(positions, n)]).tolist()
            levels, before = numbers[:P], numbers[P:]
        raise_if_found_inf(levels)

        def commit() -> None:
            weights = relative_magnitudes([levels[rank] for rank in ranks])
            profile.observe(before, [counts[rank] for rank in ranks], weights, profile_memory(total, P))

        return Selection([positions], counts, commit)
