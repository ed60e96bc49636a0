"""The Triton kernels, called as the library calls them, against the specification: the same bits on a GPU, else in Triton's interpreter."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from json import loads
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from helpers.kernel_cases import MOVES, SPREADS, TABLE, compare, laid, made, on
from helpers.on_triton import CUDA, DEVICE
from helpers.quick import one_in
from helpers.reference import reference
from helpers.same_bits import same
from sparsync import kernels
from sparsync.core import Rows, Sparse
from sparsync.kernels import cuda, operations
from sparsync.kernels.codec_reference import PositionCodec
from sparsync.kernels.cuda import exact_top_k, launch
from sparsync.schemes import Span
from sparsync.selection.exclusive import BlockCyclic
from studies.gpu.launches import WAITS

BLOCK = launch.BLOCK
WRITTEN_IN_TRITON = sorted(TABLE.keys() & vars(cuda).keys())
# Which sign a NaN has is open, and the bits of a sign show it.
SIGNS = ("encode_steps_", "apply_steps_", "values_encode", "reduce_shares_", "write_mean_", "packets_fit")


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    with kernels.set_backend("triton"):
        yield


@pytest.mark.parametrize("kind", one_in(5, ["normal", "special", "denormal", "equal", "mostly-nan"]))
@pytest.mark.parametrize("operation", WRITTEN_IN_TRITON)
def test_an_operation_is_its_specification(operation: str, kind: str) -> None:
    if (operation in SIGNS and kind == "mostly-nan") or (operation == "reduce_shares_" and kind == "special"):
        pytest.skip("the signs of NaN are not compared")
    cases = list(TABLE[operation](kind, 300))
    few = [next(iter(TABLE[operation](kind, 1))), list(TABLE[operation]("few-values", 40))[-1]]  # with zeros
    taken = [compare(cuda, operation, on(DEVICE, each)) for each in (*few, *cases[:: 1 + len(cases) // 2])]
    assert any(taken)


@pytest.mark.slow
@pytest.mark.parametrize("operation", WRITTEN_IN_TRITON)
def test_an_operation_on_several_blocks_is_its_specification(operation: str) -> None:
    cases = list(TABLE[operation]("normal", 2 * BLOCK + 5))
    taken = [compare(cuda, operation, on(DEVICE, each)) for each in cases[::4]]
    assert any(taken)


def test_a_sample_that_misleads_does_not_change_what_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 200
    monkeypatch.setattr(exact_top_k, "SAMPLE", 16)
    stride = -(-n // 16) | 1
    x = made("few-values", n).to(DEVICE)
    low, high = x.clone(), x.clone()
    low[::stride], high[::stride] = 1e-40, 1e30
    for each, k in ((low, 1), (high, n // 5)):
        same(kernels.top_k(each, k), reference.top_k(each, k))


@pytest.mark.parametrize("position", [-1, 4, 2**31 - 1, -(2**31)])
def test_a_position_outside_is_left_out_and_nothing_is_asked(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.ones(6, device=DEVICE)  # with neighbours of x
    x, index = memory[1:5], torch.tensor([0, position], dtype=torch.int32, device=DEVICE)
    two = torch.full((2,), 2.0, device=DEVICE)
    with watched(monkeypatch) as (_, asked):
        kernels.scatter_add_(x, Sparse(index, two, 4))
        added = kernels.gather(x, index)
        kernels.put_(x, index, two)
        put = kernels.gather(x, index)
        kernels.clear_(x, index)
    assert set(asked) <= {"empty"}, asked
    assert (added.tolist(), put.tolist(), memory.tolist()) == ([3.0, 0.0], [2.0, 0.0], [1.0, 0.0, 1.0, 1.0, 1.0, 1.0])


@pytest.mark.slow
@pytest.mark.skipif(CUDA, reason="the kernels run on the GPU that is here")
def test_every_kernel_compiles_for_a_gpu_with_wide_loads_and_exact_arithmetic(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("helpers") / "compiled_kernels.py"
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", program],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    *rows, last = map(loads, printed.stdout.splitlines())
    assert {row["kernel"] for row in rows} == set(last["all"])
    for row in rows:
        assert not row["inexact"], row
        if row["kernel"] == "_add_kernel":
            assert row["wide_loads"], row
    for kernel in ("count_kernel", "tally_kernel", "choose_kernel"):
        assert any(row["wide_loads"] for row in rows if row["kernel"] == kernel)


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], list[str]]]:
    """Note the kernels that are launched, and what is asked of torch besides."""
    from triton.runtime.interpreter import InterpretedFunction  # once the interpreter is on

    launched: list[str] = []
    asked: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # torch calls it
            asked.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    def counted(kernel: InterpretedFunction, *args: object, **named: object) -> object:
        launched.append(kernel.fn.__name__)
        with _disable_current_modes():  # the interpreter computes with torch
            return run(kernel, *args, **named)

    run = InterpretedFunction.run
    monkeypatch.setattr(InterpretedFunction, "run", counted)
    with Seen():
        yield launched, asked


@pytest.mark.skipif(CUDA, reason="the interpreter counts")
def test_the_largest_of_any_number_of_regions_take_ten_launches_and_ask_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = made("normal", 300).to(DEVICE)
    for P in (2, 4):
        regions = [BlockCyclic(300, P).rows(p, x.device) for p in range(1, P)]
        with watched(monkeypatch) as (launched, asked):
            operations.top_k_of_each(x, regions, [9] * (P - 1), [None] * (P - 1))
        assert launched == ["guess_kernel", *["count_kernel", "narrow_kernel"] * 3, "tally_kernel", "choose_kernel"]
        # Memory, views, a table, and one more launch.
        assert set(asked) <= {"empty", "split", "split_with_sizes", "lift_fresh", "detach", "cumsum"}, asked
        assert asked.count("cumsum") == 1


def test_a_settled_step_takes_five_launches_and_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    n, P = 900, 3
    gradients: tuple[list[Tensor], list[int], list[float]] = on(DEVICE, laid("normal", n, torch.float32))
    square, ratio = torch.ones(n, device=DEVICE), torch.ones(3, device=DEVICE)
    residual, momentum = torch.zeros(n, device=DEVICE), torch.zeros(n, device=DEVICE)
    skip, whole = torch.zeros(1, device=DEVICE), [Span(0, n)]
    with watched(monkeypatch) as (launched, asked):
        fits = cuda.squares_fit(gradients[0], gradients[2], 1e30)
        sent = cuda.encode_steps_(residual, *gradients, square, ratio, 1024, whole, SPREADS[:1], 1, P, 3, skip)
        own = Span(300, 600).of(residual)
        packet = cuda.reduce_shares_(own, list(sent.chunk(2)), 3, P, 3, skip)
        cuda.apply_steps_(gradients[0], gradients[1], momentum, [packet] * P, 3, whole, MOVES[:1], skip)
    assert bool(fits)
    assert launched == ["_squares_kernel", "_fit_kernel", "_encode_steps_kernel", "_reduce_kernel", "_move_kernel"]
    # Memory, views, and tables of what lies where: no work, and no question to the device.
    assert set(asked) <= {"empty", "new_empty", "slice", "split", "lift_fresh", "detach"}, asked


def test_rows_outside_count_as_zero_or_are_refused() -> None:
    x = torch.ones(5, device=DEVICE)
    part_outside = Rows(torch.tensor([3, -2], dtype=torch.int32, device=DEVICE), 4, 8)
    assert sorted(cuda.top_k_of_each(x, [part_outside], [8])[0].value.tolist()) == [0.0] * 4 + [1.0] * 4
    with pytest.raises(IndexError, match="rows must"):
        cuda.top_k_of_each(x, [replace(part_outside, length=9)], [1])


@pytest.mark.parametrize("codec", get_args(PositionCodec))
def test_positions_ask_nothing_and_spoilt_packets_stay_inside(
    codec: PositionCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k, span, gap in ((9, 900, 97), (1500, 50_000, 33)):
        index = (span - 1 - gap * torch.arange(k - 1, -1, -1)).int().to(DEVICE)
        with watched(monkeypatch) as (_, asked):
            packet = cuda.encode_positions(codec, index, span)
            found = cuda.decode_positions(codec, packet, k, span)
        assert not WAITS & set(asked), asked
        assert torch.equal(packet, reference.encode_positions(codec, index, span))
        assert torch.equal(found, index)
        spoilt = cuda.decode_positions(codec, packet.fill_(255), k, span)
        assert 0 <= int(spoilt.min()) <= int(spoilt.max()) < span
