"""A scheme of your own, whole: signs with one scale per rank, without residuals. It works behind every integration.

Run: python examples/own_scheme.py tests it; `sparsync compare --schemes dense,examples/own_scheme.py:ScaledSign` trains with it.
"""

from dataclasses import dataclass

import torch

import sparsync
from sparsync.core import Comm


@dataclass
class ScaledSign(sparsync.Scheme):
    """Every rank sends the sign of each element as one byte, and the mean magnitude of its elements, times `gain`."""

    name = "scaled_sign"

    gain: float = 1.0

    def reduce(self, bucket: sparsync.Bucket, comm: Comm) -> sparsync.Report:
        grad, n, P = bucket.grad, bucket.grad.numel(), comm.size
        scale = (grad.abs().sum() / max(n, 1) * self.gain).float().reshape(1)  # NaN or Inf in any element shows here
        scales = comm.all_gather(scale, [1] * P)
        signs = comm.all_gather(grad.sign().to(torch.int8), [n] * P)
        total = torch.zeros(n, device=grad.device)
        for each_sign, each_scale in zip(signs, scales, strict=True):  # in rank order: the same bits on every rank
            total += each_sign * each_scale
        grad.copy_(total / P)
        others = P - 1
        cost = sparsync.Cost(
            2 * others, (1 + (n > 0)) * others, (4 + n) * others
        )  # rounds, messages and bytes of this rank
        return sparsync.Report(self.name, bucket.key, bucket.step, n, n, n, cost)


if __name__ == "__main__":
    from sparsync.testing import check_scheme  # pyright: ignore[reportMissingImports]

    check_scheme(ScaledSign, worlds=(1, 2, 4))
