"""The passes of AdamW steps: own second moments and step, and momentum and weights, of all parameters in one launch.

Each operation is rounded, as in torch: nothing is fused to a multiply-add.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.core import Span
from sparsync.kernels.cuda.launch import FLOAT32, PASS, lanes, loaded, programs, store, takes

SPLIT = 1024  # programs at most that share a parameter
ROUNDED = {**PASS, "enable_fp_fusion": False}


@takes(FLOAT32)
def adam_step_(
    grad: Tensor, square: Tensor, scale: Tensor, start: int, block: int, beta2: float, eps: float, rate: float
) -> None:
    """Add `grad` [n] to its second moments, and make a step of it, in place; element i has `scale[(start + i) // block]`."""
    if n := grad.numel():
        _adam_kernel[programs(n)](grad, square, scale, n, start, block, beta2, 1 - beta2, eps, rate, **ROUNDED)


@takes(FLOAT32)
def momentum_steps_(
    weights: Tensor,
    momentum: Tensor,
    mean: Tensor,
    spans: Sequence[Span],
    factors: Sequence[tuple[float, float, float]],
) -> Any:  # None, or NotImplemented where a span lies outside
    """Take several momentum steps in one launch, each in its span with its beta1, decay and length."""
    n = weights.numel()
    if not momentum.numel() == mean.numel() == n or any(not 0 <= each.start <= each.stop <= n for each in spans):
        return NotImplemented
    described = zip(spans, factors, strict=True)
    numbers = [(each.start, len(each), beta1, 1 - beta1, *rest) for each, (beta1, *rest) in described if len(each)]
    if not numbers:
        return None
    where = torch.tensor([each[:2] for each in numbers]).to(weights.device)
    rates = torch.tensor([each[2:] for each in numbers], dtype=torch.float32).to(weights.device)
    split = min(SPLIT, *programs(max(length for _, length, *_ in numbers)))
    _momentum_kernel[len(numbers), split](weights, momentum, mean, where, rates, split, **ROUNDED)
    return None


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
