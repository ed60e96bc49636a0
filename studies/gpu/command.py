"""Measure the library's cost on a GPU, for the table of docs/gpu.md.

    python -m studies gpu [--device cuda|cpu] [--page]
    python -m studies gpu --counts

One rank exchanges given gradients of GPT-2 with 124 M parameters and takes the optimizer's step, for about five minutes on one GPU. Steps
are settled: none measures a ratio. Failures are listed below the table. --counts counts launches and waits on a CPU, and writes
tests/counts.json and a table of docs/gpu.md.
"""

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

import sparsync
from sparsync.core import generator
from sparsync.recipes import bits_of
from sparsync_lab.report.format import significant
from sparsync_lab.workloads.gpt import Decoder
from studies import parts
from studies.bench.frame import interleaved
from studies.gpu import counts

PAGE, PART = "docs/gpu.md", "gpu"
ADAMW = "fused AdamW"
METHODS = (
    *(
        ADAMW,
        "default",
        "bits=0.8",
        "two_shot:density=1.0:values=int4",
        "skip_reduce",
        "exact_micro",
        "exact_exdyna",
        "exact_oktopk",
    ),
    "two_shot:density=0.05:values=int4",
)
BESIDE, MOMENTS = 12, 8  # bytes per parameter: weights, gradients and given gradients; AdamW's state
WARMUP = 9  # steps 0 to 8 measure the ratio of second moments, then every eighth does
SETTLED = 1  # step number modulo 8
# The profiler lists these among kernels, but they are ranges.
_RANGES = ("sparsync::", "nccl:", "aten::", "Optimizer.", "ProfilerStep", "record_param", "## Call", "autograd::")


@dataclass
class Steps:
    """A method's step: `prepare` its inputs, then `take` it. `beside`: bytes per parameter that are not the method's."""

    prepare: Callable[[], object]
    take: Callable[[], object]
    handle: Any = None  # Any: of sparsync.attach
    beside: int = BESIDE


@dataclass
class Measured:
    """One method: the median wall time, and the median ratio to the first method in the same rounds."""

    text: str
    wall_ms: float
    ratio: float
    gpu_ms: float | None = None
    launches: int | None = None
    syncs: int | None = None
    memory: float | None = None  # peak bytes per parameter in a step


@dataclass
class Found:
    """All measurements and their device; `problems` explain missing ones."""

    device: str
    torch: str = torch.__version__
    date: str = field(default_factory=lambda: date.today().isoformat())
    parameters: int = 0
    copy_bytes_per_s: float = 0.0
    step: list[Measured] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def main(argv: Sequence[str]) -> None:
    given = _options(argv)
    if given.counts:
        counts.write()
        return
    parts.put(PAGE, PART, page(_measure(given)), only_print=not given.page)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = parts.options("gpu", __doc__, writes=False)
    add = parser.add_argument
    gpu = torch.cuda.is_available()
    add("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu", help="default: cuda if there is one")
    add("--page", action="store_true", help=f"write the table into {PAGE} instead of printing it")
    add("--counts", action="store_true", help="count launches and waits on a CPU")
    add("--layers", type=int, default=12, help="default: 12")
    add("--width", type=int, default=768, help="default: 768")
    add("--rounds", type=int, default=24 if gpu else 8, help="default: 24, on a CPU 8")
    return parser.parse_args(argv)


