"""DEFT: layers are dealt to the ranks by how long selecting takes, and each rank selects in its own for all (arXiv 2307.03500).

Tensors of more than n/P elements are cut into P pieces. Every rank gives each piece a share of k in proportion to the norm of its own acc
there. A leader, rank t mod P, packs the pieces into P bins of about equal cost, size * log2(share), and tells the others; rank r selects
in bin (t + r) mod P. Pieces whose share is all of their elements are sent whole by all ranks, without positions. No position is selected
twice, so the union has about k elements at any P; only about, because norms differ between ranks.

Differs from the paper and the authors' code: shares that pieces are too short for go to the pieces of largest norm, where the code in
its last version drops them and so sends less than k (at density 1, too); positions travel unpadded, in the shortest code of places in a
bin; P = 1 sends the whole pieces, too; the leader's broadcast is P-1 messages; n is the size of a bucket, not of the model; NaN and Inf
are noticed, by the message that holds the counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from sparsync import Accumulator, Bucket, Comm, ErrorFeedbackScheme, Span, Update, kernels
from sparsync.collectives.values import exchange_counts, mean_at, mean_at_plan
from sparsync.comm.plan import Given, Plan, all_gather_exchange, counts_exchange, packet_tally, planned
from sparsync.core import ParameterSpan, check_density, count_for, phase, spans
from sparsync.feedback import Residuals
from sparsync.schemes.micro import padding
from sparsync.selection.exclusive import by_rank
from sparsync.wire import (
    ValueCodec,
    Values,
    check_values,
    decode_fixed_length,
    encode_fixed_length,
    fixed_length_nbytes,
)
from sparsync_lab.rivals.cltk import from_one_exchange


@dataclass
class DEFT(ErrorFeedbackScheme):
    """Deal layers to the ranks, each of which selects in its own for all: DEFT (arXiv 2307.03500).

    All ranks send their values at these positions; the mean divides by P. NaN or Inf on any rank makes every gradient NaN, and changes
    nothing else.
    """

    density: float = (
        0.01  # share of the elements in the union of all ranks; at least one element of each piece of a layer
    )
    values: Values = "float32"  # how values travel; what rounding drops stays in the residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds

    name = "deft"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)

    @classmethod
    def published(cls, density: float = 0.01) -> Self:
        """Return the same: the published algorithm."""
        return cls(density=density)

    def planned(self, given: Given) -> Plan:
        """Return the plan where all ranks select equally many in equally long bins; figures: "selected" and "lengths" by rank, "union"."""
        n, P = given.n, given.P
        pieces = len(pieces_of(given.parameters, P))
        counts = given.by_rank("selected") or [len(span) for span in spans(max(count_for(self.density, n), pieces), P)]
        lengths = given.by_rank("lengths") or [len(span) for span in spans(n, P)]
        union = given.figures.get("union", sum(counts))
        mean = mean_at_plan(union, given.dtype, P, ValueCodec(self.values))
        sizes = packet_tally(counts, lengths, lambda count, length: fixed_length_nbytes(min(count, length), length))
        return planned(
            given,
            [
                from_one_exchange(2 * pieces, P),
                counts_exchange(P),
                all_gather_exchange(sizes),
                *mean.exchanges,
            ],
            self.residual_nbytes(given),
            select=(max(lengths), -(-pieces // P)),
            passes_to_select=n + max(lengths),  # norms of all pieces
            encode=mean.encode,
            decode=mean.decode,
        )

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        n, P, t, x = bucket.grad.numel(), comm.size, bucket.step, acc.values
        pieces = pieces_of(bucket.layout, P)
        with phase("select"):
            lengths = [len(piece) for piece in pieces]
            share = shares(
                _norms(x, pieces) if acc.finite else [0.0] * len(pieces), lengths, count_for(self.density, n)
            )
        # Which bin each piece is in; P: sent whole by all.
        bins = _from_leader(packed(share, lengths, P), t % P, x.device, comm)
        held = by_rank([[piece for piece, its in enumerate(bins) if its == b] for b in range(P)], t)
        with phase("select"):
            mine = held[comm.rank]
            place = _places_of_largest(x, [pieces[piece] for piece in mine], [share[piece] for piece in mine])
        counts = exchange_counts(place.numel(), acc.finite, comm, x.device)
        within = [sum(lengths[piece] for piece in own) for own in held]
        with phase("encode"):
            packet = encode_fixed_length(place, within[comm.rank])
        packets = comm.all_gather(packet, list(map(fixed_length_nbytes, counts, within)))
        with phase("decode"):
            whole = [
                torch.arange(pieces[piece].start, pieces[piece].stop, device=x.device)
                for piece, its in enumerate(bins)
                if its == P
            ]
            found = [
                _positions(decode_fixed_length(each, count, length).long(), [pieces[piece] for piece in own])
                for each, count, length, own in zip(packets, counts, within, held, strict=True)
            ]
            index = torch.cat([*whole, *found])  # [K]
        mean, errors = mean_at(x, index, comm, ValueCodec(self.values))
        selected = place.numel() + sum(each.numel() for each in whole)
        details = {"padding": padding(counts), "whole": len(whole), "pieces": len(pieces)}
        return Update(mean, mean.index, selected, errors, details)


def pieces_of(layout: Sequence[ParameterSpan], P: int) -> list[Span]:
    """Return the spans of the parameters, those of more than n/P elements cut into P; none is empty."""
    n, pieces = layout[-1].span.stop, []
    for entry in layout:
        start, length = entry.span.start, len(entry.span)
        parts = spans(length, P if P * length > n else 1)
        pieces += [Span(start + part.start, start + part.stop) for part in parts if len(part)]
    return pieces


def shares(norms: Sequence[float], lengths: Sequence[int], k: int) -> list[int]:
    """Return how many elements each piece may send: of k in proportion to its norm, at least 1 and at most all.

    Largest norms first, each of what the ones before have left; what is left in the end goes to them in the same order. So they are k
    together, or the number of pieces if that is more.
    """
    order = sorted(range(len(norms)), key=lambda piece: (-norms[piece], piece))
    given, left, norm = [0] * len(norms), k, math.fsum(norms)
    for piece in order:
        wanted = min(left, int(left * norms[piece] / norm)) if norm > 0 else 0
        given[piece] = min(lengths[piece], max(1, wanted))
        left, norm = left - given[piece], norm - norms[piece]
    for piece in order:
        more = max(0, min(left, lengths[piece] - given[piece]))
        given[piece], left = given[piece] + more, left - more
    return given


def packed(share: Sequence[int], lengths: Sequence[int], P: int) -> list[int]:
    """Return the bin of each piece: the costliest first, each into the bin that has least; P for pieces that are sent whole."""
    cost = [length * max(1.0, math.log2(count)) for length, count in zip(lengths, share, strict=True)]
    bins, load = [P] * len(share), [0.0] * P
    for piece in sorted(range(len(share)), key=lambda piece: (-cost[piece], piece)):
        if share[piece] < lengths[piece]:
            bins[piece] = min(range(P), key=load.__getitem__)
            load[bins[piece]] += cost[piece]
    return bins


def _from_leader(bins: list[int], leader: int, device: torch.device, comm: Comm) -> list[int]:
    """Return the leader's `bins`, which it sends to all: 2 bytes a piece."""
    own = torch.tensor(bins if comm.rank == leader else [], dtype=torch.int16, device=device)
    counts = [len(bins) if rank == leader else 0 for rank in range(comm.size)]
    # A host sync: who examines what depends on it.
    return comm.all_gather(own, counts)[leader].tolist()


