"""Measures the steps of one rank: wall time, and on a GPU its time, launches, waits and memory."""

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from studies.bench.frame import interleaved
from studies.gpu.methods import ADAMW, DDP, Shape, Steps

INT4 = "two_shot:density=1.0:values=int4"
STEP = (
    ADAMW,
    "default",
    "bits=0.8",
    INT4,
    "skip_reduce",
    "micro",
    "exdyna",
    "oktopk",
    "two_shot:density=0.05:values=int4",
)
WHOLE = (DDP, "bf16 hook", "powersgd 8", "powersgd 16", "default", "bits=0.8", INT4)
WARMUP = 9  # steps 0 to 8 measure the ratio
MEASURES_EVERY = 8  # later steps
# What the profiler lists among kernels though it is none.
_RANGES = ("sparsync::", "nccl:", "aten::", "Optimizer.", "DistributedDataParallel", "ProfilerStep", "record_param")
_RANGES += ("Torch-Compiled", "## Call", "CompiledFunction", "autograd::")
Pair = tuple[float | None, float | None]  # of a settled step, and of one that measures the ratio


@dataclass
class Measured:
    """One method: wall times are medians, ratios those to the first method in the same rounds."""

    text: str
    wall_ms: Pair
    ratio: Pair
    gpu_ms: Pair
    launches: Pair
    syncs: Pair
    memory: float | None  # bytes per parameter, the most in a step


def measured(base: Steps, text: str, shape: Shape, make: Callable[[], Steps], rounds: int) -> Measured:
    """Measure the method that `make` makes beside `base`, and close it."""
    _wall_s(base, shape.device)  # from here on it has all its memory
    before = _allocated(shape.device)
    steps = make()
    try:
        found = interleaved([base, steps], lambda each, _: _wall_s(each, shape.device), rounds, WARMUP)
        by_steps = text == "default" or text.startswith("bits=")
        measuring = [by_steps and (WARMUP + number) % MEASURES_EVERY == 0 for number in range(rounds)]
        wall = _both([1e3 * own for own in found[1]], measuring)
        ratio = _both([own / other for other, own in zip(*found, strict=True)], measuring)
        memory, profiles = None, list[tuple[float | None, ...]]()
        taken = WARMUP + rounds
        while shape.device == "cuda" and len(profiles) < 1 + by_steps:
            steps.prepare()
            torch.cuda.reset_peak_memory_stats()
            if taken % MEASURES_EVERY == (0 if profiles else 1):
                profiles.append(_profiled(steps.take))
            else:
                steps.take()
            taken += 1
            if steps.beside is not None:
                held = (torch.cuda.max_memory_allocated() - before) / shape.parameters
                memory = max(memory or 0.0, held - steps.beside)
        settled, other = ([*profiles, (None,) * 3, (None,) * 3])[:2]
        gpu_ms, launches, syncs = zip(settled, other, strict=True)
        return Measured(text, wall, ratio, gpu_ms, launches, syncs, memory)
    finally:
        if steps.handle is not None:
            with suppress(Exception):  # what failed before is told
                steps.handle.close()
        del steps
        gc.collect()
        if shape.device == "cuda":
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


def _both(values: list[float], measuring: list[bool]) -> Pair:
    settled = [each for each, not_this in zip(values, measuring, strict=True) if not not_this]
    others = [each for each, this in zip(values, measuring, strict=True) if this]
    return median(settled), median(others) if others else None


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


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
