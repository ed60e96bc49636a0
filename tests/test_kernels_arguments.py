"""Bad arguments raise an error that says what is wrong, before anything is written, on every backend; the process never ends."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.distributed import run
from helpers.wrong_arguments import OPERATIONS, check_all
from sparsync import Span, kernels
from sparsync.core import Rows, Sparse

BACKENDS = [name for name in kernels.backends() if name != "triton"]
REFUSED = (ValueError, IndexError, TypeError)
N = 8


def vector(n: int = N) -> Tensor:
    return torch.arange(1.0, n + 1)


def positions(*index: int) -> Tensor:
    return torch.tensor(index, dtype=torch.int32)


def rows(*starts: int) -> Rows:
    return Rows(positions(*starts), N // 2, N)


def short_of_values() -> Sparse:
    return Sparse(positions(0, 3, 5), vector(2), N)


BAD: dict[str, list[Callable[[], object]]] = {
    "accumulate": [
        lambda: kernels.accumulate(vector(), vector(7), vector()),
        lambda: kernels.accumulate(vector(), vector(), vector(9)),
        lambda: kernels.accumulate(vector().view(2, 4), vector().view(2, 4), vector().view(2, 4)),
    ],
    "accumulate_select_ge": [
        lambda: kernels.accumulate_select_ge(vector(), vector(7), 1.0, vector(), Span(0, N)),
        lambda: kernels.accumulate_select_ge(vector(), vector(), 1.0, vector(), Span(2, N + 1)),
        lambda: kernels.accumulate_select_ge(vector(), vector(), 1.0, vector(), Span(5, 2)),
        lambda: kernels.accumulate_select_ge(vector(), vector(), 1.0, vector(), Span(-1, 2)),
    ],
    "accumulate_top_k": [
        lambda: kernels.accumulate_top_k(vector(), vector(), -1, vector()),
        lambda: kernels.accumulate_top_k(vector(), vector(), N + 1, vector()),
        lambda: kernels.accumulate_top_k(vector(), vector(7), 1, vector()),
    ],
    "accumulate_top_k_nonzero": [
        lambda: kernels.accumulate_top_k_nonzero(vector(), vector(), -1, vector()),
        lambda: kernels.accumulate_top_k_nonzero(vector(), vector(), 1, vector(), Span(2, N + 1)),
        lambda: kernels.accumulate_top_k_nonzero(vector(), vector(), 1, vector(), Span(-1, 2)),
        lambda: kernels.accumulate_top_k_nonzero(vector(), vector(), 1, vector(), Span(5, 2)),
    ],
    "accumulate_top_k_of_rows": [
        lambda: kernels.accumulate_top_k_of_rows(vector(), vector(7), [], [], vector(), []),
        lambda: kernels.accumulate_top_k_of_rows(vector(), vector(), [rows(0, 4)], [], vector(), []),
        lambda: kernels.accumulate_top_k_of_rows(vector(), vector(), [rows(0, 4)], [N + 1], vector(), [None]),
        lambda: kernels.accumulate_top_k_of_rows(vector(), vector(), [rows(0, 5)], [1], vector(), [None]),
    ],
    "all_finite": [lambda: kernels.all_finite(vector().view(2, 4))],
    "argtopk": [lambda: kernels.argtopk(vector(), -1), lambda: kernels.argtopk(vector(), N + 1)],
    "clear_": [
        lambda: kernels.clear_(vector(), positions(0, N)),
        lambda: kernels.clear_(vector(), positions(-1)),
        lambda: kernels.clear_(vector(0), positions(0)),
        lambda: kernels.clear_(vector(), torch.tensor([0, 2**40])),
        lambda: kernels.clear_(vector(), vector(2)),
    ],
    "coalesce": [lambda: kernels.coalesce([]), lambda: kernels.coalesce([short_of_values()])],
    "gather": [
        lambda: kernels.gather(vector(), positions(0, N)),
        lambda: kernels.gather(vector(), positions(-(2**31))),
        lambda: kernels.gather(vector(), vector(2)),
    ],
    "isin": [lambda: kernels.isin(positions(1, 2).view(1, 2), positions(1))],
    "locate": [
        lambda: kernels.locate(rows(0, 4), positions(-1)),
        lambda: kernels.locate(rows(0, 4), positions(N)),
        lambda: kernels.locate(rows(0), positions(1)),
    ],
    "merge": [lambda: kernels.merge([]), lambda: kernels.merge([short_of_values()])],
    "move_put_": [
        lambda: kernels.move_put_(vector(), vector(7), [], []),
        lambda: kernels.move_put_(vector(), vector(), [short_of_values()], []),
        lambda: kernels.move_put_(vector(), vector(), [], [Sparse(positions(-1), vector(1), N)]),
        lambda: kernels.move_put_(vector(), vector(), [Sparse(positions(N), vector(1), N)], []),
    ],
    "put_": [
        lambda: kernels.put_(vector(), positions(0, N), vector(2)),
        lambda: kernels.put_(vector(), positions(0, 1), vector(1)),
        lambda: kernels.put_(vector(), positions(-1), vector(1)),
    ],
    "scatter_add_": [
        lambda: kernels.scatter_add_(vector(), Sparse(positions(0, N), vector(2), N)),
        lambda: kernels.scatter_add_(vector(), Sparse(positions(-1, 3), vector(2), N)),
        lambda: kernels.scatter_add_(vector(), short_of_values()),
    ],
    "select_ge": [lambda: kernels.select_ge(vector().view(2, 4), 0.0)],
    "smallest_magnitude": [lambda: kernels.smallest_magnitude(vector().view(2, 4))],
    "split": [lambda: kernels.split(short_of_values(), [Span(0, N)])],
    "top_k": [
        lambda: kernels.top_k(vector(), -1),
        lambda: kernels.top_k(vector(), N + 1),
        lambda: kernels.top_k(vector(), 2**63 - 1),
    ],
    "top_k_nonzero": [
        lambda: kernels.top_k_nonzero(vector(), -1),
        lambda: kernels.top_k_nonzero(vector(), 1, Span(0, N + 1)),
        lambda: kernels.top_k_nonzero(vector(), 1, Span(-3, 1)),
    ],
    "top_k_of_rows": [
        lambda: kernels.top_k_of_rows(vector(), rows(0, 4), -1),
        lambda: kernels.top_k_of_rows(vector(), rows(0, 4), N + 1),
        lambda: kernels.top_k_of_rows(vector(), rows(0), 1),
        lambda: kernels.top_k_of_rows(vector(), rows(0, 5), 1),
        lambda: kernels.top_k_of_rows(vector(), rows(-1, 4), 1),
        lambda: kernels.top_k_of_rows(vector(), Rows(positions(0), 0, N), 1),
    ],
}


@pytest.fixture(autouse=True)
def unchecked_annotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users call the library: tests execute its annotations, which would raise first."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.set_backend(request.param):
        yield request.param


def test_every_operation_is_called_with_bad_arguments() -> None:
    assert set(BAD) == set(OPERATIONS)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("operation", BAD)
def test_bad_arguments_are_refused(operation: str) -> None:
    for number, call in enumerate(BAD[operation]):
        with pytest.raises(REFUSED) as refused:
            call()
        assert str(refused.value), f"call {number} says nothing"


FUSED = ("encode_packets", "decode_packets", "add_packets_", "scatter_add_each_", "finite_each", "smallest_each")
CODECS = ("encode_positions", "decode_positions", "values_encode", "values_decode")
TENSORS = st.builds(
    lambda n, dtype, stride: torch.zeros(n * stride).to(dtype)[::stride],
    st.integers(0, 20),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8]),
    st.integers(1, 2),
)
ROWS = st.builds(
    lambda starts, row, length: Rows(torch.tensor(starts, dtype=torch.int32), row, length),
    st.lists(st.integers(-3, 20), max_size=4),
    st.integers(-2, 2**40),
    st.integers(-2, 2**40),
)
PARTS = st.builds(
    lambda index, k, length: Sparse(torch.tensor(index, dtype=torch.int32), torch.ones(k), length),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
    st.integers(0, 4),
    st.integers(-2, 20),
)
ARGUMENTS = st.one_of(
    st.none(),
    st.integers(-(2**40), 2**40),
    st.floats(),
    st.text(max_size=3),
    st.builds(Span, st.integers(-3, 20), st.integers(-3, 20)),
    TENSORS,
    ROWS,
    PARTS,
)
SMALL = st.integers(-1, 20)
EACH = st.lists(PARTS, max_size=3) | st.lists(ARGUMENTS, max_size=3)
PACKETS = st.lists(st.builds(lambda it: torch.tensor(list(it), dtype=torch.uint8), st.binary(max_size=20)), max_size=3)
REGIONS = st.none() | st.lists(ROWS, max_size=3)
FORMAT = [
    st.lists(SMALL, max_size=3),
    st.lists(SMALL, max_size=3),
    st.sampled_from([32, 8, 4, 3, 2, 1, 0, -7]),
    REGIONS,
]
SIGNATURES = {
    "encode_packets": [EACH, FORMAT[2], SMALL, REGIONS, SMALL],
    "decode_packets": [PACKETS | EACH, *FORMAT, SMALL],
    "add_packets_": [TENSORS, PACKETS | EACH, *FORMAT],
    "scatter_add_each_": [TENSORS, EACH],
    "finite_each": [EACH, SMALL],
    "smallest_each": [EACH],
}


@pytest.mark.slow
@pytest.mark.skipif(not BACKENDS[0].startswith("cpp"), reason="the C++ kernels are not built")
@pytest.mark.parametrize("operation", [*OPERATIONS, *CODECS, *FUSED])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_compiled_functions_take_any_objects_without_a_crash(operation: str, data: st.DataObject) -> None:
    """Without the checks in Python: whatever comes is taken, refused with an error, or left to the next backend."""
    from sparsync.kernels import _cpu  # type: ignore[attr-defined]

    count = {
        "accumulate_top_k_nonzero": 6,
        "accumulate_top_k_of_rows": 6,
        "accumulate_top_k": 5,
        "accumulate_select_ge": 5,
    }.get(operation)
    drawn = st.lists(ARGUMENTS, min_size=count or 1, max_size=count or 4)
    arguments: Any = data.draw(st.tuples(*SIGNATURES[operation]) if operation in SIGNATURES else drawn)
    try:
        getattr(_cpu, operation)(*arguments)
    except (*REFUSED, RuntimeError, AttributeError, MemoryError):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("examples", [3, 300])
def test_wrong_arguments_are_refused_alike_on_all_backends_or_give_the_same_bits(examples: int, tmp_path: Path) -> None:
    """In a process of its own, which a crash ends."""
    at = tmp_path / "operation"
    try:
        run(check_all, 1, examples=examples, at=at, within_s=3000.0)
    except AssertionError as error:
        raise AssertionError(f"in {at.read_text()}") from error
    assert at.read_text() == OPERATIONS[-1]


def without_memory() -> Tensor:
    x = vector()
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("make", [without_memory, lambda: vector().to("meta")])
def test_a_tensor_without_memory_is_refused(make: Callable[[], Tensor]) -> None:
    with pytest.raises(ValueError, match="grad must have memory for its 8 elements, got a Tensor on"):
        kernels.accumulate(vector(), make(), vector())


@pytest.mark.usefixtures("backend")
def test_an_error_says_what_is_wrong_and_what_is_allowed() -> None:
    for call, message in (
        (lambda: kernels.top_k(vector(), 2.0), "k must be an integer, got 2.0"),  # pyright: ignore[reportArgumentType]
        (lambda: kernels.top_k(vector(), 9), r"k must be in \[0, 8\] for 8 elements, got 9"),
        (
            lambda: kernels.top_k(positions(1), 1),
            "x must be bfloat16 or float16 or float32 or float64, got int32; convert",
        ),
        (
            lambda: kernels.scatter_add_(vector(), short_of_values()),
            "value must have as many elements as index, 3, got 2",
        ),
        (lambda: kernels.split(Sparse(positions(1), vector(1), N), [Span(0, 4)]), "regions must cover all 8 positions"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()


def test_a_bound_of_any_size_only_changes_how_long_it_takes(backend: str) -> None:
    for bound in (-1.0, 0.0, -0.0, 1e-300, 3.0, 1e300, math.inf, -math.inf, math.nan):
        assert kernels.top_k(vector(), 2, bound).index.tolist() == [6, 7]
