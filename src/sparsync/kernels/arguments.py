"""What kernels and codecs require of their arguments, the same for every backend: TypeError or ValueError before anything is written.

A check takes about a microsecond a tensor, so the library's own parts call `operations` without them. Positions outside of a vector are
found by the kernel that would read or write there.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from sparsync.core import Rows, Span, Sparse

FLOATING = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
FLOAT32 = frozenset({torch.float32})
POSITIONS = frozenset({torch.int32, torch.int64})
ROW_STARTS = frozenset({torch.int32})
BYTES = frozenset({torch.uint8})

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Any: whatever the caller gave; that is what is checked here.


def checked(operation: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the operation with its arguments checked, and numbers made an int or a float."""
    check = _CHECKS[operation.__name__]

    @wraps(operation)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return operation(*check(*args, **kwargs))  # pyright: ignore[reportCallIssue]  # the same ones, converted

    return called


def check_vector(x: Any, name: str, dtypes: frozenset[torch.dtype] = FLOATING) -> None:
    """Raise TypeError unless `x` is a tensor of one of `dtypes`, ValueError unless it has one dimension and memory for its elements."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {tuple(x.shape)}; pass {name}.flatten()")
    if x.dtype not in dtypes:
        allowed = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise TypeError(
            f"{name} must be {allowed}, got {str(x.dtype).removeprefix('torch.')}; convert it with {name}.to(...)"
        )
    if not _has_memory(x):
        raise ValueError(
            f"{name} must have memory for its {x.numel()} elements, got a {type(x).__name__} on {x.device} without; "
            "pass a plain tensor whose storage was not resized"
        )


def check_one_device(*named: tuple[str, Tensor]) -> None:
    """Raise ValueError unless the tensors lie on one device."""
    first, x = named[0]
    for name, other in named[1:]:
        if other.device != x.device:
            raise ValueError(
                f"{name} must be on the device of {first}, {x.device}, got {other.device}; move it with {name}.to(...)"
            )


def check_sum(residual: Any, grad: Any, out: Any) -> None:
    """Raise TypeError or ValueError unless `out` can take residual + grad."""
    check_vector(residual, "residual")
    check_vector(grad, "grad")
    check_vector(out, "out")
    n = residual.numel()
    for name, x in (("grad", grad), ("out", out)):
        if x.numel() != n:
            raise ValueError(f"{name} must have as many elements as residual, {n}, got {x.numel()}")
    check_one_device(("residual", residual), ("grad", grad), ("out", out))


def check_move(to: Any, source: Any) -> None:
    """Raise TypeError or ValueError unless `to` can take the elements of `source`."""
    check_vector(to, "to")
    check_vector(source, "source")
    if to.numel() != source.numel():
        raise ValueError(f"source must have as many elements as its new place, {to.numel()}, got {source.numel()}")
    check_one_device(("to", to), ("source", source))


def check_sequences(**named: Any) -> None:
    """Raise TypeError unless these arguments are sequences."""
    for name, argument in named.items():
        if not isinstance(argument, Sequence) or isinstance(argument, str):
            raise TypeError(f"{name} must be a sequence, got {type(argument).__name__}; pass list({name})")


def check_rows(rows: Any) -> None:
    """Raise TypeError or ValueError unless `rows` has a start for each row."""
    if not isinstance(rows, Rows):
        raise TypeError(f"rows must be a sparsync.core.Rows, got {type(rows).__name__}")
    check_vector(rows.starts, "starts", ROW_STARTS)
    row, length = integer(rows.row, "row"), integer(rows.length, "length")
    if not 1 <= row < 2**31 or length < 0 or -(-length // row) > rows.starts.numel():
        raise ValueError(
            f"rows must have 1 to 2^31 - 1 elements and as many starts as there are rows, got {rows.starts.numel()} starts "
            f"for {length} elements in rows of {row}"
        )


def check_values(index: Any, value: Any, dtypes: frozenset[torch.dtype] = FLOATING) -> None:
    """Raise TypeError or ValueError unless there is a value for each position."""
    check_vector(index, "index", POSITIONS)
    check_vector(value, "value", dtypes)
    if value.numel() != index.numel():
        raise ValueError(f"value must have an element for each of {index.numel()} positions, got {value.numel()}")
    check_one_device(("index", index), ("value", value))


def check_sparse(part: Any) -> None:
    """Raise TypeError or ValueError unless `part` is a sparse vector with a value for each position."""
    if not isinstance(part, Sparse):
        raise TypeError(f"a sparse vector must be a sparsync.Sparse, got {type(part).__name__}")
    check_values(part.index, part.value)
    if integer(part.length, "length") < part.index.numel():
        raise ValueError(
            f"a sparse vector of length {part.length} has at most as many positions, got {part.index.numel()}"
        )


def check_parts(parts: Any) -> None:
    """Raise TypeError or ValueError unless `parts` is a sequence of at least one sparse vector, all of one length, type and device."""
    if not isinstance(parts, Sequence):
        raise TypeError(f"parts must be a sequence of sparse vectors, got {type(parts).__name__}; pass list(parts)")
    if not parts:
        raise ValueError("there must be at least one sparse vector, got none")
    for part in parts:
        check_sparse(part)
        first = parts[0]
        if part.length != first.length:
            raise ValueError(f"sparse vectors must have one length, got {first.length} and {part.length}")
        for name, x, other in (("index", first.index, part.index), ("value", first.value, part.value)):
            if other.dtype != x.dtype:
                raise TypeError(f"the {name} of all sparse vectors must have one type, got {x.dtype} and {other.dtype}")
            check_one_device((f"the first {name}", x), (f"every {name}", other))


def check_regions(regions: Any, length: int) -> None:
    """Raise TypeError or ValueError unless `regions` are adjacent spans that cover [0, length)."""
    if not isinstance(regions, Sequence):
        raise TypeError(f"regions must be a sequence of spans, got {type(regions).__name__}; pass list(regions)")
    if not regions:
        raise ValueError("there must be at least one region, got none")
    position = 0
    for region in regions:
        if not isinstance(region, Span):
            raise TypeError(f"a region must be a sparsync.Span, got {type(region).__name__}")
        if integer(region.start, "start") != position or integer(region.stop, "stop") < position:
            raise ValueError(
                f"regions must be adjacent and ascend from 0, got [{region.start}, {region.stop}) where one must start at {position}"
            )
        position = region.stop
    if position != length:
        raise ValueError(f"regions must cover all {length} positions, got some that end at {position}")


def check_span(span: Any, n: int) -> None:
    """Raise TypeError or ValueError unless `span` is None, or a span inside [0, n]."""
    if span is None:
        return
    if not isinstance(span, Span):
        raise TypeError(f"skip must be a sparsync.Span or None, got {type(span).__name__}")
    if not 0 <= integer(span.start, "start") <= integer(span.stop, "stop") <= n:
        raise ValueError(f"a span of {n} elements must lie in [0, {n}], got [{span.start}, {span.stop})")


def integer(number: Any, name: str) -> int:
    """Return `number` as an int. Raises TypeError for what is no integer."""
    if type(number) is int:
        return number
    if isinstance(number, Tensor) or not hasattr(type(number), "__index__"):
        raise TypeError(f"{name} must be an integer, got {_shown(number)}")
    return operator.index(number)


def count(k: Any, n: int) -> int:
    """Return k as an int. Raises TypeError for what is no integer, and ValueError unless it is in [0, n]."""
    k = integer(k, "k")
    if not 0 <= k <= n:
        raise ValueError(f"k must be in [0, {n}] for {n} elements, got {k}")
    return k


def at_most(k: Any, n: int) -> int:
    """Return k, or n where that is less. Raises TypeError for what is no integer, and ValueError when it is negative."""
    k = integer(k, "k")
    if k < 0:
        raise ValueError(f"k must be 0 or more, got {k}")
    return min(k, n)


def real(number: Any, name: str) -> float:
    """Return `number` as a float, an integer beyond all floats as infinity. Raises TypeError for what is no number."""
    if type(number) is float:
        return number
    if isinstance(number, Tensor) or not hasattr(type(number), "__float__"):
        raise TypeError(f"{name} must be a number, got {_shown(number)}")
    try:
        return float(number)
    except OverflowError:
        return math.copysign(math.inf, number)


def _shown(argument: Any) -> str:
    """Return what a message says of `argument`: tensors by their type, because reading one without memory would end the process."""
    return (
        repr(argument)
        if argument is None or isinstance(argument, (int, float, str))
        else f"a {type(argument).__name__}"
    )


def _has_memory(x: Tensor) -> bool:
    """Return whether the storage of `x` is there and long enough: torch itself ends the process where it is not."""
    try:
        if not x.numel():
            # What has no values to give, such as a fake tensor, is a subclass with its own dispatch.
            plain, own = (getattr(kind, "__torch_dispatch__", None) for kind in (Tensor, type(x)))
            return own is plain and not x.is_meta
        storage = x.untyped_storage()
        last = x.storage_offset() + (x.numel() - 1) * x.stride(0) + 1
        return storage.nbytes() >= last * x.element_size() and x.data_ptr() != 0
    except (RuntimeError, NotImplementedError):  # a fake or functional tensor, one on the meta device, or a sparse one
        return False


# The checks of each operation return its arguments, as they are passed on.


def _accumulate(residual: Any, grad: Any, out: Any) -> tuple[Any, ...]:
    check_sum(residual, grad, out)
    return residual, grad, out


def _accumulate_top_k(residual: Any, grad: Any, k: Any, out: Any, bound: Any = None) -> tuple[Any, ...]:
    check_sum(residual, grad, out)
    return residual, grad, count(k, residual.numel()), out, _bound(bound)


def _accumulate_top_k_nonzero(
    residual: Any, grad: Any, k: Any, out: Any, skip: Any = None, bound: Any = None
) -> tuple[Any, ...]:
    check_sum(residual, grad, out)
    k = at_most(k, residual.numel())
    check_span(skip, residual.numel())
    return residual, grad, k, out, skip, _bound(bound)


def _accumulate_top_k_of_rows(
    residual: Any, grad: Any, regions: Any, counts: Any, out: Any, bounds: Any
) -> tuple[Any, ...]:
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
    return residual, grad, regions, counts, out, [_bound(bound) for bound in bounds]


def _vector(x: Any) -> tuple[Any, ...]:
    check_vector(x, "x")
    return (x,)


def _select_ge(x: Any, threshold: Any) -> tuple[Any, ...]:
    check_vector(x, "x")
    return x, real(threshold, "threshold")


def _top_k(x: Any, k: Any, bound: Any = None) -> tuple[Any, ...]:
    check_vector(x, "x")
    return x, count(k, x.numel()), _bound(bound)


def _top_k_nonzero(x: Any, k: Any, skip: Any = None, bound: Any = None) -> tuple[Any, ...]:
    check_vector(x, "x")
    k = at_most(k, x.numel())
    check_span(skip, x.numel())
    return x, k, skip, _bound(bound)


def _top_k_of_rows(x: Any, rows: Any, k: Any, bound: Any = None) -> tuple[Any, ...]:
    check_vector(x, "x")
    check_rows(rows)
    check_one_device(("x", x), ("starts", rows.starts))
    return x, rows, count(k, rows.length), _bound(bound)


def _locate(rows: Any, place: Any) -> tuple[Any, ...]:
    check_rows(rows)
    check_vector(place, "place", POSITIONS)
    check_one_device(("starts", rows.starts), ("place", place))
    return rows, place


def _argtopk(magnitude: Any, k: Any) -> tuple[Any, ...]:
    check_vector(magnitude, "magnitude")
    return magnitude, count(k, magnitude.numel())


def _scatter_add_(out: Any, part: Any) -> tuple[Any, ...]:
    check_vector(out, "out")
    check_sparse(part)
    check_one_device(("out", out), ("index", part.index))
    return out, part


def _at(x: Any, index: Any) -> tuple[Any, ...]:
    check_vector(x, "x")
    check_vector(index, "index", POSITIONS)
    check_one_device(("x", x), ("index", index))
    return x, index


def _put_(x: Any, index: Any, value: Any) -> tuple[Any, ...]:
    check_vector(x, "x")
    check_values(index, value)
    check_one_device(("x", x), ("index", index))
    return x, index, value


def _move_put_(to: Any, source: Any, kept: Any, written: Any) -> tuple[Any, ...]:
    check_move(to, source)
    check_sequences(kept=kept, written=written)
    for part in (*kept, *written):
        check_sparse(part)
        check_one_device(("to", to), ("index", part.index))
    return to, source, kept, written


def _parts(parts: Any) -> tuple[Any, ...]:
    check_parts(parts)
    return (parts,)


def _split(part: Any, regions: Any) -> tuple[Any, ...]:
    check_sparse(part)
    check_regions(regions, part.length)
    return part, regions


def _isin(index: Any, others: Any) -> tuple[Any, ...]:
    check_vector(index, "index", POSITIONS)
    check_vector(others, "others", POSITIONS)
    check_one_device(("index", index), ("others", others))
    return index, others


def _bound(bound: Any) -> float | None:
    return None if bound is None else real(bound, "bound")


_CHECKS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "accumulate": _accumulate,
    "accumulate_top_k": _accumulate_top_k,
    "accumulate_top_k_nonzero": _accumulate_top_k_nonzero,
    "accumulate_top_k_of_rows": _accumulate_top_k_of_rows,
    "all_finite": _vector,
    "argtopk": _argtopk,
    "clear_": _at,
    "coalesce": _parts,
    "gather": _at,
    "isin": _isin,
    "locate": _locate,
    "merge": _parts,
    "move_put_": _move_put_,
    "put_": _put_,
    "scatter_add_": _scatter_add_,
    "select_ge": _select_ge,
    "smallest_magnitude": _vector,
    "split": _split,
    "top_k": _top_k,
    "top_k_nonzero": _top_k_nonzero,
    "top_k_of_rows": _top_k_of_rows,
}
