"""An all-gather of shards that change little from one time to the next, such as parameters: their owners send rounded differences.

Every rank holds an estimate of all shards, the same bits everywhere. An owner sends the difference between its shard and the estimate, and
all ranks add what was decoded. What rounding drops stays in the owner's next difference: error feedback without a residual, as in EF21
(arXiv:2106.05203) for gradients. ZeRO++ (arXiv:2306.10209) instead rounds the parameters themselves, at each all-gather anew.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from sparsync import phases
from sparsync.comm.metered import all_gather_cost
from sparsync.core import Comm, Cost
from sparsync.wire.values import ValueCodec


def gather_differences_cost(m: int, dtype: torch.dtype, codec: ValueCodec, P: int) -> Cost:
    """Return the cost of `gather_differences`."""
    return all_gather_cost(codec.nbytes(m, dtype), P)


def gather_differences(shard: Float[Tensor, " m"], held: Float[Tensor, " n"], codec: ValueCodec, comm: Comm) -> None:
    """Move `held` [P m], chunk r of which estimates the shard of rank r, towards the shards, in place and by the same bits everywhere.

    An exact codec sends the shards themselves: `held` becomes what the ranks have, bit for bit, whatever it was. Otherwise it must be the
    same on all ranks. NaN and Inf show on all ranks, in the formats below 16 bits throughout their block of 256; an element that is not
    finite counts as zero the next time, so that it recovers when its owner does.

    Steps: P-1
    Bytes sent per rank: (P-1) codec.nbytes(m)
    """
    m, wide = shard.numel(), torch.promote_types(shard.dtype, torch.float32)
    chunks = held.view(comm.size, m)
    with phases.phase("encode"):
        if not codec.exact:
            held.nan_to_num_(0.0, 0.0, 0.0)
            shard = shard.to(wide) - chunks[comm.rank]
        packet = codec.encode(shard)
    received = comm.all_gather(packet, [packet.numel()] * comm.size)
    with phases.phase("decode"):
        for chunk, theirs in zip(chunks, received, strict=True):
            decoded = codec.decode(theirs, m, shard.dtype)
            if codec.exact:
                chunk.copy_(decoded)
            else:
                chunk.add_(decoded)
