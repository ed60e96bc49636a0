"""A broadcast from rank 0: one chunk goes to each rank, then all gather them, so that no rank sends all of it to all others."""

import torch
from torch import Tensor

from sparsync.comm.busiest import all_gather_exchange, near_equal, tally
from sparsync.comm.cost import costs
from sparsync.comm.metered import all_gather_cost, all_to_all_cost
from sparsync.comm.plan import Exchange
from sparsync.core import Comm, Cost, spans


def broadcast_cost(x: Tensor, comm: Comm) -> Cost:
    """Return the cost of `broadcast`."""
    if comm.size == 1 or not x.numel():
        return Cost()
    nbytes = [len(chunk) * x.element_size() for chunk in spans(x.numel(), comm.size)]
    scattered = all_to_all_cost(nbytes if comm.rank == 0 else [0] * comm.size, comm.rank)
    return scattered + all_gather_cost(nbytes[comm.rank], comm.size)


def broadcast_exchanges(count: int, element_nbytes: int, P: int) -> list[Exchange]:
    """Return the exchanges of `broadcast`: rank 0 is the busiest of the first."""
    chunks = near_equal(count, P)
    if P == 1 or not count:
        return []
    rest = element_nbytes * (count - max(chunks))
    scattered = Exchange("all_to_all", rest, min(P, count) - 1, 1, element_nbytes * len(spans(count, P)[1]))
    return [scattered, all_gather_exchange(tally(chunks, lambda length: element_nbytes * length))]


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
