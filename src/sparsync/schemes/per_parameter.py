"""Several schemes in one: parameters are dealt out by name, and each scheme reduces its own, as if they were a bucket."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sparsync.base.scheme import Scheme
from sparsync.base.state import State, overflowed
from sparsync.core import Bucket, Comm, Cost, Detail, ParameterSpan, Report, SpanSet, laid_out, matches


@dataclass(frozen=True)
class PerParameter(Scheme):
    """Reduce each parameter by the first scheme whose pattern its name matches, and by `default` where there is none.

    For example `PerParameter(TopK(0.01), {"embedding.*": TopK(0.001), "*norm*": Dense()})`. A residual stays with its scheme, so
    do not change the patterns when training continues. Where a scheme finds NaN or Inf the step will be skipped, so the others roll
    back what they have written. Raises ValueError for an empty pattern.
    """

    default: Scheme
    # Name or shell pattern -> scheme; the first match counts.
    patterns: Mapping[str, Scheme] = field(default_factory=dict)

    name = "per_parameter"

    def __post_init__(self) -> None:
        if isinstance(self.patterns, str) or not all(self.patterns):
            raise ValueError(f"patterns takes a dict of parameter names or patterns and schemes, got {self.patterns!r}")

    @property
    def inner(self) -> dict[str, Scheme]:
        """The scheme of each pattern, and the default by ""."""
        return {**self.patterns, "": self.default}

    def parts(self, bucket: Bucket) -> dict[str, Bucket]:
        return {key: _inner(bucket, key, layout) for key, layout in self._layouts(bucket.layout).items()}

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        return self._reduced(state, bucket, lambda inner, part: inner.reduce(part, comm))

    def send_all(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        return self._reduced(state, bucket, lambda inner, part: inner.send_all(part, comm))

    def _reduced(self, state: State, bucket: Bucket, reduce: Callable[[State, Bucket], Report]) -> Report:
        own = self.parts(bucket)
        reports = {key: reduce(state.inner[key], inner) for key, inner in own.items()}
        for key, layout in self._layouts(bucket.layout).items():
            SpanSet.of(layout).put_(bucket.grad, own[key].grad)
        details: dict[str, Detail] = {f"{key or 'default'} density": report.density for key, report in reports.items()}
        found_inf = {key for key, report in reports.items() if overflowed(report, own[key].grad)}
        if found_inf:
            for key in set(own) - found_inf:
                state.inner[key].rollback(own[key])
        details["overflow"] = bool(found_inf)
        selected = sum(report.selected for report in reports.values())
        union = sum(report.union for report in reports.values())
        cost = sum((report.cost for report in reports.values()), Cost())
        return self.report(bucket, cost, selected, union, details)

    @property
    def has_residual(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets these
        return any(each.has_residual for each in self.inner.values())

    @property
    def has_momentum(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(each.has_momentum for each in self.inner.values())

    @property
    def interleaves(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return all(each.interleaves for each in self.inner.values())

    @property
    def leaves_out(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(each.leaves_out for each in self.inner.values())

    def _layouts(self, layout: Sequence[ParameterSpan]) -> dict[str, list[ParameterSpan]]:
        """Return the parameters of each pattern; "" stands for the default. Patterns without elements here are left out."""
        layouts: dict[str, list[ParameterSpan]] = {key: [] for key in self.inner}
        for entry in layout:
            layouts[self._pattern(entry.name)].append(entry)
        return {key: entries for key, entries in layouts.items() if any(len(entry.span) for entry in entries)}

    def _pattern(self, name: str) -> str:
        """Return the first pattern that a parameter's name matches; "" where there is none."""
        return next((pattern for pattern in self.patterns if matches(name, [pattern])), "")


def _inner(bucket: Bucket, key: str, layout: Sequence[ParameterSpan]) -> Bucket:
    """Return the parameters of one pattern as a bucket, with their part of the gradient."""
    own = laid_out((entry.name, entry.shape or len(entry.span)) for entry in layout)
    return Bucket(f"{bucket.key}/{key}", SpanSet.of(layout).take(bucket.grad), bucket.step, own)
