"""The table of operations with arguments for each, and the law that a backend matches the specification bit for bit."""

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor

from helpers.reference import filled, reference
from helpers.same_bits import bits
from sparsync.core import Rows, Sparse, spans
from sparsync.kernels.codec_reference import PositionCodec
from sparsync.kernels.value_reference import TERNARY
from sparsync.schemes import Span
from sparsync.selection.exclusive import BlockCyclic

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WEIGHTS = (torch.float32, torch.float32, torch.float16)  # Triton's interpreter truncates bfloat16
WIDTHS = (TERNARY, 8, 3, 4, 1)  # bits of rounded values
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-40, 3e38, -3e38, math.inf, -math.inf, math.nan]
KINDS = [
    "normal",
    "special",
    "equal",
    "zeros",
    "two-valued",
    "sorted",
    "heavy-tailed",
    "few-values",
    "denormal",
    "mostly-nan",
]
THRESHOLDS = [-1.0, 0.0, 1e-45, 1.0, 2.0, 3e38, math.inf, math.nan]
BOUNDS = [None, 0.1, 3.0, math.inf, math.nan]
SPREADS = [(3e-4, 0.95, 1e-8, 0.4), (1.0, 0.5, 1.0, 1.0), (1e-3, 0.99, 1e-6, 0.9)]
MOVES = [(0.9, 0.9997, 1.1), (0.5, 1.0, 1.0), (0.0, 0.9, 1.0)]
SCALED = [(*move, *spread) for move, spread in zip(MOVES, SPREADS, strict=True)]
SKIPS = (torch.ones(1), None, torch.zeros(1))
Arguments = tuple[Any, ...]  # Any: as the operation takes them
Cases = Callable[[str, int], Iterator[Arguments]]  # (kind, n)


def made(kind: str, n: int, seed: int = 0) -> Tensor:
    """Make a vector of `n` elements that starts one element into its storage, so that it is misaligned."""
    source = torch.Generator().manual_seed(seed)
    normal = torch.randn(n + 1, generator=source)[1:]
    if kind == "special":
        return torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (n + 1,), generator=source)][1:]
    return {
        "normal": lambda: normal,
        "equal": lambda: torch.full((n + 1,), -2.0)[1:],
        "zeros": lambda: torch.zeros(n + 1)[1:],
        "two-valued": normal.sign,
        "sorted": lambda: normal.sort().values,
        "heavy-tailed": lambda: normal**9,
        "few-values": (3 * normal).round,
        "denormal": lambda: normal * 1e-41,
        "mostly-nan": lambda: torch.where(normal > -1, torch.nan, normal),
    }[kind]()


def parts(n: int, P: int, apart: bool, seed: int = 0) -> list[Sparse]:
    """Make P selections out of `n` elements, with no common position if `apart`."""
    source = torch.Generator().manual_seed(seed)
    owner, values = torch.randint(max(1, P), (n,), generator=source), made("special", n, seed)
    found = []
    for part in range(P):
        index = (owner == part if apart else torch.rand(n, generator=source) < 0.4).nonzero().view(-1)
        found.append(Sparse(index.to(torch.int32), values[index], n))
    return found


