"""The hot loops over whole vectors and over what was selected from them, one signature each.

Arguments are not checked, but that positions lie inside of a vector; on a GPU, where the host would have to wait for that, elements at
other positions are left out. `reference` specifies the functions in plain torch; results are the same bits on every backend, but for the
bits inside a NaN. `dispatch` has the registry of backends. The C++ one takes float32 in this machine's memory, and gradients in bfloat16
and float16 too; so does the Triton one on a GPU. The reference does whatever these do not take.

All vectors are one-dimensional; n is their length, k a number of positions, which are int32 or int64.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from sparsync.core import Rows, Span, Sparse
from sparsync.kernels.dispatch import fused, run
from sparsync.kernels.step_reference import Move, Spread

Vector = Float[Tensor, " n"]
Positions = Int[Tensor, " k"]


def accumulate(residual: Vector, grad: Vector, out: Vector) -> bool | Tensor:
    """Write residual + grad to `out`, which may be `residual`, and return whether it is finite everywhere.

    On a GPU that is a tensor [], for which nobody waits; likewise in the functions below.
    """
    return run("accumulate", residual, grad, out)


def accumulate_top_k(
    residual: Vector, grad: Vector, k: int, out: Vector, bound: float | None = None
) -> tuple[Sparse, bool | Tensor]:
    """Write residual + grad to `out`, which may be `residual`, and return its `top_k` and whether it is finite everywhere."""
    return run("accumulate_top_k", residual, grad, k, out, bound)


def accumulate_top_k_nonzero(
    residual: Vector, grad: Vector, k: int, out: Vector, skip: Span | None = None, bound: float | None = None
) -> tuple[Sparse, bool | Tensor]:
    """Write residual + grad to `out`, which may be `residual`, and return its `top_k_nonzero` and whether it is finite everywhere."""
    return run("accumulate_top_k_nonzero", residual, grad, k, out, skip, bound)


def accumulate_select_ge(
    residual: Vector, grad: Vector, threshold: float, out: Vector, span: Span
) -> tuple[Sparse, bool | Tensor]:
    """Write residual + grad to `out`, which may be `residual`; return its `select_ge` inside `span` and whether it is finite everywhere.

    Positions are those in the whole vector.
    """
    return run("accumulate_select_ge", residual, grad, threshold, out, span)


def accumulate_top_k_of_rows(
    residual: Vector,
    grad: Vector,
    regions: Sequence[Rows],
    counts: Sequence[int],
    out: Vector,
    bounds: Sequence[float | None],
) -> tuple[list[Sparse], bool | Tensor]:
    """Write residual + grad to `out`, which may be either, and return `top_k_of_rows` of each region and whether it is finite everywhere.

    `counts` and `bounds` are the k and the bound of each region. Raises as `top_k_of_rows` does, but what was added is then in `out`.
    """
    return run("accumulate_top_k_of_rows", residual, grad, regions, counts, out, bounds)


def divide_to_(out: Vector, x: Vector, divisor: int) -> None:
    """Write `x` / `divisor` to `out`, divided in at least float32 and rounded once to the type of `out`."""
    run("divide_to_", out, x, divisor)


def all_finite(x: Vector) -> bool:
    """Return whether `x` holds neither NaN nor Inf."""
    return run("all_finite", x)


def finite_each(parts: Sequence[Sparse], times: int) -> bool | Tensor:
    """Return whether `times` all values of `parts`, and so these, are finite, in float32 at least; on a GPU a tensor []."""
    found = fused("finite_each", parts, times)
    if found is not NotImplemented:
        return found
    values = [part.value.to(torch.promote_types(part.value.dtype, torch.float32)) for part in parts]
    return all(all_finite(each * times) for each in values)


def select_ge(x: Vector, threshold: float) -> Sparse:
    """Return the non-zero elements of `x` whose magnitude is `threshold` or more, NaN as infinity. Positions ascend."""
    return run("select_ge", x, threshold)


def top_k(x: Vector, k: int, bound: float | None = None) -> Sparse:
    """Return the `k` elements of `x` of largest magnitude; among equal magnitudes the ones that come first. Positions ascend.

    NaN counts as infinity. `bound` is a magnitude that k elements, and not many more, are expected to reach, such as a little less than
    the last step's smallest; it changes how long this takes and nothing else.
    """
    return run("top_k", x, k, bound)


def top_k_nonzero(x: Vector, k: int, skip: Span | None = None, bound: float | None = None) -> Sparse:
    """Return what `top_k` would select outside the span `skip`, without zeros: fewer than `k` elements where fewer are not zero.

    `k` may be more than n.
    """
    return run("top_k_nonzero", x, k, skip, bound)


def top_k_of_rows(x: Vector, rows: Rows, k: int, bound: float | None = None) -> Sparse:
    """Return the `top_k` of the elements of `x` in rows, which are read where they are. Positions are places in the rows.

    Raises IndexError for rows outside of `x`.
    """
    return run("top_k_of_rows", x, rows, k, bound)


def top_k_of_each(
    x: Vector, regions: Sequence[Rows], counts: Sequence[int], bounds: Sequence[float | None]
) -> list[Sparse]:
    """Return the `top_k_of_rows` of each region. Raises as that does."""
    found = fused("top_k_of_each", x, regions, counts)
    if found is not NotImplemented:
        return found
    return [top_k_of_rows(x, *each) for each in zip(regions, counts, bounds, strict=True)]


def locate(rows: Rows, place: Positions) -> Positions:
    """Return the position in the vector of each `place` in rows, in the type of `place`. Raises IndexError for places outside of them."""
    return run("locate", rows, place)


def smallest_magnitude(x: Vector) -> float:
    """Return the smallest |x|; NaN where there is one, and 0 where there are no elements."""
    return run("smallest_magnitude", x)


def smallest_each(parts: Sequence[Sparse]) -> list[float]:
    """Return the `smallest_magnitude` of the values of each of `parts`."""
    found = fused("smallest_each", parts)
    return [smallest_magnitude(part.value) for part in parts] if found is NotImplemented else found


def divide_rows_(x: Vector, rows: Rows, divisor: int) -> None:
    """Divide the elements of `x` in rows, no two of which are the same. Raises IndexError for rows outside of `x`."""
    run("divide_rows_", x, rows, divisor)


def squares_fit(tensors: Sequence[Tensor], factors: Sequence[float], most: float) -> bool | Tensor:
    """Return whether the sum of the squares of all elements, each times its tensor's factor, is at most `most`; not where any is NaN.

    The sum is made in float64. On a GPU a tensor [] that says so, for which nobody waits.
    """
    return run("squares_fit", tensors, factors, most)


def make_steps_(
    out: Vector,
    gradients: Sequence[Tensor],
    starts: Sequence[int],
    factors: Sequence[float],
    square: Vector,
    ratio: Float[Tensor, " blocks"],
    block: int,
    spans: Sequence[Span],
    numbers: Sequence[Spread],
    skip: Tensor | None = None,
) -> None:
    """Add gradients to second moments, and write the steps that AdamW would take to `out`; see `step_reference` for what is where.

    With the numbers (rate, beta2, eps, unbiased) of its span, and the ratio r of its block of `block` elements, from the first one of the
    vector on: v = beta2 v + (1 - beta2) g^2, out = rate g / (sqrt(v r / unbiased) + eps).
    If `skip`, one number, is not zero, second moments stay, and the steps are zero.
    """
    run("make_steps_", out, gradients, starts, factors, square, ratio, block, spans, numbers, skip)


def encode_steps_(
    residual: Vector,
    gradients: Sequence[Tensor],
    starts: Sequence[int],
    factors: Sequence[float],
    square: Vector | None,
    ratio: Float[Tensor, " blocks"] | None,
    block: int,
    spans: Sequence[Span],
    numbers: Sequence[Spread],
    rank: int,
    P: int,
    bits: int,
    skip: Tensor | None = None,
    out: Vector | None = None,
) -> UInt8[Tensor, " nbytes"]:
    """Do `make_steps_`, add the steps to `residual`, and encode shares of the sum: all in one pass; spans cover everything.

    Without second moments (`square` None) gradients are added as they are. Returns the packets of sum / P of all chunks
    (`core.spans(n, P)`) but the own one, one after the other, in `bits` bits: 8, 4, 3, 1 or TERNARY. The bytes are those of
    `value_reference`. `out`, None: the residual, becomes what P times these lack of the sum, and the sum in the own chunk; it may be a
    gradient. If `skip`, one number, is not zero, nothing changes, and all packets are of NaN.
    """
    moments = square, ratio, block, spans, numbers
    return run("encode_steps_", residual, gradients, starts, factors, *moments, rank, P, bits, skip, out)


def packets_fit(
    packets: Sequence[Tensor], lengths: Sequence[int], bits: int, times: int, dtype: torch.dtype = torch.float32
) -> bool | Tensor:
    """Return whether all values in packets of so many are finite in `dtype`, and `times` them in float32.

    On a GPU a tensor [] that says so, for which nobody waits.
    """
    return run("packets_fit", packets, lengths, bits, times, dtype)


def write_mean_(
    grad: Vector,
    error: Vector | None,
    residual: Vector | None,
    packets: Sequence[Tensor],
    bits: int,
    rank: int,
    skip: Tensor | None = None,
) -> None:
    """Write the mean that the packets of all chunks hold to `grad`, rounded to its type, and `error`, which may be `grad`, to `residual`.

    In this rank's chunk what P times the rounded mean lacks is added to the residual. Without a residual nothing else is written.
    If `skip`, one number, is not zero, the residual stays, and the gradient is NaN. Raises RuntimeError for a packet of another length.
    """
    run("write_mean_", grad, error, residual, packets, bits, rank, skip)


def move_steps_(
    targets: Sequence[Tensor],
    starts: Sequence[int],
    momentum: Vector,
    mean: Vector,
    spans: Sequence[Span],
    numbers: Sequence[Move],
    skip: Tensor | None = None,
) -> None:
    """Move weights by the mean step of all ranks; `targets[i]`, of any shape, are those from `starts[i]` on.

    With the numbers (beta1, kept, length) of its span: m = beta1 m + (1 - beta1) mean, weight = kept weight - length m.
    Nothing changes if `skip`, one number, is not zero.
    """
    run("move_steps_", targets, starts, momentum, mean, spans, numbers, skip)


def apply_steps_(
    targets: Sequence[Tensor],
    starts: Sequence[int],
    momentum: Vector,
    packets: Sequence[Tensor],
    bits: int,
    spans: Sequence[Span],
    numbers: Sequence[Move],
    skip: Tensor | None = None,
) -> None:
    """Do `move_steps_` with the mean that the packets of all chunks, in rank order, hold in `bits` bits, in one pass.

    Nothing changes if `skip`, one number, is not zero. Raises RuntimeError for a packet of another length.
    """
    run("apply_steps_", targets, starts, momentum, packets, bits, spans, numbers, skip)


def sketch(
    gradients: Sequence[Tensor], starts: Sequence[int], factors: Sequence[float], like: Vector, block: int, key: int
) -> tuple[Float[Tensor, " blocks"], Float[Tensor, " blocks"]]:
    """Return of each block of gradients the sum with random signs, and the sum of squares; `like` has their number, type and device.

    The signs follow from the place of an element and `key`, in [0, 2^32).
    """
    return run("sketch", gradients, starts, factors, like, block, key)


def write_own_(
    targets: Sequence[Tensor],
    starts: Sequence[int],
    weights: Vector,
    unsent: Vector,
    rows: Rows | None,
    divisor: int,
    share: float,
) -> Int[Tensor, " targets"]:
    """Write weights - share unsent to `targets`, of any types and shapes; each has its elements from its start on. Return their `digests`.

    What is unsent is divided by `divisor` in `rows`, whose starts ascend. Raises ValueError where a target does not lie in `weights`, and
    IndexError for rows outside of it.
    """
    return run("write_own_", targets, starts, weights, unsent, rows, divisor, share)


def digests(tensors: Sequence[Tensor]) -> Int[Tensor, " tensors"]:
    """Return a digest of the bits in each tensor, of any types and shapes, int64 on the device of the first.

    It depends on bits and number of elements only. A change of one element always shows, another one but once in 2^64 times.
    """
    return run("digests", tensors)


def reduce_shares_(
    value: Float[Tensor, " k"],
    packets: Sequence[Tensor],
    bits: int,
    P: int,
    bits_down: int,
    skip: Tensor | None = None,
) -> UInt8[Tensor, " nbytes"]:
    """Return the packet, in `bits_down` bits, of the mean of `value` and what other ranks sent by `encode_steps_` in `bits` bits.

    The mean is (value + P * the sum of the decoded `packets`) / P; finite ones beyond float32 become its largest number. `value` becomes
    what P times the decoded mean lacks of the sum. Sums are made in float64, in the order of the packets. Raises RuntimeError for a
    packet of another length. If `skip`, one number, is not zero, nothing changes, and the packet is of NaN.
    """
    return run("reduce_shares_", value, packets, bits, P, bits_down, skip)


def scatter_add_(out: Vector, part: Sparse) -> None:
    """Add the elements of `part` to `out`. Raises IndexError, before anything is written, for positions outside of it."""
    run("scatter_add_", out, part)


def scatter_add_each_(out: Vector, parts: Sequence[Sparse]) -> None:
    """Add the elements of `parts`, in their order, to `out`. Raises as `scatter_add_` does, which may have added the parts before."""
    if fused("scatter_add_each_", out, parts) is NotImplemented:
        for part in parts:
            scatter_add_(out, part)


def clear_(x: Vector, index: Positions) -> None:
    """Set `x` to zero at the positions `index`. Raises IndexError, before anything is written, for positions outside of it."""
    run("clear_", x, index)


def put_(x: Vector, index: Positions, value: Float[Tensor, " k"]) -> None:
    """Set `x` to `value` at the positions `index`, distinct or with equal values.

    Raises IndexError, before anything is written, for positions outside of it.
    """
    run("put_", x, index, value)


def gather(x: Vector, index: Positions) -> Float[Tensor, " k"]:
    """Return the elements of `x` at the positions `index`. Raises IndexError for positions outside of it."""
    return run("gather", x, index)


def move_put_(
    to: Vector, source: Vector, kept: Sequence[Sparse], written: Sequence[Sparse], skip: Tensor | None = None
) -> None:
    """Copy `source` to `to`, which does not overlap with it, with the values of `kept` at its positions; leave `written` and zeros.

    Values of `written` may lie in `source`. Raises IndexError, before anything is written, for positions outside. If `skip`, one number,
    is not zero, `to` stays, and what `source` holds then is of no use.
    """
    run("move_put_", to, source, kept, written, skip)


def merge(parts: Sequence[Sparse]) -> Sparse:
    """Return all elements of `parts`, which have no position in common, as one; positions ascend."""
    return run("merge", parts)


def coalesce(parts: Sequence[Sparse]) -> Sparse:
    """Return the sum of `parts` as one, added in their order, starting from 0; positions ascend."""
    return run("coalesce", parts)


def split(part: Sparse, regions: Sequence[Span]) -> list[Sparse]:
    """Cut `part` at adjacent `regions` that cover it; positions become relative to the start of their region."""
    return run("split", part, regions)


def isin(index: Int[Tensor, " a"], others: Int[Tensor, " b"]) -> Bool[Tensor, " a"]:
    """Return for each of `index` whether it is one of the ascending `others`."""
    return run("isin", index, others)
