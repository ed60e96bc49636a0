"""The stations a bucket passes, by name: a profiler sees each, and whoever asks gets the seconds spent in each.

Time inside the communicator is counted by MeteredComm; a station that contains messages is not marked as one.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Station = Literal["accumulate", "select", "encode", "decode", "apply"]

_OPEN = threading.local()  # .ledger: the dict that this thread's stations are added to; absent when nobody asked


@contextmanager
def station(name: Station) -> Iterator[None]:
    """Names what happens inside: "sparsync::select" in torch's profiler, and in `recorded` seconds. On CUDA, of the host only."""
    from torch.autograd import profiler  # here, because the names of the stations are read where torch is not needed

    ledger: dict[str, float] | None = getattr(_OPEN, "ledger", None)
    if ledger is None and not profiler._is_profiler_enabled:
        yield
        return
    began = time.perf_counter()
    with profiler.record_function(f"sparsync::{name}"):
        yield
    if ledger is not None:
        ledger[name] = ledger.get(name, 0.0) + time.perf_counter() - began


@contextmanager
def recorded() -> Iterator[dict[str, float]]:
    """The seconds this thread spends in each station, filled in while the block runs."""
    outer = getattr(_OPEN, "ledger", None)
    _OPEN.ledger = spent = {}
    try:
        yield spent
    finally:
        _OPEN.ledger = outer