def layouts(n: int) -> list[list[Rows]]:
    """List regions of a vector of `n` elements: those of a scheme, and rows that overlap and are unordered."""
    cyclic = [[BlockCyclic(n, P).rows(p, torch.device("cpu")) for p in range(P)] for P in (1, 3, 4)]
    starts = torch.tensor([n // 2, 0, 0, n // 3], dtype=torch.int32)
    return [*cyclic, [Rows(starts, max(1, n // 3), min(n, 3 * (n // 3)))]]


def laid(kind: str, n: int, dtype: torch.dtype) -> tuple[list[Tensor], list[int], list[float]]:
    """Lay tensors out in a vector of `n` elements, with gaps and an empty one; also returns their starts and factors."""
    sizes = [n // 7, 0, n // 3, 1, n // 3] if n > 20 else [n - n // 2]
    starts = [sum(sizes[:i]) + i for i in range(len(sizes))] if n > 20 else [n // 2]
    tensors = [made(kind, size, i).to(dtype) for i, size in enumerate(sizes)]
    return (
        [each.view(1, -1) if i == 2 else each for i, each in enumerate(tensors)],
        starts,
        [1.0, 0.5, 1.7, 1.0, 0.3][: len(sizes)],
    )


def three_spans(n: int) -> list[Span]:
    return [Span(0, n // 3), Span(n // 3, n // 3), Span(n // 3, n)]


def scales(n: int, block: int) -> tuple[Tensor, Tensor, int, float]:
    return made("normal", n, 5).abs(), made("normal", -(-n // block), 6).abs(), block, 0.1


def counts(n: int) -> list[int]:
    return sorted({0, min(1, n), n // 100, n // 2, n})


def packets_of(kind: str, n: int, P: int, width: int) -> list[Tensor]:
    return [reference.values_encode(part.of(made(kind, n, 4)).clone(), width) for part in spans(n, P)]


def _accumulate(kind: str, n: int) -> Iterator[Arguments]:
    for dtype in DTYPES:
        yield made("normal" if kind != "normal" else "special", n, 1), made(kind, n + 1).to(dtype)[1:], torch.empty(n)
    x = made(kind, n)
    yield x, made("normal", n, 1), x


def _top_k(kind: str, n: int) -> Iterator[Arguments]:
    for k, bound in product(counts(n), BOUNDS):
        yield made(kind, n), k, bound


def _nonzero(kind: str, n: int) -> Iterator[Arguments]:
    for skip, k in product((None, Span(0, n), Span(n // 3, n // 2), Span(n // 2, n)), counts(n)):
        yield made(kind, n), k, skip, None if k % 2 else 1.0


def _rows(kind: str, n: int) -> Iterator[tuple[list[Rows], list[int], list[float | None]]]:
    shared = [(0, None), *((5, bound) for bound in BOUNDS), (1, None), (1, 3.0), (1, math.nan)]
    for regions, (share, bound) in product(layouts(n), shared):
        yield regions, [share and rows.length // share for rows in regions], [bound] * len(regions)


def _at_positions(kind: str, n: int) -> Iterator[tuple[Tensor, Sparse]]:
    for part, wide in product(parts(n, 2, apart=False), (False, True)):
        yield made("special", n, 2), Sparse(part.index.long() if wide else part.index, part.value, n)


def _move_put(kind: str, n: int) -> Iterator[Arguments]:
    for start, skip in product((0, 1), SKIPS[1:]):  # nothing observable moves if it is skipped
        source, to = made(kind, n + 1)[start : start + n], torch.full((n + 1,), 7.0)[start : start + n]
        yield to, source, parts(n, 3, apart=True, seed=1), parts(n, 2, apart=True, seed=2), skip


def _split(kind: str, n: int) -> Iterator[Arguments]:
    (part,) = parts(n, 1, apart=False)
    for cuts in ((), (0,), (n,), (0, 0, n // 9, n // 2, n // 2, n)):
        yield part, [Span(start, stop) for start, stop in zip((0, *cuts), (*cuts, n), strict=True)]


def _write_own(kind: str, n: int) -> Iterator[Arguments]:
    starts = torch.arange(0, 2 * n + 1, 6, dtype=torch.int32)
    for dtype, rows in product(
        DTYPES, (None, Rows(starts, 2, 2 * len(starts) - 1), Rows(starts[:1] + n, max(1, n), n))
    ):
        targets = [made(kind, n).to(dtype), made("normal", n, 1).to(dtype).view(1, n)]
        yield targets, [1, n + 1], made(kind, 2 * n + 1), made("normal", 2 * n + 1, 1), rows, 4, 0.35


def _moments(kind: str, n: int, dtype: torch.dtype, block: int) -> Arguments:
    square, ratio = made("normal", n, 1).abs(), made("normal", n // block + 1, 2).abs()
    return *laid(kind, n, dtype), square, ratio, block


def _make_steps(kind: str, n: int) -> Iterator[Arguments]:
    # Triton's interpreter flushes denormal bfloat16 numbers to zero.
    types = [each for each in DTYPES if each != torch.bfloat16 or kind not in ("special", "denormal")]
    for dtype, block, skip in product(types, (64, 7), SKIPS):
        first, _, last = three_spans(n)  # elements outside are not touched
        within = [first if skip is None else Span(0, last.start), Span(last.start + n // 9 * (skip is None), last.stop)]
        yield made("normal", n), *_moments(kind, n, dtype, block), within, SPREADS[::2], skip


def _encode_steps(kind: str, n: int) -> Iterator[Arguments]:
    for width, (P, dtype, skip) in product(WIDTHS, zip((1, 3, 4), DTYPES, SKIPS, strict=True)):
        spread = _moments(kind, n, dtype, 64 if P > 1 else 300), three_spans(n), SPREADS
        yield made("normal", n, 3) * 1e-3, *spread[0], *spread[1:], P - 1, P, width, skip, None
        # Without second moments the gradient itself is added; without gradients nothing is added.
        if P < 4:
            yield made("normal", n, 3), *laid(kind, n, dtype), None, None, 1, [], [], 0, P, width, skip, torch.zeros(n)
        if P > 1:
            yield made(kind, n, 3), [], [], [], None, None, 1, [], [], 0, P, width, skip, None


def _apply_steps(kind: str, n: int) -> Iterator[Arguments]:
    for width, (P, dtype, skip) in product(WIDTHS, zip((1, 3, 4), WEIGHTS, SKIPS, strict=True)):
        weights, starts, _ = laid("normal", n, dtype)
        given = weights, starts, made("normal", n), packets_of(kind, n, P, width), width, three_spans(n)
        yield *given, MOVES, skip, None
        yield *given, SCALED, skip, scales(n, 64)


def _move_steps(kind: str, n: int) -> Iterator[Arguments]:
    for dtype, skip in product(WEIGHTS, SKIPS):
        weights, starts, _ = laid("normal", n, dtype)
        apart = [Span(0, n // 3), Span(n // 2, n - n // 9)]
        given = weights, starts, made("normal", n, 1), made(kind, n, 2), apart
        yield *given, MOVES[::2], skip, None
        yield *given, SCALED[::2], skip, scales(n, 7)


def _write_mean(kind: str, n: int) -> Iterator[Arguments]:
    for width, (P, skip) in product(WIDTHS, zip((1, 3, 4), SKIPS, strict=True)):
        packets, grad = packets_of(kind, n, P, width), made("normal", n)
        yield grad, made("normal", n, 6), made("normal", n, 7), packets, width, P - 1, skip
        if P < 4:
            yield grad, grad, made("normal", n, 7), packets, width, 0, skip  # the error shares the gradient's memory
        if P > 1:
            yield grad, None, None, packets, width, 0, skip


def _packets_fit(kind: str, n: int) -> Iterator[Arguments]:
    for width, P, factor in product(WIDTHS, (1, 3), (1.0, 2.0**127, math.nan)):
        x = made(kind, n)
        x[n // 2 :] *= factor
        yield (
            [reference.values_encode(part.of(x).clone(), width) for part in spans(n, P)],
            [len(part) for part in spans(n, P)],
            width,
            P,
        )


def _sketch(kind: str, n: int) -> Iterator[Arguments]:
    for dtype, block, key in product(DTYPES, (16, 64, 1024), (0, 2**32 - 1)):
        yield *laid(kind, n, dtype), torch.empty(n), block, key


def _squares_fit(kind: str, n: int) -> Iterator[Arguments]:
    for dtype in DTYPES:
        tensors, _, factors = laid(kind, n, dtype)
        most = float(
            sum((each.double() * factor).square().sum() for each, factor in zip(tensors, factors, strict=True))
        )
        for limit in (most * 0.99, most * 1.01, math.inf):
            yield tensors, factors, limit


def _reduce_shares(kind: str, n: int) -> Iterator[Arguments]:
    for width, (P, skip) in product(WIDTHS, zip((1, 2, 3), SKIPS, strict=True)):
        packets = [reference.values_encode(made(kind, n, rank), width) for rank in range(P - 1)]
        for down in {width, 4}:
            yield made(kind, n, P), packets, width, P, down, skip


def _positions(kind: str, n: int) -> Iterator[tuple[PositionCodec, Tensor, int]]:
    for codec, part, wide in product(get_args(PositionCodec), parts(n, 2, apart=True), (False, True)):
        yield codec, part.index.long() if wide else part.index, n


TABLE: dict[str, Cases] = {
    "accumulate": _accumulate,
    "accumulate_top_k": lambda kind, n: (
        (x, made("special", n, 1), k, torch.empty(n), bound) for x, k, bound in _top_k(kind, n)
    ),
    "accumulate_top_k_nonzero": lambda kind, n: (
        (x, made("normal", n, 1), k, torch.empty(n), skip, bound) for x, k, skip, bound in _nonzero(kind, n)
    ),
    "accumulate_select_ge": lambda kind, n: (
        (made(kind, n), made("normal", n, 1), threshold, torch.empty(n), span)
        for span, threshold in product((Span(0, n), Span(n // 3, n // 2), Span(n, n)), THRESHOLDS)
    ),
    "accumulate_top_k_of_rows": lambda kind, n: (
        (made(kind, n), made("normal", n, 1), regions, counts, torch.empty(n), bounds)
        for regions, counts, bounds in _rows(kind, n)
    ),
    "divide_to_": lambda kind, n: (
        (torch.empty(n + 1)[1:], made(kind, n).to(dtype), divisor) for dtype, divisor in product(DTYPES, (2, 3))
    ),
    "all_finite": lambda kind, n: ((made(kind, n),) for _ in range(1)),
    "finite_each": lambda kind, n: ((parts(n, count, True), times) for count, times in product((0, 1, 3), (1, 4))),
    "select_ge": lambda kind, n: ((made(kind, n), threshold) for threshold in THRESHOLDS),
    "top_k": _top_k,
    "top_k_nonzero": _nonzero,
    "top_k_of_rows": lambda kind, n: (
        (made(kind, n), *each) for regions in _rows(kind, n) for each in zip(*regions, strict=True)
    ),
    "top_k_of_each": lambda kind, n: ((made(kind, n), *regions) for regions in _rows(kind, n)),
    "locate": lambda kind, n: (
        (rows, torch.arange(rows.length, dtype=torch.int32)) for regions in layouts(n) for rows in regions
    ),
    "smallest_magnitude": lambda kind, n: ((made(kind, n),) for _ in range(1)),
    "divide_rows_": lambda kind, n: ((made(kind, n), rows, 3) for regions in layouts(n)[:3] for rows in regions),
    "write_own_": _write_own,
    "digests": lambda kind, n: (
        ([made(kind, n + start).to(dtype)[start:], made(kind, n).to(dtype).view(1, -1)],)
        for start, dtype in product((0, 1), (*DTYPES, torch.float64, torch.float8_e4m3fn))
    ),
    "scatter_add_": _at_positions,
    "clear_": lambda kind, n: ((x, part.index) for x, part in _at_positions(kind, n)),
    "put_": lambda kind, n: ((x, part.index, part.value) for x, part in _at_positions(kind, n)),
    "gather": lambda kind, n: ((x, part.index) for x, part in _at_positions(kind, n)),
    "move_put_": _move_put,
    "merge": lambda kind, n: ((parts(n, P, apart=True),) for P in (1, 2, 5, 13)),
    "coalesce": lambda kind, n: ((parts(n, P, apart=False),) for P in (1, 2, 5, 13)),
    "split": _split,
    "isin": lambda kind, n: ((parts(n, 1, False)[0].index.flip(0), part.index) for part in parts(n, 2, False, 1)),
    "squares_fit": _squares_fit,
    "make_steps_": _make_steps,
    "encode_steps_": _encode_steps,
    "packets_fit": _packets_fit,
    "write_mean_": _write_mean,
    "move_steps_": _move_steps,
    "apply_steps_": _apply_steps,
    "sketch": _sketch,
    "over_means": lambda kind, n: (
        (made(kind, n).to(dtype).abs(), *each)
        for dtype, *each in [*product([torch.float32], (1, 16, 64, 1024, 2048), (1e-30, 0.5)), (torch.float64, 64, 0.5)]
    ),
    "reduce_shares_": _reduce_shares,
    "values_encode": lambda kind, n: ((made(kind, n), width) for width in WIDTHS),
    "values_decode": lambda kind, n: ((reference.values_encode(made(kind, n), width), n, width) for width in WIDTHS),
    "encode_positions": _positions,
    "decode_positions": lambda kind, n: (
        (codec, reference.encode_positions(codec, index, n), index.numel(), n)
        for codec, index, n in _positions(kind, n)
    ),
}


def compare(backend: object, operation: str, arguments: Arguments) -> bool:
    """Assert that a backend returns and writes the same as the specification; return whether it accepts the arguments."""
    given = filled(operation, arguments)
    own, others = deepcopy(given), deepcopy(given)
    found = getattr(backend, operation)(*own)
    if found is NotImplemented:
        return False
    expected = getattr(reference, operation)(*others)
    for one, other in zip(flat((found, own)), flat((expected, others)), strict=True):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            assert one.dtype == other.dtype and one.shape == other.shape
            short = one.is_floating_point() and one.dtype.itemsize < 4
            assert torch.equal(*(bits(each.float() if short else each) for each in (one, other)))
        else:
            assert one == other or (math.isnan(one) and math.isnan(other))
    return True


def flat(found: Any) -> Iterator[Any]:  # Any: results and arguments
    """Yield all tensors and numbers; a zero-dimensional tensor becomes a number."""
    if isinstance(found, Sparse):
        found = (found.index, found.value, found.length)
    if isinstance(found, list | tuple):
        for each in found:
            yield from flat(each)
    elif isinstance(found, Tensor):
        yield found.item() if found.dim() == 0 else found
    elif isinstance(found, bool | int | float):
        yield found


def on(device: str, arguments: Any) -> Any:  # Any: nested arguments
    """Move all tensors in the arguments to a device."""
    if isinstance(arguments, Tensor):
        return arguments.to(device)
    if isinstance(arguments, Sparse):
        return Sparse(arguments.index.to(device), arguments.value.to(device), arguments.length)
    if isinstance(arguments, Rows):
        return Rows(arguments.starts.to(device), arguments.row, arguments.length)
    return type(arguments)(on(device, each) for each in arguments) if isinstance(arguments, list | tuple) else arguments
