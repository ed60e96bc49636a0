"""Measure a group of ranks: what its exchanges, its memory and the library's kernels take. Collective; the file is `probe_file`.

Exchanges go through the communicator that schemes use, so what they really pay is measured. Each is repeated back to back, as many times
as its share of the time allows; of each repeat the slowest rank counts.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sparsync import Bucket, Scheme, kernels
from sparsync.comm import GroupComm
from sparsync.comm.announcement import Announcement, Told
from sparsync.core import ParameterSpan
from sparsync.schemes import Span, Sparse, State
from sparsync.wire import Elements
from sparsync_lab.predict.exchanges import Kind
from sparsync_lab.predict.probe_file import (
    KINDS,
    Kernel,
    KernelKind,
    Latency,
    Memory,
    Operation,
    ProbedLink,
    ReducedBucket,
    SchemeTimes,
    rounded,
    sizes,
)
from sparsync_lab.rivals.demo import transformed
from sparsync_lab.rivals.tiles import SIDE, tiles_of

SIZES = 5  # of each operation, from the smallest to the largest in equal ratios
SMALLEST, LARGEST = 1_000, 16_000_000  # bytes that a rank sends
REPEATS = (5, 200)  # fewest and most
OPERATIONS_SHARE, SCHEMES_SHARE = 0.6, 0.25  # of the time
TRIAL, TRIAL_S = 64_000, 0.02  # the rate is estimated from an exchange of these bytes, or of more, that takes so long
RATE_S, RATE_DELAYS = (
    0.2,
    20,
)  # seconds and one-way delays that the message takes at least which tells the rate of a link
RATE_REPEATS = 12  # of such a message, at most
TAG = 1 << 20  # of the first message whose receive is posted ahead; communicators use small ones
PAIRINGS = 8  # at most: how often partners change when round trips are measured
KERNEL_N = 1 << 22  # elements: vectors of 16 MB, which no cache holds twice
SELECTED_N = 1 << 16  # elements that are encoded and decoded: selections are smaller than buckets
SMALL_N = 1 << 10  # where fixed costs show
DENSITY = 0.01  # of what the kernels select
KERNEL_S = 0.11  # for one kind of work at one size
PARTS = 4  # that are decoded and added up
COLUMNS = 4  # of the thin factors of a matrix that is multiplied: PowerSGD's default
SCHEME_N = (1 << 11, 1 << 15, 1 << 18)  # elements of buckets, the first above the size below which schemes send all
SCHEME_ROUNDS, BATCH = (4, 3, 10), 4  # buckets to warm up with, and batches that are counted: fewest and most
OVER = 8.0  # times its share of the time that a size may take
_WARM = 0.97  # as the library's hint of where to look for the largest elements

Tell = Callable[[str, float], None]
"""Is told what is measured now, and which share of all is done."""
Work = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """What `measure` has found; the same on all ranks."""

    operation: tuple[Operation, ...]
    latency: Latency
    memory: Memory
    kernel: tuple[Kernel, ...]
    scheme: tuple[SchemeTimes, ...]
    link: ProbedLink


def measure(
    comm: GroupComm, device: torch.device, budget_s: float, schemes: Mapping[str, Scheme], tell: Tell
) -> Measured:
    """Measure within about `budget_s` seconds. Collective, with the same arguments on all ranks; `schemes` by label, each rank its own.

    `comm` is a private communicator of two ranks or more that nothing else uses. Raises ValueError for a single rank.
    """
    if comm.size < 2:
        raise ValueError("a probe measures what travels between ranks, and there is 1; start at least 2")
    bench = _Bench(comm, device)
    tell("round trips", 0.0)
    bench.announce()
    latency = _latency(bench)
    operations: list[Operation] = []
    # Half of the time is for the largest sizes, half for all others.
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
    return Measured(tuple(operations), latency, memory, kernel, tuple(times), _link(bench, operations))


class _Bench:
    """Times work on this rank, and compares with the other ranks."""

    def __init__(self, comm: GroupComm, device: torch.device) -> None:
        self.comm, self.device = comm, device
        self._one = torch.ones(1, device=device)
        self._number = 0

    def announce(self, first: Work | None = None) -> None:
        """Announce as before each bucket, and do `first` before the announcements are read.

        From then on operations are not compared one by one.
        """
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
        """Wait until the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def once(self, run: Work) -> float:
        """Return the seconds of `run` on this rank."""
        began = time.perf_counter()
        run()
        self.finish()
        return time.perf_counter() - began

    def slowest(self, own: Sequence[float]) -> list[float]:
        """Return for each entry the largest of all ranks."""
        table = self.gathered(own)
        return table.max(0).values.tolist()

    def gathered(self, own: Sequence[float]) -> Tensor:
        """Return the entries of all ranks, [P, entries]."""
        row = torch.tensor(own, dtype=torch.float64, device=self.device)
        return torch.stack(self.comm.all_gather(row, [len(own)] * self.comm.size)).cpu()

    def repeated(self, run: Work, within_s: float) -> list[float]:
        """Return the seconds of the slowest rank in each of as many repeats as fit; one more comes first, and does not count."""
        self.together()
        first = max(self.slowest([self.once(run)]))
        fewest, most = REPEATS
        count = min(most, max(fewest, int(within_s / max(first, 1e-7)) - 1))
        self.together()
        return self.slowest([self.once(run) for _ in range(count)])

    def alone(self, run: Work, within_s: float) -> float:
        """Return the median seconds of `run`, which does not communicate, on the slowest rank; all ranks are at work meanwhile."""
        run()
        self.together()
        own, deadline = [], time.perf_counter() + within_s
        while len(own) < 3 or (time.perf_counter() < deadline and len(own) < 1000):
            own.append(self.once(run))
        return max(self.slowest([statistics.median(own)]))


