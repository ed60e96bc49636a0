"""The mean of selections, shared by SparseLoCo and DeMo: by position, over all ranks or over the senders."""

from dataclasses import replace

import torch
from torch import Tensor

from sparsync import Comm, kernels
from sparsync.collectives.values import Quantizer
from sparsync.core import Divisor, phase
from sparsync.kernels.rounding import lacking
from sparsync.schemes import Sparse
from sparsync.wire import decode_fixed_length, encode_fixed_length, fixed_length_nbytes


def mean_of_selections(own: Sparse, codec: Quantizer, divide_by: Divisor, comm: Comm) -> tuple[Sparse, Tensor]:
    """Compute the mean of all ranks' selections, which have equal sizes, and the rounding error of this rank's values, [k].

    "contributors" divides the sum at a position by the number of ranks that sent it, "ranks" by P.
    Steps: 1
    Bytes sent per rank: P-1 times the packet of this rank's elements
    """
    k, n, dtype, P = own.index.numel(), own.length, own.value.dtype, comm.size
    head = fixed_length_nbytes(k, n)
    with phase("encode"):
        # Send rounded values as their share of the mean, value / P: multiplying by P is exact, unlike a mean of decoded values.
        values = codec.encode(own.value if codec.exact else own.value / P)
        packet = torch.cat([encode_fixed_length(own.index, n), values])
    packets = comm.all_gather(packet, [packet.numel()] * P)
    with phase("decode"):
        gathered = [
            Sparse(decode_fixed_length(each[:head], k, n), codec.decode(each[head:], k, dtype), n) for each in packets
        ]
        union = kernels.coalesce(gathered)  # in rank order, so the same bits on every rank
        share = 1 if codec.exact else P
        if divide_by == "ranks":
            mean = replace(union, value=union.value / P if codec.exact else union.value)
        else:
            senders = kernels.coalesce([replace(each, value=torch.ones_like(each.value)) for each in gathered])
            mean = replace(union, value=union.value * share / senders.value)
        return mean, lacking(own.value, codec.decode(values, k, dtype), share)


def check_per_tile(per_tile: object) -> None:
    """Raise ValueError unless `per_tile` is a positive integer."""
    if not isinstance(per_tile, int) or isinstance(per_tile, bool) or per_tile < 1:
        raise ValueError(
            f"per_tile must be a whole number of at least 1, what a rank sends of each tile, got {per_tile!r}"
        )
