"""DeMo: the largest components of the gradient's momentum in a cosine transform of each tile of 64 x 64 (arXiv 2411.19870).

Every rank keeps a momentum of its own, which is a residual that hardly decays; what it sends leaves it. The optimizer is SGD without
momentum: with `sign` the update has magnitude 1 everywhere, as that of a sign optimizer.

Differs from the paper: the learning rate stays outside of the momentum (`attach(optimizer=...)` follows it); vectors are transformed in
pieces of 64; and edges of matrices that are no multiple of 64 by a transform of their own length. `divide_by="ranks"`, `sign=False`
and `decay=1.0` make it an error feedback that conserves what comes in, up to rounding. Replicas agree to the bit where ranks have the
same kind of processor.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from sparsync import kernels
from sparsync.base.error_feedback import DenseUpdate, ErrorFeedbackScheme
from sparsync.comm.plan import Given, Plan
from sparsync.core import Bucket, Comm, Sparse
from sparsync.feedback import Accumulator, Residuals
from sparsync.phases import phase
from sparsync.schemes.tile_parts import Divisor, check_divisor, mean_of_selections, planned_in_tiles
from sparsync.selection.density import check_density
from sparsync.selection.tiles import SIDE, SIZE, Tiles, selected_in_tiles, tiles_of
from sparsync.wire.values import ValueCodec, Values, check_values


@dataclass
class DeMo(ErrorFeedbackScheme):
    """Send the share `density` of each tile's cosine components, of largest magnitude, to all, and write the inverse of their mean.

    NaN or Inf on any rank shows in the gradient of every rank and changes nothing else. A rollback returns to each rank what it has sent.
    """

    density: float = 32 / SIZE  # share of each tile that a rank sends, rounded up; the paper's
    decay: float = 0.999  # share of the momentum that joins the next gradient; the paper's
    sign: bool = True  # write the sign of the result; as published
    divide_by: Divisor = "contributors"  # as published; "ranks" conserves what comes in
    values: Values = "float32"  # how components travel
    residuals: Residuals = "float32"

    name = "demo"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_divisor(self.divide_by)
        check_values(self.values)
        self._sent: dict[str, Sparse] = {}  # the components that this rank sent in the last step of each bucket

    @classmethod
    def published(cls, density: float = 32 / SIZE) -> Self:
        """Return the same: the published rule is the plain setting."""
        return cls(density=density)

    @property
    def has_momentum(self) -> bool:
        return True

    def planned(self, given: Given) -> Plan:
        counts, tiles = selected_in_tiles(given.parameters, self.density)
        length = tiles * SIZE
        plan = planned_in_tiles(given, sum(counts), length, ValueCodec(self.values), self.residual_nbytes(given))
        # Three transforms of all tiles, each a product from the left and one from the right.
        transformed = {"transform": 3 * length}
        return replace(
            plan,
            passes=plan.passes + 12 * length * given.value_nbytes,
            kernels={**plan.kernels, **transformed},
            calls={**plan.calls, "transform": 3},
        )

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> DenseUpdate:
        tiles, values = tiles_of(bucket.layout), acc.values
        with phase("select"):
            components = transformed(tiles.take(values), tiles).view(-1)
            index = tiles.largest(components, self.density)
            own = Sparse(index.to(torch.int32), kernels.gather(components, index), components.numel())
        mean, error = mean_of_selections(own, ValueCodec(self.values), self.divide_by, comm)
        with phase("decode"):
            sent = Sparse(own.index, own.value - error, own.length)
            written = _inverse(mean, tiles, values)
            values -= _inverse(sent, tiles, values)
            # The sign of NaN is 0. All ranks have the same numbers, so all decide the same.
            if self.sign and kernels.all_finite(written):
                written.sign_()
            if self.divide_by == "contributors":
                # What its type drops is of a mean over senders, which no residual holds.
                written = written.to(bucket.grad.dtype)

        def commit() -> None:
            self._sent[bucket.key] = sent

        n = values.numel()
        return DenseUpdate(written, values, min(n, index.numel()), min(n, mean.index.numel()), commit=commit)

    def rollback(self, bucket: Bucket) -> None:
        if bucket.key in self._sent:
            residual = self.feedback.residual_of(bucket)
            residual += _inverse(self._sent.pop(bucket.key), tiles_of(bucket.layout), bucket.grad.to(residual.dtype))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: as Scheme
        super().load_state_dict(state)
        self._sent = {}


def transformed(tiles: Tensor, layout: Tiles, inverse: bool = False) -> Tensor:
    """Return the orthonormal cosine transform (DCT-II) of each tile, or its inverse: [count, 64, 64].

    Along both axes, of pieces of a vector along their own only.
    """
    bases = _bases(tiles.dtype, tiles.device)
    rows = torch.where(layout.vector, 0, layout.rows)  # which basis
    for kinds, left in ((layout.columns, False), (rows, True)):
        result = _product(tiles, bases[SIDE], left, inverse)
        other = (kinds != SIDE).nonzero().view(-1).to(tiles.device)
        if other.numel():
            result[other] = _product(tiles[other], bases[kinds.to(tiles.device)[other]], left, inverse)
        tiles = result
    return tiles


def _product(tiles: Tensor, basis: Tensor, left: bool, inverse: bool) -> Tensor:
    """Return basis @ tile or tile @ basis^T; with `inverse` those of the transposed basis."""
    if left:
        return (basis.mT if inverse else basis) @ tiles
    return tiles @ (basis if inverse else basis.mT)


def _inverse(components: Sparse, tiles: Tiles, like: Tensor) -> Tensor:
    """Return the vector, [n] as `like`, whose transformed tiles have these components and are zero elsewhere."""
    whole = like.new_zeros(components.length)
    kernels.put_(whole, components.index, components.value)
    vector = torch.empty_like(like)
    tiles.put_(vector, transformed(whole.view(-1, SIDE, SIDE), tiles, inverse=True))
    return vector


@lru_cache(maxsize=8)
def _bases(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the transforms of lengths 1 to 64, each in the corner of a matrix that is zero elsewhere, after the identity: [65, 64, 64]."""
    bases = torch.zeros(SIDE + 1, SIDE, SIDE, dtype=torch.float64)
    bases[0] = torch.eye(SIDE, dtype=torch.float64)
    for m in range(1, SIDE + 1):
        frequency, place = torch.arange(m, dtype=torch.float64)[:, None], torch.arange(m, dtype=torch.float64)
        basis = math.sqrt(2 / m) * torch.cos(math.pi / m * (place + 0.5) * frequency)
        basis[0] /= math.sqrt(2)
        bases[m, :m, :m] = basis
    return bases.to(dtype=dtype, device=device)
