"""LoCo: gradients in 4 bits, with an average of past errors in 8 bits that is cleared periodically (Xie et al., arXiv 2407.04480).

    h = gradient + e
    q = h in 4 bits, each chunk to its owner, which sends the mean to all
    e = (1 - beta) e + beta (h - q), in 8 bits; 0 after every `reset_every` steps

It corrects each gradient by an estimate of the error, so it does not conserve its input.

Differs from the paper: scales are per block of 256, not fixed; a rank's own chunk is not rounded; the owner sends the mean gradient in
bfloat16, instead of the weights that sharded training gathers, and its rounding joins the error; e is held in float32, with values that
8 bits can represent.
"""

from dataclasses import dataclass

from sparsync import Bucket, Comm, ErrorFeedbackScheme
from sparsync.base.error_feedback import DenseUpdate
from sparsync.collectives.values import quantized_all_reduce_
from sparsync.feedback import Residuals
from sparsync.schemes import Accumulator, State
from sparsync.wire import ValueCodec, Values, check_values

_ERRORS = ValueCodec("int8")


@dataclass(frozen=True)
class LoCo(ErrorFeedbackScheme):
    """Write the mean of gradients in 4 bits, each corrected by an average of past errors (arXiv 2407.04480).

    NaN or Inf on any rank shows on every rank as NaN in its block, and changes nothing else. A rollback adds what was written to the error.
    """

    beta: float = 0.2  # share of a step's error in the average
    reset_every: int = 1024  # steps after which the average is cleared, on all ranks
    values: Values = "int4"  # to owners
    values_down: Values = "bfloat16"  # to all
    residuals: Residuals = "float32"

    name = "loco"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta <= 1:
            raise ValueError(f"beta must be in (0, 1], the share of a step's error in the average, got {self.beta}")
        if self.reset_every < 1:
            raise ValueError(f"reset_every must be at least 1 step, got {self.reset_every}")
        check_values(self.values)
        check_values(self.values_down)

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> DenseUpdate:
        error = acc.values  # h, and then h - q
        mean = quantized_all_reduce_(error, comm, ValueCodec(self.values), ValueCodec(self.values_down))
        if (bucket.step + 1) % self.reset_every == 0:
            return DenseUpdate(mean, error.zero_())
        average = acc.residual.to(error.dtype).lerp(error, self.beta)
        return DenseUpdate(mean, _ERRORS.decode(_ERRORS.encode(average), average.numel(), average.dtype))
