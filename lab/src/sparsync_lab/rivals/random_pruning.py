"""Fine-grained random pruning: each element of the gradient loses some ranks, drawn from a shared seed.

The study that SkipReduce's coarse chunks are compared with (thesis "Skip-Reduce", KAIST 2023, and doi 10.1145/3725843.3756092): it
tells how much gradient may be dropped, but a ring still carries every chunk, so it saves no traffic at all.
Differs from the authors' code: the draws come from a separate generator, not from torch's global one.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Self

from sparsync import Bucket, Comm, MeteredComm, Report, Scheme
from sparsync.comm.plan import Given, Plan, all_reduce_exchange, planned
from sparsync.core import Divisor, check_one_of, generator

Mode = Literal["complementary", "independent"]


@dataclass
class RandomPruning(Scheme):
    """Leave some ranks out of the mean of each element; saves no traffic, for comparison.

    What is written is the mean over the ranks that an element did not lose; one that lost all of them is zero.
    """

    name = "random_pruning"

    drop: float = 0.5  # share of the ranks each element loses, in [0, 1); the study tries 0.25, 0.375, 0.5, 0.75
    # one draw an element decides for all ranks, so each loses drop * P of them; or each rank draws
    mode: Mode = "complementary"
    divide_by: Divisor = "contributors"  # per element; the authors divide by ranks
    seed: int = 0  # the same on every rank

    def __post_init__(self) -> None:
        if not 0 <= self.drop < 1:
            raise ValueError(f"drop must be in [0, 1), the share of ranks each element loses, got {self.drop}")
        check_one_of("mode", self.mode, Mode)
        check_one_of("divide_by", self.divide_by, Divisor)

    @classmethod
    def published(cls, drop: float = 0.5, seed: int = 0) -> Self:
        """Return the authors' setting: complementary masks, divided by P."""
        return cls(drop=drop, divide_by="ranks", seed=seed)

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        grad, P = bucket.grad, comm.size
        if P == 1:
            return self.report(bucket)
        masks = [self._mask(bucket, rank, P) for rank in range(P)]  # every rank knows every mask
        comm = MeteredComm(comm)
        total = comm.all_reduce(grad.masked_fill(~masks[comm.rank], 0.0))
        contributors = torch.stack(masks).sum(dim=0)  # [n]
        grad.copy_(total / (contributors.clamp(min=1) if self.divide_by == "contributors" else P))
        selected, union = int(masks[comm.rank].sum()), int((contributors > 0).sum())
        return self.report(bucket, comm.sent, selected, union)

    def plan(self, given: Given) -> Plan:
        return planned(given, [all_reduce_exchange(given.n, given.itemsize, given.P)], accumulate=False)

    def _mask(self, bucket: Bucket, rank: int, P: int) -> Tensor:
        """Return where rank `rank` contributes, bool [n]; with one uniform u an element, it is dropped where (u - rank/P) mod 1 < drop."""
        n = bucket.grad.numel()
        if self.mode == "independent":
            u = torch.rand(n, generator=generator(self.seed, f"prune/{bucket.key}/{rank}", bucket.step))
            return (u >= self.drop).to(bucket.grad.device)
        u = torch.rand(n, generator=generator(self.seed, f"prune/{bucket.key}", bucket.step), dtype=torch.float64)
        return ((u - rank / P) % 1.0 >= self.drop).to(bucket.grad.device)
