"""InTurn: a quantized all-reduce of a different part of the elements at every step, in rotation.

All ranks know which part is next, so nothing is selected and no position travels. Elements that wait add up in the residuals of their
ranks. A hashed order spreads the parts over the whole vector, so that every layer has elements in every part. Choosing the same
elements on all ranks goes back to Random-k (arXiv 1809.07599); a fixed instead of a random order bounds how long an element waits.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparsync.base.error_feedback import DenseUpdate, ErrorFeedbackScheme
from sparsync.base.state import State
from sparsync.collectives.values import QuantizedMean, quantized_all_reduce_
from sparsync.core import Bucket, Comm, Rows, phase
from sparsync.feedback import Accumulator, Residuals
from sparsync.selection.turns import Turn, Turns
from sparsync.wire import ValueCodec, Values, check_values


@dataclass(frozen=True)
class InTurn(ErrorFeedbackScheme):
    """Write the mean of 1/`every` of the elements, a different part at every step, rounded on the way to the owners and to all.

    A rank sends about (P-1)/P * (bits up + bits down) * n / `every` bits per step, whatever the gradients; nothing is selected, and no
    position travels. Once in a round of `every` steps the mean includes an element, with all of its gradients since the last time. Rounding
    errors stay in the residuals of the sender and of the owner, who is the same in every turn. With `every=1` it equals `TwoShot` of
    density 1, but for the order of the elements. Buckets of fewer than `every` elements per rank have fewer turns.

    If any rank's gradient holds NaN or Inf, in its turn or not, or the mean overflows the gradient's type, it shows in the gradient of
    every rank, and residuals do not change.
    """

    every: int = 4  # steps of a round, in which an element is sent once; more: fewer bytes, and older gradients in them
    values: Values = "sign"  # format of values to owners; rounding errors stay in the residuals
    values_down: Values = "int3"  # format of the owners' sums to all; finer, because the mean includes its errors
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses their rounding errors
    decay: float = 1.0  # share of the residual that joins the next gradient, at every step that it waits

    name = "in_turn"
    may_send_whole = True
    heeds_skip = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every must be a whole number of steps, at least 1, got {self.every!r}")
        check_values(self.values)
        check_values(self.values_down, "values_down")

    @property
    def density(self) -> float:
        """The share of the elements that is sent in a step."""
        return 1 / self.every

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> DenseUpdate:
        turns, summed = Turns(bucket.grad.numel(), comm.size, self.every), acc.values
        turn = _turn_at(turns, turns.number(bucket.step), bucket.grad.device)
        with phase("select"):
            values = turn.of(summed)  # [K]
            if not acc.finite:
                values.fill_(torch.nan)  # the non-finite element may not be in this turn
        mean = quantized_all_reduce_(values, comm, ValueCodec(self.values), ValueCodec(self.values_down))
        with phase("apply"):
            turn.put_(summed, values)
        return DenseUpdate(_MeanInTurn(mean, turn), summed, values.numel(), values.numel())

    def unsent(self, state: State, bucket: Bucket, comm: Comm) -> tuple[Tensor, Rows | None]:
        """Return this rank's residual, [n], and the region that it owns, where it holds the rounding errors of sums over all ranks.

        This rank's gradients that wait there are divided too: the residual does not tell the two apart.
        """
        residual = state.residual(bucket)
        if comm.size == 1:
            return residual, None
        return residual, Turns(residual.numel(), comm.size, self.every).regions.rows(comm.rank, residual.device)


@lru_cache(maxsize=256)
def _turn_at(turns: Turns, number: int, device: torch.device) -> Turn:
    return turns.at(number, device)


@dataclass(frozen=True)
class _MeanInTurn:
    """The encoded mean of the elements of a turn; the others are zero."""

    mean: QuantizedMean
    turn: Turn

    @property
    def dtype(self) -> torch.dtype:
        return self.mean.dtype

    def decoded(self) -> Tensor:
        """Decode the mean, [n]."""
        out = self.mean.packets[0].new_empty(self.turn.n, dtype=self.dtype)
        self.write_(out)
        return out

    def write_(self, out: Tensor) -> None:
        """Write the mean to `out` [n]."""
        out.zero_()
        self.turn.put_(out, self.mean.decoded())

    def fits(self, times: int) -> bool:
        """Return whether `times` the mean is finite everywhere."""
        return self.mean.fits(times)
