"""Several schemes in one: parameter names decide which scheme reduces a parameter. A scheme sees its parameters as a bucket."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sparsync.base.scheme import Scheme
from sparsync.base.state import State, overflowed
from sparsync.core import Bucket, Comm, Cost, Detail, ParameterSpan, Report, SpanSet, laid_out, matches


@dataclass(frozen=True)
class PerParameter(Scheme):
    """Reduce a parameter by the first scheme whose pattern matches its name, or else by `default`.

    For example `PerParameter(TopK(0.01), {"embedding.*": TopK(0.001), "*norm*": Dense()})`. A residual stays with its scheme, so
    do not change the patterns when training continues. If a scheme finds NaN or Inf, the step will be skipped, so the others roll
    back. Raises ValueError for an empty pattern.
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
        """The schemes by pattern, and the default under ""."""
        return {**self.patterns, "": self.default}

    def parts(self, bucket: Bucket) -> dict[str, Bucket]:
        return {key: _inner(bucket, key, layout) for key, layout in self._layouts(bucket.layout).items()}

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        return self._reduced(state, bucket, lambda inner, part: inner.reduce(part, comm))

    def send_all(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        return self._reduced(state, bucket, lambda inner, part: inner.send_all(part, comm))

    def _reduced(self, state: State, bucket: Bucket, reduce: Callable[[State, Bucket], Report]) -> Report:
        parts = self.parts(bucket)
        reports = {key: reduce(state.inner[key], inner) for key, inner in parts.items()}
        for key, layout in self._layouts(bucket.layout).items():
            SpanSet.of(layout).put_(bucket.grad, parts[key].grad)
        details: dict[str, Detail] = {f"{key or 'default'} density": report.density for key, report in reports.items()}
        found_inf = {key for key, report in reports.items() if overflowed(report, parts[key].grad)}
        if found_inf:
            for key in set(parts) - found_inf:
                state.inner[key].rollback(parts[key])
        details["overflow"] = bool(found_inf)
        selected = sum(report.selected for report in reports.values())
        union = sum(report.union for report in reports.values())
        cost = sum((report.cost for report in reports.values()), Cost())
        return self.report(bucket, cost, selected, union, details)

    @property
    def has_residual(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets these
        return any(scheme.has_residual for scheme in self.inner.values())

    @property
    def has_momentum(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(scheme.has_momentum for scheme in self.inner.values())

    @property
    def interleaves(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return all(scheme.interleaves for scheme in self.inner.values())

    @property
    def leaves_out(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(scheme.leaves_out for scheme in self.inner.values())

    def _layouts(self, layout: Sequence[ParameterSpan]) -> dict[str, list[ParameterSpan]]:
        """Group the parameters by the first pattern that matches; "" stands for the default. Omits patterns without elements here."""
        layouts: dict[str, list[ParameterSpan]] = {key: [] for key in self.inner}
        for entry in layout:
            layouts[next((each for each in self.patterns if matches(entry.name, [each])), "")].append(entry)
        return {key: entries for key, entries in layouts.items() if any(len(entry.span) for entry in entries)}


def _inner(bucket: Bucket, key: str, layout: Sequence[ParameterSpan]) -> Bucket:
    """Make a bucket of the parameters of one pattern, with their part of the gradient."""
    parameters = laid_out((entry.name, entry.shape or len(entry.span)) for entry in layout)
    return Bucket(f"{bucket.key}/{key}", SpanSet.of(layout).take(bucket.grad), bucket.step, parameters)
