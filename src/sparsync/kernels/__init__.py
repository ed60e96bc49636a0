"""The hot loops over whole vectors and over what was selected from them, one signature each.

`reference` and `sparse_reference` specify them in plain torch; results are the same bits on every backend, but for the bits inside a NaN.
`dispatch` has the registry of backends. The C++ one takes float32 in this machine's memory, and gradients in bfloat16 and float16 too;
so does the Triton one on a GPU. The reference does whatever these do not take.

All vectors are one-dimensional; n is their length, k a number of positions, which are int32 or int64. Every function raises ValueError
or TypeError for arguments that are no such things, before it writes anything.
"""

from collections.abc import Sequence

from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsync.core import Rows, Span, Sparse
from sparsync.kernels.arguments import (
    POSITIONS,
    at_most,
    check_move,
    check_one_device,
    check_parts,
    check_regions,
    check_rows,
    check_sequences,
    check_span,
    check_sparse,
    check_sum,
    check_values,
    check_vector,
    count,
    real,
)
from sparsync.kernels.dispatch import backend, backends, run, set_backend

__all__ = [
    "accumulate",
    "accumulate_top_k",
    "accumulate_top_k_nonzero",
    "accumulate_top_k_of_rows",
    "all_finite",
    "argtopk",
    "backend",
    "backends",
    "clear_",
    "coalesce",
    "gather",
    "isin",
    "locate",
    "merge",
    "move_",
    "move_put_",
    "put_",
    "scatter_add_",
    "select_ge",
    "set_backend",
    "smallest_magnitude",
    "split",
    "top_k",
    "top_k_nonzero",
    "top_k_of_rows",
]


def accumulate(residual: Float[Tensor, " n"], grad: Float[Tensor, " n"], out: Float[Tensor, " n"]) -> bool:
    """Write residual + grad to `out`, which may be `residual`, and return whether it is finite everywhere."""
    check_sum(residual, grad, out)
    return run("accumulate", residual, grad, out)


def accumulate_top_k(
    residual: Float[Tensor, " n"],
    grad: Float[Tensor, " n"],
    k: int,
    out: Float[Tensor, " n"],
    bound: float | None = None,
) -> tuple[Sparse, bool]:
    """Write residual + grad to `out`, which may be `residual`, and return its `top_k` and whether it is finite everywhere."""
    check_sum(residual, grad, out)
    k = count(k, residual.numel())
    return run("accumulate_top_k", residual, grad, k, out, None if bound is None else real(bound, "bound"))


def accumulate_top_k_nonzero(
    residual: Float[Tensor, " n"],
    grad: Float[Tensor, " n"],
    k: int,
    out: Float[Tensor, " n"],
    skip: Span | None = None,
    bound: float | None = None,
) -> tuple[Sparse, bool]:
    """Write residual + grad to `out`, which may be `residual`, and return its `top_k_nonzero` and whether it is finite everywhere."""
    check_sum(residual, grad, out)
    k = at_most(k, residual.numel())
    check_span(skip, residual.numel())
    return run(
        "accumulate_top_k_nonzero", residual, grad, k, out, skip, None if bound is None else real(bound, "bound")
    )


def accumulate_top_k_of_rows(
    residual: Float[Tensor, " n"],
    grad: Float[Tensor, " n"],
    regions: Sequence[Rows],
    counts: Sequence[int],
    out: Float[Tensor, " n"],
    bounds: Sequence[float | None],
) -> tuple[list[Sparse], bool]:
    """Write residual + grad to `out`, which may be either, and return `top_k_of_rows` of each region and whether it is finite everywhere.

    `counts` and `bounds` are the k and the bound of each region. Raises as `top_k_of_rows` does, but what was added is then in `out`.
    """
    check_sum(residual, grad, out)
    check_sequences(regions=regions, counts=counts, bounds=bounds)
    if not len(regions) == len(counts) == len(bounds):
        raise ValueError(
            f"there must be a count and a bound for each region, got {len(counts)} and {len(bounds)} for {len(regions)}"
        )
    for rows in regions:
        check_rows(rows)
        check_one_device(("residual", residual), ("starts", rows.starts))
    counts = [count(k, rows.length) for rows, k in zip(regions, counts, strict=True)]
    bounds = [None if bound is None else real(bound, "bound") for bound in bounds]
    return run("accumulate_top_k_of_rows", residual, grad, regions, counts, out, bounds)


def all_finite(x: Float[Tensor, " n"]) -> bool:
    """Return whether `x` holds neither NaN nor Inf."""
    check_vector(x, "x")
    return run("all_finite", x)


def select_ge(x: Float[Tensor, " n"], threshold: float) -> Sparse:
    """Return the non-zero elements of `x` whose magnitude is `threshold` or more, NaN as infinity. Positions ascend."""
    check_vector(x, "x")
    return run("select_ge", x, real(threshold, "threshold"))


def top_k(x: Float[Tensor, " n"], k: int, bound: float | None = None) -> Sparse:
    """Return the `k` elements of `x` of largest magnitude; among equal magnitudes the ones that come first. Positions ascend.

    NaN counts as infinity. `bound` is a magnitude that k elements, and not many more, are expected to reach, such as a little less than
    the last step's smallest; it changes how long this takes and nothing else. Raises ValueError when `k` is not in [0, n].
    """
    check_vector(x, "x")
    k = count(k, x.numel())
    return run("top_k", x, k, None if bound is None else real(bound, "bound"))


