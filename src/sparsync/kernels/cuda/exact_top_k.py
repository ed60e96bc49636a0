"""Exact selections: the k largest elements of regions of a vector, and all elements that reach a threshold.

The k largest take a fixed chain of launches for all regions, without a host sync.

A sample gives a window of rank keys in which a region's k-th largest is expected. A round counts the keys in parts of the window, and the
part that contains the k-th is the next window: after two rounds it is one key. If the sample misled, it takes three rounds; otherwise the
third reads nothing. Then every block knows how many of its elements are selected, and writes them, so that positions ascend.
A threshold is a window of one key from the start.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from sparsync.core import Rows, Span, Sparse
from sparsync.kernels.cuda.launch import BLOCK, FLOAT32, GRADIENT, PASS, POSITIONS, bits_of, table, takes, takes_all
from sparsync.kernels.cuda.passes import added, none
from sparsync.kernels.cuda.windows import (
    BINS,
    LARGEST,
    STATE,
    choose_kernel,
    count_kernel,
    guess_kernel,
    narrow_kernel,
    tally_kernel,
)

MARGIN = 4.0  # the margin of the first window, in standard deviations of a sampled count
SAMPLE = 8192  # elements of a region that are sampled to estimate its k-th largest
ROUNDS = 3
SEARCH = {"CHUNK": 4096, "num_warps": 8}  # for the search in the counts of a window, by one program per region

NOWHERE = Span(0, 0)
_Region = tuple[int, int, int, int, Span]  # the address of the starts of its rows, row, length, k, and the skipped span

# Any: the result that `operations` declares, or NotImplemented for unsupported arguments.


@takes(FLOAT32)
def top_k(x: Tensor, k: int, bound: float | None = None) -> Any:
    return _largest(x, k)


@takes(FLOAT32)
def top_k_nonzero(x: Tensor, k: int, skip: Span | None = None, bound: float | None = None) -> Any:
    """Select as the reference does. A host sync: the number of non-zero elements depends on the data."""
    skip = skip or NOWHERE
    return _nonzero(_largest(x, min(k, x.numel() - len(skip)), skip))


@takes(FLOAT32, GRADIENT, FLOAT32)
def accumulate_top_k(residual: Tensor, grad: Tensor, k: int, out: Tensor, bound: float | None = None) -> Any:
    bad = torch.zeros(1, dtype=torch.int32, device=out.device)
    largest = _largest(residual, k, NOWHERE, grad, out, bad)
    return largest if largest is NotImplemented else (largest, none(bad))


@takes(FLOAT32, GRADIENT, FLOAT32)
def accumulate_top_k_nonzero(
    residual: Tensor, grad: Tensor, k: int, out: Tensor, skip: Span | None = None, bound: float | None = None
) -> Any:
    """Select as the reference does. A host sync, as in `top_k_nonzero`."""
    skip, bad = skip or NOWHERE, torch.zeros(1, dtype=torch.int32, device=out.device)
    selected = _nonzero(_largest(residual, min(k, out.numel() - len(skip)), skip, grad, out, bad))
    return selected, none(bad)


@takes(FLOAT32)
def select_ge(x: Tensor, threshold: float) -> Any:
    """Select as the reference does. A host sync: the count depends on the data."""
    return _reaching(x, threshold, Span(0, x.numel()))


@takes(FLOAT32, GRADIENT, FLOAT32)
def accumulate_select_ge(residual: Tensor, grad: Tensor, threshold: float, out: Tensor, span: Span) -> Any:
    """Select as the reference does, in two launches. A host sync, as in `select_ge`."""
    bad = torch.zeros(1, dtype=torch.int32, device=out.device)
    return _reaching(residual, threshold, span, grad, out, bad), none(bad)


def top_k_of_each(
    x: Tensor, regions: Sequence[Rows], counts: Sequence[int], bounds: Sequence[float | None] = ()
) -> Any:
    """Select as the reference does; elements outside `x` count as zero."""
    return _of_each(x, regions, counts) if _taken(x, regions, counts) else NotImplemented


def accumulate_top_k_of_rows(
    residual: Tensor,
    grad: Tensor,
    regions: Sequence[Rows],
    counts: Sequence[int],
    out: Tensor,
    bounds: Sequence[float | None],
) -> Any:
    bad = added(residual, grad, out) if _taken(out, regions, counts) else NotImplemented
    if bad is NotImplemented:
        return NotImplemented
    return _of_each(out, regions, counts), none(bad)


def _taken(x: Tensor, regions: Sequence[Rows], counts: Sequence[int]) -> bool:
    starts = [rows.starts.contiguous() for rows in regions]
    fit = all(k <= rows.length for rows, k in zip(regions, counts, strict=True))
    return fit and x.dtype in FLOAT32 and all(first.dtype in POSITIONS for first in starts) and takes_all([x, *starts])


def _of_each(x: Tensor, regions: Sequence[Rows], counts: Sequence[int]) -> list[Sparse]:
    with torch.cuda.device_of(x):
        if any(rows.starts.numel() * rows.row < rows.length for rows in regions):
            raise IndexError(f"rows must begin somewhere, got fewer starts than rows in {regions}")
        starts = [rows.starts.to(torch.int32).contiguous() for rows in regions]  # kept until all is launched
        about = [
            (first.data_ptr(), rows.row, rows.length, k, NOWHERE)
            for first, rows, k in zip(starts, regions, counts, strict=True)
        ]
        return _chosen(x, about, True)


def _largest(
    x: Tensor, k: int, skip: Span = NOWHERE, grad: Tensor | None = None, out: Tensor | None = None, bad: Any = None
) -> Any:
    """Select the k largest of `x` [n], or of x + grad, written to `out`, outside of `skip`; flag non-finite sums in `bad`."""
    if k > x.numel() - len(skip):
        return NotImplemented
    if not k and grad is not None:
        bad += added(x, grad, out)
    return _chosen(x, [(0, 1, x.numel(), k, skip)], False, grad, out, bad)[0]


def _nonzero(part: Sparse) -> Sparse:
    kept = part.value.nonzero().view(-1)  # a host sync
    return Sparse(part.index[kept], part.value[kept], part.length)


def _described(regions: Sequence[_Region], n: int) -> list[int]:
    """Describe the regions by the `ROW` numbers that kernels read.

    They are address, row, length, k, the first place in the output, and start and stop of the skipped span; then the stride of the sample,
    the ranks in it, from the largest, of the lowest and the highest key of the first window; and n.
    """
    rows: list[int] = []
    offset = 0
    for starts, row, length, k, skip in regions:
        stride = triton.cdiv(length, SAMPLE) | 1  # odd, so that it does not walk down one column of a matrix
        expected = k / stride
        margin = MARGIN * math.sqrt(expected) + 1
        rows += [starts, row, length, k, offset, skip.start, skip.stop, stride]
        rows += [int(expected + margin), max(0, int(expected - margin)), n]
        offset += k
    return rows


def _chosen(
    x: Tensor,
    regions: Sequence[_Region],
    in_rows: bool,
    grad: Tensor | None = None,
    out: Tensor | None = None,
    bad: Tensor | None = None,
) -> list[Sparse]:
    """Select the largest elements of all regions of `x`, or of x + grad, written to `out`, in ten launches."""
    counts, device, summed = [k for *_, k, _ in regions], x.device, x if out is None else out
    index = torch.empty(sum(counts), dtype=torch.int32, device=device)
    value = torch.empty(sum(counts), dtype=torch.float32, device=device)
    wanted = [region for region, k in zip(regions, counts, strict=True) if k]
    if wanted:
        number, blocks = len(wanted), max(triton.cdiv(length, BLOCK) for _, _, length, _, _ in wanted)
        about = table(_described(wanted, x.numel()), torch.int64, device)
        state = torch.empty((number, STATE.value), dtype=torch.int32, device=device)
        bins = torch.empty((number, BINS.value + 1), dtype=torch.int32, device=device)
        tally = torch.empty((2, number, blocks), dtype=torch.int32, device=device)
        one, grid, adds = (number,), (blocks, number), grad is not None
        guess_kernel[one](x, grad if adds else x, about, state, bins, ADD=adds, ROWS=in_rows, SAMPLE=SAMPLE, **SEARCH)
        for turn in range(ROUNDS):
            adds = grad is not None and turn == 0
            given = (x, grad, out, bad) if adds else (summed, summed, summed, tally)
            count_kernel[grid](*given, about, state, bins, tally, blocks, ADD=adds, ROWS=in_rows, **PASS)
            narrow_kernel[one](about, state, bins, **SEARCH)
        tally_kernel[grid](summed, about, state, tally, blocks, ROWS=in_rows, **PASS)
        ends = tally.cumsum(2, dtype=torch.int32)
        choose_kernel[grid](summed, about, state, tally, ends, index, value, blocks, ROWS=in_rows, **PASS)
    parts = zip(index.split(counts), value.split(counts), regions, strict=True)
    return [Sparse(place, part, length) for place, part, (_, _, length, _, _) in parts]


def _reaching(
    x: Tensor,
    threshold: float,
    span: Span,
    grad: Tensor | None = None,
    out: Tensor | None = None,
    bad: Tensor | None = None,
) -> Sparse:
    """Select the non-zero elements in `span` of `x` [n], or of x + grad, written to `out`, that reach `threshold`."""
    n, device, summed, adds = x.numel(), x.device, x if out is None else out, grad is not None
    if not n:
        return Sparse(torch.empty(0, dtype=torch.int32, device=device), summed[:0], 0)
    bits, blocks = bits_of(threshold), triton.cdiv(n, BLOCK)
    # No element has a key above the largest.
    lowest = LARGEST.value + 1 if bits is None or not len(span) else max(bits, 1)
    # All but the span is skipped.
    about = table([0, 1, n, n - 1, 0, span.stop, span.start, 1, 0, 0, n], torch.int64, device)
    state = table([lowest, 1, -1], torch.int32, device)
    bins = torch.empty(BINS.value + 1, dtype=torch.int32, device=device)  # never read
    tally = torch.empty((2, 1, blocks), dtype=torch.int32, device=device)
    given = (x, grad, out, bad) if adds else (x, x, x, tally)
    count_kernel[blocks, 1](*given, about, state, bins, tally, blocks, ADD=adds, ROWS=False, **PASS)
    ends = tally.cumsum(2, dtype=torch.int32)
    count = int(ends[:, 0, -1].sum())  # a host sync: the count depends on the data
    index = torch.empty(count, dtype=torch.int32, device=device)
    value = torch.empty(count, dtype=torch.float32, device=device)
    if count:
        choose_kernel[blocks, 1](summed, about, state, tally, ends, index, value, blocks, ROWS=False, **PASS)
    return Sparse(index, value, n)
