"""How many elements a step may send, and which of them all ranks know beforehand: small dense parameters, and a cyclic refresh."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from sparsync.core import ParameterSpan, Span
from sparsync.selection.parameters import matches

DENSE_SHARE = 0.1  # of the budget, at most, for parameters that are sent whole


@dataclass(frozen=True)
class Budget:
    """`count` elements are sent at this step; those in `known`, disjoint ascending spans, need no index."""

    count: int
    known: tuple[Span, ...]

    @property
    def known_count(self) -> int:
        return sum(len(span) for span in self.known)

    @property
    def open_count(self) -> int:
        """How many are still to be selected."""
        return self.count - self.known_count

    def known_index(self, device: torch.device) -> Tensor:
        """Return the known positions, ascending, int64."""
        parts = [torch.arange(span.start, span.stop, device=device) for span in self.known]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def budget(density: float, layout: Sequence[ParameterSpan], dense: Iterable[str], refresh: float, step: int) -> Budget:
    """Return what `density` of the elements of `layout` allows at `step`: at least 1 element of a bucket that has any.

    Over many steps exactly density * n a step are sent, also where that is not a whole number (but below 1).
    Parameters whose names match `dense` are sent whole, the smallest first, as long as they take at most DENSE_SHARE of the budget.
    A window takes the share `refresh` of the budget and cycles through the vector, so no element waits longer than 1/(refresh * density)
    steps, and one step more for rounding.
    """
    n = layout[-1].span.stop
    start, stop = _share(density, n, step)
    count = min(n, max(1, stop - start))
    exempt = _exempt(tuple(layout), tuple(dense), int(DENSE_SHARE * density * n))
    start, stop = _share(_exact(refresh) * _exact(density), n, step)
    stop = min(stop, start + count)
    return Budget(count, _fitting([*_wrapped(start, stop, n), *exempt], count))


@lru_cache(maxsize=1024)
def _exempt(layout: tuple[ParameterSpan, ...], patterns: tuple[str, ...], left: int) -> tuple[Span, ...]:
    """Return the spans of the smallest parameters that match, as long as they have `left` elements together."""
    exempt: list[Span] = []
    for entry in sorted(
        (entry for entry in layout if matches(entry.name, patterns)), key=lambda entry: len(entry.span)
    ):
        if len(entry.span) > left:
            break
        left -= len(entry.span)
        exempt.append(entry.span)
    return tuple(exempt)


@lru_cache(maxsize=1024)
def _exact(share: float | Fraction) -> Fraction:
    """Return the fraction that was meant: 0.01 is 1/100."""
    return Fraction(share).limit_denominator(10**9)


def _share(share: float | Fraction, n: int, step: int) -> tuple[int, int]:
    """Return where the share of step `step` starts and stops when `share` * n elements a step follow each other without gaps."""
    each = _exact(share) * n
    return int(each * step), int(each * (step + 1))


def _wrapped(start: int, stop: int, n: int) -> list[Span]:
    length, start = stop - start, start % n
    if start + length <= n:
        return [Span(start, start + length)]
    return [Span(start, n), Span(0, start + length - n)]


def _fitting(wanted: list[Span], count: int) -> tuple[Span, ...]:
    """Return the union of `wanted`, spans merged and ascending; the last wanted are dropped while it has more than `count` elements."""
    while True:
        merged = _merged(wanted)
        if sum(len(span) for span in merged) <= count:
            return merged
        wanted = wanted[:-1]


def _merged(wanted: Iterable[Span]) -> tuple[Span, ...]:
    merged: list[Span] = []
    for span in sorted((span for span in wanted if len(span)), key=lambda span: span.start):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return tuple(merged)
