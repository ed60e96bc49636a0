"""gTop-k: about the k largest sums over ranks, found by merging selections pairwise in a tree (Shi et al., ICDCS 2019, arXiv 1901.04359).

Every rank selects its k largest elements. In ceil(log2 P) rounds half of the ranks send their k sums to the other half, which keep the k
largest of each merge; the final sums are sent to all. Traffic grows with log2 P, and the result has k elements at any P.

Differs from the paper: there, an element that one merge dropped while it survived on another branch was cleared everywhere and so lost;
here the rank that dropped it adds it to its residual, so mass is conserved. P need not be a power of two. The learning rate is outside.
NaN and Inf count among the largest, reach all ranks, and leave residuals untouched.
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

    The result is about the k = density * n largest sums over the ranks' selections, divided by P; the rest stays in the residuals.
    NaN or Inf on any rank shows in the gradient of every rank, and leaves residuals unchanged.
    """

    density: float = 0.01  # share of elements that each rank selects, and that the result has; 0.001 in the paper
    values: Values = "float32"  # format of sent values, rounded at every hop; rounding errors stay in a residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses its rounding errors

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
    """Make the update that clears a rank's surviving selection, and returns the parts of survivors that the rank dropped.

    Every rank keeps its acc of elements that did not survive, so parts dropped there need no return.
    """
    cleared = own.index[kernels.isin(own.index, mean.index)]
    errors = [error for error in (at(part, mean.index) for part in dropped) if error.index.numel()]
    return Update(mean, cleared, own.index.numel(), errors, {"survived": cleared.numel()})
