"""Messages beside steps and weights: step numbers, changed and non-finite parameters, buffers, and a few numbers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sparsync.collectives.values import broadcast
from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, Comm, Report
from sparsync.exchanges.weights import copy_bytes_, flat_bytes
from sparsync.runtime.connection import Reduction

KEY = "agreement"
IDLE, CHANGED, FROZEN = 0, 1, 2  # states of a parameter on one rank
_PACKED = 24  # parameters per number, at 2 bits; float64 holds 53 bits exactly


class CommonBuffers:
    """The common values of a model's buffers: rank 0's at an exchange, as under DistributedDataParallel."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = [each.detach().clone() for each in model.buffers()]

    def take(self, values: Iterable[Tensor]) -> None:
        """Make these values the common ones."""
        _copy_all_(self.values, values)

    def show(self) -> None:
        """Write the common values into the model."""
        _copy_all_(self.model.buffers(), self.values)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Put the common values into the model, and this rank's back afterwards."""
        before = [each.detach().clone() for each in self.model.buffers()]
        try:
            self.show()
            yield
        finally:
            _copy_all_(self.model.buffers(), before)


class Agreement(Reduction):
    """A few numbers from every rank to every other, then the buffers of rank 0, if any.

    `finite`: this rank's weights are finite. `parameters`: IDLE, CHANGED or FROZEN for each parameter name.
    `reduce` sets `not_finite`, the ranks whose weights are not finite; `idle`, the parameters that are frozen or that no rank has changed;
    and, if all ranks are finite, `buffers`, the common values.
    `reduce` raises RuntimeError, on all ranks, if ranks differ in their step, their number of exchanges or their frozen parameters.
    """

    name = KEY

    def __init__(
        self, step: int, applied: int, finite: bool, parameters: Mapping[str, int], buffers: Iterable[Tensor] = ()
    ) -> None:
        self.own, self.parameters = (step, applied, int(finite)), parameters
        self.buffers = [each.detach().clone() for each in buffers]
        self.not_finite: list[int] = []
        self.idle: frozenset[str] = frozenset()

    def bucket(self, step: int, device: torch.device) -> Bucket:
        """Return these numbers as the bucket to reduce, in float64."""
        numbers = torch.tensor((*self.own, *_packed(list(self.parameters.values()))), dtype=torch.float64)
        return Bucket(KEY, numbers.to(device), step)

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        comm, n = MeteredComm(comm), bucket.grad.numel()
        received = [row.cpu() for row in comm.all_gather(bucket.grad, [n] * comm.size)]  # a host sync
        rows = [tuple(int(each) for each in row.tolist()) for row in received]
        for rank, (step, applied, *_) in enumerate(rows):
            if (step, applied) != self.own[:2]:
                raise RuntimeError(
                    f"ranks are at different steps: rank {comm.rank} exchanges at step {self.own[0]} after {self.own[1]} exchanges, rank "
                    f"{rank} at step {step} after {applied}; call step() equally often on all ranks, attach with scaler= "
                    "if a GradScaler skips steps, or load one checkpoint on all ranks"
                )
        self.not_finite = [rank for rank, row in enumerate(rows) if not row[2]]
        self.idle = self._idle([_unpacked(row[len(self.own) :], len(self.parameters)) for row in rows])
        if self.buffers and not self.not_finite:
            copy_bytes_(self.buffers, broadcast(flat_bytes(self.buffers), comm))
        return Report(self.name, bucket.key, bucket.step, n, n, n, comm.sent, details={"overflow": False})

    def _idle(self, ranks: Sequence[Sequence[int]]) -> frozenset[str]:
        idle = []
        for name, states in zip(self.parameters, zip(*ranks, strict=True), strict=True):
            frozen = [rank for rank, state in enumerate(states) if state == FROZEN]
            if frozen and len(frozen) < len(states):
                raise RuntimeError(
                    f"{name} is frozen on ranks {frozen} and trained on the others; set its requires_grad to the same on all ranks"
                )
            if frozen or not any(states):
                idle.append(name)
        return frozenset(idle)


class Gathered(Reduction):
    """The numbers of each rank, as `rows` [P, n]."""

    name = "numbers"
    rows: Tensor

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        comm, n = MeteredComm(comm), bucket.grad.numel()
        self.rows = torch.stack(list(comm.all_gather(bucket.grad, [n] * comm.size)))
        return Report(self.name, bucket.key, bucket.step, n, n, n, comm.sent, details={"overflow": False})


class FirstRanks(Reduction):
    """The vector of rank 0."""

    name = "first"

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        comm, n = MeteredComm(comm), bucket.grad.numel()
        bucket.grad.copy_(broadcast(bucket.grad, comm))
        return Report(self.name, bucket.key, bucket.step, n, n, n, comm.sent, details={"overflow": False})


def _packed(states: Sequence[int]) -> list[int]:
    """Pack numbers from 0 to 3, `_PACKED` into one."""
    return [
        sum(state << 2 * place for place, state in enumerate(states[first : first + _PACKED]))
        for first in range(0, len(states), _PACKED)
    ]


def _unpacked(numbers: Sequence[int], count: int) -> list[int]:
    """Unpack the first `count` states: the inverse of `_packed`."""
    return [numbers[i // _PACKED] >> 2 * (i % _PACKED) & 3 for i in range(count)]


def _copy_all_(into: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for each, value in zip(into, values, strict=True):
        each.detach().copy_(value)
