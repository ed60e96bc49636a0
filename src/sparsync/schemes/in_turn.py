"""InTurn: a quantized all-reduce of one part of the elements in each step, and of the next part in the next.

All ranks know whose turn it is, so nothing is selected and no position travels. What waits for its turn adds up in the residuals of its
ranks. The parts are spread over the whole vector in a hashed order, so that every layer has elements in each of them. Choosing the same
elements on all ranks goes back to Random-k (arXiv 1809.07599); a fixed order instead of a random one bounds how long an element waits.
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
    """Write the mean of an `every`-th of the elements, other ones in each of `every` steps, rounded on the way to owners and to all.

    A rank sends about (P-1)/P * (bits up + bits down) * n / `every` bits in each step, whatever the gradients; nothing is selected, and no
    position travels. Every element is in the mean once in each round of `every` steps, with all that has come in since. Errors of rounding
    stay in the residuals of the sender and of the owner, who is the same in each turn. With `every=1` it is `TwoShot` of density 1, whose
    elements lie in another order. Buckets of fewer than `every` elements for each rank have fewer turns.

    Where any rank's gradient holds NaN or Inf, in its turn or not, or the mean overflows the gradient's type, it shows in the gradient of
    every rank, and residuals stay as they were.
    """

    every: int = (
        4  # steps of a round, in which each element is sent once; more: fewer bytes, and older gradients in them
    )
    values: Values = "sign"  # how values travel to owners; what rounding drops stays in the residuals
    values_down: Values = "int3"  # how the owners' sums travel to all; an error here is in the mean itself, so finer
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds
    decay: float = 1.0  # share of the residual that joins the next gradient, at each step of those it waits

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
        turn, summed = self._turn(bucket, comm), acc.values
        with phase("select"):
            values = turn.of(summed)  # [K]
            if not acc.finite:
                values.fill_(torch.nan)  # what is not finite may not be in its turn
        mean = quantized_all_reduce_(values, comm, *self._codecs)
        with phase("apply"):
            turn.put_(summed, values)
        return DenseUpdate(_MeanInTurn(mean, turn), summed, values.numel(), values.numel())

    def unsent(self, state: State, bucket: Bucket, comm: Comm) -> tuple[Tensor, Rows | None]:
        """Return this rank's residual, [n], and its own region, where it holds what rounding dropped of all ranks' sums.

        Its own gradients that wait there for their turn are divided too: the residual does not tell the two apart.
        """
        residual = state.residual(bucket)
        if comm.size == 1:
            return residual, None
        return residual, self._turns(residual.numel(), comm.size).regions.rows(comm.rank, residual.device)

    def _turns(self, n: int, P: int) -> Turns:
        return Turns(n, P, self.every)

    def _turn(self, bucket: Bucket, comm: Comm) -> Turn:
        turns = self._turns(bucket.grad.numel(), comm.size)
        return _turn_at(turns, turns.number(bucket.step), bucket.grad.device)

    @property
    def _codecs(self) -> tuple[ValueCodec, ValueCodec]:
        return ValueCodec(self.values), ValueCodec(self.values_down)


@lru_cache(maxsize=256)
def _turn_at(turns: Turns, number: int, device: torch.device) -> Turn:
    return turns.at(number, device)


@dataclass(frozen=True)
class _MeanInTurn:
    """The mean of the elements of a turn as it arrived; the others are zero."""

    mean: QuantizedMean
    turn: Turn

    @property
    def dtype(self) -> torch.dtype:
        return self.mean.dtype

    def decoded(self) -> Tensor:
        """Return the mean, [n]."""
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
