"""gTop-k: about the k largest sums over ranks, found by merging selections pairwise in a tree (Shi et al., ICDCS 2019, arXiv 1901.04359).

Every rank selects its k largest elements. In ceil(log2 P) rounds half of the ranks send their k sums to the other half, which keep the k
largest of each merge; what is left in the end is sent to all. Traffic grows with log2 P, and the result has k elements at any P.

Differs from the paper: an element that a merge dropped, while it survived on another branch, was cleared everywhere and so lost; here the
rank that dropped it adds it to its residual, so mass is conserved. P need not be a power of two. The learning rate is outside. NaN and
Inf are among the largest, reach all ranks, and leave residuals untouched.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sparsync import Bucket, Comm, ErrorFeedbackScheme, kernels
from sparsync.core import check_density, count_for
from sparsync.feedback import Residuals
from sparsync.schemes import Accumulator, Sparse, State, Update
from sparsync.wire import Elements, Values, check_values
from sparsync_lab.rivals.tree_top_k import at, tree_top_k


@dataclass(frozen=True)
class GTopK(ErrorFeedbackScheme):
    """Merge selections pairwise in a tree, k elements in the end: gTop-k (arXiv 1901.04359).

    What is written are about the k = density * n largest sums over what each rank selected, divided by P; the rest stays in the residuals.
    Where any rank holds NaN or Inf, it shows in the gradient of every rank, and residuals stay as they were.
    """

    density: float = 0.01  # share of elements each rank selects, and share in the result; 0.001 in the paper
    values: Values = "float32"  # how values travel, rounded at every hop; what rounding drops stays in a residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds

    name = "gtopk"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        own = acc.top_k(count_for(self.density, bucket.grad.numel()))  # [k]
        merged = tree_top_k(own, comm, Elements(self.values))
        return of_survivors(own, merged.mean, merged.dropped)


def of_survivors(own: Sparse, mean: Sparse, dropped: Sequence[Sparse]) -> Update:
    """Return the update in which a rank clears those of its selection that survived, and returns what it dropped of survivors.

    Of elements that did not survive, every rank keeps its own acc, so what was dropped there is nobody's to return.
    """
    cleared = own.index[kernels.isin(own.index, mean.index)]
    errors = [error for error in (at(part, mean.index) for part in dropped) if error.index.numel()]
    return Update(mean, cleared, own.index.numel(), errors, {"survived": cleared.numel()})
