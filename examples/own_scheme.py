"""A scheme of your own, whole: signs with one scale per rank, without residuals. It works behind every integration.

Run: python examples/own_scheme.py tests it; `sparsync compare --schemes dense,examples/own_scheme.py:ScaledSign` trains with it.
"""

from dataclasses import dataclass

import torch

from sparsync import Bucket, Comm, Report, Scheme, testing
from sparsync.comm import MeteredComm
from sparsync.schemes import State


@dataclass(frozen=True)
class ScaledSign(Scheme):
    """Send the sign of each element as one byte, and the mean magnitude of the elements, times `gain`."""

    gain: float = 1.0

    name = "scaled_sign"

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        grad, n, P = bucket.grad, bucket.grad.numel(), comm.size
        if P == 1 or not n:
            return self.report(bucket)
        scale = (grad.abs().sum() / max(n, 1) * self.gain).float().reshape(1)  # NaN or Inf in any element shows here
        comm = MeteredComm(comm)
        scales = comm.all_gather(scale, [1] * P)
        signs = comm.all_gather(grad.sign().to(torch.int8), [n] * P)
        # In rank order, as messages come: the same bits on every rank.
        grad.zero_()
        for sign, other in zip(signs, scales, strict=True):
            grad += sign * other / P
        return self.report(bucket, comm.sent)


if __name__ == "__main__":
    testing.check_scheme(ScaledSign, worlds=(1, 2, 4))
