"""Calls every public kernel with random arguments, most of them wrong, on all backends, for a process that may crash.

What is asked: an exception of one type and message on all backends, or the same bits on all of them, in results and in what is written.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.same_bits import bits as bits_of
from sparsync import Span, kernels
from sparsync.core import Rows, Sparse

REFUSED = (ValueError, TypeError, IndexError, RuntimeError)
BACKENDS = [name for name in kernels.backends() if name != "triton"]
OPERATIONS = tuple(name for name in kernels.__all__ if name not in ("backend", "backends", "set_backend"))

Strategy = st.SearchStrategy[Any]  # Any: arguments of every kind


def stored_nothing(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(0)
    return x


def fake(n: int) -> Tensor:
    with FakeTensorMode():
        return torch.zeros(n)


sizes = st.sampled_from([8, 8, 8, 8, 0, 1, 7, 300])
floats = st.builds(
    lambda n, seed: torch.randn(n, generator=torch.Generator().manual_seed(seed)).round(decimals=1),
    sizes,
    st.integers(0, 9),
)
whole = st.one_of(st.integers(-2, 12), st.sampled_from([300, 2**31, 2**63, -(2**31), 2**70]))
positions = st.one_of(
    st.lists(st.integers(0, 7), max_size=8, unique=True).map(sorted),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4, unique=True).map(sorted),
).flatmap(
    lambda index: st.sampled_from([torch.int32, torch.int32, torch.int64]).map(
        lambda dtype: torch.tensor(index, dtype=dtype)
    )
)
odd = st.one_of(
    st.none(),
    st.text(max_size=2),
    st.floats(),
    whole,
    floats.map(lambda x: x.to(torch.float16)),
    floats.map(lambda x: x.to(torch.float64)),
    floats.map(lambda x: x.to(torch.int32)),
    floats.map(lambda x: x.repeat_interleave(2)[::2]),
    floats.map(lambda x: x.view(1, -1)),
    floats.map(lambda x: x.to("meta")),
    floats.map(lambda x: x.to_sparse()),
    floats.map(stored_nothing),
    sizes.map(fake),
    st.just(torch.tensor(3.0)),
    st.just(torch.tensor(3)),
)


def mostly(usual: Strategy) -> Strategy:
    """Return seven times of eight what `usual` draws, else anything."""
    return st.integers(0, 7).flatmap(lambda draw: usual if draw else odd)


def ascending(argument: Any) -> Any:
    """Return positions in order, which some operations ask for and do not check; anything else as it is."""
    whole = isinstance(argument, Tensor) and argument.dtype in (torch.int32, torch.int64) and argument.dim() == 1
    return argument.sort().values if whole and type(argument) is Tensor and argument.device.type == "cpu" else argument


vectors, index, number = mostly(floats), mostly(positions), mostly(whole)
spans = st.builds(Span, st.integers(-1, 9), st.integers(-1, 9))
skips = mostly(st.one_of(st.none(), spans))
bounds = mostly(st.one_of(st.none(), st.floats(allow_nan=True)))
lengths = st.one_of(st.just(8), st.integers(-1, 9))
sparse = mostly(
    positions.flatmap(lambda at: st.builds(Sparse, st.just(at.int()), mostly(st.just(torch.ones(at.numel()))), lengths))
)
parts = mostly(st.lists(sparse, max_size=4))
regions = mostly(st.one_of(st.just([Span(0, 3), Span(3, 8)]), st.lists(spans, max_size=3)))
starts = mostly(st.lists(st.integers(-1, 9), max_size=4).map(lambda at: torch.tensor(at, dtype=torch.int32)))
rows = mostly(st.builds(Rows, starts, mostly(st.integers(0, 3)), mostly(st.integers(-1, 9))))

ARGUMENTS: dict[str, tuple[Strategy, ...]] = {
    "accumulate": (vectors, vectors, vectors),
    "accumulate_select_ge": (vectors, vectors, mostly(st.floats()), vectors, mostly(spans)),
    "accumulate_top_k": (vectors, vectors, number, vectors, bounds),
    "accumulate_top_k_nonzero": (vectors, vectors, number, vectors, skips, bounds),
    "accumulate_top_k_of_rows": (
        vectors,
        vectors,
        mostly(st.lists(rows, max_size=2)),
        mostly(st.lists(number, max_size=2)),
        vectors,
        mostly(st.lists(bounds, max_size=2)),
    ),
    "all_finite": (vectors,),
    "argtopk": (vectors, number),
    "clear_": (vectors, index),
    "coalesce": (parts,),
    "gather": (vectors, index),
    "isin": (index, index.map(ascending)),
    "locate": (rows, index),
    "merge": (parts,),
    "move_put_": (vectors, vectors, parts, parts),
    "put_": (vectors, index, vectors),
    "scatter_add_": (vectors, sparse),
    "select_ge": (vectors, mostly(st.floats())),
    "smallest_magnitude": (vectors,),
    "split": (sparse, regions),
    "top_k": (vectors, number, bounds),
    "top_k_nonzero": (vectors, number, skips, bounds),
    "top_k_of_rows": (vectors, rows, number, bounds),
}


def copied(argument: Any) -> Any:
    """Return a copy whose writing shows nowhere else; what cannot be copied, because it has no memory, as it is."""
    if isinstance(argument, list):
        return [copied(each) for each in argument]
    if isinstance(argument, Sparse):
        return Sparse(copied(argument.index), copied(argument.value), argument.length)
    if isinstance(argument, Rows):
        return Rows(copied(argument.starts), argument.row, argument.length)
    if isinstance(argument, Tensor):
        plain = type(argument) is Tensor and argument.layout is torch.strided and argument.device.type == "cpu"
        if not plain or (argument.numel() and not argument.data_ptr()):
            return argument
        return argument.clone(memory_format=torch.preserve_format)
    return copy.copy(argument)


def outcome(call: Callable[..., Any], arguments: tuple[Any, ...], backend: str) -> tuple[str, Any]:
    """Return the error of a call on this backend, or its result and its arguments afterwards."""
    given_ = tuple(map(copied, arguments))
    with kernels.set_backend(backend):
        try:
            result = call(*given_)
        except REFUSED as error:
            return f"{type(error).__name__}: {error}", None
    return "", (result, given_)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a is b or (a.dtype == b.dtype and torch.equal(bits_of(a), bits_of(b)))
    if isinstance(a, Sparse):
        return a.length == b.length and same(a.index, b.index) and same(a.value, b.value)
    if isinstance(a, Rows):
        return (a.row, a.length) == (b.row, b.length) and same(a.starts, b.starts)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def check(operation: str, examples: int) -> None:
    call = getattr(kernels, operation)

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(arguments=st.tuples(*ARGUMENTS[operation]))
    def agree(arguments: tuple[Any, ...]) -> None:
        wanted, result = outcome(call, arguments, "reference")
        for backend in BACKENDS:
            refused, found = outcome(call, arguments, backend)
            assert refused == wanted, f"{operation} on {backend}: {refused!r}, on the reference {wanted!r}"
            assert same(found, result), f"{operation} on {backend}: {found}, on the reference {result}"

    agree()


def check_all(examples: int, at: Path) -> None:
    """Check every operation; `at` has the name of the last one that was begun."""
    for operation in OPERATIONS:
        at.write_text(operation)
        check(operation, examples)