def _norms(x: Tensor, pieces: Sequence[Span]) -> list[float]:
    # A host sync, one for all pieces. In float64, where squares of the largest float32 are finite; those of float64 need a scale.
    scale = 2.0**-520 if x.dtype == torch.float64 and x.numel() and float(x.abs().max()) > 2.0**500 else 1.0
    norms = [torch.linalg.vector_norm(piece.of(x) * scale, dtype=torch.float64) for piece in pieces]
    return torch.stack(norms).tolist()


def _places_of_largest(x: Tensor, pieces: Sequence[Span], counts: Sequence[int]) -> Tensor:
    """Return where the `counts[i]` largest of each piece stand when the pieces stand after each other, int32, ascending."""
    places, start = [torch.empty(0, dtype=torch.int32, device=x.device)], 0
    for piece, count in zip(pieces, counts, strict=True):
        places.append(kernels.top_k(piece.of(x), count).index + start)
        start += len(piece)
    return torch.cat(places)


def _positions(place: Tensor, pieces: Sequence[Span]) -> Tensor:
    """Return where the elements at `place` in the concatenated pieces stand in the vector."""
    if not pieces:
        return place
    lengths = torch.tensor([len(piece) for piece in pieces], device=place.device)
    ends = lengths.cumsum(0)
    shift = torch.tensor([piece.start for piece in pieces], device=place.device) - (ends - lengths)
    return place + shift[torch.searchsorted(ends, place, right=True)]