def _measure(given: argparse.Namespace) -> Found:
    cuda = given.device == "cuda"
    found = Found(torch.cuda.get_device_name() if cuda else "cpu", parameters=_elements(_model(given)))
    if not cuda:
        torch.set_num_threads(1)
        found.problems.append("no GPU: neither its time nor its memory, launches and host syncs; see --counts")
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=0, world_size=1)
    try:
        found.copy_bytes_per_s = _copy_bytes_per_s(given.device)
        base = _steps(METHODS[0], given)
        for text in METHODS:
            try:
                found.step.append(measured(base, text, given))
            except Exception as error:  # the rest can still be measured
                found.problems.append(f"{text}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    finally:
        dist.destroy_process_group()
    return found


def _model(given: argparse.Namespace) -> Decoder:
    """Build GPT-2, whose heads have 64 elements; on a CPU with few words and short sequences."""
    torch.manual_seed(0)
    words, context = (50304, 1024) if given.device == "cuda" else (1000, 64)
    return Decoder(words, context, given.width, given.layers, max(1, given.width // 64)).to(given.device)


def _elements(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def _steps(text: str, given: argparse.Namespace) -> Steps:
    """Make the exchange and the optimizer's step of a bare model, with the same gradients in each step."""
    model = _model(given)
    optimizer = AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    if text == ADAMW:
        handle = None
    elif text == "default" or text.startswith("bits="):
        handle = sparsync.attach(model, bits=bits_of(text), optimizer=optimizer)
    else:
        handle = sparsync.attach(model, sparsync.schemes.from_text(text), exchange=sparsync.Gradients())
    drawn, parameters = generator(0, "gpu", 0), list(model.parameters())

    def rows(like: torch.Tensor) -> torch.Tensor:
        """Draw a gradient whose rows have different lengths."""
        lengths = torch.randn(len(like), *[1] * (like.dim() - 1), generator=drawn).exp()
        return (1e-3 * torch.randn(like.shape, generator=drawn) * lengths).to(like)

    gradients = [rows(each) for each in parameters]

    def prepare() -> None:
        for parameter, each in zip(parameters, gradients, strict=True):
            parameter.grad = each.clone()

    reduce = getattr(handle, "reduce", None)  # of gradients
    return Steps(prepare, reduce or optimizer.step, handle, BESIDE + MOMENTS * (reduce is None))


def measured(base: Steps, text: str, given: argparse.Namespace) -> Measured:
    """Measure a method in alternation with `base`, and close it."""
    cuda, rounds = given.device == "cuda", given.rounds
    _wall_s(base, given.device)  # allocates all of its memory
    before = torch.cuda.memory_allocated() if cuda else 0
    steps = _steps(text, given)
    try:
        others, own = interleaved([base, steps], lambda each, _: _wall_s(each, given.device), rounds, WARMUP)
        ratios = [mine / other for other, mine in zip(others, own, strict=True)]
        found = Measured(text, 1e3 * median(own), median(ratios))
        if cuda:
            for _ in range((SETTLED - WARMUP - rounds) % 8):
                _wall_s(steps, given.device)
            steps.prepare()
            torch.cuda.reset_peak_memory_stats()
            found.gpu_ms, found.launches, found.syncs = _profiled(steps.take)
            found.memory = (torch.cuda.max_memory_allocated() - before) / _elements(_model(given)) - steps.beside
        return found
    finally:
        with suppress(Exception):  # an earlier error is the one to report
            if steps.handle is not None:
                steps.handle.close()
        del steps
        gc.collect()
        torch.cuda.empty_cache()


def _copy_bytes_per_s(device: str) -> float:
    """Measure the bytes read and written per second by a copy that exceeds the caches."""
    source = torch.ones(2**28 if device == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    copy = Steps(lambda: None, partial(target.copy_, source))
    return 2 * source.nbytes / min(_wall_s(copy, device) for _ in range(10))


def _wall_s(steps: Steps, device: str) -> float:
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    steps.prepare()
    synchronize()
    start = time.perf_counter()
    steps.take()
    synchronize()
    return time.perf_counter() - start


def _profiled(work: Callable[[], object]) -> tuple[float, int, int]:
    """Profile the GPU milliseconds of kernels and copies, the launches, and the host's waits."""
    none, found = (_of_profile(each) for each in (lambda: None, work))  # the profiler itself waits, too
    return found[0], found[1] - none[1], found[2] - none[2]


def _of_profile(work: Callable[[], object]) -> tuple[float, int, int]:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    gpu_ns = launches = syncs = 0
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if "CUDA" in str(event.device_type()):
            is_range = name.startswith(_RANGES) or "annotation" in str(getattr(event, "activity_type", str)())
            gpu_ns += 0 if is_range else event.duration_ns()
        elif name.startswith("cu"):
            launches += "Launch" in name
            syncs += "Synchronize" in name
    return gpu_ns / 1e6, launches, syncs


def page(found: Found) -> str:
    """Format the table and the missing measurements as Markdown."""
    said = [
        f"{found.device}, torch {found.torch}, {found.date}: {found.parameters / 1e6:.3g} M parameters, copies at "
        f"{found.copy_bytes_per_s / 1e9:.0f} GB/s. Memory is that beyond AdamW, in bytes per parameter; GPU time in bytes is what a copy "
        "would move meanwhile."
    ]
    columns = ("wall, ms", f"over {METHODS[0]}", "GPU, ms", "launches", "host syncs", "GPU time in bytes per parameter")
    heads = ["one rank's exchange and step", *columns, "memory"]
    said.append(parts.table(heads, [_cells(each, found) for each in found.step]))
    if found.problems:
        said.append("Not measured:\n\n" + "\n".join(f"- {each}" for each in found.problems))
    return "\n\n".join(said)


def _cells(row: Measured, found: Found) -> list[str]:
    copied = None if row.gpu_ms is None else row.gpu_ms / 1e3 * found.copy_bytes_per_s / found.parameters
    values = (row.wall_ms, row.ratio, row.gpu_ms, row.launches, row.syncs, copied, row.memory)
    return [f"`{row.text}`", *("-" if each is None else significant(each, 3) for each in values)]
