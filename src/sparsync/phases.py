"""The phases a bucket passes, by name: a profiler sees each, and whoever asks gets the seconds spent in each.

Time inside the communicator is counted by MeteredComm; a phase that contains messages is not marked as one. torch.profiler sees the
thread that started it; the one that reduces DDP's buckets only with `_ExperimentalConfig(profile_all_threads=True)`.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

Phase = Literal["accumulate", "select", "encode", "decode", "apply"]

_OPEN = (
    threading.local()
)  # .ledger: the dict that this thread's phases are added to, .label: their bucket's; absent when nobody asked


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Names what happens inside: "sparsync::select [bucket0]" in torch's profiler, and in `recorded` seconds. On CUDA, of the host only.

    The bucket's name is there inside `recorded` only.
    """
    from torch.autograd import profiler  # here, because the names of the phases are read where torch is not needed

    ledger: dict[str, float] | None = getattr(_OPEN, "ledger", None)
    if ledger is None and not profiler._is_profiler_enabled:
        yield
        return
    began = time.perf_counter()
    with (
        profiler.record_function(f"sparsync::{name}{getattr(_OPEN, 'label', '')}")
        if profiler._is_profiler_enabled
        else nullcontext()
    ):
        yield
    if ledger is not None:
        ledger[name] = ledger.get(name, 0.0) + time.perf_counter() - began


@contextmanager
def recorded(bucket: str) -> Iterator[dict[str, float]]:
    """The seconds this thread spends in each phase, filled in while the block runs; a profiler sees them with the bucket's name."""
    outer = getattr(_OPEN, "ledger", None), getattr(_OPEN, "label", "")
    _OPEN.ledger, _OPEN.label = {}, f" [{bucket}]"
    try:
        yield _OPEN.ledger
    finally:
        _OPEN.ledger, _OPEN.label = outer
