"""Ok-Topk with exact selections: k sums in every step, bounded traffic, and two exchanges. A variant of `oktopk` (arXiv 2201.07598).

Every rank owns a region of the vector. Ranks send their largest elements to the owners of the regions, who add them up; the k largest
sums of all regions survive and are gathered. A rank clears what it contributed to a survivor; everything else stays in its residual.

Differs from the paper, so that traffic has a bound, nothing drifts, and a step waits for two exchanges:
- Selections are exact in every step. The last threshold is only a starting point, so the scale and its changes do not matter.
- Elements of the region that a rank owns need not be sent, so all of them count. The k (P-1)/P elements that it may send are the
  largest outside.
- Equally many sums survive in every region, so the ranks need not agree on counts before gathering, nor balance them.
- Regions move at every step, without traffic, so that equal counts approach one threshold for all regions: a profile of past survivors,
  whose positions all ranks know, weighs the survivors of a region by the smallest sum among them (`selection.shares`).
- Counts travel in the headers of packets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from sparsync.base.error_feedback import DenseUpdate, ErrorFeedbackScheme, Update, everything
from sparsync.base.scheme import ReduceScatterScheme
from sparsync.base.state import State
from sparsync.collectives import sparse_allreduce
from sparsync.collectives.sparse_allreduce import details
from sparsync.core import Bucket, Comm, Span, Sparse, check_density, count_for, exact_divisor, or_found_inf, phase
from sparsync.feedback import Accumulator, Residuals
from sparsync.kernels import operations as kernels
from sparsync.kernels.rounding import lacking
from sparsync.selection.shares import (
    Profile,
    before_blocks,
    equal_shares,
    levels_of,
    profile_memory,
    relative_magnitudes,
    smallest_of,
)
from sparsync.wire import Elements, Values, check_values

_LEVEL_BITS = 31  # precision of a region's smallest surviving sum


@dataclass(frozen=True)
class ExactOkTopk(ErrorFeedbackScheme):
    """Write the k = density * n largest sums of all ranks' selections, divided by P; the rest stays in the residuals.

    Every region contributes k/P sums, or all non-zero ones if these are fewer. In words of 4 bytes (a float32 value or a position),
    counts and lengths included, no rank sends more than 4k (P-1)/P + 9 (P-1) in any step, whatever the gradients.
    If any rank has NaN or Inf, all ranks fill the gradient with NaN, so that a loss scaler finds it, and residuals and regions
    do not change.
    """

    density: float = 0.01  # k/n, of a rank's selection and of the result
    dense_steps: int = 0  # first steps that reduce everything
    values: Values = "float32"  # format of values; rounding errors stay in the residuals
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses their rounding errors

    name = "exact_oktopk"
    may_send_whole = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)
        if self.dense_steps < 0:
            raise ValueError(f"dense_steps must be at least 0, got {self.dense_steps}")

    def reduce_scatter_form(self) -> ReduceScatterScheme:
        from sparsync.schemes.sharded import OkTopkReduceScatter

        return OkTopkReduceScatter(self)

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update | DenseUpdate:
        n, P, rank, codec = bucket.grad.numel(), comm.size, comm.rank, Elements(self.values)
        k, control = count_for(self.density, n), state.shared_state("control", Control, bucket, P)
        if bucket.step < self.dense_steps:
            return replace(everything(acc, comm), commit=control.advance)
        regions, profile = control.regions(n, P), state.shared_state("profile", Profile, bucket, P)
        # 1: the largest elements outside this rank's region; inside it all elements count, at no cost
        own, shares = regions[rank], equal_shares([len(region) for region in regions], k, control.t)
        mine = acc.top_k_nonzero(max(1, k - k // P), skip=own)
        region = own.of(acc.values)
        # 2: owners add up what they receive
        reduced = sparse_allreduce.split_and_reduce_(region, mine, regions, comm, codec, undoable=True)
        # 3: the largest sums of every region survive; then restore this rank's values in its region
        sums = acc.top_k_nonzero_of(region, shares[rank], "sums")
        with phase("select"):
            assert reduced.before is not None
            kernels.put_(region, reduced.before.index, reduced.before.value)
            # NaN and Inf are selected first.
            finite = acc.is_finite & sums.value.isfinite().all()
            note = or_found_inf(levels_of(smallest_of(sums.value), _LEVEL_BITS), finite)
        # 4: all ranks gather the survivors of all regions
        share = replace(sums, value=sums.value / exact_divisor(sums.value, P))
        gathered = sparse_allreduce.gather_survivors(share, note, regions, n, comm, codec)
        parts, levels = gathered.parts, gathered.notes
        held = [part.index.numel() for part in parts]
        mean = Sparse(torch.cat([part.index for part in parts]), torch.cat([part.value for part in parts]), n)
        # 5: contributions to survivors leave the residuals. If all non-zero sums of a region survive, so do its zero sums
        whole = [have < wanted or wanted == len(span) for have, wanted, span in zip(held, shares, regions, strict=True)]
        kept = replace(mine, value=_kept(mine, mean, reduced, whole))
        everywhere = partial(torch.arange, own.start, own.stop, dtype=mine.index.dtype, device=mine.index.device)
        cleared = everywhere() if whole[rank] else parts[rank].index
        errors = [] if codec.exact else [Sparse(parts[rank].index, lacking(sums.value, gathered.decoded, P), n)]

        def commit() -> None:
            control.advance()
            if k == n or k < P:  # then equal widths are balanced, or regions take turns with one element
                return
            weights = relative_magnitudes([level >> (_LEVEL_BITS - 15) for level in levels])
            # A host sync: regions depend on it.
            profile.observe(before_blocks(mean.index, n).tolist(), held, weights, profile_memory(k, P))
            cut = profile.cut(n, P, least=2 * -(-k // P))
            control.boundaries = [span.start for span in cut[1:]]

        said = details(mine, held, held, reduced.incoming, rank)
        return Update(mean, cleared, mine.index.numel() + held[rank], errors, said, commit, replaced=[kept])


@dataclass
class Control:
    """The regions of one bucket; the same on all ranks."""

    t: int = 0  # steps
    boundaries: list[int] = field(default_factory=list)  # P-1; empty: equal widths

    def regions(self, n: int, P: int) -> tuple[Span, ...]:
        """Return the regions in rank order."""
        return sparse_allreduce.regions_of(self.boundaries or sparse_allreduce.equal_boundaries(n, P), n)

    def advance(self) -> None:
        """Count a step."""
        self.t += 1


def _kept(mine: Sparse, mean: Sparse, reduced: sparse_allreduce.Reduced, whole: Sequence[bool]) -> Tensor:
    """Return the residual at the positions of `mine`, [k]: rounding errors if they survived or lie in a `whole` region, else the values."""
    survived = kernels.isin(mine.index, mean.index)
    start = 0
    for count, all_sent in zip(reduced.outgoing, whole, strict=True):
        if all_sent:
            survived[start : start + count] = True
        start += count
    return torch.where(survived, 0.0 if reduced.error is None else reduced.error, mine.value)
