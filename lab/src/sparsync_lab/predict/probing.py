"""Measure the exchanges, the memory and the library's kernels on a group of ranks. Collective; `probe_file` has the file format.

Exchanges use the schemes' communicator, so its overhead is included. Each exchange is repeated back to back, as often as its share of the
time allows, and a repeat takes as long as its slowest rank.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from sparsync import Bucket, Scheme, kernels
from sparsync.comm import GroupComm
from sparsync.comm.announcement import Announcement, Told
from sparsync.schemes import Sparse, State
from sparsync.wire import Elements
from sparsync_lab.predict.exchanges import Kind
from sparsync_lab.predict.probe_file import (
    KINDS,
    Kernel,
    KernelKind,
    Latency,
    Memory,
    Operation,
    Probe,
    ProbedGroup,
    ReducedBucket,
    SchemeTimes,
    rounded,
)

SIZES = 5  # of each operation, from the smallest to the largest in equal ratios
SMALLEST, LARGEST = 1_000, 16_000_000  # bytes sent by a rank
REPEATS = (5, 200)  # fewest and most
OPERATIONS_SHARE, SCHEMES_SHARE = 0.6, 0.25  # of the time
TRIAL, TRIAL_S = 64_000, 0.02  # bytes, seconds: an exchange that large or long estimates the rate
KERNEL_N = 1 << 22  # elements: vectors of 16 MB, two of which exceed any cache
SELECTED_N = 1 << 16  # elements encoded and decoded: selections are smaller than buckets
SMALL_N = 1 << 10  # where fixed costs show
DENSITY = 0.01  # of the kernels' selection
KERNEL_S = 0.11  # for one kind of work at one size
PARTS = 4  # decoded and added up
SCHEME_N = (1 << 11, 1 << 15, 1 << 18)  # elements of buckets; smaller buckets than the first are sent whole by schemes
SCHEME_ROUNDS, BATCH = (4, 3, 10), 4  # warm-up buckets, fewest and most measured batches; buckets per batch
OVER = 8.0  # a size may take this many times its share of the time
_WARM = 0.97  # as the library's starting bound for the search of the largest elements

Tell = Callable[[str, float], None]
"""Takes the name of the current measurement and the finished share of the whole."""
Work = Callable[[], object]


def measure(
    comm: GroupComm,
    group: ProbedGroup,
    device: torch.device,
    budget_s: float,
    schemes: Mapping[str, Scheme],
    tell: Tell,
) -> Probe:
    """Measure a probe of `group` within about `budget_s` seconds; the same on all ranks.

    Collective, with the same arguments on all ranks; `schemes` maps labels to this rank's schemes. `comm` is a private communicator of two
    or more ranks that nothing else uses.
    """
    bench = _Bench(comm, device)
    tell("announcements", 0.0)
    bench.announce()
    latency = Latency(rounded(_announce_s(bench)))
    operations: list[Operation] = []
    # The largest sizes get half of the time, all others the other half.
    half_s = OPERATIONS_SHARE * budget_s / 2
    plan = list(product(KINDS, _sizes(bench, half_s)))
    each_s = half_s / len(plan)
    for number, (kind, nbytes) in enumerate(plan):
        tell(f"{kind}, {nbytes} bytes", 0.05 + OPERATIONS_SHARE * number / len(plan))
        operations.append(_operation(bench, kind, nbytes, each_s))
    tell("memory and kernels, all ranks at the same time", 0.7)
    memory, kernel = _kernels(bench)
    times, each_s = [], SCHEMES_SHARE * budget_s / max(1, len(schemes) * len(SCHEME_N))
    for number, (label, scheme) in enumerate(schemes.items()):
        done = 0.75 + 0.25 * number / len(schemes)
        times.append(_scheme_times(bench, label, scheme, each_s, lambda text, done=done: tell(text, done)))
    return Probe(group, tuple(operations), latency, memory, kernel, tuple(times))


class _Bench:
    """Times work on this rank, and compares the times with other ranks'."""

    def __init__(self, comm: GroupComm, device: torch.device) -> None:
        self.comm, self.device = comm, device
        self._one = torch.ones(1, device=device)
        self._number = 0

    def announce(self, first: Work | None = None) -> None:
        """Announce as before a bucket, and run `first` before the announcements are read."""
        self._number += 1
        self.comm.announce(Announcement((self._number, 0, 0, 0), lambda: [Told(["a probe"], "probe with all ranks")]))
        if first is not None:
            first()
        self.comm.settle()

    def together(self) -> None:
        """Wait for all ranks."""
        self.comm.all_reduce(self._one)
        self.finish()

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def once(self, run: Work) -> float:
        """Time `run` on this rank, in seconds."""
        began = time.perf_counter()
        run()
        self.finish()
        return time.perf_counter() - began

    def slowest(self, own: Sequence[float]) -> list[float]:
        """Take the maximum over all ranks of each entry."""
        row = torch.tensor(own, dtype=torch.float64, device=self.device)
        return torch.stack(self.comm.all_gather(row, [len(own)] * self.comm.size)).max(0).values.tolist()

    def repeated(self, run: Work, within_s: float) -> list[float]:
        """Time the slowest rank in each of as many repeats as fit, after one that does not count."""
        self.together()
        first = max(self.slowest([self.once(run)]))
        fewest, most = REPEATS
        count = min(most, max(fewest, int(within_s / max(first, 1e-7)) - 1))
        self.together()
        return self.slowest([self.once(run) for _ in range(count)])

    def alone(self, run: Work, within_s: float) -> float:
        """Time `run`, which does not communicate, while all ranks are busy: the median seconds of the slowest rank."""
        run()
        self.together()
        own, deadline = [], time.perf_counter() + within_s
        while len(own) < 3 or (time.perf_counter() < deadline and len(own) < 1000):
            own.append(self.once(run))
        return max(self.slowest([statistics.median(own)]))


