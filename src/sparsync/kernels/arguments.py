"""What `sparsync.kernels` requires of its arguments, the same for every backend: TypeError or ValueError before anything is written.

A check takes about a microsecond a tensor, so the library's own parts call `operations` without them. Positions outside of a vector are
found by the kernel that would read or write there.
"""

import inspect
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from sparsync.core import Rows, Span, Sparse

FLOATING = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
POSITIONS = frozenset({torch.int32, torch.int64})
ROW_STARTS = frozenset({torch.int32})

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Any: whatever the caller gave; that is what is checked here.


def checked(operation: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the operation with its arguments checked by their names, and numbers made an int or a float."""
    signature = inspect.signature(operation)

    @wraps(operation)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        for name, argument in given.arguments.items():
            if name in _CHECKS:
                _CHECKS[name](argument, name)
        _check_together(given.arguments)
        given.arguments.update(_numbers(given.arguments))
        return operation(*given.args, **given.kwargs)

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


def check_positions(index: Any, name: str) -> None:
    """Raise as `check_vector` unless `index` holds positions."""
    check_vector(index, name, POSITIONS)


def check_sequence(argument: Any, name: str) -> None:
    """Raise TypeError unless the argument is a sequence."""
    if not isinstance(argument, Sequence) or isinstance(argument, str):
        raise TypeError(f"{name} must be a sequence, got {type(argument).__name__}; pass list({name})")


def check_rows(rows: Any, name: str) -> None:
    """Raise TypeError or ValueError unless `rows` has a start for each row."""
    if not isinstance(rows, Rows):
        raise TypeError(f"{name} must be a sparsync.core.Rows, got {type(rows).__name__}")
    check_vector(rows.starts, "starts", ROW_STARTS)
    row, length = integer(rows.row, "row"), integer(rows.length, "length")
    if not 1 <= row < 2**31 or length < 0 or -(-length // row) > rows.starts.numel():
        raise ValueError(
            f"rows must have 1 to 2^31 - 1 elements and as many starts as there are rows, got {rows.starts.numel()} starts "
            f"for {length} elements in rows of {row}"
        )


def check_sparse(part: Any, name: str) -> None:
    """Raise TypeError or ValueError unless `part` is a sparse vector with a value for each position."""
    if not isinstance(part, Sparse):
        raise TypeError(f"{name} must be a sparsync.Sparse, got {type(part).__name__}")
    check_positions(part.index, "index")
    check_vector(part.value, "value")
    _check_as_many("value", part.value, "index", part.index)
    if integer(part.length, "length") < part.index.numel():
        raise ValueError(
            f"a sparse vector of length {part.length} has at most as many positions, got {part.index.numel()}"
        )


def check_sparse_vectors(parts: Any, name: str) -> None:
    """Raise TypeError or ValueError unless `parts` is a sequence of sparse vectors."""
    check_sequence(parts, name)
    for part in parts:
        check_sparse(part, f"an element of {name}")


def check_addends(parts: Any, name: str) -> None:
    """Raise TypeError or ValueError unless `parts` has at least one sparse vector, all of one length and type."""
    check_sparse_vectors(parts, name)
    if not parts:
        raise ValueError("there must be at least one sparse vector, got none")
    first = parts[0]
    for part in parts[1:]:
        if part.length != first.length:
            raise ValueError(f"sparse vectors must have one length, got {first.length} and {part.length}")
        for what, x, other in (("index", first.index, part.index), ("value", first.value, part.value)):
            if other.dtype != x.dtype:
                raise TypeError(f"the {what} of all sparse vectors must have one type, got {x.dtype} and {other.dtype}")


# By the name that an argument has in all operations. What a number must be depends on other arguments, see `_numbers`.
_CHECKS: dict[str, Callable[[Any, str], None]] = {
    **dict.fromkeys(("residual", "grad", "out", "x", "magnitude", "to", "source", "value"), check_vector),
    **dict.fromkeys(("index", "others", "place"), check_positions),
    **dict.fromkeys(("regions", "counts", "bounds"), check_sequence),
    **dict.fromkeys(("kept", "written"), check_sparse_vectors),
    "part": check_sparse,
    "parts": check_addends,
    "rows": check_rows,
}
_SAME_LENGTH = (("grad", "residual"), ("out", "residual"), ("source", "to"), ("value", "index"))


def _check_together(given: dict[str, Any]) -> None:
    """Raise TypeError or ValueError unless the arguments, each of which was checked alone, go with each other."""
    for name, other in _SAME_LENGTH:
        if name in given and other in given:
            _check_as_many(name, given[name], other, given[other])
    if "counts" in given:
        regions, counts, bounds = given["regions"], given["counts"], given["bounds"]
        if not len(regions) == len(counts) == len(bounds):
            raise ValueError(
                f"there must be a count and a bound for each region, got {len(counts)} and {len(bounds)} for {len(regions)}"
            )
        for rows in regions:
            check_rows(rows, "a region")
    elif "regions" in given:
        _check_regions(given["regions"], given["part"].length)
    (first, x), *others = _tensors(given)
    for name, other in others:
        if other.device != x.device:
            raise ValueError(
                f"{name} must be on the device of {first}, {x.device}, got {other.device}; move one of them with .to(...)"
            )


def _check_as_many(name: str, x: Tensor, other: str, y: Tensor) -> None:
    if x.numel() != y.numel():
        raise ValueError(f"{name} must have as many elements as {other}, {y.numel()}, got {x.numel()}")


def _check_regions(regions: Sequence[Any], length: int) -> None:
    """Raise TypeError or ValueError unless `regions` are adjacent spans that cover [0, length)."""
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


def _tensors(given: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors among the arguments, with the names of these."""
    for name, argument in given.items():
        for each in argument if isinstance(argument, Sequence) else (argument,):
            if isinstance(each, Tensor):
                yield name, each
            elif isinstance(each, Rows):
                yield name, each.starts
            elif isinstance(each, Sparse):
                yield from ((name, each.index), (name, each.value))


def _numbers(given: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers among the arguments as int and float. Raises TypeError or ValueError for those that are none or out of range."""
    found: dict[str, Any] = {}
    if "k" in given:
        n = given["rows"].length if "rows" in given else next(iter(given.values())).numel()
        found["k"] = at_most(given["k"], n) if "skip" in given else count(given["k"], n)
        _check_span(given.get("skip"), n)
    if "counts" in given:
        found["counts"] = [count(k, rows.length) for rows, k in zip(given["regions"], given["counts"], strict=True)]
        found["bounds"] = [_bound(bound) for bound in given["bounds"]]
    if "bound" in given:
        found["bound"] = _bound(given["bound"])
    if "threshold" in given:
        found["threshold"] = real(given["threshold"], "threshold")
    if "span" in given:
        _check_span(given["span"], given["out"].numel(), "span")
    return found


def _check_span(span: Any, n: int, name: str = "skip") -> None:
    """Raise TypeError or ValueError unless `span` is a span inside [0, n], or None where it is called `skip`."""
    if span is None and name == "skip":
        return
    if not isinstance(span, Span):
        raise TypeError(
            f"{name} must be a sparsync.Span{' or None' if name == 'skip' else ''}, got {type(span).__name__}"
        )
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


def _bound(bound: Any) -> float | None:
    return None if bound is None else real(bound, "bound")


def _shown(argument: Any) -> str:
    """Return what a message says of `argument`: tensors by their type, because reading one without memory would end the process."""
    plain = argument is None or isinstance(argument, (int, float, str))
    return repr(argument) if plain else f"a {type(argument).__name__}"


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
