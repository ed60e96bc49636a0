"""A training loop with attach on one rank, its record, and a comparison with the scheme without DDP."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.distributed import case
from helpers.known_gradients import Gradient, KnownGradients, Step, expected, noted, row, whole_numbers
from sparsync import Report
from sparsync.base.scheme import Scheme
from sparsync.runtime.handle import Handle
from sparsync.testing.world import same_bits

COUNT, N = 32, 61  # parameters, and their elements: odd, so that slices are uneven
NAMES = KnownGradients(COUNT, N).names
TIMEOUT_S = 120.0  # longer than any working step, even on a busy machine


def known(rank: int, step: int, name: str) -> Tensor:
    return whole_numbers(N, rank, step, name)


@dataclass
class RankRecord:
    """The record of one rank."""

    grads: Tensor  # [steps, elements]
    steps: dict[int, Step]
    reports: list[Report]
    residual: dict[str, Tensor]

    def check(self, wanted: Tensor, residual: Mapping[str, Tensor]) -> None:
        assert same_bits(self.grads, wanted)
        assert self.residual.keys() == residual.keys()
        assert all(same_bits(self.residual[name], residual[name]) for name in residual)
        for report in self.reports:
            assert report.sent == report.cost


class AttachedTraining:
    """A model with attach on this rank, and the record of its steps."""

    def __init__(
        self,
        scheme: str | Scheme,
        buckets: int = 4,
        dtype: torch.dtype = torch.float32,
        timeout_s: float = TIMEOUT_S,
        model: KnownGradients | None = None,
        scaler: GradScaler | None = None,
        **options: Any,
    ) -> None:
        self.model = model or KnownGradients(COUNT, N, dtype)
        cap_mb = COUNT // buckets * N * dtype.itemsize / 2**20  # DDP closes a bucket once it holds this much
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=cap_mb, **options)
        self.handle: Handle = sparsync.attach(
            self.ddp,
            row(scheme).make() if isinstance(scheme, str) else scheme,
            scaler=scaler,
            options=sparsync.Options(timeout_s=timeout_s, join_mb=0, dense_below=0),
        )
        self.buckets = noted(self.handle.state)
        self.rank = dist.get_rank(self.ddp.process_group)
        self.rows: list[Tensor] = []

    def step(self, inputs: Mapping[str, Tensor] | None = None) -> None:
        self.ddp.zero_grad()
        self.ddp(self.model.inputs(self.rank, len(self.rows)) if inputs is None else inputs).backward()
        self.rows.append(self.model.gradients().clone())

    def done(self) -> RankRecord:
        residual = self.handle.state.state_dict().get("residual", {})
        return RankRecord(torch.stack(self.rows), self.buckets, self.handle.reports(), residual)


def step_at_once(trainings: Sequence[AttachedTraining], step: int) -> None:
    """Step several models in one backward pass."""
    losses = []
    for training in trainings:
        training.ddp.zero_grad()
        losses.append(training.ddp(training.model.inputs(training.rank, step)))
    torch.stack(losses).sum().backward()
    for training in trainings:
        training.rows.append(training.model.gradients().clone())


def check(id: str, ranks: list[RankRecord], gradient: Gradient = known, keys: Sequence[str] = ()) -> None:
    """Check that all ranks did, at every step and bit for bit, what the scheme does without DDP."""
    wanted = expected(id, len(ranks), ranks[0].steps, NAMES, gradient, keys)
    for number, rank in enumerate(ranks):
        with case(f"rank {number}"):
            assert rank.steps == ranks[0].steps
            rank.check(wanted.grads, wanted.residuals[number])


def total(parts: Iterable[Tensor]) -> Tensor:
    """Add up tensors of equal shapes."""
    return torch.stack(list(parts)).sum(dim=0)
