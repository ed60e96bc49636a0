"""The plain exchanges of a communicator, with their closed forms."""

from collections.abc import Sequence

from torch import Tensor

from sparsync.comm.cost import costs
from sparsync.comm.metered import all_gather_cost, all_reduce_cost, all_to_all_cost
from sparsync.core import Comm


@costs(lambda _, x, counts, comm: all_gather_cost(x.nbytes, comm.size))
def all_gather(x: Tensor, counts: Sequence[int], comm: Comm) -> list[Tensor]:
    """Return every rank's `x`, in rank order; `counts[r]`, the elements of rank r's, are known to all.

    Steps: 1
    Bytes sent per rank: (P-1) * nbytes(x)
    """
    return comm.all_gather(x, counts)


@costs(lambda _, x, comm: all_reduce_cost(x.numel(), x.element_size(), comm.size, comm.rank))
def all_reduce(x: Tensor, comm: Comm) -> Tensor:
    """Return the sum of `x` over ranks, the same bits on every rank.

    Steps: 2 (P-1)
    Bytes sent per rank: 2 (P-1)/P * nbytes(x)
    """
    return comm.all_reduce(x)


@costs(lambda _, parts, counts, comm: all_to_all_cost([part.nbytes for part in parts], comm.rank))
def all_to_all(parts: Sequence[Tensor], counts: Sequence[int], comm: Comm) -> list[Tensor]:
    """Return what each rank sent here, in rank order; `counts[r]`, the elements that come from rank r, are known beforehand.

    Steps: 1
    Bytes sent per rank: all parts but its own
    """
    return comm.all_to_all(parts, counts)
