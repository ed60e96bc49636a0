"""An all-reduce of a large tensor over gloo in pieces: while one is added up, the next ones travel, and the link is never idle."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from sparsync.comm.channels import Channels, Waits, wait_for
from sparsync.core import Span, spans, sum_in_rank_order

PIECE_NBYTES = 2**18
_TAG = 2**29  # and the bucket's number: of pieces, whose receives are posted when the all-reduce begins


def all_reduce_in_pieces(
    x: Tensor, channels: Channels, rank: int, size: int, number: int, settle: Callable[[], None], waits: Waits
) -> Tensor:
    """Return the sum of `x` [n] over ranks, added in rank order: chunk r on rank r, which sends its sum to all.

    `settle` and `waits` are as of `Channels.exchange`; `number` is the bucket's. Sends what `Lane.all_reduce` sends, in more messages.
    """
    total, tag = torch.empty_like(x), _TAG + number
    chunks, sources = spans(x.numel(), size), [(rank - i) % size for i in range(1, size)]
    count = -(-len(chunks[0]) * x.element_size() // PIECE_NBYTES)  # of pieces in a chunk
    pieces = [
        [Span(chunk.start + each.start, chunk.start + each.stop) for each in spans(len(chunk), count)]
        for chunk in chunks
    ]
    own = chunks[rank]
    arrived = {source: x.new_empty(len(own)) for source in sources}

    def receive(into: Tensor, source: int) -> tuple[dist.Work, int]:
        return channels.receive(into.view(torch.uint8), source, tag), source

    adding = [
        [receive(arrived[source][each.start - own.start : each.stop - own.start], source) for source in sources]
        for each in pieces[rank]
    ]
    gathering = [receive(pieces[source][place].of(total), source) for place in range(count) for source in sources]
    settle()
    sends = [
        (channels.send(pieces[to][place].of(x).view(torch.uint8), to, tag), to)
        for place in range(count)
        for to in reversed(sources)
    ]
    for each, works in zip(pieces[rank], adding, strict=True):
        with waits():
            for work, source in works:
                wait_for(work, f"rank {source}")
        inside = slice(each.start - own.start, each.stop - own.start)
        addends = [each.of(x) if source == rank else arrived[source][inside] for source in range(size)]
        mine = each.of(total)
        mine.copy_(sum_in_rank_order(addends))
        sends += [(channels.send(mine.view(torch.uint8), to, tag), to) for to in reversed(sources)]
    with waits():
        for work, other in [*gathering, *sends]:
            wait_for(work, f"rank {other}")
    return total
