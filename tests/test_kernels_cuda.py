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

from helpers.kernel_cases import MOVES, SPREADS, TABLE, compare, laid, on
from helpers.on_triton import CUDA, DEVICE, made
from helpers.quick import one_in
from helpers.reference import reference
from helpers.same_bits import same
from sparsync import kernels, schemes
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import Bucket, Rows, Sparse
from sparsync.kernels import cuda, operations
from sparsync.kernels.codec_reference import PositionCodec
from sparsync.kernels.cuda import exact_top_k, launch, passes
from sparsync.schemes import Span
from sparsync.selection.exclusive import BlockCyclic
from studies.bench.kernels import main as bench
from studies.gpu.launches import WAITS

BLOCK = launch.BLOCK
WRITTEN_IN_TRITON = sorted(TABLE.keys() & vars(cuda).keys())
# Which sign a NaN has is open, and the bits of a sign show it.
SIGNS = ("encode_steps_", "apply_steps_", "values_encode", "reduce_shares_", "write_mean_", "packets_fit")


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    with kernels.set_backend("triton"):
        yield


@pytest.mark.parametrize("kind", one_in(3, ["normal", "special", "denormal", "equal", "mostly-nan"]))
@pytest.mark.parametrize("operation", WRITTEN_IN_TRITON)
def test_an_operation_is_its_specification(operation: str, kind: str) -> None:
    if operation in SIGNS and kind == "mostly-nan":
        pytest.skip("the signs of NaN are not compared")
    for n in (1, 300):
        cases = list(TABLE[operation](kind, n))
        taken = [compare(cuda, operation, on(DEVICE, each)) for each in cases[:: 1 + len(cases) // 12]]
        assert any(taken)


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation", ["accumulate", "accumulate_top_k", "select_ge", "top_k", "values_encode", "coalesce", "digests"]
)
def test_an_operation_on_several_blocks_is_its_specification(operation: str) -> None:
    for number, arguments in enumerate(TABLE[operation]("normal", 2 * BLOCK + 5)):
        assert number % 4 or compare(cuda, operation, on(DEVICE, arguments))


@pytest.mark.parametrize(
    "kind", ["special", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("normal", "non-finite"))]
)
def test_a_selection_larger_than_the_pool_is_found_by_another_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = made(kind, 4 * BLOCK + 77)
    monkeypatch.setattr(passes, "SHARE", 10**9)  # the pool has room for one block
    for threshold in (0.0, 0.1):
        same(kernels.select_ge(x, threshold), reference.select_ge(x, threshold))


def test_a_sample_that_misleads_does_not_change_what_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 200
    monkeypatch.setattr(exact_top_k, "SAMPLE", 16)
    stride = -(-n // 16) | 1
    for kind in ("special", "normal", "ties"):
        x = made(kind, n)
        low, high = x.clone(), x.clone()
        low[::stride], high[::stride] = 1e-40, 1e30
        for each in (low, high):
            for k in (1, n // 5):
                same(kernels.top_k(each, k), reference.top_k(each, k))


def test_more_elements_than_there_are_are_refused() -> None:
    x = made("normal", 9)
    for call in (lambda: kernels.top_k(x, 10), lambda: kernels.accumulate_top_k(x, x, 10, torch.empty_like(x))):
        with pytest.raises(RuntimeError):
            call()


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
@pytest.mark.parametrize(
    "name",
    [
        "topk",
        pytest.param("exact_exdyna", marks=pytest.mark.slow),
        pytest.param("exact_oktopk", marks=pytest.mark.slow),
    ],
)
def test_a_scheme_comes_to_the_same_bits_as_on_the_reference(name: str) -> None:
    def body(comm: LocalComm) -> list[Tensor]:
        scheme, seen = schemes.get(name, density=0.05).start(), []
        for step, dtype in enumerate((torch.float32, torch.bfloat16)):
            grad = made("normal", BLOCK + 9, 10 * step + comm.rank).to(dtype)
            scheme.reduce(Bucket("w", grad, step), comm)
            seen += [grad.float(), scheme.state_dict()["residual"]["w"].clone()]
        return seen

    found = LocalWorld(2).run(body)
    with kernels.set_backend("reference"):
        wanted = LocalWorld(2).run(body)
    assert all(
        torch.equal(a, b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_types_and_strides_that_triton_lacks_are_done_by_torch() -> None:
    x = made("normal", 100).double()
    same(kernels.top_k(x, 7), reference.top_k(x, 7))
    matrix = made("normal", 100).view(10, 10)[:, 3]
    same(kernels.select_ge(matrix, 0.5), reference.select_ge(matrix, 0.5))


@pytest.mark.skipif(CUDA, reason="there is a GPU here")
def test_the_bench_says_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench(["--device", "cuda"])
    assert "--device cuda needs a GPU that torch can use, and there is none here" in capsys.readouterr().err


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
        if row["kernel"] in ("_add_kernel", "_collect_kernel"):
            assert row["wide_loads"], row
        if row["kernel"] == "_collect_kernel":
            assert row["wide_stores"] == 0, row
            assert row["shared_nbytes"] < 1024, row  # elements stay with the thread that loaded them
    for kernel in ("_count_kernel", "_tally_kernel", "_choose_kernel"):
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
    x = made("normal", 900)
    for P in (2, 8):
        regions = [BlockCyclic(900, P).rows(p, x.device) for p in range(1, P)]
        with watched(monkeypatch) as (launched, asked):
            operations.top_k_of_each(x, regions, [9] * (P - 1), [None] * (P - 1))
        assert launched == [
            "_guess_kernel",
            *["_count_kernel", "_narrow_kernel"] * 3,
            "_tally_kernel",
            "_choose_kernel",
        ]
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
    assert sorted(cuda.top_k_of_rows(x, part_outside, 8).value.tolist()) == [0.0] * 4 + [1.0] * 4
    with pytest.raises(IndexError, match="rows must"):
        cuda.top_k_of_rows(x, replace(part_outside, length=9), 1)


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
