"""DeMo: the largest components of the gradient's momentum in a cosine transform of each tile of up to 64 x 64 (arXiv 2411.19870).

Every rank keeps a momentum, which is a residual that hardly decays; components that it sends leave it. The optimizer is SGD without
momentum: with `sign` every element of the update has magnitude 1, as with a sign optimizer.

Tiles and counts follow the authors' program: the sides of a tile are the largest divisors, up to 64, of its matrix's sides, and a rank
sends 32 components of each tile, or all of a smaller one. So a vector of 64 m elements sends half of them, and one whose length is a prime
above 64 sends all.

Differs from the paper: the learning rate stays outside the momentum (`attach(optimizer=...)` follows it); positions are sent in Elias-Fano
code, where the authors' program sends 64 bits; and tensors of more than two dimensions, which it rejects, are matrices of the first
dimension and the rest. `divide_by="ranks"`, `sign=False` and `decay=1.0` turn it into error feedback that conserves its input, up to
rounding. Replicas are bit-identical if ranks have the same kind of processor.
"""

import math
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from sparsync import Bucket, Comm, ErrorFeedbackScheme, kernels
from sparsync.base.error_feedback import DenseUpdate
from sparsync.core import Divisor, check_one_of, phase
from sparsync.feedback import Residuals
from sparsync.schemes import Accumulator, Sparse, State
from sparsync.wire import ValueCodec, Values, check_values
from sparsync_lab.rivals.tiles import Tiles, check_per_tile, mean_of_selections, tiles_of


@dataclass(frozen=True)
class DeMo(ErrorFeedbackScheme):
    """Send the largest cosine components of each tile of a momentum that each rank keeps (arXiv 2411.19870).

    A rank sends `per_tile` components of each tile; the result is the inverse transform of their mean, or its sign. NaN or Inf on any
    rank shows in the gradient of every rank and changes nothing else. A rollback restores the sent components on each rank.
    """

    per_tile: int = 32  # components sent per tile, or all of a smaller tile; the paper's, which also tries 8
    decay: float = 0.999  # share of the momentum that is added to the next gradient; the paper's
    sign: bool = True  # write the sign of the result; as published
    divide_by: Divisor = "contributors"  # as published; "ranks" conserves the input
    values: Values = "float32"  # format of sent components
    residuals: Residuals = "float32"

    name = "demo"
    has_momentum = True
    follows_rate = True  # the authors' residual holds gradients times the learning rate

    def __post_init__(self) -> None:
        super().__post_init__()
        check_per_tile(self.per_tile)
        check_one_of("divide_by", self.divide_by, Divisor)
        check_values(self.values)

    @property
    def writes_steps(self) -> bool:
        """Whether the result's elements are about 1, as in Adam's steps, so that SGD takes a learning rate of Adam."""
        return self.sign

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> DenseUpdate:
        tiles, values = tiles_of(bucket.layout), acc.values
        with phase("select"):
            components = transformed(tiles.take(values), tiles)
            index = tiles.largest(components, self.per_tile)
            own = Sparse(index.to(torch.int32), kernels.gather(components, index), components.numel())
        mean, error = mean_of_selections(own, ValueCodec(self.values), self.divide_by, comm)
        with phase("decode"):
            sent = Sparse(own.index, own.value - error, own.length)
            written = _inverse(mean, tiles, values)
            values -= _inverse(sent, tiles, values)
            # The sign of NaN is 0. All ranks have the same numbers, so they decide the same.
            if self.sign and kernels.all_finite(written):
                written.sign_()
            if self.divide_by == "contributors":
                # The dtype's rounding is an error of a mean over senders, which no residual holds.
                written = written.to(bucket.grad.dtype)

        def commit() -> None:
            state.undo[bucket.key] = partial(_return, state, sent)

        return DenseUpdate(written, values, index.numel(), mean.index.numel(), commit=commit)


def _return(state: State, sent: Sparse, bucket: Bucket) -> None:
    """Return the sent components to the momentum."""
    momentum = state.residual(bucket)
    momentum += _inverse(sent, tiles_of(bucket.layout), bucket.grad.to(momentum.dtype))


def transformed(tiles: Tensor, layout: Tiles, inverse: bool = False) -> Tensor:
    """Compute the orthonormal cosine transform (DCT-II) of each tile along both axes, or its inverse: [n] as `tiles`."""
    result = torch.empty_like(tiles)
    for group in layout.groups:
        left, right = (_basis(side, tiles.dtype, tiles.device) for side in group.side)
        if inverse:
            left, right = left.mT, right.mT
        torch.matmul(left @ group.of(tiles), right.mT, out=group.of(result))
    return result


def _inverse(components: Sparse, tiles: Tiles, like: Tensor) -> Tensor:
    """Compute the vector, [n] as `like`, whose transformed tiles have these components and are zero elsewhere."""
    whole, vector = torch.zeros_like(like), torch.empty_like(like)
    kernels.put_(whole, components.index, components.value)
    tiles.put_(vector, transformed(whole, tiles, inverse=True))
    return vector


@lru_cache(maxsize=256)
def _basis(side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Compute the transform matrix of this length, [side, side]."""
    frequency, place = torch.arange(side, dtype=torch.float64)[:, None], torch.arange(side, dtype=torch.float64)
    basis = math.sqrt(2 / side) * torch.cos(math.pi / side * (place + 0.5) * frequency)
    basis[0] /= math.sqrt(2)
    return basis.to(dtype=dtype, device=device)
