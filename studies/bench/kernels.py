"""Measure the schemes' kernels, compared with the memory's limit and with other ways to select the same elements.

    python -m studies bench kernels [--n 1e7] [--rounds 15]          # figures of CONTRIBUTING.md, four minutes
    python -m studies bench kernels --device cuda --n 1e7,1e8

Every result is first compared with the reference, and a wrong one ends the run. The cases of a backend are interleaved; a cell is the
median over rounds of a case's seconds to those of the plain pass in the same round: b += a in float32, which reads two vectors and writes
one. Every case must move as many bytes of whole vectors, so the plain pass is the memory's limit. The clock is the processor time of the
single thread, or on a GPU the wall time between two moments at which the device is idle, so that launches and host syncs count.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.kernels import operations
from sparsync.schemes import Span, Sparse
from sparsync.selection.exclusive import BlockCyclic
from sparsync_lab.progress import Progress
from studies import parts
from studies.bench import frame

WARM = 0.97  # of the last step's smallest selected magnitude: the bound for the next step
CEILING = "plain pass"
DENSITY = 0.01  # to select


@dataclass(frozen=True)
class Data:
    """One step: a residual and a gradient, and the expected results."""

    before: Tensor
    grad: Tensor
    residual: Tensor  # written by cases
    k: int
    threshold: float
    top: Sparse  # of residual + grad
    skip: Span  # a quarter of the vector, like the region of one of four ranks
    beside: Sparse  # the k largest outside `skip`


@dataclass(frozen=True)
class KernelCase:
    """One of the interleaved measurements; `check` tells whether the result of `run` is correct."""

    name: str
    run: Callable[[], Any]  # Any: what `check` takes
    check: Callable[[Any], bool]


def main(arguments: Sequence[str]) -> None:
    options = _options(arguments)
    torch.set_num_threads(1)
    for n in options.n:
        print(f"{_table(n, options)}\n")


def _reference(operation: str, *arguments: Any) -> Any:  # Any: as of the operation
    """Compute the reference result of an operation."""
    with kernels.set_backend("reference"):
        return getattr(operations, operation)(*arguments)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = frame.options("kernels", __doc__)
    parser.add_argument("--n", type=_sizes, default=[10**7], help="elements, by commas (default: 1e7)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the vectors are (default: cpu)")
    parser.add_argument("--rounds", type=int, default=15, help="in which every case is measured once (default: 15)")
    return parser.parse_args(arguments)


def _sizes(text: str) -> list[int]:
    return [int(float(part)) for part in text.split(",")]


def _table(n: int, options: argparse.Namespace) -> str:
    """Format the ratios to the plain pass of each backend."""
    gpu = options.device == "cuda"
    backends = [each for each in kernels.backends() if each.startswith("triton" if gpu else "cpp/")]
    columns = list(zip(*(_cells(each, n, options) for each in backends), strict=True))
    return parts.table(
        [f"n = {n:g}, {100 * DENSITY:g} %", *backends], [[row[0][0], *(cell for _, cell in row)] for row in columns]
    )


def _cells(backend: str, n: int, options: argparse.Namespace) -> list[tuple[str, str]]:
    """Measure a backend; returns each case with its cell, and the rate of the plain pass."""
    kernels.set_backend(backend)
    clock = time.thread_time if options.device == "cpu" else _idle
    shown = Progress(f"{backend}, n {n:g}")
    data = _data(n, options.device)
    cases = _cases(data)

    def measure(case: KernelCase, number: int) -> float:
        data.residual.copy_(data.before)
        begun = clock()
        result = case.run()
        taken = clock() - begun
        if number == 0 and not case.check(result):
            raise RuntimeError(f"{case.name!r} gives another result than the reference on {backend}")
        return taken

    found = frame.interleaved(cases, measure, options.rounds, 1, lambda done, total: shown.at(done, total=total))
    plain = next(seconds for case, seconds in zip(cases, found, strict=True) if case.name == CEILING)
    cells = list[tuple[str, str]]()
    for case, seconds in zip(cases, found, strict=True):
        ratio = statistics.median(own / other for own, other in zip(seconds, plain, strict=True))
        cells.append((case.name, f"{ratio:.2f}"))
    return [*cells, ("the plain pass, GB/s", f"{12e-9 * n / statistics.median(plain):.1f}")]


def _idle() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def _data(n: int, device: str) -> Data:
    source = torch.Generator().manual_seed(0)
    before = torch.randn(n, generator=source).to(device)
    grad = torch.randn(n, generator=source).to(device)
    acc = before + grad
    k = max(1, int(DENSITY * n))
    top, skip = _reference("top_k", acc, k), Span(n // 4, n // 2)
    beside = _reference("top_k_nonzero", acc, k, skip)
    threshold = float(top.value.abs().min())
    return Data(before, grad, before.clone(), k, threshold, top, skip, beside)


def _cases(data: Data) -> list[KernelCase]:
    k, residual, grad, warm = data.k, data.residual, data.grad, WARM * data.threshold
    warm_beside = WARM * float(data.beside.value.abs().min())
    partition = BlockCyclic(grad.numel(), 4, 128).rows(1, grad.device)  # as ExactMiCRO's
    part = _reference("top_k_of_rows", data.before + grad, partition, max(1, k // 4))
    bound = WARM * float(part.value.abs().min())

    def topk() -> Sparse:
        acc = residual.add_(grad)
        return _chosen(acc, acc.abs().topk(k, sorted=False).indices.sort().values)

    def nonzero() -> Sparse:
        acc = residual.add_(grad)
        return _chosen(acc, (acc.abs() >= data.threshold).nonzero().view(-1))

    def plain(_: object) -> bool:
        return torch.equal(residual, data.before + grad)

    def is_as(*due: Sparse) -> Callable[[Any], bool]:
        """Make a check of a kernel's result: the selection, and whether everything was finite."""

        def check(result: Any) -> bool:  # Any: as the kernel returns it
            selected = result[0] if isinstance(result[0], list) else [result[0]]
            return bool(result[1]) and all(map(_same, selected, due))

        return check

    # TwoShot's regions for four ranks, and the selection of each.
    whole = BlockCyclic(grad.numel(), 4)
    regions = [whole.rows(p, grad.device) for p in range(4)]
    counts = [max(1, k * each.length // grad.numel()) for each in regions]
    tops = [_reference("top_k_of_rows", data.before + grad, *each) for each in zip(regions, counts, strict=True)]
    bounds: list[float | None] = [WARM * float(top.value.abs().min()) for top in tops]
    return [
        KernelCase(CEILING, lambda: residual.add_(grad), plain),
        KernelCase(
            "TopK: accumulate_top_k, by the last step's bound",
            lambda: kernels.accumulate_top_k(residual, grad, k, residual, warm),
            is_as(data.top),
        ),
        KernelCase(
            "TopK: accumulate_top_k, by a sample",
            lambda: kernels.accumulate_top_k(residual, grad, k, residual),
            is_as(data.top),
        ),
        KernelCase(
            "Ok-Topk: accumulate_top_k_nonzero, a quarter skipped",
            lambda: kernels.accumulate_top_k_nonzero(residual, grad, k, residual, data.skip, warm_beside),
            is_as(data.beside),
        ),
        KernelCase(
            "ExactMiCRO: accumulate_top_k_of_rows, one partition of four",
            lambda: kernels.accumulate_top_k_of_rows(
                residual, grad, [partition], [part.index.numel()], residual, [bound]
            ),
            is_as(part),
        ),
        KernelCase(
            "published thresholds: accumulate_select_ge",
            lambda: kernels.accumulate_select_ge(residual, grad, data.threshold, residual, Span(0, grad.numel())),
            is_as(data.top),
        ),
        KernelCase(
            "TwoShot: accumulate_top_k_of_rows, four regions",
            lambda: kernels.accumulate_top_k_of_rows(residual, grad, regions, counts, residual, bounds),
            is_as(*tops),
        ),
        KernelCase("torch: topk", topk, lambda result: _same(result, data.top)),
        KernelCase("torch: abs(x) >= threshold, nonzero, gather", nonzero, lambda result: _same(result, data.top)),
    ]


def _chosen(acc: Tensor, index: Tensor) -> Sparse:
    return Sparse(index.to(torch.int32), acc[index], acc.numel())


def _same(result: Sparse, expected: Sparse) -> bool:
    return torch.equal(result.index, expected.index) and torch.equal(result.value, expected.value)
