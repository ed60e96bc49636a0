"""SparseLoCo's compressor: the largest elements of each tile of up to 64 x 64, in 2 bits, with a residual that decays (arXiv 2508.15706).

The paper exchanges the change of weights over 30 local steps; this compresses one such change, or a gradient. Tiles and counts follow the
authors' program: the sides of a tile are the largest divisors, up to 64, of its matrix's sides, and a rank sends 64 elements of each tile,
or all of a smaller one. So vectors are sent whole.

Differs from the paper: positions are sent in Elias-Fano code, not in 12 bits each; updates are not clipped to the ranks' median norm; and
the program cuts its four bins half a bin lower, at -2.25, -0.75 and 0.75 standard deviations. `divide_by="ranks"` with `decay=1.0` turns
it into error feedback that conserves its input.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsync import Bucket, Comm, ErrorFeedbackScheme, kernels
from sparsync.collectives.values import Quantizer
from sparsync.core import Divisor, check_one_of, phase
from sparsync.feedback import Residuals
from sparsync.kernels.rounding import rounded
from sparsync.schemes import Accumulator, Sparse, State, Update
from sparsync.wire import ValueCodec, Values
from sparsync_lab.rivals.tiles import check_per_tile, mean_of_selections, selected_in_tiles, tiles_of

TileValues = Literal["bins"] | Values
BINS = 4
WIDTH = 1.5  # of a bin, in standard deviations of the group: all four cover 6
_MEAN_NBYTES = 4


@dataclass(frozen=True)
class SparseLoCo(ErrorFeedbackScheme):
    """Send the largest elements of each tile of up to 64 x 64 in 2 bits, with a residual that decays (arXiv 2508.15706).

    A rank sends `per_tile` elements of each tile; the mean at a position is over the ranks that sent it. NaN or Inf on any rank shows in
    the gradient of every rank and changes nothing else. A rollback restores the sent elements on each rank.
    """

    per_tile: int = 64  # elements sent per tile, or all of a smaller tile; the paper's
    # Share of the residual that is added to the next gradient, so that local steps forget outdated parts; the paper's.
    decay: float = 0.95
    values: TileValues = "bins"  # "bins": 2 bits; or another format
    divide_by: Divisor = "contributors"  # as published; "ranks" conserves the input
    residuals: Residuals = "float32"

    name = "sparse_loco"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_per_tile(self.per_tile)
        check_one_of("divide_by", self.divide_by, Divisor)
        allowed = ("bins", *get_args(Values))
        if self.values not in allowed:
            raise ValueError(f"values must be one of {', '.join(allowed)}, got {self.values!r}")

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        n, tiles, values = bucket.grad.numel(), tiles_of(bucket.layout), acc.values
        codec = self.codec(selected_in_tiles(bucket.layout, self.per_tile))
        with phase("select"):
            cut = tiles.take(values)
            index = tiles.largest(cut, self.per_tile)
            own = Sparse(index.to(torch.int32), kernels.gather(cut, index), n)
        mean, error = mean_of_selections(own, codec, self.divide_by, comm)
        place, lost = tiles.places(own.index), None
        found, order = tiles.places(mean.index).sort()
        union = Sparse(found.to(torch.int32), mean.value[order], n)
        if self.divide_by == "contributors":
            # The dtype's rounding is an error of a mean over senders, which no residual holds.
            union = replace(union, value=union.value.to(bucket.grad.dtype))
            lost = Sparse(place, own.value - error, n)
        return Update(union, place, place.numel(), [Sparse(place, error, n)], lost=lost)

    def codec(self, counts: Sequence[int]) -> Quantizer:
        return BinMeans(tuple(counts)) if self.values == "bins" else ValueCodec(self.values)


@dataclass(frozen=True)
class BinMeans:
    """Values in 2 bits: each value's bin number, and for each group of values the mean of each bin.

    Packets hold groups of `counts` values: the float32 means of four bins per group, then 2 bits per value.

    Bins are cut at the group's mean and 1.5 standard deviations on either side. A group with NaN or Inf is decoded as NaN.
    """

    counts: tuple[int, ...]

    exact = False  # decoding returns the mean of a bin

    def encode(self, value: Tensor) -> Tensor:
        """Encode `value` [k] as a packet, uint8."""
        group, count = _groups(self.counts)
        group, count = group.to(value.device), count.to(value.device)
        wide = value.double()  # so that the order of sums over groups does not matter
        total = torch.zeros_like(count).index_add_(0, group, wide)
        centre = total / count
        off = wide - centre[group]
        deviation = (torch.zeros_like(count).index_add_(0, group, off * off) / count).sqrt()
        finite = deviation.isfinite()[group]
        place = off / (WIDTH * deviation[group]).clamp(min=torch.finfo(torch.float32).tiny)
        code = torch.where(finite, place.clamp(-BINS / 2, BINS / 2 - 1).floor() + BINS / 2, 0.0).long()
        bin = BINS * group + code
        held = torch.zeros(BINS * len(self.counts), dtype=torch.float64, device=value.device)
        sums, members = held.index_add(0, bin, wide), held.index_add(0, bin, torch.ones_like(wide))
        means = rounded(sums / members.clamp(min=1), torch.float32)
        means[~means.isfinite()] = torch.nan
        pairs = pad(code.to(torch.uint8), (0, -code.numel() % 4)).view(-1, 4)
        packed = pairs[:, 0] | pairs[:, 1] << 2 | pairs[:, 2] << 4 | pairs[:, 3] << 6
        return torch.cat([means.view(torch.uint8), packed])

    def decode(self, packet: Tensor, k: int, dtype: torch.dtype) -> Tensor:
        """Decode the `k` values of a packet in `dtype`. Raises RuntimeError if the packet has another length."""
        if packet.numel() != self.nbytes(k, dtype):
            raise RuntimeError(
                f"{k} values in {len(self.counts)} groups take {self.nbytes(k, dtype)} bytes, the packet has {packet.numel()}; "
                "sender and receiver must agree on the layout"
            )
        head = BINS * _MEAN_NBYTES * len(self.counts)
        means = packet[:head].clone().view(torch.float32).to(dtype)
        shifts = torch.arange(0, 8, 2, device=packet.device, dtype=torch.uint8)
        code = ((packet[head:, None] >> shifts) & 3).view(-1)[:k]
        return means[BINS * _groups(self.counts)[0].to(packet.device) + code]

    def nbytes(self, k: int, dtype: torch.dtype) -> int:  # dtype: as other codecs
        """Compute the bytes of `k` values."""
        return BINS * _MEAN_NBYTES * len(self.counts) + -(-k // 4)


@lru_cache(maxsize=256)
def _groups(counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Compute the group of each value, int64 [k], and the size of each group, float64."""
    sizes = torch.tensor(counts, dtype=torch.int64)
    return torch.repeat_interleave(sizes), sizes.double()
