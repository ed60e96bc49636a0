"""What ranks tell each other before they exchange weights: where they are, whether their weights are finite, and their buffers."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from sparsync.base.scheme import Scheme
from sparsync.collectives.broadcast import broadcast
from sparsync.collectives.exchange import all_gather, all_reduce
from sparsync.comm.cost import recorded_cost
from sparsync.core import Bucket, Comm, Report
from sparsync.integrations.local_steps_weights import copy_bytes_, flat_bytes

Buffers = Literal["broadcast", "mean", "own"]
KEY = "agreement"


class Agreement(Scheme):
    """One message of three numbers and a sketch, if any, from every rank to every other, and then the buffers, if any.

    `reduce` leaves in `not_finite` the ranks whose weights hold NaN or Inf, in `sketches` what all ranks sent, and in `buffers` the common
    ones, unless some rank's weights are not finite.
    Raises RuntimeError, on all ranks, when ranks are at different steps or have applied different exchanges.
    """

    name = KEY

    def __init__(
        self,
        step: int,
        applied: int,
        finite: bool,
        buffers: Sequence[Tensor] = (),
        how: Buffers = "own",
        sketch: Tensor | None = None,
    ) -> None:
        self.own = (step, applied, int(finite))
        self.sketch = sketch  # [s] in float64
        self.sketches: list[Tensor] = []
        self.buffers = [each.detach().clone() for each in buffers] if how != "own" else []
        self.how = how
        self.not_finite: list[int] = []

    def bucket(self, step: int, device: torch.device) -> Bucket:
        """Return the bucket to be reduced: these numbers, in float64."""
        numbers = torch.tensor(self.own, dtype=torch.float64)
        return Bucket(KEY, torch.cat([numbers, *([] if self.sketch is None else [self.sketch])]).to(device), step)

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        with recorded_cost() as cost:
            counts = [bucket.grad.numel()] * comm.size
            # A host sync: all ranks decide on these.
            received = [row.cpu() for row in all_gather(bucket.grad, counts, comm)]
            rows = [tuple(int(each) for each in row[: len(self.own)].tolist()) for row in received]
            for rank, (step, applied, _) in enumerate(rows):
                if (step, applied) != self.own[:2]:
                    raise RuntimeError(
                        f"ranks came apart: rank {comm.rank} exchanges at step {self.own[0]} after {self.own[1]} exchanges, rank {rank} at "
                        f"step {step} after {applied}; call step() equally often on all ranks, or load the same checkpoint on all of them"
                    )
            self.not_finite = [rank for rank, (_, _, finite) in enumerate(rows) if not finite]
            self.sketches = [row[len(self.own) :] for row in received]
            if not self.not_finite:
                self._share_buffers(comm)
        return self.report(bucket, cost.total, details={"overflow": False})

    def _share_buffers(self, comm: Comm) -> None:
        averaged = [each for each in self.buffers if self.how == "mean" and each.is_floating_point()]
        first = [each for each in self.buffers if not any(each is other for other in averaged)]
        if first:
            copy_bytes_(first, broadcast(flat_bytes(first), comm))
        if averaged:
            flat = torch.cat([each.reshape(-1).double() for each in averaged])
            mean = all_reduce(flat, comm) / comm.size
            for each, part in zip(averaged, mean.split([each.numel() for each in averaged]), strict=True):
                each.copy_(part.view(each.shape))