def _sizes(bench: _Bench, budget_s: float) -> list[int]:
    """Choose the sizes that can be measured in time, from SMALLEST to at most LARGEST bytes."""
    nbytes = min(TRIAL, LARGEST)
    while True:
        run, sent = _exchange(bench, "all_to_all", nbytes)
        seconds = min(bench.repeated(run, 0.0)[-2:])
        if seconds >= TRIAL_S or nbytes >= LARGEST:
            break
        nbytes = min(4 * nbytes, LARGEST)
    rate = sent / seconds
    turns = len(KINDS) * (REPEATS[0] + 1)
    largest = int(min(LARGEST, max(16 * SMALLEST, rate * budget_s / turns)))
    ratio = (largest / SMALLEST) ** (1 / (SIZES - 1))
    return [round(SMALLEST * ratio**i) for i in range(SIZES)]


def _operation(bench: _Bench, kind: Kind, nbytes: int, within_s: float) -> Operation:
    run, sent = _exchange(bench, kind, nbytes)
    times = bench.repeated(run, within_s)
    p20, p50, p80 = np.percentile(times, (20, 50, 80))
    return Operation(kind, sent, rounded(p50), rounded(p20), rounded(p80))


def _exchange(bench: _Bench, kind: str, nbytes: int) -> tuple[Work, int]:
    """Make an operation in which each rank sends about `nbytes`; also returns the exact number."""
    comm, P = bench.comm, bench.comm.size
    if kind == "all_reduce":
        x = torch.zeros(max(1, round(nbytes * P / (2 * (P - 1)) / 4)), device=bench.device)
        return lambda: comm.all_reduce(x), round(x.nbytes * 2 * (P - 1) / P)
    if kind == "send_recv":
        out, into = _bytes(nbytes, bench), _bytes(nbytes, bench)
        return lambda: comm.send_recv(out, (comm.rank + 1) % P, into, (comm.rank - 1) % P), nbytes
    part = _bytes(max(1, round(nbytes / (P - 1))), bench)
    counts, sent = [part.numel()] * P, part.numel() * (P - 1)
    if kind == "all_gather":
        return lambda: comm.all_gather(part, counts), sent
    return lambda: comm.all_to_all([part] * P, counts), sent


def _bytes(count: int, bench: _Bench) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=bench.device)


def _announce_s(bench: _Bench) -> float:
    """Time what an announcement adds to a small exchange while its messages travel beside the exchange's.

    The two cases alternate, so that disturbances hit both.
    """
    byte = _bytes(1, bench)
    own: list[list[float]] = [[], []]

    def exchange() -> None:
        bench.comm.all_to_all([byte] * bench.comm.size, [1] * bench.comm.size)

    bench.together()
    for _ in range(40):
        own[0].append(bench.once(exchange))
        own[1].append(bench.once(lambda: bench.announce(exchange)))
    plain, more = (statistics.median(bench.slowest(times)) for times in own)
    return max(0.0, more - plain)


def _kernels(bench: _Bench) -> tuple[Memory, tuple[Kernel, ...]]:
    a, b = (torch.zeros(KERNEL_N, device=bench.device) for _ in range(2))
    pass_s = bench.alone(lambda: b.add_(a), KERNEL_S)
    found: list[Kernel] = []
    small, large = _work(SMALL_N, SMALL_N, bench.device), _work(KERNEL_N, SELECTED_N, bench.device)
    for kind, (run, few, calls) in small.items():
        more, many, _ = large[kind]
        fixed_s, whole_s = bench.alone(run, KERNEL_S), bench.alone(more, KERNEL_S)
        rate = (many - few) / max(whole_s - fixed_s, 1e-9)
        fixed_s = max(0.0, fixed_s - few / rate) / calls
        found.append(Kernel(kind, rounded(rate), rounded(fixed_s)))
    return Memory(rounded(12 * KERNEL_N / pass_s)), tuple(found)