def _sizes(bench: _Bench, budget_s: float) -> list[int]:
    """Return the sizes that can be measured in time, from SMALLEST to at most LARGEST bytes."""
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
    """Return an operation in which each rank sends about `nbytes`, and how many these are."""
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


def _latency(bench: _Bench) -> Latency:
    trips = _round_trips(bench)
    P = bench.comm.size
    full = statistics.median(bench.repeated(_small(bench, P - 1), 0.3))
    one = statistics.median(bench.repeated(_small(bench, 1), 0.3))
    # Of two ranks each sends one message, and what it costs beside the way is what is left of the exchange.
    more = (full - one) / (P - 2) if P > 2 else full - statistics.median(trips) / 2
    return Latency(
        round_trip_s=rounded(statistics.median(trips)),
        slowest_round_trip_s=rounded(max(trips)),
        per_message_s=rounded(max(0.0, more)),
        messages_per_s=rounded((P - 1) / full),
        announce_s=rounded(_announce_s(bench)),
    )


def _small(bench: _Bench, peers: int) -> Work:
    """Return an exchange in which each rank sends one byte to each of the next `peers` ranks."""
    comm, P = bench.comm, bench.comm.size
    byte, nothing = _bytes(1, bench), _bytes(0, bench)
    to = {(comm.rank + i) % P for i in range(1, peers + 1)}
    source = {(comm.rank - i) % P for i in range(1, peers + 1)}
    parts = [byte if other in to else nothing for other in range(P)]
    counts = [1 if other in source else 0 for other in range(P)]
    return lambda: comm.all_to_all(parts, counts)


def _link(bench: _Bench, operations: Sequence[Operation]) -> ProbedLink:
    """Return the one-way delays from round trips, and the rate from a long message to the next rank, less what the smallest one takes."""
    # NCCL has no receives that are posted ahead: those of a stream wait for each other.
    trips = _round_trips(bench, ahead=dist.get_backend(bench.comm.group) == "gloo")
    one_way_s = statistics.median(trips) / 2
    smallest, *_, largest = sizes(operations, "send_recv")
    nbytes, long_s = largest.nbytes, max(RATE_S, RATE_DELAYS * one_way_s)
    while True:
        run, sent = _exchange(bench, "send_recv", nbytes)
        seconds = _settled_s(bench, run)
        if seconds >= long_s or nbytes >= LARGEST:
            break
        nbytes = min(LARGEST, 4 * nbytes)
    beyond_s = seconds - smallest.p20_s
    rate = (sent - smallest.nbytes) / beyond_s if beyond_s > 0 else sent / seconds
    return ProbedLink(rounded(8 * rate), rounded(one_way_s), rounded(max(trips) / 2))


def _settled_s(bench: _Bench, run: Work) -> float:
    """Return the least seconds of `run` once it gets no quicker: TCP's windows grow from one message to the next."""
    best_s, late = math.inf, 0
    for _ in range(RATE_REPEATS):
        bench.together()
        seconds = max(bench.slowest([bench.once(run)]))
        late = late + 1 if seconds > 0.97 * best_s else 0
        best_s = min(best_s, seconds)
        if late == 3:
            break
    return best_s


def _round_trips(bench: _Bench, ahead: bool = False) -> list[float]:
    """Return the median round trip of each pair that was measured.

    `ahead`: all receives are posted before the first trip, so that no byte waits until its receiver has said that it is ready.
    """
    comm = bench.comm
    byte, into, nothing = _bytes(1, bench), _bytes(1, bench), _bytes(0, bench)

    def trips(partner: int | None, count: int) -> list[float]:
        if partner is None or not ahead:
            bench.together()
            return [] if partner is None else [bench.once(partial(trip, partner)) for _ in range(count)]
        other = comm.ranks[partner]
        receives = [dist.irecv(_bytes(1, bench), other, comm.group, TAG + trip) for trip in range(count)]
        bench.together()
        return [
            bench.once(partial(trip_ahead, partner < comm.rank, other, TAG + number, receive))
            for number, receive in enumerate(receives)
        ]

    def trip_ahead(answers: bool, other: int, tag: int, receive: dist.Work | None) -> None:
        assert receive is not None
        if answers:
            receive.wait()
        dist.send(byte, other, comm.group, tag)
        if not answers:
            receive.wait()

    def trip(partner: int) -> None:
        if comm.rank < partner:
            comm.send_recv(byte, partner, nothing, partner)
            comm.send_recv(nothing, partner, into, partner)
        else:
            comm.send_recv(nothing, partner, into, partner)
            comm.send_recv(byte, partner, nothing, partner)
        bench.finish()

    own: list[float] = []
    for partner in _partners(comm.rank, comm.size):
        slowest = max(bench.slowest([min(trips(partner, 3), default=0.0)]))
        times = trips(partner, min(30, max(3, int(0.2 / slowest))))
        own.append(statistics.median(times) if times else -1.0)
    return [each for each in bench.gathered(own).flatten().tolist() if each >= 0]


