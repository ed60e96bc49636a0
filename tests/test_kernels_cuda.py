"""The Triton kernels, called as the library calls them, against the reference: the same bits on a GPU, else in Triton's interpreter."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from json import loads
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from helpers.on_triton import CUDA, DEVICE, KINDS, SPECIAL, made
from helpers.quick import one_in
from helpers.same_bits import bits, same
from sparsync import Span, kernels, schemes
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import Bucket, Rows, Sparse, spans
from sparsync.kernels import (
    codec_reference,
    cuda,
    operations,
    reference,
    share_reference,
    step_reference,
    value_reference,
)
from sparsync.kernels.codec_reference import PositionCodec
from sparsync.kernels.cuda import exact_top_k, launch, passes
from sparsync.kernels.value_reference import TERNARY
from sparsync.selection.exclusive import BlockCyclic
from sparsync.wire import ValueCodec
from studies.bench.kernels import main as bench
from studies.gpu.launches import WAITS

BLOCK = launch.BLOCK
SIZES = (0, 1, BLOCK, 2 * BLOCK + 5)
AWKWARD = ("special", pytest.param("ties", marks=pytest.mark.slow))
THRESHOLDS = (0.0, 1e-45, 1.0, torch.inf, torch.nan)


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    with kernels.set_backend("triton"):
        yield


def ranked(x: Tensor, k: int) -> None:
    """Adds and ranks on both."""
    grad, out, expected_out = made("normal", x.numel(), 2), torch.empty_like(x), torch.empty_like(x)
    found, finite = kernels.accumulate_top_k(x, grad, k, out)
    expected_finite = reference.accumulate(x, grad, expected_out)
    same(found, reference.top_k(expected_out, k))
    assert finite == expected_finite
    assert torch.equal(bits(out), bits(expected_out))
    same(kernels.top_k(x, k), reference.top_k(x, k))


@pytest.mark.parametrize("kind", KINDS)
def test_accumulating_is_the_reference(kind: str) -> None:
    for n in SIZES:
        residual, grad = made(kind, n), made("normal" if kind != "normal" else "special", n, 1)
        out, expected = torch.empty_like(residual), torch.empty_like(residual)
        assert kernels.accumulate(residual, grad, out) == reference.accumulate(residual, grad, expected)
        assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize(
    "kind", ["special", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("normal", "non-finite"))]
)
def test_a_selection_larger_than_the_pool_is_found_by_another_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = made(kind, 4 * BLOCK + 77)
    monkeypatch.setattr(passes, "SHARE", 10**9)  # the pool has room for one block
    for threshold in (0.0, 0.1):
        same(kernels.select_ge(x, threshold), reference.select_ge(x, threshold))


@pytest.mark.slow
@pytest.mark.parametrize("kind", AWKWARD)
def test_selection_by_a_threshold_and_finiteness_are_the_reference(kind: str) -> None:
    for n in (0, 1, 2 * BLOCK + 5):
        x = made(kind, n)
        for threshold in THRESHOLDS:
            same(kernels.select_ge(x, threshold), reference.select_ge(x, threshold))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert kernels.all_finite(x.to(dtype)) == reference.all_finite(x.to(dtype))


@pytest.mark.parametrize(
    "kind", [*KINDS[1:2], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != KINDS[1])]
)
def test_top_k_is_the_reference(kind: str) -> None:
    for n in (0, 1, 65, BLOCK + 5):
        x, grad, skip = made(kind, n), made("special", n, 2), Span(n // 3, n // 2)
        for k in {0, n // 3, n}:
            ranked(x, k)
            same(kernels.top_k_nonzero(x, k, skip), reference.top_k_nonzero(x, k, skip))
        out = torch.empty_like(x)
        found, finite = kernels.accumulate_top_k_nonzero(x, grad, n // 3, out, skip)
        same(found, reference.top_k_nonzero(x + grad, n // 3, skip))
        assert finite == reference.all_finite(x + grad)
        assert torch.equal(bits(out), bits(x + grad))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_are_added_in_single_precision(dtype: torch.dtype) -> None:
    n = BLOCK + 100
    residual, grad = made("normal", n), made("normal", n, 1).to(dtype)
    out = torch.empty_like(residual)
    kernels.accumulate(residual, grad, out)
    assert torch.equal(out, residual + grad.float())
    same(kernels.accumulate_top_k(residual, grad, 30, out)[0], reference.top_k(residual + grad.float(), 30))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
def test_adding_reading_clearing_and_writing_at_positions_are_the_reference(dtype: torch.dtype, wide: bool) -> None:
    n = 5000
    index = (made("normal", n) > 0.7).nonzero().view(-1).to(torch.int64 if wide else torch.int32)
    value = made("special", index.numel(), 1)
    out, expected = made("special", n, 2).to(dtype), made("special", n, 2).to(dtype)
    kernels.scatter_add_(out, Sparse(index, value, n))
    host = expected.cpu()  # where torch adds denormal numbers too
    reference.scatter_add_(host, Sparse(index.cpu(), value.cpu(), n))
    expected.copy_(host)
    assert torch.equal(bits(out.float()), bits(expected.float()))
    assert torch.equal(bits(kernels.gather(out, index).float()), bits(reference.gather(expected, index).float()))
    kernels.clear_(out, index[::2].contiguous())
    reference.clear_(expected, index[::2])
    assert torch.equal(bits(out.float()), bits(expected.float()))
    kernels.put_(out, index, value)
    reference.put_(expected, index, value)
    assert torch.equal(bits(out.float()), bits(expected.float()))


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


@pytest.mark.parametrize("codec", get_args(PositionCodec))
def test_positions_are_the_bytes_of_the_reference_and_nothing_is_asked(
    codec: PositionCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k, span, gap in (
        (0, 7, 1),
        (1, 1, 1),
        (9, 900, 97),
        (40, 41, 1),
        (1500, 50_000, 33),
        (2, 2**31 - 1, 2**31 - 2),
    ):
        if codec == "bitmap" and span > 50_000:
            continue
        index = (span - 1 - gap * torch.arange(k - 1, -1, -1)).int().to(DEVICE)
        rows = BlockCyclic(max(4, min(4 * span, 2**20)), 4).rows(1, index.device)
        with watched(monkeypatch) as (_, asked):
            packet = cuda.encode_positions(codec, index, span)
            found = cuda.decode_positions(codec, packet, k, span)
            located = cuda.locate(rows, found % rows.length)
        assert not WAITS & set(asked), asked
        assert torch.equal(packet, codec_reference.encode_positions(codec, index, span))
        assert torch.equal(found, index)
        assert torch.equal(located, reference.locate(rows, index % rows.length))
        if k:
            spoilt = cuda.decode_positions(codec, packet.fill_(255), k, span)
            assert 0 <= int(spoilt.min()) <= int(spoilt.max()) < span


@pytest.mark.parametrize("bits_each", [8, 4, 3, 1, TERNARY])
@pytest.mark.parametrize(
    "kind",
    ("special", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("normal", "ties", "tiny", "equal", "zero"))),
)
def test_values_in_few_bits_are_the_bytes_of_the_reference(kind: str, bits_each: int) -> None:
    for n in (0, 1, 256, 517):
        x = made(kind, n) * (1e30 if kind == "normal" else 1.0)
        packet = value_reference.values_encode(x, bits_each)
        assert torch.equal(cuda.values_encode(x, bits_each), packet)
        decoded, wanted = (each.values_decode(packet, n, bits_each) for each in (cuda, value_reference))
        assert torch.equal(bits(decoded), bits(wanted))


@pytest.mark.parametrize(("bits_each", "P"), [(8, 3), (4, 4), (3, 1), (1, 3), (TERNARY, 4)])
def test_shares_of_a_mean_and_their_sums_are_the_reference(bits_each: int, P: int) -> None:
    n, down = 517, abs(bits_each) % 5 or TERNARY
    values = [made("normal", n) * (rank + 1) for rank in range(P)]
    own = values.pop()
    wanted = own.clone()
    packets = []
    for value in values:
        packets.append(share_reference.encode_share_by(cuda.values_encode, cuda.values_decode, value, bits_each, P))
    packet = cuda.reduce_shares_(own, packets, bits_each, P, down)
    assert torch.equal(packet, share_reference.reduce_shares_(wanted, packets, bits_each, P, down))
    assert torch.equal(bits(own), bits(wanted))
    for flag in (torch.zeros(1), torch.ones(1)):  # the second one leaves everything as it is
        packet = cuda.reduce_shares_(own, packets, bits_each, P, down, flag)
        assert torch.equal(packet, share_reference.reduce_shares_(wanted, packets, bits_each, P, down, flag))
        assert torch.equal(bits(own), bits(wanted))
    # Means beyond float32 have its largest number, and a block with NaN is NaN.
    large = made("normal", n).sign() * 3e38
    large[400] = torch.nan
    packets = [value_reference.values_encode(each, bits_each) for each in (large, large)]
    found, expected = large.clone(), large.clone()
    packet = cuda.reduce_shares_(found, packets, bits_each, P, 4)
    assert torch.equal(packet, share_reference.reduce_shares_(expected, packets, bits_each, P, 4))
    assert torch.equal(bits(found), bits(expected))
    assert cuda.reduce_shares_(found, [packets[0][1:]], bits_each, P, 4) is NotImplemented


def test_values_of_packets_are_decoded_on_triton_by_the_codec_of_the_library() -> None:
    x = made("normal", 700)
    for values in ("int8", "int4", "int3", "ternary", "sign"):
        codec = ValueCodec(values)
        packet = codec.encode(x)
        decoded = codec.decode(packet, 700, torch.float32)
        with kernels.set_backend("reference"):
            assert torch.equal(packet, codec.encode(x))
            assert torch.equal(decoded, codec.decode(packet, 700, torch.float32))


@pytest.mark.parametrize("n", [700, pytest.param(BLOCK * 3 + 700, marks=pytest.mark.slow)])
def test_the_largest_of_elements_in_rows_are_the_reference(n: int) -> None:
    residual, grad, out = made("normal", n), made("ties", n, 1), torch.empty(n, device=DEVICE)
    regions = [BlockCyclic(n, 3).rows(p, residual.device) for p in range(3)]
    regions += [replace(regions[0], length=0), replace(regions[0], length=5)]
    regions += [Rows(torch.tensor([9, 4], dtype=torch.int64, device=DEVICE), 3, 5)]
    counts = [40, 1, 0, 0, 5, 2]
    wanted = [
        reference.top_k(reference.of_rows(residual + grad, rows), k) for rows, k in zip(regions, counts, strict=True)
    ]
    found, finite = kernels.accumulate_top_k_of_rows(residual, grad, regions, counts, out, [None] * 6)
    assert finite
    assert torch.equal(out, residual + grad)
    again = operations.top_k_of_each(out, regions, counts, [None, 1.0, torch.nan, None, None, None])
    for one, other, right in zip(found, again, wanted, strict=True):
        same(one, right)
        same(other, right)


@pytest.mark.parametrize("P", [1, 2, 5, 13])
def test_sums_are_added_in_the_order_of_their_parts(P: int) -> None:
    n, source = 3000, torch.Generator().manual_seed(P)
    parts = []
    for part in range(P):
        index = (torch.rand(n, generator=source) < 0.4).nonzero().view(-1).to(torch.int32).to(DEVICE)
        # Of different magnitudes, so that order matters.
        parts.append(Sparse(index, made("normal", index.numel(), part) * 10.0 ** (part % 4), n))
    wanted = reference.coalesce([Sparse(part.index.cpu(), part.value.cpu(), n) for part in parts])
    found = kernels.coalesce(parts)
    same(Sparse(found.index.cpu(), found.value.cpu(), n), wanted)
    same(
        kernels.coalesce([Sparse(part.index[:0], part.value[:0], n) for part in parts]),
        Sparse(parts[0].index[:0], parts[0].value[:0], n),
    )


values = st.lists(st.sampled_from(SPECIAL), max_size=70) | st.lists(st.floats(width=32), max_size=70)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(values=values, threshold=st.sampled_from(SPECIAL) | st.floats(), data=st.data())
def test_whatever_is_drawn_gives_the_bits_of_the_reference(
    values: list[float], threshold: float, data: st.DataObject
) -> None:
    x = torch.tensor(values, dtype=torch.float32, device=DEVICE)
    k = data.draw(st.integers(0, x.numel()))
    with kernels.set_backend("triton"):
        same(kernels.top_k(x, k, threshold), reference.top_k(x, k))
        same(kernels.select_ge(x, threshold), reference.select_ge(x, threshold))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["topk", pytest.param("exdyna", marks=pytest.mark.slow), pytest.param("oktopk", marks=pytest.mark.slow)]
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


DIGESTED = (0, 1, 508, 1017, 1018, 1019, 1526, 2036, 20_003, 40_000)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", one_in(4, [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn]))
def test_digests_of_many_tensors_are_the_reference(dtype: torch.dtype) -> None:
    normal = made("normal", max(DIGESTED) + 1)
    tensors = [normal[start : start + n].to(dtype) for n in DIGESTED for start in (0, 1)]
    whole = normal.to(dtype)
    tensors += [whole[1:], whole[:20_000].view(100, 200), whole[:20_000].view(100, 200).t()]
    assert torch.equal(cuda.digests(tensors), reference.digests(tensors))
    assert operations.digests([]).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_weights_are_written_as_the_reference_does(dtype: torch.dtype) -> None:
    n = 3000
    weights, unsent = made("normal", 2 * n + 1), made("normal", 2 * n + 1, 1)
    found = [torch.zeros(n, dtype=dtype, device=DEVICE), torch.zeros(n // 3, 3, dtype=dtype, device=DEVICE).t()]
    others = [each.clone() for each in found]
    rows = BlockCyclic(2 * n + 1, 4, 128).rows(1, weights.device)
    for divided in (None, rows):
        digests = cuda.write_own_(found, [1, n + 1], weights, unsent, divided, 4, 0.35)
        assert torch.equal(digests, reference.write_own_(others, [1, n + 1], weights, unsent, divided, 4, 0.35))
        assert all(map(torch.equal, found, others))
    assert operations.write_own_([], [], weights, unsent, rows, 4, 0.35).tolist() == []


def laid(n: int, kind: str, dtype: torch.dtype) -> tuple[list[Tensor], list[int], list[float]]:
    """Tensors that begin anywhere in a vector of `n` elements, and leave gaps, with their starts and factors."""
    vector = made(kind, n, 3)
    ends = [(n // 2 + 3, n - 7), (5, 5), (1, n // 3), (n // 3, n // 3 + 2)]  # in no order, one of them empty
    return [vector[start:stop].to(dtype) for start, stop in ends], [start for start, _ in ends], [0.5, 1.0, -1.7, 3.0]


SPREADS = [(3e-4, 0.95, 1e-8, 0.3), (1e-3, 0.99, 1e-6, 0.7), (2.0, 0.5, 1.0, 1.0)]
MOVES = [(0.9, 0.9997, 1.1), (0.95, 1.0, 1.0), (0.5, 0.9, 3.0)]
BITS = (8, 4, 3, 1, TERNARY)


def three_spans(n: int) -> list[Span]:
    return [Span(0, n // 4), Span(n // 4, n // 2 + 10), Span(n // 2 + 10, n)]


def both(name: str, *arguments: object) -> None:
    """Call an operation of both with copies of all arguments, and compare what they return, and what all their tensors have become."""

    def called(module: object) -> list[Tensor]:
        copied = deepcopy(arguments)
        found = getattr(module, name)(*copied)
        assert found is not NotImplemented
        listed = [found, *copied]
        flat = [each for one in listed for each in (one if isinstance(one, list | tuple) else [one])]
        return [each for each in flat if isinstance(each, Tensor)]

    for found, expected in zip(called(cuda), called(step_reference), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(bits(found.float()), bits(expected.float()))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("normal", torch.float32), ("normal", torch.bfloat16), ("special", torch.float32)]
)
def test_steps_of_gradients_where_they_lie_are_the_reference(kind: str, dtype: torch.dtype) -> None:
    n, block = 1300, 96
    square, ratio = made("normal", n, 1).abs(), made("normal", -(-n // block), 2).abs()
    about = (*laid(n, kind, dtype), square, ratio, block, three_spans(n), SPREADS)
    off, on = torch.zeros(1, device=DEVICE), torch.ones((), dtype=torch.bool, device=DEVICE)
    for skip in (None, off, on):
        both("make_steps_", made("normal", n), *about, skip)
    cases = [(4, 3, None), (1, 4, off), (3, 3, on)]
    if kind == "normal" and dtype == torch.float32:  # which sign a NaN has is open
        cases += [(3, 8, None), (4, 4, on), (4, 1, off), (3, TERNARY, off), (3, TERNARY, on)]
    for P, width, skip in cases:
        both("encode_steps_", made(kind, n), *about, P - 1, P, width, skip)
        if skip is None or kind == "normal":
            gradients = laid(n, kind, dtype)
            both("encode_steps_", made("normal", n), *gradients, None, None, 1, [], [], 0, P, width, skip, square)


def test_steps_in_few_spans_and_beyond_float32_are_the_reference() -> None:
    square, ratio = made("normal", 1300, 1).abs(), made("normal", 5, 2).abs()
    both("make_steps_", square, [], [], [], square, ratio, 300, [Span(7, 9), Span(1030, 1031)], SPREADS[:2])
    large = made("equal", 1300) * 1.7e38  # 4 times what is received is infinite
    both("encode_steps_", large, [], [], [], square, ratio, 300, three_spans(1300), SPREADS, 1, 4, 3)
    assert cuda.make_steps_(square, [square[::2]], [0], [1.0], square, ratio, 1, [], []) is NotImplemented
    # Each gradient has a type of its own. Without gradients every zero keeps its sign.
    mixed = [square[:2].clone(), square[2:400].half(), square[700:1300].bfloat16()], [0, 2, 700], [1.0, 0.5, 2.0]
    both("encode_steps_", large, *mixed, square.abs(), ratio, 300, three_spans(1300), SPREADS, 1, 4, 3)
    both("sketch", *mixed, square, 64, 7)
    assert cuda.squares_fit(mixed[0], mixed[2], 1e30) is not NotImplemented
    assert cuda.move_steps_(*mixed[:2], square, square, [], []) is NotImplemented
    both("encode_steps_", -made("zero", 1300), [], [], [], None, None, 1, [], [], 1, 4, 1)


@pytest.mark.parametrize(("kind", "dtype"), [("special", torch.float16), ("normal", torch.float32)])
def test_moves_of_weights_where_they_lie_are_the_reference(kind: str, dtype: torch.dtype) -> None:
    n = 1300
    weights, starts, _ = laid(n, "normal", dtype)
    weights[0] = weights[0][:640].view(2, 320)
    about = (weights, starts, made("normal", n, 1))
    on = torch.ones(1, device=DEVICE)
    for skip in (None, on * 0, on):
        both("move_steps_", *about, made(kind, n, 2), three_spans(n), MOVES, skip)
    both("move_steps_", *about, made(kind, n, 2), [Span(7, 9), Span(20, 1031)], MOVES[:2])
    both("move_steps_", [], [], *about[2:], made(kind, n, 2), three_spans(n), MOVES)  # without weights
    for P, width, skip in ((3, 8, None), (4, 4, None), (1, 3, on * 0), (4, 3, None), (3, 1, None), (4, TERNARY, on)):
        parts = spans(n, P)
        packets = [value_reference.values_encode(part.of(made(kind, n, 5)), width) for part in parts]
        both("apply_steps_", *about, packets, width, three_spans(n), MOVES, skip)
    with pytest.raises(RuntimeError):
        operations.apply_steps_(*about, [packet[:1] for packet in packets], TERNARY, three_spans(n), MOVES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_means_that_are_written_are_the_reference(dtype: torch.dtype) -> None:
    n = 1300
    off, on = torch.zeros(1, device=DEVICE), torch.ones((), dtype=torch.bool, device=DEVICE)
    for P, width, skip in ((3, 8, None), (4, 4, off), (1, 3, on), (3, TERNARY, None)):
        mean, lengths = made("normal", n, 5), [len(part) for part in spans(n, P)]
        packets = [value_reference.values_encode(each, width) for each in mean.split(lengths)]
        both("write_mean_", made("normal", n).to(dtype), made("normal", n, 1), mean, packets, width, P - 1, skip)
        grad, residual = made("normal", n), made("normal", n, 1)
        operations.write_mean_(grad, grad, residual, packets, width, 0)  # what lies in the gradient moves
        assert torch.equal(residual, made("normal", n))
        for factor in (1.0, 2.0**127, torch.nan):
            last = mean[-lengths[-1] :].sign() * factor
            x = [*packets[:-1], value_reference.values_encode(last, width)]
            fit = step_reference.packets_fit(x, lengths, width, P, dtype)
            assert bool(cuda.packets_fit(x, lengths, width, P, dtype)) is fit
            assert P == 1 or fit is (factor == 1.0)


@pytest.mark.parametrize(("kind", "dtype"), [("normal", torch.bfloat16), ("zero", torch.float32)])
def test_sketches_and_sums_of_squares_are_the_reference(kind: str, dtype: torch.dtype) -> None:
    for block in (1, 64, 1024):
        both("sketch", *laid(1300, kind, dtype), made("zero", 1300), block, 0xFFFFFFFE)
    tensors, _, factors = laid(1300, kind, dtype)
    most = sum(
        float((each.float() * factor).double().square().sum()) for each, factor in zip(tensors, factors, strict=True)
    )
    for limit in (most * 0.999, most * 1.001, float("inf")):
        assert bool(cuda.squares_fit(tensors, factors, limit)) == step_reference.squares_fit(tensors, factors, limit)
    assert not operations.squares_fit([tensors[0] * torch.nan], [1.0], float("inf"))
    large = [torch.full((1,), 3e38, device=DEVICE)] * 2
    assert operations.squares_fit(large, [1.0, 1.0], 1.8001e77)
    assert not operations.squares_fit(large, [1.0, 1.0], 1.7999e77)


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
    gradients, square, ratio = (
        laid(n, "normal", torch.float32),
        torch.ones(n, device=DEVICE),
        torch.ones(3, device=DEVICE),
    )
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


@pytest.mark.slow
def test_elements_in_rows_are_those_of_the_reference() -> None:
    for n, P, row in ((1, 2, 1), (2 * BLOCK + 77, 4, 128), (1000, 3, 7)):
        x = made("special", n)
        for rank in range(P):
            rows = BlockCyclic(n, P, row).rows(rank, x.device)
            if rows.length:
                k = rows.length // 2
                same(cuda.top_k_of_rows(x, rows, k), reference.top_k(reference.of_rows(x, rows), k))
            found, expected = x.clone(), x.clone()
            cuda.divide_rows_(found, rows, 3)
            reference.divide_rows_(expected, rows, 3)
            assert torch.equal(bits(found), bits(expected))
    apart = Rows(torch.tensor([0, 9, 4, 9], dtype=torch.int32, device=DEVICE)[::2], 3, 5)  # no plain vector
    x = made("normal", 9)
    found, _ = cuda.accumulate_top_k_of_rows(x, torch.zeros_like(x), [apart], [2], torch.empty_like(x), [None])
    same(found[0], reference.top_k(reference.of_rows(x, apart), 2))
    for start, length in ((2, 4), (-1, 2), (0, 6)):
        outside, x = (
            Rows(torch.tensor([start], dtype=torch.int32, device=DEVICE), 4, length),
            torch.ones(5, device=DEVICE),
        )
        with pytest.raises(IndexError, match="rows must"):
            cuda.divide_rows_(x, outside, 2)
        assert x.tolist() == [1.0] * 5
    part_outside = Rows(torch.tensor([3, -2], dtype=torch.int32, device=DEVICE), 4, 8)
    assert sorted(cuda.top_k_of_rows(x, part_outside, 8).value.tolist()) == [0.0] * 4 + [1.0] * 4
    with pytest.raises(IndexError, match="rows must"):
        cuda.top_k_of_rows(x, replace(part_outside, length=9), 1)
