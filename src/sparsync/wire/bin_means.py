"""Values in 2 bits: the number of a bin, and for each group of values the mean of each bin (SparseLoCo, arXiv 2508.15706)."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsync.kernels.rounding import rounded

BINS = 4
WIDTH = 1.5  # of a bin, in standard deviations of the group: all four span 6
_MEAN_NBYTES = 4


@dataclass(frozen=True)
class BinMeans:
    """Packets of values in groups of `counts` values each: the means of four bins, float32, for each group, then 2 bits a value.

    Bins are cut at the group's mean and 1.5 of its standard deviations on either side. A group with NaN or Inf is decoded as NaN.
    """

    counts: tuple[int, ...]

    exact = False  # decoding gives back the mean of a bin

    def encode(self, value: Tensor) -> Tensor:
        """Return the packet, uint8, of `value` [k]."""
        group, count = _groups(self.counts)
        group, count = group.to(value.device), count.to(value.device)
        wide = value.double()  # in which sums over groups depend on no order that matters
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
        """Return the `k` values of a packet in `dtype`. Raises RuntimeError when the packet has another length."""
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

    def nbytes(self, k: int, dtype: torch.dtype) -> int:  # as other codecs
        """Return the bytes of `k` values."""
        return BINS * _MEAN_NBYTES * len(self.counts) + -(-k // 4)


@lru_cache(maxsize=256)
def _groups(counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the group of each value, int64 [k], and the size of each group, float64."""
    sizes = torch.tensor(counts, dtype=torch.int64)
    return torch.repeat_interleave(sizes), sizes.double()
