"""SparseLoCo's compressor: the largest elements of each tile of 64 x 64, in 2 bits, with a residual that decays (arXiv 2508.15706).

The paper exchanges the change of weights over 30 local steps; this is what it does to one such change, or to a gradient.

Differs from the paper: positions travel in Elias-Fano code, about 2 + log2(1/d) bits, not in 12; the four means are those of a
parameter; a smaller tile sends the same share; and no rank's update is clipped to the median norm of all. `divide_by="ranks"` with
`decay=1.0` makes it an error feedback that conserves what comes in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Self

from sparsync import kernels
from sparsync.base.error_feedback import ErrorFeedbackScheme, Update
from sparsync.comm.plan import Given, Plan
from sparsync.core import Bucket, Comm, Sparse
from sparsync.feedback import Accumulator, Residuals
from sparsync.phases import phase
from sparsync.schemes.tile_parts import Divisor, check_divisor, mean_of_selections, planned_in_tiles
from sparsync.selection.density import check_density
from sparsync.selection.tiles import SIZE, selected_in_tiles, tiles_of
from sparsync.wire.bin_means import BinMeans
from sparsync.wire.values import ValueCodec, Values

TileValues = Literal["bins"] | Values


@dataclass
class SparseLoCo(ErrorFeedbackScheme):
    """Send the share `density` of each tile, of largest magnitude, to all; the mean at a position is that of the ranks that sent it.

    NaN or Inf on any rank shows in the gradient of every rank and changes nothing else. A rollback returns to each rank what it has sent.
    """

    density: float = 64 / SIZE  # share of each tile that a rank sends, rounded up; the paper's
    # Share of the residual that joins the next gradient, by which a rule with local steps forgets what is out of date; the paper's.
    decay: float = 0.95
    values: TileValues = "bins"  # "bins": in 2 bits; or another format
    divide_by: Divisor = "contributors"  # as published; "ranks" conserves what comes in
    residuals: Residuals = "float32"

    name = "sparse_loco"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_divisor(self.divide_by)
        allowed = ("bins", *get_args(Values))
        if self.values not in allowed:
            raise ValueError(f"values must be one of {', '.join(allowed)}, got {self.values!r}")
        self._sent: dict[str, Sparse] = {}  # what this rank sent in the last step of each bucket

    @classmethod
    def published(cls, density: float = 64 / SIZE) -> Self:
        """Return the same: the published rule is the plain setting."""
        return cls(density=density)

    def planned(self, given: Given) -> Plan:
        counts, tiles = selected_in_tiles(given.parameters, self.density)
        codec = BinMeans(tuple(counts)) if self.values == "bins" else ValueCodec(self.values)
        return planned_in_tiles(given, sum(counts), tiles * SIZE, codec, self.residual_nbytes(given))

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        n, tiles, values = bucket.grad.numel(), tiles_of(bucket.layout), acc.values
        codec = BinMeans(tiles.parameter_counts(self.density)) if self.values == "bins" else ValueCodec(self.values)
        with phase("select"):
            cut = tiles.take(values)
            index = tiles.largest(cut, self.density)
            own = Sparse(index.to(torch.int32), kernels.gather(cut.view(-1), index), cut.numel())
        mean, error = mean_of_selections(own, codec, self.divide_by, comm)
        place, inside = tiles.places(own.index)
        place, error = place[inside], error[inside]
        sent = own.value[inside] - error
        union = _ascending(*tiles.places(mean.index), mean.value, n)
        if self.divide_by == "contributors":
            # What its type drops is of a mean over senders, which no residual holds.
            union = replace(union, value=union.value.to(bucket.grad.dtype))

        def commit() -> None:
            self._sent[bucket.key] = Sparse(place, sent, n)

        return Update(union, place, place.numel(), [Sparse(place, error, n)], commit=commit)

    def rollback(self, bucket: Bucket) -> None:
        if self.divide_by == "ranks":
            super().rollback(bucket)
        elif bucket.key in self._sent:
            kernels.scatter_add_(self.feedback.residual_of(bucket), self._sent.pop(bucket.key))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: as Scheme
        super().load_state_dict(state)
        self._sent = {}


def _ascending(place: Tensor, inside: Tensor, value: Tensor, n: int) -> Sparse:
    """Return the elements at the places that are inside, in the order of the bucket."""
    found, order = place[inside].sort()
    return Sparse(found.to(torch.int32), value[inside][order], n)
