"""Measures the settled steps of one rank: wall time, and on a GPU its time, launches, waits and memory."""

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from studies.bench.frame import interleaved
from studies.gpu.methods import Shape, Steps

WARMUP = 9  # steps 0 to 8 measure the ratio of second moments, and afterwards every eighth
SETTLED = 1  # of the numbers modulo 8
# What the profiler lists among kernels though it is none.
_RANGES = ("sparsync::", "nccl:", "aten::", "Optimizer.", "DistributedDataParallel", "ProfilerStep", "record_param")
_RANGES += ("Torch-Compiled", "## Call", "CompiledFunction", "autograd::")


@dataclass
class Measured:
    """One method: the median wall time, and that of its ratios to the first method in the same rounds."""

    text: str
    wall_ms: float
    ratio: float
    gpu_ms: float | None = None
    launches: int | None = None
    syncs: int | None = None
    memory: float | None = None  # bytes per parameter, the most in a step


def measured(base: Steps, text: str, shape: Shape, make: Callable[[], Steps], rounds: int) -> Measured:
    """Measure the method that `make` makes beside `base`, and close it."""
    _wall_s(base, shape.device)  # from here on it has all its memory
    before = torch.cuda.memory_allocated() if shape.device == "cuda" else 0
    steps = make()
    try:
        others, own = interleaved([base, steps], lambda each, _: _wall_s(each, shape.device), rounds, WARMUP)
        ratios = [mine / other for other, mine in zip(others, own, strict=True)]
        found = Measured(text, 1e3 * median(own), median(ratios))
        if shape.device == "cuda":
            while (WARMUP + rounds) % 8 != SETTLED:
                _wall_s(steps, shape.device)
                rounds += 1
            steps.prepare()
            torch.cuda.reset_peak_memory_stats()
            found.gpu_ms, found.launches, found.syncs = _profiled(steps.take)
            if steps.beside is not None:
                found.memory = (torch.cuda.max_memory_allocated() - before) / shape.parameters - steps.beside
        return found
    finally:
        if steps.handle is not None:
            with suppress(Exception):  # what failed before is told
                steps.handle.close()
        del steps
        gc.collect()
        torch.cuda.empty_cache()


def copy_bytes_per_s(device: str) -> float:
    """Return the bytes per second, read and written ones, of a copy that does not fit into caches."""
    source = torch.ones(2**28 if device == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    copy = Steps(lambda: None, lambda: target.copy_(source), None)
    return 2 * source.nbytes / min(_wall_s(copy, device) for _ in range(10))


def _wall_s(steps: Steps, device: str) -> float:
    steps.prepare()
    _synchronize(device)
    start = time.perf_counter()
    steps.take()
    _synchronize(device)
    return time.perf_counter() - start


def _profiled(work: Callable[[], object]) -> tuple[float, int, int]:
    """Return the milliseconds of kernels and copies on the GPU, the launches, and the times that the host waits for it."""
    none, found = (_of_profile(each) for each in (lambda: None, work))  # the profiler waits, too
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


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
