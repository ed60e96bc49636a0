"""The passes of AdamW steps: own second moments and step, and momentum and weights, of all parameters in one launch.

Each operation is rounded, as in torch: nothing is fused to a multiply-add.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.core import Span
from sparsync.kernels.cuda.launch import FLOAT32, PASS, lanes, loaded, programs, store, takes

SPLIT = 64  # programs at most that share a parameter
ROUNDED = {**PASS, "enable_fp_fusion": False}


@takes(FLOAT32)
def adam_step_(
    grad: Tensor, square: Tensor, scale: Tensor, start: int, block: int, beta2: float, eps: float, rate: float
) -> None:
    """Add `grad` [n] to its second moments, and make a step of it, in place; element i has `scale[(start + i) // block]`."""
    if n := grad.numel():
        _adam_kernel[programs(n)](grad, square, scale, n, start, block, beta2, 1 - beta2, eps, rate, **ROUNDED)


@takes(FLOAT32)
def momentum_step_(weights: Tensor, momentum: Tensor, mean: Tensor, beta1: float, decay: float, length: float) -> None:
    """Add `mean` [n] to `momentum`, and move `weights` by it, in place."""
    _momentum_steps(weights, momentum, mean, [Span(0, weights.numel())], [(beta1, decay, length)])


@takes(FLOAT32)
def momentum_steps_(
    weights: Tensor,
    momentum: Tensor,
    mean: Tensor,
    spans: Sequence[Span],
    factors: Sequence[tuple[float, float, float]],
) -> None:
    """Take several momentum steps, each in its span with its beta1, decay and length, in one launch."""
    _momentum_steps(weights, momentum, mean, spans, factors)


def _momentum_steps(
    weights: Tensor,
    momentum: Tensor,
    mean: Tensor,
    spans: Sequence[Span],
    factors: Sequence[tuple[float, float, float]],
) -> None:
    longest = max(map(len, spans), default=0)
    if not longest:
        return
    where = torch.tensor([[each.start, len(each)] for each in spans]).to(weights.device)
    each = torch.tensor([[beta1, 1 - beta1, decay, length] for beta1, decay, length in factors], dtype=torch.float32)
    split = min(SPLIT, *programs(longest))
    _momentum_kernel[len(spans), split](weights, momentum, mean, where, each.to(weights.device), split, **ROUNDED)


@triton.jit(do_not_specialize=["start", "block", "beta2", "rest2", "eps", "rate"])
def _adam_kernel(grad, square, scale, n, start, block, beta2, rest2, eps, rate, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    lane = lanes(BLOCK)
    left = tl.minimum(n - first, BLOCK).to(tl.int32)
    g = loaded(grad + first, lane, left, BLOCK)
    v = loaded(square + first, lane, left, BLOCK) * beta2 + g * g * rest2
    store(square + first, lane, v, left, BLOCK)
    scales = tl.load(scale + (start + first + lane) // block, mask=lane < left, other=0.0)
    root = tl.sqrt_rn(v * scales) + eps
    store(grad + first, lane, tl.div_rn(g * rate, root), left, BLOCK)


@triton.jit(do_not_specialize=["split"])
def _momentum_kernel(weights, momentum, mean, where, each, split, BLOCK: tl.constexpr):
    span = tl.program_id(0)
    start, n = tl.load(where + 2 * span), tl.load(where + 2 * span + 1)
    beta1, rest1 = tl.load(each + 4 * span), tl.load(each + 4 * span + 1)
    decay, length = tl.load(each + 4 * span + 2), tl.load(each + 4 * span + 3)
    lane = lanes(BLOCK)
    done = tl.program_id(1).to(tl.int64) * BLOCK
    while done < n:
        first = start + done
        left = tl.minimum(n - done, BLOCK).to(tl.int32)
        m = loaded(momentum + first, lane, left, BLOCK) * beta1 + loaded(mean + first, lane, left, BLOCK) * rest1
        store(momentum + first, lane, m, left, BLOCK)
        store(weights + first, lane, loaded(weights + first, lane, left, BLOCK) * decay - m * length, left, BLOCK)
        done += split.to(tl.int64) * BLOCK
