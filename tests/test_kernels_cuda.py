"""The Triton kernels against the reference: on a GPU where there is one, else in Triton's interpreter."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="triton is not installed here; it comes with torch on machines with CUDA")

from sparsync import kernels  # noqa: E402
from sparsync.kernels import cuda, reference, sparse_reference  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
SIZES = (0, 1, 63, 64, 65, cuda.BLOCK - 1, cuda.BLOCK, cuda.BLOCK + 1, 3 * cuda.BLOCK + 5)
KINDS = ("normal", "ties", "equal", "zero", "poisoned", "tiny")


def made(kind: str, n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator)
    if kind == "ties":
        x = x.mul(2).round()
    if kind == "equal":
        x = torch.ones(n)
    if kind == "zero":
        x = torch.zeros(n)
        x[::2] = -0.0
    if kind == "poisoned" and n:
        x[n // 2], x[-1], x[0] = torch.nan, torch.inf, -torch.inf
    if kind == "tiny":
        x = x * 1e-40  # denormal
    return x.to(DEVICE)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
def test_every_kernel_gives_what_the_reference_gives(kind: str, n: int) -> None:
    residual, grad = made(kind, n), made("normal", n, 1)
    acc, out = residual + grad, torch.empty_like(residual)
    assert cuda.accumulate(residual, grad, out) == bool(acc.isfinite().all())
    assert same(out, acc)
    for threshold in (0.5, 1.0, 5.0, float("inf")):
        for expected in (0, n):
            found, finite = cuda.accumulate_select(residual, grad, out.zero_(), threshold, expected)
            where = ((acc.abs() >= threshold) | acc.isnan()).nonzero().view(-1)
            assert same(found.index, where.to(torch.int32))
            assert same(found.value, acc[where])
            assert same(out, acc)
            assert finite == bool(acc.isfinite().all())
    found, wanted = cuda.at_least(residual, 1.0, n), sparse_reference.at_least(residual, 1.0)
    assert same(found.index, wanted.index)
    level = (residual.abs().view(torch.int32) >> 16).long()
    assert torch.equal(cuda.magnitude_histogram(residual), torch.bincount(level, minlength=cuda.BINS))
    for k in {0, min(1, n), n // 3, n}:
        for warm in (None, 0.3, 1.0, 100.0):
            found, wanted = cuda.top_k(residual, k, warm), reference.top_k(residual, k)
            assert same(found.index, wanted.index)
            assert same(found.value, wanted.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_are_added_in_single_precision(dtype: torch.dtype) -> None:
    residual, grad = made("normal", 1000), made("normal", 1000, 1).to(dtype)
    out = torch.empty_like(residual)
    cuda.accumulate(residual, grad, out)
    assert same(out, residual + grad.float())


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.floats(width=32), max_size=200), k=st.integers(0, 200), warm=st.floats(0, 2))
def test_any_values_are_ranked_as_the_reference_ranks_them(values: list[float], k: int, warm: float) -> None:
    x = torch.tensor(values, dtype=torch.float32, device=DEVICE)
    found, wanted = cuda.top_k(x, min(k, len(values)), warm), reference.top_k(x, min(k, len(values)))
    assert same(found.index, wanted.index)
    assert same(found.value, wanted.value)


def test_the_kernels_of_the_library_run_in_triton_where_that_is_the_backend() -> None:
    residual, grad = made("ties", 1000), made("normal", 1000, 1)
    with kernels.use("triton"):
        assert kernels.backend() == "triton"
        out = torch.empty_like(residual)
        found, finite = kernels.accumulate_top_k(residual, grad, 50, out)
        above = kernels.at_least(out, 1.0)
    wanted = reference.top_k(residual + grad, 50)
    assert finite
    assert same(out, residual + grad)
    assert same(found.index, wanted.index)
    assert same(found.value, wanted.value)
    assert same(above.index, sparse_reference.at_least(out, 1.0).index)
