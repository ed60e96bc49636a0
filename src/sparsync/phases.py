"""The phases a bucket passes, by name: a profiler sees each, and the seconds spent in each can be recorded.

Time inside the communicator is counted by MeteredComm; a phase that contains messages is not marked as one. torch.profiler sees the
thread that started it; the one that reduces DDP's buckets only with `_ExperimentalConfig(profile_all_threads=True)`.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

Phase = Literal["accumulate", "select", "encode", "decode", "apply"]

# .ledger: the dict that this thread's phases are added to, .label: their bucket's name; absent outside `recorded`.
_THREAD = threading.local()


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Name the block in torch's profiler, as "sparsync::select [bucket0]", and add its seconds to those of `recorded`.

    On CUDA the time is the host's only. The bucket's name is there inside `recorded` only.
    """
    from torch.autograd import profiler  # here, because the names of the phases are read where torch is not needed

    ledger: dict[str, float] | None = getattr(_THREAD, "ledger", None)
    profiling = profiler._is_profiler_enabled
    if ledger is None and not profiling:
        yield
        return
    began = time.perf_counter()
    label = getattr(_THREAD, "label", "")
    with profiler.record_function(f"sparsync::{name}{label}") if profiling else nullcontext():
        yield
    if ledger is not None:
        ledger[name] = ledger.get(name, 0.0) + time.perf_counter() - began


@contextmanager
def recorded(bucket: str) -> Iterator[dict[str, float]]:
    """Return the seconds this thread spends in each phase, filled in while the block runs; a profiler sees the bucket's name."""
    outer = getattr(_THREAD, "ledger", None), getattr(_THREAD, "label", "")
    _THREAD.ledger, _THREAD.label = {}, f" [{bucket}]"
    try:
        yield _THREAD.ledger
    finally:
        _THREAD.ledger, _THREAD.label = outer
