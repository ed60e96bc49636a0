"""Several schemes in one: parameters are dealt out by name, and each scheme reduces its own, as if they were a bucket."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparsync.base.scheme import Scheme
from sparsync.core import Bucket, Comm, Cost, Detail, ParameterSpan, Report, laid_out
from sparsync.feedback import overflowed, state_from
from sparsync.selection.parameters import Part, matches


@dataclass
class PerParameter(Scheme):
    """Each parameter by the first scheme whose pattern its name matches, and by `default` where there is none.

    For example `PerParameter(MiCRO(0.01), {"embedding.*": MiCRO(0.001), "*norm*": Dense()})`. A residual stays with its scheme, so keep
    the patterns as they are when training goes on. Where a scheme finds NaN or Inf the step will be skipped, so the others keep what
    they have written.
    Raises ValueError for an empty pattern or one scheme object in two places, whose states would mix.
    """

    name = "per_parameter"

    default: Scheme
    patterns: Mapping[str, Scheme] = field(
        default_factory=dict
    )  # name or shell pattern -> scheme; the first match counts

    def __post_init__(self) -> None:
        if isinstance(self.patterns, str) or not all(self.patterns):
            raise ValueError(f"patterns takes a dict of parameter names or patterns and schemes, got {self.patterns!r}")
        if len({id(scheme) for scheme in self._schemes.values()}) < len(self._schemes):
            raise ValueError("a scheme stands in two places of patterns; make one for each, states must not mix")

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        parts = self._parts(bucket.layout)
        own = {key: self._part(bucket, key, slots) for key, slots in parts.items()}
        reports = {key: self._schemes[key].reduce(part, comm) for key, part in own.items()}
        for key, slots in parts.items():
            Part.of_slots(slots).put_(bucket.grad, own[key].grad)
        poisoned = (
            {key for key, report in reports.items() if overflowed(report, own[key].grad)} if self.has_residual else ()
        )
        for key in set(own) - set(poisoned) if poisoned else ():
            self._schemes[key].rollback(own[key])
        details: dict[str, Detail] = {f"{key or 'default'} density": report.density for key, report in reports.items()}
        details["overflow"] = any(report.details.get("overflow") for report in reports.values())
        selected = sum(report.selected for report in reports.values())
        union = sum(report.union for report in reports.values())
        cost = sum((report.cost for report in reports.values()), Cost())
        n = bucket.grad.numel()
        if self.has_residual:
            details["overflow"] = bool(poisoned)
        return Report(self.name, bucket.key, bucket.step, n, selected, union, cost, details=details)

    def reset_shared_state(self) -> None:
        for scheme in self._schemes.values():
            scheme.reset_shared_state()

    @property
    def has_residual(self) -> bool:
        return any(scheme.has_residual for scheme in self._schemes.values())

    def rollback(self, bucket: Bucket) -> None:
        for key, slots in self._parts(bucket.layout).items():
            self._schemes[key].rollback(self._part(bucket, key, slots))

    def rescale_residual(self, factors: Mapping[str, float]) -> None:
        for scheme in self._schemes.values():
            scheme.rescale_residual(factors)

    def state_dict(self) -> dict[str, Any]:  # Any: as the protocol
        """All residuals by parameter name, as every scheme has them, and what else the schemes keep, by pattern."""
        states = {key: scheme.state_dict() for key, scheme in self._schemes.items()}
        residual = {name: part for state in states.values() for name, part in state.get("residual", {}).items()}
        rest = {
            key: {field: kept for field, kept in state.items() if field != "residual"} for key, state in states.items()
        }
        return {"residual": residual, "schemes": rest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        residual, rest = (state_from(state, key, "PerParameter") for key in ("residual", "schemes"))
        states = {
            key: dict(state_from(rest, key, "PerParameter")) for key in self._schemes
        }  # all, before any is changed
        for key, scheme in self._schemes.items():
            if "residual" in scheme.state_dict():
                own = {name: part for name, part in residual.items() if self._pattern(name) == key}
                states[key]["residual"] = own
            scheme.load_state_dict(states[key])

    @property
    def _schemes(self) -> dict[str, Scheme]:
        return {**self.patterns, "": self.default}

    def _parts(self, layout: Sequence[ParameterSpan]) -> dict[str, list[ParameterSpan]]:
        """The slots of each pattern; "" stands for the default. Patterns without elements here are left out, alike on all ranks."""
        parts: dict[str, list[ParameterSpan]] = {key: [] for key in self._schemes}
        for slot in layout:
            parts[self._pattern(slot.name)].append(slot)
        return {key: slots for key, slots in parts.items() if any(len(slot.span) for slot in slots)}

    def _pattern(self, name: str) -> str:
        """The first pattern that a parameter's name matches; "" where there is none."""
        return next((pattern for pattern in self.patterns if matches(name, [pattern])), "")

    def _part(self, bucket: Bucket, key: str, slots: Sequence[ParameterSpan]) -> Bucket:
        """The parameters of one pattern as a bucket, copied."""
        layout = laid_out((slot.name, len(slot.span)) for slot in slots)
        return Bucket(f"{bucket.key}/{key}", Part.of_slots(slots).take(bucket.grad), bucket.step, layout)