def _work(n: int, k: int, device: torch.device) -> dict[KernelKind, tuple[Work, int, int]]:
    """Make each kind of work on a bucket of `n` elements, or `k` selected ones, with its elements and calls as plans count them."""
    source = torch.Generator().manual_seed(0)
    residual, grad = (torch.randn(n, generator=source).to(device) for _ in range(2))
    out, zeros = torch.empty_like(grad), torch.zeros_like(grad)
    count = max(1, int(DENSITY * n))
    top = kernels.top_k(grad, count)
    written = [Sparse(top.index, zeros[:count], n)]
    bound = _WARM * kernels.smallest_magnitude(top.value)
    codec, wide = Elements("int8"), round(k / DENSITY)
    parts = [_spread(k // PARTS, wide, start, device) for start in range(PARTS)]
    packets = [codec.encode(part) for part in parts]
    whole = _spread(k, wide, 0, device)

    def decode() -> Sparse:
        each = [codec.decode(packet, k // PARTS, wide, torch.float32) for packet in packets]
        return kernels.coalesce(each)

    return {
        "accumulate": (lambda: kernels.accumulate(residual, grad, out), n, 1),
        "select": (lambda: kernels.top_k(grad, count, bound), n, 1),
        "encode": (lambda: codec.encode(whole), k, 1),
        "decode": (decode, k // PARTS * PARTS, PARTS),
        "apply": (lambda: kernels.move_put_(out, zeros, [], written), n, 1),
    }


def _spread(k: int, length: int, start: int, device: torch.device) -> Sparse:
    """Make `k` evenly spaced elements in a vector of `length`."""
    index = torch.arange(k, dtype=torch.int32, device=device) * (length // k) + start
    return Sparse(index, torch.ones(k, device=device), length)


def _scheme_times(
    bench: _Bench, label: str, scheme: Scheme, within_s: float, tell: Callable[[str], None]
) -> SchemeTimes:
    """Time the reduction of buckets with `scheme` as integrations do it: announce, reduce, and read the announcements.

    Sizes that would take much longer than `within_s` are left out, except the smallest.
    """
    fixed_s, buckets, state = 0.0, list[ReducedBucket](), scheme.start()
    for n in SCHEME_N:
        tell(f"{label}, {n} elements")
        found = _reductions(bench, state, n, within_s, always=not buckets)
        if found is None:
            break
        processor_s, seconds = found
        fixed_s = fixed_s or processor_s
        buckets.append(ReducedBucket(n, rounded(seconds)))
    return SchemeTimes(label, rounded(fixed_s), repr(scheme), tuple(buckets))


def _reductions(bench: _Bench, state: State, n: int, within_s: float, always: bool) -> tuple[float, float] | None:
    """Time buckets of `n` elements in batches. Returns the median over batches of a bucket's mean processor seconds and mean seconds.

    Both are the slowest rank's. None if the fewest batches would take OVER times `within_s`, unless `always`.
    """
    source = torch.Generator().manual_seed(bench.comm.rank)
    warmup, fewest, most = SCHEME_ROUNDS
    own: list[tuple[float, float]] = []
    bench.together()

    def rounds(count: int) -> None:
        for _ in range(count):
            grad = torch.randn(n, generator=source).to(bench.device)
            bucket = Bucket(f"probe{n}", grad, len(own))
            bench.finish()
            began, worked = time.perf_counter(), time.thread_time()
            bench.announce(lambda bucket=bucket: state.reduce(bucket, bench.comm))
            bench.finish()
            own.append((time.thread_time() - worked, time.perf_counter() - began))

    rounds(1)
    slowest_s = max(bench.slowest([own[-1][1]]))
    if not always and slowest_s * (warmup + BATCH * fewest) > OVER * within_s:
        return None
    rounds(warmup - 1)
    slowest_s = max(bench.slowest([own[-1][1]]))
    rounds(BATCH * min(most, max(fewest, int(within_s / slowest_s / BATCH))))
    # A bucket's time includes the wait for other ranks, which the next one then lacks, so only the mean of several buckets counts.
    batches = [own[start : start + BATCH] for start in range(warmup, len(own), BATCH)]
    totals = [[sum(times) / BATCH for times in zip(*batch, strict=True)] for batch in batches]
    processor_s, seconds = (bench.slowest(times) for times in zip(*totals, strict=True))
    return statistics.median(processor_s), statistics.median(seconds)
