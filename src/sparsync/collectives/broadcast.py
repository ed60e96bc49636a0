"""A broadcast from rank 0: one chunk goes to each rank, then all gather them, so that no rank sends all of it to all others."""

import torch
from torch import Tensor

from sparsync.comm.cost import costs
from sparsync.comm.metered import all_gather_cost, all_to_all_cost
from sparsync.core import Comm, Cost, spans


def broadcast_cost(x: Tensor, comm: Comm) -> Cost:
    """Return the cost of `broadcast`."""
    if comm.size == 1 or not x.numel():
        return Cost()
    nbytes = [len(chunk) * x.element_size() for chunk in spans(x.numel(), comm.size)]
    scattered = all_to_all_cost(nbytes if comm.rank == 0 else [0] * comm.size, comm.rank)
    return scattered + all_gather_cost(nbytes[comm.rank], comm.size)


@costs(lambda _, x, comm: broadcast_cost(x, comm))
def broadcast(x: Tensor, comm: Comm) -> Tensor:
    """Return rank 0's `x` [n] on every rank; n and the type are the same on all of them.

    Steps: 2, a scatter and an all-gather
    Bytes sent per rank: (P-1)/P * nbytes(x), and the same again on rank 0
    """
    if comm.size == 1 or not x.numel():
        return x
    chunks = spans(x.numel(), comm.size)
    parts = [chunk.of(x) if comm.rank == 0 else x[:0] for chunk in chunks]
    own = comm.all_to_all(parts, [len(chunks[comm.rank]), *[0] * (comm.size - 1)])[0]
    return torch.cat(comm.all_gather(own.contiguous(), [len(chunk) for chunk in chunks]))
