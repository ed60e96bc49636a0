"""The k-th largest element of a vector, found by counting the digits of all elements, the highest digit first."""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.kernels.cuda.launch import BLOCK, ONE_WARP, PASS, loaded, local, programs, rank_key

DIGITS = 4  # of 8 bits each, the first the highest
BINS = 256
ROUNDS = 8  # blocks that one program counts before it adds its counts to all others'


def ranked(
    x: Tensor, found: Tensor | None, count: int, k: int, least: int, skip: tuple[int, int], signed: bool
) -> Tensor:
    """Return the k-th largest rank key, and how many elements of that key belong to the k largest, int64 [2], on the device.

    Of the first `found[0]` of `x`, or of the first `count` where `found` is None; of keys of `least` or more, outside of `skip`. Where
    there are fewer than k, it is the smallest one that there is, and all of that key belong to them. Nothing to count: the largest key
    there could be, and 0. Four passes over 4 bytes an element, whatever they are.
    """
    counts = torch.zeros(DIGITS * BINS, dtype=torch.int32, device=x.device)
    result = torch.empty(2, dtype=torch.int64, device=x.device)
    if count:
        for depth in range(DIGITS):
            _digit_kernel[programs(count, ROUNDS * BLOCK)](
                x,
                counts if found is None else found,
                counts,
                count,
                k,
                least,
                *skip,
                depth,
                SIGNED=signed,
                COUNTED=found is not None,
                ROUNDS=ROUNDS,
                **PASS,
            )
    _settle_kernel[(1,)](counts, result, k, DIGITS, **ONE_WARP)
    return result


@triton.jit
def ordered(rank):
    """Return a rank key as a number of 32 bits without a sign, int64."""
    return rank.to(tl.int64) + 2147483648


@triton.jit
def _narrowed(counts, k, depth):
    """Return the first `depth` digits of the k-th largest key, and how many of those that begin so belong to the k largest."""
    digit = tl.arange(0, 256)
    most = tl.minimum(tl.sum(tl.load(counts + digit)), k)
    prefix = tl.full([], 0, tl.int64)
    for known in range(depth):
        here = tl.load(counts + known * 256 + digit)
        reach = tl.cumsum(here, 0, reverse=True)  # how many have this digit or a larger one
        found = tl.max(tl.where(reach >= most, digit, 0))
        most -= tl.sum(tl.where(digit > found, here, 0))
        prefix = prefix * 256 + found
    return prefix, most


@triton.jit(do_not_specialize=["depth", "k", "least", "start", "stop"])
def _digit_kernel(
    x,
    found,
    counts,
    n,
    k,
    least,
    start,
    stop,
    depth,
    SIGNED: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Count the digit after the first `depth` ones of all keys that begin as the k-th largest does."""
    last = n
    if COUNTED:
        last = tl.minimum(n, tl.load(found))
    first = tl.program_id(0).to(tl.int64) * (ROUNDS * BLOCK)
    if first < last:
        prefix, _ = _narrowed(counts, k, depth)
        lane = tl.arange(0, BLOCK)
        digit = tl.arange(0, 256)
        total = tl.zeros((256,), tl.int32)
        for at in range(first, tl.minimum(first + ROUNDS * BLOCK, last), BLOCK):
            left = tl.minimum(last - at, BLOCK).to(tl.int32)
            rank = rank_key(loaded(x + at, lane, left, BLOCK), SIGNED)
            outside = (lane < local(start, at, left)) | (lane >= local(stop, at, left))
            counted = (lane < left) & (rank >= least) & outside
            key = ordered(rank)
            counted = counted & ((key >> (32 - 8 * depth)) == prefix)
            total += tl.histogram(((key >> (24 - 8 * depth)) & 255).to(tl.int32), 256, mask=counted)
        tl.atomic_add(counts + depth * 256 + digit, total, mask=total > 0, sem="relaxed")


@triton.jit(do_not_specialize=["k", "digits"])
def _settle_kernel(counts, result, k, digits):
    prefix, most = _narrowed(counts, k, digits)
    tl.store(result, prefix)
    tl.store(result + 1, most.to(tl.int64))
