"""Choosing parameters: by name pattern, and by how much the ranks disagree about them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from sparsync.core import ParameterSpan, Span


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a parameter's name is one of `patterns`, or matches one as a shell pattern ("*.bias", "encoder.*")."""
    # Equality first: "[0]" in a name is no pattern.
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class SpanSet:
    """Some spans of a vector, handled as one shorter vector."""

    spans: tuple[Span, ...]

    @classmethod
    def of(cls, layout: Iterable[ParameterSpan]) -> "SpanSet":
        """Return the spans of these parameters, neighbours merged."""
        return cls.joined(entry.span for entry in layout)

    @classmethod
    def joined(cls, spans: Iterable[Span]) -> "SpanSet":
        """Return these spans in this order, neighbours merged."""
        merged: list[Span] = []
        for span in spans:
            if merged and merged[-1].stop == span.start:
                merged[-1] = Span(merged[-1].start, span.stop)
            else:
                merged.append(span)
        return cls(tuple(merged))

    def __len__(self) -> int:
        return sum(len(span) for span in self.spans)

    def part(self, wanted: Span) -> list[Span]:
        """Return where the elements `wanted` of what `take` returns lie in the vector."""
        found: list[Span] = []
        position = 0
        for span in self.spans:
            start, stop = max(wanted.start - position, 0), min(wanted.stop - position, len(span))
            if start < stop:
                found.append(Span(span.start + start, span.start + stop))
            position += len(span)
        return found

    def take(self, x: Tensor) -> Tensor:
        """Return these elements of `x`: a view of it when they are one span, else a copy."""
        if len(self.spans) == 1:
            return self.spans[0].of(x)
        return torch.cat([x[:0], *(span.of(x) for span in self.spans)])

    def put_(self, x: Tensor, taken: Tensor) -> None:
        """Write what `take` returned, perhaps changed, back to its place in `x`."""
        if len(self.spans) == 1 and taken.data_ptr() == self.spans[0].of(x).data_ptr():
            return
        position = 0
        for span in self.spans:
            span.of(x).copy_(taken[position : position + len(span)])
            position += len(span)


@dataclass
class Disagreement:
    """How much ranks disagree about each parameter, measured over some steps; the same numbers on every rank.

    With g_r the gradient of rank r and g their mean, what a skipping reduction loses of a parameter is in proportion to the mean over
    ranks of |g_r - g|^2 = mean |g_r|^2 - |g|^2. Per element, that is what protecting the parameter gains for what it costs.
    """

    variance: dict[str, float] = field(default_factory=dict)  # per element, summed over the observed steps
    elements: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    def observe(self, layout: Sequence[ParameterSpan], mean_square: Tensor, mean: Tensor) -> None:
        """Add one step: `mean_square[i]` is the mean over ranks of |g_r|^2 for parameter i, `mean` [n] the mean gradient."""
        for entry, square in zip(layout, mean_square.tolist(), strict=True):
            lost = max(0.0, square - float(entry.span.of(mean).double().square().sum()))
            count = max(1, len(entry.span))
            self.variance[entry.name] = self.variance.get(entry.name, 0.0) + lost / count
            self.elements[entry.name] = len(entry.span)
            self.steps[entry.name] = self.steps.get(entry.name, 0) + 1

    def most(self, share: float) -> tuple[str, ...]:
        """Return the parameters of largest variance per element that together make up at most `share` of all elements seen."""
        budget = share * sum(self.elements.values())
        chosen: list[str] = []
        for name in sorted(self.variance, key=lambda name: (-self.variance[name] / self.steps[name], name)):
            if self.elements[name] <= budget:
                chosen.append(name)
                budget -= self.elements[name]
        return tuple(sorted(chosen))

    def state_dict(self) -> dict[str, Any]:  # Any: plain dicts of numbers
        return {"variance": dict(self.variance), "elements": dict(self.elements), "steps": dict(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # Any: what state_dict returned
        self.variance, self.elements, self.steps = (dict(state[key]) for key in ("variance", "elements", "steps"))


def square_norms(layout: Sequence[ParameterSpan], grad: Tensor) -> Tensor:
    """Return |g|^2 of each parameter, float64 [parameters]."""
    return torch.stack([entry.span.of(grad).double().square().sum() for entry in layout])
