"""Several schemes in one: parameters are dealt out by name, and each scheme reduces its own, as if they were a bucket."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsync.base.scheme import Scheme, overflowed
from sparsync.core import Bucket, Comm, Cost, Detail, ParameterSpan, Report, SpanSet, laid_out, matches


@dataclass
class PerParameter(Scheme):
    """Reduce each parameter by the first scheme whose pattern its name matches, and by `default` where there is none.

    For example `PerParameter(MiCRO(0.01), {"embedding.*": MiCRO(0.001), "*norm*": Dense()})`. A residual stays with its scheme, so
    do not change the patterns when training continues. Where a scheme finds NaN or Inf the step will be skipped, so the others roll
    back what they have written.
    Raises ValueError for an empty pattern or one scheme object in two places, whose states would mix.
    """

    default: Scheme
    # Name or shell pattern -> scheme; the first match counts.
    patterns: Mapping[str, Scheme] = field(default_factory=dict)

    name = "per_parameter"

    def __post_init__(self) -> None:
        if isinstance(self.patterns, str) or not all(self.patterns):
            raise ValueError(f"patterns takes a dict of parameter names or patterns and schemes, got {self.patterns!r}")
        if len({id(scheme) for scheme in self._schemes.values()}) < len(self._schemes):
            raise ValueError("a scheme stands in two places of patterns; make one for each, states must not mix")

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        return self._reduced(bucket, lambda scheme, inner: scheme.reduce(inner, comm))

    def send_all(self, bucket: Bucket, comm: Comm) -> Report:
        return self._reduced(bucket, lambda scheme, inner: scheme.send_all(inner, comm))

    def _reduced(self, bucket: Bucket, reduce: Callable[[Scheme, Bucket], Report]) -> Report:
        layouts = self._layouts(bucket.layout)
        own = {key: _inner(bucket, key, layout) for key, layout in layouts.items()}
        reports = {key: reduce(self._schemes[key], inner) for key, inner in own.items()}
        for key, layout in layouts.items():
            SpanSet.of(layout).put_(bucket.grad, own[key].grad)
        details: dict[str, Detail] = {f"{key or 'default'} density": report.density for key, report in reports.items()}
        found_inf = {key for key, report in reports.items() if overflowed(report, own[key].grad)}
        if found_inf:
            for key in set(own) - found_inf:
                self._schemes[key].rollback(own[key])
        details["overflow"] = bool(found_inf)
        selected = sum(report.selected for report in reports.values())
        union = sum(report.union for report in reports.values())
        cost = sum((report.cost for report in reports.values()), Cost())
        return self.report(bucket, cost, selected, union, details)

    def shared_text(self, bucket: Bucket) -> str:
        texts = []
        for key, layout in self._layouts(bucket.layout).items():
            # Without elements, which the text is not about: to copy them takes longer than all the rest.
            missing = torch.empty(len(SpanSet.of(layout)), dtype=bucket.grad.dtype, device="meta")
            texts.append(f"{key or 'default'}: {self._schemes[key].shared_text(_inner(bucket, key, layout, missing))}")
        return ", ".join(texts)

    def unsent(self, bucket: Bucket, comm: Comm) -> Tensor | None:
        found: Tensor | None = None
        for key, layout in self._layouts(bucket.layout).items():
            own = self._schemes[key].unsent(_inner(bucket, key, layout), comm)
            if own is not None:
                found = torch.zeros_like(bucket.grad, dtype=own.dtype) if found is None else found
                SpanSet.of(layout).put_(found, own)
        return found

    def rollback(self, bucket: Bucket) -> None:
        for key, layout in self._layouts(bucket.layout).items():
            self._schemes[key].rollback(_inner(bucket, key, layout))

    def config_fingerprint(self) -> str:
        patterns = {pattern: scheme.config_fingerprint() for pattern, scheme in self.patterns.items()}
        return f"{self.default.config_fingerprint()}, {patterns}"

    def state_dict(self) -> dict[str, Any]:  # Any: as Scheme
        """Return all residuals by parameter name, as every scheme has them, and the schemes' other state, by pattern."""
        states = {key: scheme.state_dict() for key, scheme in self._schemes.items()}
        residual = {name: values for state in states.values() for name, values in state.get("residual", {}).items()}
        rest = {
            key: {entry: value for entry, value in state.items() if entry != "residual"}
            for key, state in states.items()
        }
        return {"residual": residual, "schemes": rest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        residual, rest = state["residual"], state["schemes"]
        if rest.keys() != self._schemes.keys():
            raise ValueError(
                f"this state is of the patterns {sorted(rest.keys() - {''})}, and this PerParameter has {sorted(self.patterns)}; use "
                "the same"
            )
        for key, scheme in self._schemes.items():
            own = {name: values for name, values in residual.items() if self._pattern(name) == key}
            scheme.load_state_dict({**rest[key], "residual": own} if "residual" in scheme.state_dict() else rest[key])

    @property
    def _schemes(self) -> dict[str, Scheme]:
        return {**self.patterns, "": self.default}

    def _layouts(self, layout: Sequence[ParameterSpan]) -> dict[str, list[ParameterSpan]]:
        """Return the parameters of each pattern; "" stands for the default. Patterns without elements here are left out."""
        layouts: dict[str, list[ParameterSpan]] = {key: [] for key in self._schemes}
        for entry in layout:
            layouts[self._pattern(entry.name)].append(entry)
        return {key: entries for key, entries in layouts.items() if any(len(entry.span) for entry in entries)}

    def _pattern(self, name: str) -> str:
        """Return the first pattern that a parameter's name matches; "" where there is none."""
        return next((pattern for pattern in self.patterns if matches(name, [pattern])), "")


def _inner(bucket: Bucket, key: str, layout: Sequence[ParameterSpan], grad: Tensor | None = None) -> Bucket:
    """Return the parameters of one pattern as a bucket, with their part of the gradient or with `grad`."""
    own = laid_out((entry.name, entry.shape or len(entry.span)) for entry in layout)
    grad = SpanSet.of(layout).take(bucket.grad) if grad is None else grad
    return Bucket(f"{bucket.key}/{key}", grad, bucket.step, own)