def top_k_nonzero(x: Float[Tensor, " n"], k: int, skip: Span | None = None, bound: float | None = None) -> Sparse:
    """Return what `top_k` would select outside the span `skip`, without zeros: fewer than `k` elements where fewer are not zero.

    `k` may be more than n. Raises ValueError when it is negative, or `skip` does not lie in [0, n].
    """
    check_vector(x, "x")
    k = at_most(k, x.numel())
    check_span(skip, x.numel())
    return run("top_k_nonzero", x, k, skip, None if bound is None else real(bound, "bound"))


def top_k_of_rows(x: Float[Tensor, " n"], rows: Rows, k: int, bound: float | None = None) -> Sparse:
    """Return the `top_k` of the elements of `x` in rows, which are read where they are. Positions are places in the rows.

    Raises ValueError when `k` is not in [0, length], and IndexError for rows outside of `x`.
    """
    check_vector(x, "x")
    check_rows(rows)
    check_one_device(("x", x), ("starts", rows.starts))
    k = count(k, rows.length)
    return run("top_k_of_rows", x, rows, k, None if bound is None else real(bound, "bound"))


def locate(rows: Rows, place: Int[Tensor, " k"]) -> Int[Tensor, " k"]:
    """Return the position in the vector of each `place` in rows, in the type of `place`. Raises IndexError for places outside of them."""
    check_rows(rows)
    check_vector(place, "place", POSITIONS)
    check_one_device(("starts", rows.starts), ("place", place))
    return run("locate", rows, place)


def smallest_magnitude(x: Float[Tensor, " n"]) -> float:
    """Return the smallest |x|; NaN where there is one, and 0 where there are no elements."""
    check_vector(x, "x")
    return run("smallest_magnitude", x)


def argtopk(magnitude: Float[Tensor, " n"], k: int) -> Int[Tensor, " k"]:
    """Return the positions of the `k` largest of `magnitude`, int64, ascending; among equal ones those that come first. No NaN.

    Numbers may be negative. Raises ValueError when `k` is not in [0, n].
    """
    check_vector(magnitude, "magnitude")
    return run("argtopk", magnitude, count(k, magnitude.numel()))


def scatter_add_(out: Float[Tensor, " n"], part: Sparse) -> None:
    """Add the elements of `part` to `out`. Raises IndexError, before anything is written, for positions outside of it."""
    check_vector(out, "out")
    check_sparse(part)
    check_one_device(("out", out), ("index", part.index))
    run("scatter_add_", out, part)


def clear_(x: Float[Tensor, " n"], index: Int[Tensor, " k"]) -> None:
    """Set `x` to zero at the positions `index`. Raises IndexError, before anything is written, for positions outside of it."""
    _check_at(x, index)
    run("clear_", x, index)


def put_(x: Float[Tensor, " n"], index: Int[Tensor, " k"], value: Float[Tensor, " k"]) -> None:
    """Set `x` to `value` at the positions `index`, distinct or with equal values.

    Raises IndexError, before anything is written, for positions outside of it.
    """
    check_vector(x, "x")
    check_values(index, value)
    check_one_device(("x", x), ("index", index))
    run("put_", x, index, value)


def gather(x: Float[Tensor, " n"], index: Int[Tensor, " k"]) -> Float[Tensor, " k"]:
    """Return the elements of `x` at the positions `index`. Raises IndexError for positions outside of it."""
    _check_at(x, index)
    return run("gather", x, index)


def move_(to: Float[Tensor, " n"], source: Float[Tensor, " n"]) -> None:
    """Copy `source` to `to`, which does not overlap with it, and set it to zero."""
    check_move(to, source)
    run("move_", to, source)


def move_put_(
    to: Float[Tensor, " n"], source: Float[Tensor, " n"], kept: Sequence[Sparse], written: Sequence[Sparse]
) -> None:
    """Copy `source` to `to`, which does not overlap with it, with the values of `kept` at its positions; leave `written` and zeros.

    Raises IndexError, before anything is written, for positions outside.
    """
    check_move(to, source)
    check_sequences(kept=kept, written=written)
    for part in (*kept, *written):
        check_sparse(part)
        check_one_device(("to", to), ("index", part.index))
    run("move_put_", to, source, kept, written)


def merge(parts: Sequence[Sparse]) -> Sparse:
    """Return all elements of `parts`, which have no position in common, as one; positions ascend."""
    check_parts(parts)
    return run("merge", parts)


def coalesce(parts: Sequence[Sparse]) -> Sparse:
    """Return the sum of `parts` as one, added in their order, starting from 0; positions ascend."""
    check_parts(parts)
    return run("coalesce", parts)


def split(part: Sparse, regions: Sequence[Span]) -> list[Sparse]:
    """Cut `part` at adjacent `regions` that cover it; positions become relative to the start of their region."""
    check_sparse(part)
    check_regions(regions, part.length)
    return run("split", part, regions)


def isin(index: Int[Tensor, " a"], others: Int[Tensor, " b"]) -> Bool[Tensor, " a"]:
    """Return for each of `index` whether it is one of the ascending `others`."""
    check_vector(index, "index", POSITIONS)
    check_vector(others, "others", POSITIONS)
    check_one_device(("index", index), ("others", others))
    return run("isin", index, others)


def _check_at(x: Tensor, index: Tensor) -> None:
    check_vector(x, "x")
    check_vector(index, "index", POSITIONS)
    check_one_device(("x", x), ("index", index))