def _partners(rank: int, P: int) -> Iterator[int | None]:
    """Yield this rank's partner in each of some pairings of all ranks; None where it is left over. Pairs do not come again."""
    seats = P + P % 2  # round robin: one seat stays, the others move on
    turns = range(0, seats - 1, max(1, (seats - 1) // PAIRINGS))
    for turn in list(turns)[:PAIRINGS]:
        if rank == seats - 1:
            partner = turn * (seats // 2) % (seats - 1)
        else:
            partner = (turn - rank) % (seats - 1)
            partner = seats - 1 if partner == rank else partner
        yield partner if partner < P else None


def _announce_s(bench: _Bench) -> float:
    """Return what an announcement adds to a small exchange, whose messages it travels beside, as those of a bucket.

    The two cases take turns, so that both see the same disturbances.
    """
    exchange = _small(bench, bench.comm.size - 1)

    def announced() -> None:
        bench.announce(exchange)

    own: list[list[float]] = [[], []]
    bench.together()
    for _ in range(40):
        own[0].append(bench.once(exchange))
        own[1].append(bench.once(announced))
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
    """Return each kind of work on a bucket of `n` elements, or `k` selected ones, with its number of elements and of calls.

    Elements and calls are counted as the plans of schemes count them.
    """
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
    rows = math.isqrt(n)
    matrix = grad[: rows * rows].view(1, rows, rows).clone()
    factor = torch.linalg.qr(torch.randn(1, rows, COLUMNS, generator=source)).Q.to(device)
    side = rows // SIDE * SIDE or rows
    tiled = tiles_of((ParameterSpan("", Span(0, side * side), (side, side)),))
    tiles = torch.randn(side * side, generator=source).to(device)

    def decode() -> Sparse:
        each = [codec.decode(packet, k // PARTS, wide, torch.float32) for packet in packets]
        return kernels.coalesce(each)

    def multiply() -> None:
        """Do PowerSGD's products: both factors, what is written, and what stays. With orthonormal columns the matrix does not grow."""
        left = torch.bmm(matrix, factor)
        torch.bmm(matrix.mT, left)
        torch.bmm(left, factor.mT)
        matrix.baddbmm_(left, factor.mT, alpha=-1)

    return {
        "accumulate": (lambda: kernels.accumulate(residual, grad, out), n, 1),
        "select": (lambda: kernels.top_k(grad, count, bound), n, 1),
        "encode": (lambda: codec.encode(whole), k, 1),
        "decode": (decode, k // PARTS * PARTS, PARTS),
        "apply": (lambda: kernels.move_put_(out, zeros, [], written), n, 1),
        "multiply": (multiply, 4 * COLUMNS * rows * rows, 4),
        "transform": (lambda: transformed(tiles, tiled), tiles.numel(), 1),
    }


def _spread(k: int, length: int, start: int, device: torch.device) -> Sparse:
    """Return `k` elements at even distances in a vector of `length`."""
    index = torch.arange(k, dtype=torch.int32, device=device) * (length // k) + start
    return Sparse(index, torch.ones(k, device=device), length)


def _scheme_times(
    bench: _Bench, label: str, scheme: Scheme, within_s: float, tell: Callable[[str], None]
) -> SchemeTimes:
    """Return what reducing buckets takes with `scheme`, each as an integration has it: announced, reduced, and the announcements read.

    Sizes that would take much longer than `within_s` are left out, but for the smallest.
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
    """Return what a bucket of `n` elements takes of a batch, the median batch: processor seconds of this thread, and seconds in all.

    Both are of the slowest rank. None where the fewest batches would take OVER times `within_s`, unless `always`.
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
    # Of one bucket a rank's time has its wait for the others, which the next bucket does not have: only the rate of several counts.
    batches = [own[start : start + BATCH] for start in range(warmup, len(own), BATCH)]
    totals = [[sum(times) / BATCH for times in zip(*batch, strict=True)] for batch in batches]
    processor_s, seconds = (bench.slowest(times) for times in zip(*totals, strict=True))
    return statistics.median(processor_s), statistics.median(seconds)
